"""Kills a process at every file operation of a save and checks that the old or the new save is intact.

python -m scripts.reliability.kill_during_save

A checkpoint, an agent with an adapter and an agent with all weights are saved, each to a new folder and over an older
save.

1. `kill -9` at every open, write, flush, rename and delete by Python; a killed write is half done.
2. From the same points on, the kernel kills the process in the next write by any library, at 0 or 500 bytes. This
   covers safetensors and tokenizers, whose writes in Rust Python cannot intercept.

After each kill the folder must match its checksums; a new folder may also be missing. Writes
results/kill_during_save.json.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
from common import setting

from llamagym import Agent, train
from llamagym.agent import export
from llamagym.saving import checkpoints
from llamagym.saving.atomic import verify
from tests.helpers.agents import ChoiceAgent, make_agent
from tests.helpers.killed import killed_at
from tests.helpers.resumed_run import DiceEnv, make

HERE = Path(__file__).resolve().parent
# Step between tried points, since Python makes several calls between two writes.
_STEP = 5


def kills(folder: Path, kind: str, save: Callable[[Path], Any]) -> dict[str, int]:
    """Kills saves; returns how often at a call by Python, and how often in a write by any library."""

    def is_killed(point: int, replaces: bool, most: int | None = None) -> bool:
        if not replaces:
            shutil.rmtree(folder, ignore_errors=True)
        elif not folder.exists():
            save(folder)
        was_killed = not killed_at(point, partial(save, folder), most)
        if replaces or folder.exists():
            verify(folder, kind)
        return was_killed

    at_calls, in_writes = 0, 0
    for replaces in (False, True):
        point = 0
        while is_killed(point, replaces):
            point += 1
        at_calls += point
        in_writes += sum(is_killed(early, replaces, most) for most in (0, 500) for early in range(0, point, _STEP))
    return {"at calls of Python's": at_calls, "in writes of any library": in_writes}


def trained(agent: Agent) -> Agent:
    """Trains an agent for a few updates and returns it."""
    train(agent, DiceEnv, episodes=12, num_envs=2, seed=0)
    return agent


def main() -> None:
    """Kill all kinds of saves and write the counts."""
    adapted, whole = trained(make_agent(ChoiceAgent, replay_config_dict={})), trained(make(ChoiceAgent, adapter=False))
    saves = {
        "a checkpoint": (checkpoints.KIND, adapted.save_checkpoint),
        "an agent": (export.KIND, adapted.save),
        "an agent, all weights": (export.KIND, whole.save),
    }
    with tempfile.TemporaryDirectory() as scratch:
        result = {
            "command": "python -m scripts.reliability.kill_during_save",
            **setting(),
            "kills": {name: kills(Path(scratch) / name, kind, save) for name, (kind, save) in saves.items()},
            "damaged": 0,
        }
    (HERE / "results" / "kill_during_save.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
