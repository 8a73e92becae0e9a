"""Budgets follow what the process may use, and nothing grows without bound."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from llamagym import ModelLoadError, load_model_and_tokenizer
from llamagym.models import hardware
from llamagym.policy import policy as policy_module
from tests.agents import ChoiceAgent, make_agent


def groups(folder: Path, processes: str, limits: dict[str, str]) -> tuple[Path, Path]:
    """A description of control groups as Linux gives it."""
    (folder / "cgroup").write_text(processes)
    for name, limit in limits.items():
        path = folder / "mounted" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(limit)
    return folder / "cgroup", folder / "mounted"


@pytest.mark.parametrize(
    ("processes", "limits", "expected"),
    [
        ("0::/\n", {"memory.max": "2147483648\n"}, 2**31),
        ("0::/\n", {"memory.max": "max\n"}, math.inf),
        ("0::/a/b\n", {"a/memory.max": "1000\n", "a/b/memory.max": "2000\n"}, 1000),
        ("0::/gone\n", {"memory.max": "3000\n"}, 3000),
        ("5:cpu,memory:/a\n4:pids:/b\n", {"memory/a/memory.limit_in_bytes": "4000\n", "memory.max": "1\n"}, 4000),
        ("", {}, math.inf),
    ],
)
def test_the_smallest_limit_above_a_process_counts(tmp_path, processes, limits, expected):
    assert hardware.container_limit(*groups(tmp_path, processes, limits)) == expected
    assert hardware.container_limit(tmp_path / "nowhere", tmp_path) == math.inf


def test_a_container_s_limit_is_the_machine_s_memory(monkeypatch):
    physical = hardware.memory_bytes(torch.device("cpu"))
    monkeypatch.setattr(hardware, "container_limit", lambda: 2**30)
    assert hardware.memory_bytes(torch.device("cpu")) == 2**30 <= physical


def test_weighed_choices_do_not_pile_up(monkeypatch):
    agent = make_agent(ChoiceAgent)
    agent.eval()
    usual = agent.action_probabilities(["0"])
    tokens = agent.policy._weighed_tokens
    monkeypatch.setattr(policy_module, "_WEIGHED_TOKENS", 5 * tokens)
    for observation in range(30):
        agent.action_probabilities([str(observation)])
    assert len(agent.policy._weighed) <= 7
    assert agent.action_probabilities(["0"])[0] == pytest.approx(usual[0], abs=1e-5)


def test_too_little_memory_is_said_before_a_model_is_loaded(monkeypatch):
    monkeypatch.setattr(hardware, "container_limit", lambda: 2**30)
    with pytest.raises(ModelLoadError, match=r"needs about 1\.\d GiB to learn, and this cpu has 1\.0"):
        load_model_and_tokenizer("smollm2-135m", device="cpu")
    monkeypatch.setattr(hardware, "container_limit", lambda: 2**31)
    with pytest.raises(ModelLoadError, match=r"needs about 3\.0 GiB"):
        load_model_and_tokenizer("smollm2-135m", device="cpu", dtype="float32", peft_config=False)
