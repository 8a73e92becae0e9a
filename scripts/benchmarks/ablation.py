"""What each cache and each kernel is good for: turns a second without it, over those with all, by workload.

python scripts/benchmarks/ablation.py [--only VARIANT ...]

Each variant runs in a process of its own, in which one piece is switched off; four at a time are measured in turn with
one in which none is. Below 1, the piece makes the workload faster: 0.9 is a tenth less without it. What is not below
0.95 anywhere does not pay.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from common import ENVIRONMENT, Rival, rates_in_turn, save, serve

SWITCH = "LLAMAGYM_CPU_KERNELS"
WORKLOADS = ("repeated", "repeated-choices", "unique", "conversation")
# Half of its environments and turns: a round takes a quarter of the time, and the picture is the same.
SMALLER = {"conversation": {"envs": 8, "turns": 5}}
ROUNDS = 4
AT_ONCE = 4  # Each takes some GB.
LEARNING = {"ppo_epochs": 1, "mini_batch_size": 512, "learning_rate": 1e-5}


def _unfused(agent: Any) -> None:
    agent.policy._backbone._acceleration.unfuse()


def _unpacked(agent: Any) -> None:
    agent.policy._backbone._acceleration._packed._max_bytes = 0


def _plain_likelihood(agent: Any) -> None:
    from llamagym.engine import likelihood

    likelihood.likelihood_kernels = lambda logits: None


def _plain_low_rank(agent: Any) -> None:
    from llamagym.cpu import fused_layer

    usual = fused_layer.low_rank_of
    fused_layer.low_rank_of = lambda module: None if (found := usual(module)) else found


def _plain_attention(agent: Any) -> None:
    """Acting's attention of fused layers by PyTorch."""
    import torch

    from llamagym.cpu import fused_layer

    usual, plain = fused_layer._Layer._look, fused_layer._Layer._look_by_pytorch
    fused_layer._Layer._look = lambda self, *given, **others: (usual if torch.is_grad_enabled() else plain)(
        self, *given, **others
    )


def _plain_attention_backward(agent: Any) -> None:
    for layer in agent.policy._backbone._acceleration._fused._layers.values():
        layer._may_hold_scores = lambda mask, heads: False


def _no_cache(agent: Any) -> None:
    agent.policy._backbone._tree._max_bytes = 0


def _no_space(agent: Any) -> None:
    agent.policy._backbone.space._max_bytes = 0


def _without_flag(flag: str) -> Callable[[Any], None]:
    return lambda agent: setattr(agent.policy._backbone, flag, False)


VARIANTS: dict[str, Callable[[Any], None]] = {
    "everything": lambda agent: None,
    "cpu/": lambda agent: None,
    "cpu/packing": _unpacked,
    "cpu/fused_layer": _unfused,
    "cpu/likelihood": _plain_likelihood,
    "cpu/low_rank": _plain_low_rank,
    "cpu/attention_kernel": _plain_attention,
    "cpu/attention_backward": _plain_attention_backward,
    "prefix cache": _no_cache,
    "space": _no_space,
    "shared prefix in attention": _without_flag("_can_share"),
    "rows side by side": _without_flag("_can_pack"),
}


def rates_without(variant: str) -> dict[str, Callable[[], float]]:
    """By workload, acting and learning: what measures turns a second with one piece switched off."""
    from workloads import WORKLOADS as ALL
    from workloads import agent_of, round_of, take_batch

    agents: dict[str, Any] = {}
    plays: dict[str, Callable[[], int]] = {}
    batches: dict[str, list[Any]] = {}

    def act(name: str) -> float:
        if name not in agents:
            workload = replace(ALL[name], **SMALLER.get(name, {}))
            agents[name] = agent_of(workload, **LEARNING)
            VARIANTS[variant](agents[name])
            agents[name].policy._backbone.forget_copies()
            plays[name] = round_of(workload, agents[name])
        started = time.perf_counter()
        turns = plays[name]()
        rate = turns / (time.perf_counter() - started)
        batches[name] = take_batch(agents[name], plays[name])
        return rate

    def learn(name: str) -> float:
        """On what was acted last, which the caches know; weights change, so acting begins anew."""
        started = time.perf_counter()
        agents[name].learner.update(batches[name])
        return sum(len(episode.turns) for episode in batches[name]) / (time.perf_counter() - started)

    return {f"{kind} {name}": partial(do, name) for name in WORKLOADS for kind, do in (("act", act), ("learn", learn))}


def measure_group(names: list[str]) -> dict[tuple[str, str], dict[str, Any]]:
    """Rates of some variants in turn, by work and variant."""
    with ExitStack() as stack:
        rates = {}
        for name in names:
            environment = ENVIRONMENT | ({SWITCH: "0"} if name == "cpu/" else {})
            command = [sys.executable, os.path.abspath(__file__), "--serve", name]
            variant = stack.enter_context(Rival(name, command, environment))
            for order, work in enumerate(f"{kind} {workload}" for workload in WORKLOADS for kind in ("act", "learn")):
                rates[order, work, name] = partial(variant.rate, work)
        measured = rates_in_turn({key: rates[key] for key in sorted(rates, key=lambda key: key[0])}, ROUNDS)
    return {(work, name): rate for (_, work, name), rate in measured.items()}


def main() -> None:
    """Measure all variants in turn, or serve one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[name for name in VARIANTS if name != "everything"], default=None)
    parser.add_argument("--serve", choices=VARIANTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(rates_without(args.serve), "torch")
        return
    names = args.only or [name for name in VARIANTS if name != "everything"]
    table: dict[str, dict[str, Any]] = {}
    for first in range(0, len(names), AT_ONCE):
        measured = measure_group(["everything", *names[first : first + AT_ONCE]])
        for (work, name), rate in measured.items():
            if name != "everything":
                share = rate["median"] / measured[work, "everything"]["median"]
                table.setdefault(name, {})[work] = {"of_everything": round(share, 3), **rate}
        print(
            {name: {work: of["of_everything"] for work, of in row.items()} for name, row in table.items()}, flush=True
        )
    save("ablation", {"unit": "turns per second, medians", "rounds": ROUNDS - 1, "without": table})


if __name__ == "__main__":
    main()
