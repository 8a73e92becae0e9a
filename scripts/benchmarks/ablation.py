"""What each cache and each kernel is good for: turns a second without it, over those with all, by workload.

python scripts/benchmarks/ablation.py [--only VARIANT ...]

Each variant runs in a process of its own, in which one piece is switched off; all are measured in turn. Below 1, the
piece makes the workload faster: 0.9 is a tenth less without it. What is not below 0.95 anywhere does not pay.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from common import ENVIRONMENT, Rival, rates_in_turn, save, serve

SWITCH = "LLAMAGYM_CPU_KERNELS"
WORKLOADS = ("repeated", "repeated-choices", "unique", "unique-choices", "conversation")
ROUNDS = 4
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


def _without(store: str) -> Callable[[Any], None]:
    def switch_off(agent: Any) -> None:
        kept = getattr(agent.policy._backbone, store)
        kept._max_bytes = 0
        if hasattr(kept, "clear"):
            kept.clear()

    return switch_off


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
    "histories": _without("_histories"),
    "tops": _without("_tops"),
    "states": _without("_states"),
    "openings": _without("_openings"),
    "written": _without("written"),
    "space": _without("space"),
    "shared prefix in attention": _without_flag("_can_share"),
    "rows side by side": _without_flag("_can_pack"),
}


def rates_without(variant: str) -> dict[str, Callable[[], float]]:
    """By workload, acting and learning: what measures turns a second with one piece switched off."""
    from workloads import WORKLOADS as ALL
    from workloads import acting_work, agent_of, round_of, take_batch

    agents: dict[str, Any] = {}

    def agent_for(name: str) -> Any:
        if name not in agents:
            agents[name] = agent_of(ALL[name], **LEARNING)
            VARIANTS[variant](agents[name])
            agents[name].policy._backbone.forget_copies()
        return agents[name]

    def act(name: str) -> float:
        work = acting_work(ALL[name], agent_for(name), [])
        started = time.perf_counter()
        return work() / (time.perf_counter() - started)

    def learn(name: str) -> float:
        agent = agent_for(name)
        batch = take_batch(ALL[name], agent, round_of(ALL[name], agent))
        started = time.perf_counter()
        agent.learner.update(batch)
        return sum(len(episode.turns) for episode in batch) / (time.perf_counter() - started)

    return {f"{kind} {name}": partial(do, name) for name in WORKLOADS for kind, do in (("act", act), ("learn", learn))}


def main() -> None:
    """Measure all variants in turn, or serve one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[name for name in VARIANTS if name != "everything"], default=None)
    parser.add_argument("--serve", choices=VARIANTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(rates_without(args.serve), "torch")
        return
    names = ["everything", *(args.only or [name for name in VARIANTS if name != "everything"])]
    with ExitStack() as stack:
        rates = {}
        for name in names:
            environment = ENVIRONMENT | ({SWITCH: "0"} if name == "cpu/" else {})
            command = [sys.executable, os.path.abspath(__file__), "--serve", name]
            variant = stack.enter_context(Rival(name, command, environment))
            for work in (f"{kind} {workload}" for workload in WORKLOADS for kind in ("act", "learn")):
                rates[work, name] = partial(variant.rate, work)
        in_turn = {key: rates[key] for key in sorted(rates, key=lambda key: (key[0], names.index(key[1])))}
        measured = rates_in_turn(in_turn, ROUNDS)
    table: dict[str, dict[str, Any]] = {}
    for (work, name), rate in measured.items():
        share = rate["median"] / measured[work, "everything"]["median"]
        table.setdefault(name, {})[work] = {"of_everything": round(share, 3), **rate}
    save("ablation", {"unit": "turns per second, medians", "rounds": ROUNDS - 1, "without": table})


if __name__ == "__main__":
    main()
