"""Ablation of caches and kernels: throughput without each of them, relative to the throughput with all.

python scripts/benchmarks/ablation.py [--dtype float32] [--only VARIANT ...] [--workloads WORKLOAD ...]

Throughput is tokens of replies per second of CPU time, since replies in free text differ in length. Each round measures
once with everything and once without each variant, in one process, so that slow changes of the machine cancel.
The result is the geometric mean of the rounds' ratios with a 95 % interval. A ratio of 0.9 means that removing the
variant costs 10 % of the throughput; a variant whose ratios all exceed 0.95 is not worth its code. Variants and
workloads that a run omits keep their earlier values. Every value names its session: commit, command and machine.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from common import RESULTS, command, named, parser_of, setting
from torch.nn import functional
from workload import dtype_of, simulate_update
from workloads import WORKLOADS, agent_of, round_of, take_batch

from llamagym.engine import likelihood
from llamagym.engine.cpu import fused_layer
from llamagym.engine.radix_tree import RadixTree
from llamagym.models.hardware import sum_dtype
from llamagym.policy.workspace import ChoiceCache

# Smaller conversations than usual, whose rounds take a minute, and more turns in one environment, whose replies differ
# in length.
MEASURED = {
    "repeated": WORKLOADS["repeated"],
    "choices": WORKLOADS["repeated-choices"],
    "unique": WORKLOADS["unique"],
    "conversation": replace(WORKLOADS["conversation"], envs=4, turns=4),
    "single": replace(WORKLOADS["single"], turns=4),
}
ROUNDS = 10
# The 97.5 % quantile of Student's t distribution with ROUNDS - 1 degrees of freedom.
T_QUANTILE = 2.262
UNIT = "tokens of replies per second of CPU time without, over those with; geometric mean of rounds, 95 % interval"
LEARNING = {"ppo_epochs": 1, "mini_batch_size": 512, "learning_rate": 1e-5}


def _acceleration(agent: Any) -> Any:
    return agent.policy.backbone.transformer.acceleration


@contextmanager
def _without_packing(agent: Any) -> Iterator[None]:
    packed = _acceleration(agent).packed_weights
    # Hide the packed weights instead of dropping them; the next round with them need not pack again.
    with patch.object(packed, "max_bytes", 0), patch.object(packed, "weights", {}):
        yield


@contextmanager
def _without_prefix_cache(agent: Any) -> Iterator[None]:
    with patch.object(agent.policy.backbone.prefix_cache, "activations", RadixTree(0)):
        yield


@contextmanager
def _without_kernels(agent: Any) -> Iterator[None]:
    with ExitStack() as stack:
        for name in ("cpu/packing", "cpu/fused_layer", "cpu/likelihood"):
            stack.enter_context(VARIANTS[name](agent))
        yield


def _normalize(states: Any, weight: Any, epsilon: float, addend: Any = None) -> Any:
    total = states if addend is None else states + addend
    return total, functional.rms_norm(total, weight.shape, weight, epsilon)


@contextmanager
def _without_rowwise(agent: Any) -> Iterator[None]:
    with (
        patch.object(fused_layer, "normalize", _normalize),
        patch.object(fused_layer, "gated", lambda gate, up: functional.silu(gate) * up),
    ):
        yield


def _add_low_rank(product: Any, inputs: Any, low_rank: Any) -> Any:
    for down, up, scale in low_rank:
        dtype = torch.promote_types(up.dtype, sum_dtype(product))
        update = functional.linear(functional.linear(inputs.to(dtype), down.to(dtype)), up.to(dtype))
        product = torch.add(product.to(dtype), update, alpha=scale).to(product.dtype)
    return product


@contextmanager
def _without_attention_backward(agent: Any) -> Iterator[None]:
    layers = _acceleration(agent)._fused._layers.values()
    for layer in layers:
        layer._may_store_scores, layer.kept = lambda mask, heads: False, layer._may_store_scores
    yield
    for layer in layers:
        layer._may_store_scores = layer.kept


# The name of the measurement with every cache and kernel.
BASELINE = "all"
VARIANTS: dict[str, Callable[[Any], AbstractContextManager[Any]]] = {
    "cpu/": _without_kernels,
    "cpu/packing": _without_packing,
    "cpu/fused_layer": lambda agent: patch.object(_acceleration(agent), "_fused", None),
    "cpu/likelihood": lambda agent: patch.object(likelihood, "likelihood_kernels", lambda logits: None),
    "cpu/rowwise": _without_rowwise,
    "cpu/low_rank": lambda agent: patch.object(fused_layer, "add_low_rank", _add_low_rank),
    "cpu/attention_kernel": lambda agent: patch.multiple(fused_layer, _MANY_TOKENS=0, _MANY_COLUMNS=0),
    "cpu/attention_backward": _without_attention_backward,
    "engine/radix_tree": _without_prefix_cache,
    "shared prefix in attention": lambda agent: patch.object(agent.policy.backbone.transformer, "can_share", False),
    "policy/workspace": lambda agent: patch.object(agent.policy.workspaces[0], "choices", ChoiceCache(0)),
}


def measure(agent: Any, play: Callable[[], int], switched: AbstractContextManager[Any]) -> dict[str, float]:
    """Tokens of replies per second of CPU time, acted and learned from, within a context manager.

    Episodes that are open at the end count in a later measurement, that of another variant.
    """
    with switched:
        simulate_update(agent)
        started = time.process_time()
        batch = take_batch(agent, play)
        acting = time.process_time() - started
        started = time.process_time()
        agent.learner.update(batch)
        learning = time.process_time() - started
    tokens = sum(len(turn.reply.ids) for episode in batch for turn in episode.turns)
    return {"act": tokens / acting, "learn": tokens / learning}


def interval_of(ratios: list[float]) -> dict[str, Any]:
    """Geometric mean of ratios and its 95 % interval, by Student's t distribution of their logarithms."""
    logarithms = [math.log(ratio) for ratio in ratios]
    mean = statistics.mean(logarithms)
    error = T_QUANTILE * statistics.stdev(logarithms) / math.sqrt(len(ratios))
    bounds = [round(math.exp(bound), 3) for bound in (mean - error, mean + error)]
    return {"without_over_with": round(math.exp(mean), 3), "interval": bounds, "all": ratios}


def main() -> None:
    """Measure the selected variants and merge the values into the result file."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--workloads", nargs="+", choices=MEASURED, default=list(MEASURED))
    arguments = parser.parse_args()
    names: list[str] = arguments.only
    table: dict[str, dict[str, Any]] = {name: {} for name in names}
    for workload in arguments.workloads:
        agent = agent_of(MEASURED[workload], arguments.dtype, **LEARNING)
        rounds = rounds_of(agent, round_of(MEASURED[workload], agent), names)
        for name in names:
            for work in ("act", "learn"):
                ratios = [rates[name][work] / rates[BASELINE][work] for rates in rounds]
                usual = statistics.median(rates[BASELINE][work] for rates in rounds)
                row = interval_of(ratios) | {"tokens_per_second": round(usual, 1)}
                table[name][f"{work} {workload}"] = row
                print(f"{name}, {work} {workload}: {row['without_over_with']} {row['interval']}", flush=True)
        write(table, dtype_of(agent))


def rounds_of(agent: Any, play: Callable[[], int], names: list[str]) -> list[dict[str, dict[str, float]]]:
    """The rates of `measure` in each round, by name: with everything, and without each variant."""
    for _ in range(2):
        measure(agent, play, ExitStack())
    rounds = []
    for _ in range(ROUNDS):
        rates = {BASELINE: measure(agent, play, ExitStack())}
        for name in names:
            rates[name] = measure(agent, play, VARIANTS[name](agent))
        rounds.append(rates)
    return rounds


def write(table: dict[str, dict[str, Any]], dtype: str) -> None:
    """Merge values into the result file of a dtype."""
    path = RESULTS / f"{named('ablation', dtype)}.json"
    saved = json.loads(path.read_text()) if path.exists() else {"rows": {}, "sessions": {}}
    path.write_text(
        json.dumps(merged(saved, table, {"command": command(), "unit": UNIT, **setting()}), indent=1) + "\n"
    )


def merged(saved: dict[str, Any], table: dict[str, dict[str, Any]], session: dict[str, Any]) -> dict[str, Any]:
    """A result in which new values replace old ones; drops sessions that no value refers to."""
    key = f"{session['commit'][:7]} {time.strftime('%Y-%m-%d %H:%M:%S')}"
    rows: dict[str, dict[str, Any]] = {}
    for name in VARIANTS:
        new = {work: {**value, "session": key} for work, value in table.get(name, {}).items()}
        if row := saved["rows"].get(name, {}) | new:
            rows[name] = row
    sessions = {**saved["sessions"], key: session}
    used = {value["session"] for row in rows.values() for value in row.values()}
    return {
        **saved,
        "sessions": {name: sessions[name] for name in sessions if name in used},
        "rows": rows,
    }


if __name__ == "__main__":
    main()
