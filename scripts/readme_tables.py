"""Regenerate the tables in README.md from what they describe.

python scripts/readme_tables.py            rewrites README.md
python scripts/readme_tables.py --check    exits with 1 if it is out of date
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from llamagym import model_registry

README = Path(__file__).resolve().parent.parent / "README.md"
BENCHMARKS = Path(__file__).resolve().parent / "benchmarks"
# What the first goal for Blackjack is; always sticking returns -0.186, the optimum -0.047.
_GOAL = -0.12


def models() -> str:
    """The registry, an entry a line."""
    lines = [
        "| name (hub id, if another) | family | parameters | LoRA on | GiB in fp32 / bf16 / 4-bit | template |",
        "|---|---|---|---|---|---|",
    ]
    for entry in model_registry.entries():
        name = f"`{entry.name}`" + (f" (`{entry.hub_id}`)" if entry.hub_id != entry.name else "")
        # The table's own entries all name their modules and their size; "all-linear" is for unknown architectures.
        assert entry.parameter_count is not None
        lora = ", ".join(f"`{module}`" for module in entry.lora_target_modules)
        memory = (
            entry.memory_gib(torch.float32),
            entry.memory_gib(torch.bfloat16),
            entry.memory_gib(quantization="4bit"),
        )
        sizes = " / ".join(f"{gib:.1f}" for gib in memory)
        parameters = f"{entry.parameter_count / 1e6:,.0f} M"
        lines.append(f"| {name} | {entry.family} | {parameters} | {lora} | {sizes} | {entry.template_notes} |")
    return "\n".join(lines)


def results() -> str:
    """Blackjack's runs, a seed a line, and their mean with its 95 % interval."""
    paths = sorted((BENCHMARKS / "learning" / "results").glob("blackjack-seed*.json"))
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    lines = [
        f"| seed | before | after, sampled | after, greedy | minutes to {_GOAL} | minutes | hands | peak GiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for path, run in zip(paths, runs, strict=True):
        reached = next((point["minutes"] for point in run["curve"] if point["expected_return"] >= _GOAL), None)
        cells = [
            f"[{run['seed']}](scripts/benchmarks/learning/results/{path.name})",
            *(f"{run['expected_return_' + when]:.3f}" for when in ("before", "after", "greedy")),
            "never" if reached is None else f"{reached:.1f}",
            f"{run['minutes']:.1f}",
            f"{run['episodes']:,}",
            f"{run['peak_memory_gib']:.1f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    if len(runs) < 2:
        return "\n".join(lines)
    sampled, greedy = (interval([run[f"expected_return_{how}"] for run in runs]) for how in ("after", "greedy"))
    baselines = ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in runs[0]["baselines"].items())
    hardware = runs[0]["hardware"]
    seeds = " ".join(str(run["seed"]) for run in runs)
    lines += [
        "",
        f"Exact expected return in Blackjack. Mean and 95 % interval over {len(runs)} seeds: sampled {sampled},",
        f"greedy {greedy}. Baselines: {baselines}.",
        f"On {hardware['cores']} cores of an {hardware['processor']}.",
        f"Command: `python scripts/benchmarks/learning/run.py blackjack --seeds {seeds}`.",
    ]
    return "\n".join(lines)


def interval(values: list[float]) -> str:
    """Mean and half-width of the 95 % interval by Student's t."""
    t = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}[len(values)]
    half = t * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):.3f} ± {half:.3f}"


def benchmarks() -> str:
    """Acting and learning against others, from one run each."""
    lines = ["| turns per second | free text, 8 tokens | choices |", "|---|---|---|"]
    names = {
        "transformers_batch_1": "times transformers' `generate`, one at a time",
        "transformers_batch_64": "times transformers' `generate`, batch of 64",
        "plain_step": "times a plain PPO step with full logits, batch of 16",
        "llamagym_0.1.1": "times LlamaGym 0.1.1",
    }
    for file, what in (("acting", "acting, 64 environments"), ("learning", "learning")):
        path = BENCHMARKS / "results" / f"{file}.json"
        if not path.exists():
            continue
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        free, choices = (result[f"llamagym_{kind}"]["median"] for kind in ("free_text", "choices"))
        lines.append(f"| [{what}](scripts/benchmarks/results/{file}.json) | {free:.1f} | {choices:.0f} |")
        for rival, label in names.items():
            if rival in result:
                ratios = (result[f"{kind}_over_{rival}"] for kind in ("free_text", "choices"))
                rate = result[rival]["median"]
                lines.append(f"| {label} ({rate:.2f}) | " + " | ".join(f"{ratio:.1f}" for ratio in ratios) + " |")
    return "\n".join(lines)


SECTIONS: dict[str, Callable[[], str]] = {"results": results, "benchmarks": benchmarks, "models": models}
"""What stands between `<!-- name:begin -->` and `<!-- name:end -->`, by name."""


def render(text: str) -> str:
    """The README's text with every section made anew.

    Raises:
        ValueError: The markers of a section are not there, each once and in order.
    """
    for name, make in SECTIONS.items():
        begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->\n"
        if text.count(begin) != 1 or text.count(end) != 1 or text.index(end) < text.index(begin):
            raise ValueError(f"README.md must hold the lines {begin!r} and {end!r} once each, in this order. Add them.")
        before, rest = text.split(begin)
        text = f"{before}{begin}{make()}\n{end}{rest.split(end)[1]}"
    return text


def main(argv: list[str]) -> int:
    """Rewrite or check; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if README.md is out of date")
    check = parser.parse_args(argv).check
    current = README.read_text(encoding="utf-8")
    fresh = render(current)
    if check:
        if fresh != current:
            print("README.md is out of date. Run python scripts/readme_tables.py", file=sys.stderr)
        return int(fresh != current)
    README.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
