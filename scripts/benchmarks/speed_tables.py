"""Tables of the speed results in `results`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common import named
from runs import table_row

_RESULTS = Path(__file__).resolve().parent / "results"
# The results' folder as pages in docs/ link to it.
_LINK = "../scripts/benchmarks/results"
# Workloads by their name in the results, from the best case to the worst.
_WORKLOADS = {
    "repeated": "Blackjack's observations, 64 environments, up to 8 tokens",
    "repeated-choices": "the same, choices",
    "unique": "every observation new, 64 environments, up to 8 tokens",
    "unique-choices": "the same, choices",
    "conversation": "conversations of 10 turns, 16 environments, up to 32 tokens",
    "single": "one environment, up to 64 tokens",
}


def workloads() -> str:
    """Acting throughput on all workloads, compared with the hardware's limit and `generate`."""
    lines = [
        "| acting | turns per second | tokens per second | of the hardware's limit | times `generate` |",
        "|---|---|---|---|---|",
    ]
    result = speed_result("workloads-bfloat16")
    for name, label in _WORKLOADS.items():
        row = result["workloads"][name]
        cells = (
            label,
            f"{row['turns_per_second']['median']:.1f}",
            f"{row['tokens_per_second']:.0f}",
            f"{of_limit(result, name):.2f}",
            f"{row['over_generate']:.1f}" if "over_generate" in row else "",
        )
        lines.append(table_row(*cells))
    limits = result["limits"]
    forward, alone = limits["forward_tokens_per_second"]["median"], limits["single_stream_tokens_per_second"]
    others = [
        f"{rate['median']:.0f} ({name.removeprefix('llama.cpp ')})"
        for name, rate in result["llama_cpp_tokens_per_second"].items()
    ]
    lines += [
        "",
        f"[Result]({_LINK}/workloads-bfloat16.json), bfloat16. The limit of a batch is a bare forward pass of 64 rows",
        f"of 40 tokens without logits ({forward:.0f} tokens/s); that of one reply is memory bandwidth over the size of",
        f"the weights ({alone:.0f} tokens/s, here {decoded_alone(result):.0f}). llama.cpp with the same weights in",
        "4 bits, in tokens/s:",
        f"{', '.join(others)}.",
    ]
    return "\n".join(lines)


def decoded_alone(result: dict[str, Any]) -> float:
    """Tokens per second of a single environment, whose replies have 64 tokens."""
    return 64 * float(result["workloads"]["single"]["turns_per_second"]["median"])


def of_limit(result: dict[str, Any], workload: str) -> float:
    """Tokens per second as a share of the hardware's limit: memory bandwidth for a single reply, else compute."""
    if workload == "single":
        return decoded_alone(result) / float(result["limits"]["single_stream_tokens_per_second"])
    return float(result["workloads"][workload]["of_forward"])


def end_to_end() -> str:
    """Throughput of acting and learning together, compared with other libraries."""
    result = speed_result("end-to-end-bfloat16")
    lines = ["| turns learned per second | llamagym | the other | times |", "|---|---|---|---|"]
    for name, ours, label in (
        ("trl_1.16", "llamagym", "TRL 1.16's GRPOTrainer, the same task"),
        ("agilerl_2.58", "llamagym", "AgileRL 2.58's LLM PPO, the same task"),
        ("llamagym_0.1.1", "llamagym script", "LlamaGym 0.1.1, its own script"),
    ):
        rates = [f"{result[of]['median']:.2f}" for of in (ours, name)]
        lines.append(table_row(label, *rates, f"{result[name]['ours_over']:.1f}"))
    link = f"[Result]({_LINK}/end-to-end-bfloat16.json)"
    return "\n".join([*lines, "", f"{link}; AgileRL and LlamaGym in float32, the others in bfloat16."])


def pieces() -> str:
    """Ablation of caches and kernels: throughput without each of them over that with it, in both dtypes."""
    return "\n\n".join(_ablation_in(dtype) for dtype in ("bfloat16", "float32"))


def _ablation_in(dtype: str) -> str:
    name = named("ablation", dtype)
    result = speed_result(name)
    workloads = ("repeated", "choices", "unique", "conversation", "single")
    works = [f"{work} {of}" for work in ("act", "learn") for of in workloads]
    works = [work for work in works if any(work in row for row in result["rows"].values())]
    lines = [table_row(f"without ({dtype})", *works), "|---" * (1 + len(works)) + "|"]
    for piece, row in result["rows"].items():
        cells = [_ratio(row[work]) if work in row else "" for work in works]
        lines.append(table_row(piece, *cells))
    return "\n".join([*lines, "", f"[Result]({_LINK}/{name}.json), which names the session of each value."])


def _ratio(value: dict[str, Any]) -> str:
    """A ratio with half the width of its interval, where ten rounds were measured."""
    ratio = f"{value['without_over_with']:.2f}"
    if "interval" not in value:
        return ratio
    low, high = value["interval"]
    return f"{ratio} ± {(high - low) / 2:.2f}"


def benchmarks() -> str:
    """Throughput of acting and of learning, compared with other libraries; one run each."""
    lines = ["| turns per second | free text, 8 tokens | choices |", "|---|---|---|"]
    names = {
        "transformers_batch_1": "times transformers' `generate`, one at a time",
        "transformers_batch_64": "times transformers' `generate`, batch of 64",
        "plain_step": "times a plain PPO step with full logits, batch of 16",
        "llamagym_0.1.1": "times LlamaGym 0.1.1",
        "agilerl_2.58": "times AgileRL 2.58's LLM PPO",
    }
    files = {
        "acting": "acting, 64 environments",
        "learning": "learning",
        "acting-bfloat16": "acting in bfloat16",
        "learning-bfloat16": "learning in bfloat16",
    }
    for file, what in files.items():
        result = speed_result(file)
        free, choices = (result[f"llamagym_{kind}"]["median"] for kind in ("free_text", "choices"))
        lines.append(table_row(f"[{what}]({_LINK}/{file}.json)", f"{free:.1f}", f"{choices:.0f}"))
        for rival, label in names.items():
            if rival in result:
                ratios = (result[f"{kind}_over_{rival}"] for kind in ("free_text", "choices"))
                rate = result[rival]["median"]
                lines.append(table_row(f"{label} ({rate:.2f})", *(f"{ratio:.1f}" for ratio in ratios)))
    lines += ["", "float32 unless bfloat16 is named; LlamaGym and AgileRL always in float32."]
    if (_RESULTS / "memory.png").exists():
        lines += ["", "![Resident memory of a Blackjack run](../scripts/benchmarks/results/memory.png)"]
    return "\n".join(lines)


def speed_result(name: str) -> dict[str, Any]:
    """The result file of a speed benchmark."""
    result: dict[str, Any] = json.loads((_RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return result
