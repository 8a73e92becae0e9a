"""Budgets follow what the process may use, and nothing grows without bound."""

from __future__ import annotations

import json
import math
import random
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from llamagym import ModelLoadError, load_model_and_tokenizer
from llamagym.engine import choice_trie
from llamagym.engine.choice_trie import ChoiceTrie
from llamagym.engine.token_tree import TokenTree
from llamagym.models import hardware, loading
from llamagym.models.registry import lookup
from llamagym.policy.workspace import ChoiceCache, ScoredChoices
from llamagym.text.episode import Prompt, Segment
from tests.helpers import ROOT
from tests.helpers.agents import ChoiceAgent, make_agent


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
def test_container_limit_is_the_smallest_of_all_groups(tmp_path, processes, limits, expected):
    assert hardware.container_limit(*groups(tmp_path, processes, limits)) == expected
    assert hardware.container_limit(tmp_path / "nowhere", tmp_path) == math.inf


def test_memory_bytes_respects_the_container_limit(monkeypatch):
    physical = hardware.memory_bytes(torch.device("cpu"))
    monkeypatch.setattr(hardware, "container_limit", lambda: 2**30)
    assert hardware.memory_bytes(torch.device("cpu")) == 2**30 <= physical


def held(*objects: Any) -> int:
    """Bytes of objects and of all that they hold, each counted once."""
    seen: dict[int, Any] = {}
    waiting = list(objects)
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen[id(each)] = each
        if isinstance(each, (tuple, list)):
            waiting += each
        elif isinstance(each, dict):
            waiting += [*each.keys(), *each.values()]
        elif is_dataclass(each):
            waiting += [getattr(each, field.name) for field in fields(each)]
        elif isinstance(each, torch.Tensor):
            waiting.append(each.untyped_storage())
    return sum(map(sys.getsizeof, seen.values()))


def scored_context(number: int, length: int, count: int, tokens: int) -> dict[TokenTree, ScoredChoices]:
    """A context of some length that offers choices of some tokens; its ids are as large as a real vocabulary's."""
    draw = random.Random(number)
    choices = tuple(tuple(draw.randrange(1000, 50_000) for _ in range(tokens)) for _ in range(count))
    ids = tuple(draw.randrange(1000, 50_000) for _ in range(length))
    return {TokenTree.from_segment(Segment((), Prompt(ids, True, choices, length // 2))): (torch.zeros(count), 0.5)}


@pytest.mark.pairwise(length=[20, 2000], tokens=[1, 3, 12], count=[2, 300])
def test_choice_cache_counts_tokens_of_40_bytes(length: int, count: int, tokens: int):
    cache = ChoiceCache()
    for number in range(4):
        cache.update(scored_context(number, length, count, tokens))
    assert 0.5 < 40 * cache.size / held(cache.entries) < 1.5


@pytest.mark.long
@pytest.mark.parametrize(("length", "count", "tokens"), [(40, 300, 3), (2000, 2, 1)])
def test_choice_cache_holds_a_hundred_megabytes(length: int, count: int, tokens: int):
    cache = ChoiceCache()
    before = -1
    for number in range(2000):
        cache.update(scored_context(number, length, count, tokens))
        if len(cache.entries) == before:
            break
        before = len(cache.entries)
    assert 60e6 < held(cache.entries) < 200e6


def test_choice_cache_stays_within_its_budget():
    agent = make_agent(ChoiceAgent, context="turn", calibrate_choices=False)
    most = 5_000
    usual = agent.action_probabilities(["0"])
    cache = agent.policy.workspaces[0].choices = ChoiceCache(most)
    for observation in range(0, 300, 3):
        agent.act_batch([str(observation), str(observation + 1), str(observation + 2)])
        agent.assign_rewards([0.0] * 3)
        assert held(cache.entries) < 80 * most
    assert 10 < len(cache.entries) < 200
    assert agent.action_probabilities(["0"])[0] == pytest.approx(usual[0], abs=1e-5)
    # More at once than there is room for.
    agent.act_batch([str(observation) for observation in range(300)])
    shown = agent.action_probabilities([str(observation) for observation in range(300)])
    assert shown[0] == pytest.approx(usual[0], abs=1e-5)
    assert held(cache.entries) < 80 * most
    agent.policy.weights_changed()
    assert len(cache.entries) == cache.size == 0


def test_cached_tries_are_bounded():
    for token in range(1000):
        ChoiceTrie.of(((token, 1), (token, 2)))
    assert choice_trie.trie_of.cache_info().currsize <= 256


RESULT = ROOT / "scripts" / "benchmarks" / "results" / "larger-models.json"


def test_memory_estimate_matches_measured_peaks(monkeypatch):
    measured = json.loads(RESULT.read_text())
    monkeypatch.setattr(loading, "memory_bytes", lambda device: measured["hardware"]["memory_gib"] * 2**30)
    for name, row in measured["models"].items():
        entry = lookup(name)
        assert entry is not None
        assert loading.load_needs_gib(entry, torch.bfloat16) == pytest.approx(row["peak_gib"], rel=0.15)


def test_rejects_a_model_beyond_memory_before_loading(monkeypatch):
    monkeypatch.setattr(hardware, "container_limit", lambda: 2**30)
    with pytest.raises(ModelLoadError, match=r"needs about 1\.\d GiB to learn, and this cpu has 1\.0"):
        load_model_and_tokenizer("smollm2-135m", device="cpu")
    monkeypatch.setattr(hardware, "container_limit", lambda: 2**31)
    with pytest.raises(ModelLoadError, match=r"needs about 2\.8 GiB"):
        load_model_and_tokenizer("smollm2-135m", device="cpu", dtype="float32", peft_config=False)
