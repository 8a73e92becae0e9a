"""Kills a process at everything that a save does to files, and shows that the old or the new one is always whole.

python -m scripts.reliability.kill_during_save

A checkpoint, an agent with an adapter and one with all weights are saved, each where nothing lies and in the place of
an older one.

1. `kill -9` at everything that Python opens, writes, flushes, renames or deletes; a write is half made by then.
2. From the same points on the kernel kills the process in its next write, whoever makes it: PEFT, safetensors and
   tokenizers write in Rust, and Python sees nothing of it. By then the file holds 0 or 500 bytes.

After each kill the folder must be whole by its checksums; where nothing lay, it may also be missing. Writes
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
from tests.agents import ChoiceAgent, make_agent
from tests.killed import killed_at
from tests.resumed_run import DiceEnv, make

HERE = Path(__file__).resolve().parent
# Between two writes Python makes several calls.
_STEP = 5


def kills(folder: Path, kind: str, save: Callable[[Path], Any]) -> dict[str, int]:
    """How often a save was killed at one of Python's own calls, and in a write of whoever made it."""

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
    """An agent that has learned something."""
    train(agent, DiceEnv, episodes=12, num_envs=2, seed=0)
    return agent


def main() -> None:
    """Kill all kinds of saves, write down how often."""
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
