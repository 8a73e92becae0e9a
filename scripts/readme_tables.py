"""Regenerate the tables in README.md and docs/ from what they describe.

python scripts/readme_tables.py            rewrites the pages
python scripts/readme_tables.py --check    exits with 1 if one is out of date
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

from llamagym.models import registry

sys.path.insert(0, str(Path(__file__).resolve().parent / "benchmarks"))
from runs import ABLATIONS, RESULTS, TITLES, Run, half_width, runs_by_name

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = Path(__file__).resolve().parent / "benchmarks"
# The results' folders as pages in docs/ link to them.
LEARNING = "../scripts/benchmarks/learning/results"
SPEED = "../scripts/benchmarks/results"
# What the first goal for Blackjack is; always sticking returns -0.186, the optimum -0.047.
_GOAL = -0.12
# What was to be reached, set before the runs, in any dtype; by the name of the result files.
_TARGETS = {
    "blackjack": "greedy -0.060, worst -0.075",
    "blackjack-free-text": "greedy -0.080",
    "frozenlake": "0.65",
    "cartpole": "450, worst 300",
    "text-world": "0.9",
    "babyai": "0.9",
    "taxi": "7.5",
    "guess_number": "0.95",
}
# What users do, by the name in the results, from the best case to the worst.
_WORKLOADS = {
    "repeated": "Blackjack's observations, 64 environments, up to 8 tokens",
    "repeated-choices": "the same, choices",
    "unique": "every observation new, 64 environments, up to 8 tokens",
    "unique-choices": "the same, choices",
    "conversation": "conversations of 10 turns, 16 environments, up to 32 tokens",
    "single": "one environment, up to 64 tokens",
}
# Variants of a recipe, by the name of their result files; a learning rate of 0 is the control.
_VARIANTS = {
    "blackjack-ppo": "Blackjack: PPO, the default",
    "blackjack-grpo": "Blackjack: GRPO",
    "blackjack-no-calibration": "Blackjack: choices not calibrated",
    "blackjack-no-entropy-bonus": "Blackjack: no entropy bonus",
    "blackjack-warm-start": "Blackjack: after a warm start",
    "blackjack-rate-0": "Blackjack: learning rate 0",
    "cartpole-grpo": "CartPole: GRPO, stopped after 12 minutes",
}


def models() -> str:
    """The registry, an entry a line."""
    lines = [
        "| name (hub id, if another) | family | parameters | LoRA on | GiB in fp32 / bf16 / 4-bit | template |",
        "|---|---|---|---|---|---|",
    ]
    for entry in registry.entries():
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
    """What was learnt: an experiment a line, its plot, and what all ran on."""
    lines = [
        "| runs, by seed | before | sampled (worst) | greedy (worst) | target | baselines | minutes | GiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    plots = []
    for name, runs in runs_by_name().items():
        seeds = " ".join(f"[{run['seed']}]({LEARNING}/{run['file']})" for run in runs)
        title = TITLES.get(name, name)
        cells = [
            f"{title} {seeds}",
            number(statistics.mean(run["expected_return_before"] for run in runs)),
            *(over_seeds([run[f"expected_return_{how}"] for run in runs]) for how in ("after", "greedy")),
            _TARGETS.get(name.removesuffix("-bfloat16"), ""),
            ", ".join(
                f"{baseline.replace('_', ' ')} {number(value)}" for baseline, value in runs[0]["baselines"].items()
            ),
            f"{statistics.mean(run['minutes'] for run in runs):.1f}",
            f"{max(run['peak_memory_gib'] for run in runs):.1f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
        if (RESULTS / f"{name}.png").exists():
            plots += ["", f"![Learning curves: {title}]({LEARNING}/{name}.png)"]
    hardware = [run["hardware"] for runs in runs_by_name().values() for run in runs]
    machines = dict.fromkeys(f"{of_run['cores']} cores of an {of_run['processor']}" for of_run in hardware)
    lines += [
        "",
        "Expected returns before and after learning, replies sampled or greedy: mean over seeds ± its 95 % interval,",
        "and the worst seed. Minutes are the seeds' mean, GiB their largest peak.",
        f"On {' or '.join(machines)}. Each file holds its command and machine;",
        "`python scripts/benchmarks/learning/run.py blackjack --seeds 0 1 2` makes Blackjack's.",
        *time_to_goal(runs_by_name()["blackjack"]),
    ]
    return "\n".join([*lines, *plots])


def time_to_goal(runs: list[Run]) -> list[str]:
    """A sentence on how long Blackjack takes to its first goal."""
    minutes = [first_reach(run, "minutes", ".1f") for run in runs]
    return [f"Blackjack passed {_GOAL}, sampled, after minutes: {', '.join(minutes)}."]


def first_reach(run: Run, axis: str, style: str) -> str:
    """Where along `axis` a Blackjack run first reached the goal."""
    reached = (point[axis] for point in run["curve"] if point.get("expected_return", _GOAL - 1) >= _GOAL)
    return next((format(at, style) for at in reached), "never")


def ablations() -> str:
    """What each part of the recipe buys: a variant a line, its seeds one after the other."""
    lines = [f"| variant, by seed | before | sampled | greedy | episodes to {_GOAL} |", "|---|---|---|---|---|"]
    found = runs_by_name(ABLATIONS)
    for name in (name for name in _VARIANTS if name in found):
        runs = found[name]
        links = " ".join(f"[{run['seed']}]({LEARNING}/ablations/{run['file']})" for run in runs)
        cells = [
            f"{_VARIANTS[name]} {links}",
            *(", ".join(number(run[f"expected_return_{at}"]) for run in runs) for at in ("before", "after", "greedy")),
            ", ".join(first_reach(run, "step", ",d") for run in runs) if name.startswith("blackjack") else "",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def number(value: float) -> str:
    """Three decimals where returns are small, one where they are large."""
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def over_seeds(values: list[float]) -> str:
    """Mean, half-width of its 95 % interval and the worst; a single value stands alone."""
    if len(values) == 1:
        return number(values[0])
    return f"{number(statistics.mean(values))} ± {number(half_width(values))} ({number(min(values))})"


def benchmarks() -> str:
    """Acting and learning against others, from one run each."""
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
        lines.append(f"| [{what}]({SPEED}/{file}.json) | {free:.1f} | {choices:.0f} |")
        for rival, label in names.items():
            if rival in result:
                ratios = (result[f"{kind}_over_{rival}"] for kind in ("free_text", "choices"))
                rate = result[rival]["median"]
                lines.append(f"| {label} ({rate:.2f}) | " + " | ".join(f"{ratio:.1f}" for ratio in ratios) + " |")
    lines += [
        "",
        f"On {machine(result)}, in float32 where nothing",
        "else is said; LlamaGym 0.1.1 and AgileRL 2.58 always in float32.",
    ]
    if (BENCHMARKS / "results" / "memory.png").exists():
        lines += ["", "![Resident memory of a Blackjack run](../scripts/benchmarks/results/memory.png)"]
    return "\n".join(lines)


def decoded_alone(result: dict[str, Any]) -> float:
    """Tokens a second of a single environment's replies, which are 64 tokens long."""
    return 64 * float(result["workloads"]["single"]["turns_per_second"]["median"])


def of_limit(result: dict[str, Any], workload: str) -> float:
    """Tokens a second as a share of what the hardware allows: memory's bandwidth for one reply alone, else compute."""
    if workload == "single":
        return decoded_alone(result) / float(result["limits"]["single_stream_tokens_per_second"])
    return float(result["workloads"][workload]["of_forward"])


def workloads() -> str:
    """Acting on what users do, the worst as well as the best, against the hardware and others."""
    lines = [
        "| acting | turns per second | tokens per second | of the hardware's limit | times `generate` |",
        "|---|---|---|---|---|",
    ]
    result = speed_result("workloads-bfloat16")
    for name, label in _WORKLOADS.items():
        row = result["workloads"][name]
        cells = (
            f"{row['turns_per_second']['median']:.1f}",
            f"{row['tokens_per_second']:.0f}",
            f"{of_limit(result, name):.2f}",
            f"{row['over_generate']:.1f}" if "over_generate" in row else "",
        )
        lines.append(f"| {label} | {' | '.join(cells)} |")
    limits = result["limits"]
    forward, alone = limits["forward_tokens_per_second"]["median"], limits["single_stream_tokens_per_second"]
    others = [
        f"{rate['median']:.0f} ({name.removeprefix('llama.cpp ')})"
        for name, rate in result["llama_cpp_tokens_per_second"].items()
    ]
    lines += [
        "",
        f"[Result]({SPEED}/workloads-bfloat16.json), in bfloat16 on {machine(result)}.",
        f"The limit of a batch is a bare forward pass of 64 rows of 40 tokens, without logits: {forward:.0f} tokens a",
        f"second. One reply alone can be decoded at {alone:.0f}, memory's bandwidth over the weights' bytes; it is",
        f"here at {decoded_alone(result):.0f}. llama.cpp, with the same weights in 4 bit, makes",
        f"{', '.join(others)} tokens a second.",
    ]
    return "\n".join(lines)


def end_to_end() -> str:
    """Acting and learning together, against others."""
    result = speed_result("end-to-end-bfloat16")
    lines = ["| turns learnt per second | llamagym | the other | times |", "|---|---|---|---|"]
    for name, ours, label in (
        ("trl_1.16", "llamagym", "TRL 1.16's GRPOTrainer, the same task"),
        ("agilerl_2.58", "llamagym", "AgileRL 2.58's LLM PPO, the same task"),
        ("llamagym_0.1.1", "llamagym script", "LlamaGym 0.1.1, its own script"),
    ):
        rates = [f"{result[of]['median']:.2f}" for of in (ours, name)]
        lines.append(f"| {label} | {' | '.join(rates)} | {result[name]['ours_over']:.1f} |")
    link = f"[Result]({SPEED}/end-to-end-bfloat16.json)"
    return "\n".join(
        [*lines, "", f"{link}, on {machine(result)}; AgileRL and LlamaGym in float32, the others in bfloat16."]
    )


def pieces() -> str:
    """What each cache and each kernel is good for: turns a second without it over those with it."""
    result = speed_result("ablation")
    works = [f"{work} {of}" for work in ("act", "learn") for of in ("repeated", "unique", "conversation", "single")]
    lines = [f"| without | {' | '.join(works)} |", "|---" * (1 + len(works)) + "|"]
    for name, row in result["rows"].items():
        lines.append(f"| {name} | " + " | ".join(f"{row[work]['without_over_with']:.2f}" for work in works) + " |")
    return "\n".join([*lines, "", f"[Result]({SPEED}/ablation.json), on {machine(result)}."])


def speed_result(name: str) -> dict[str, Any]:
    """What a benchmark of speed has found."""
    result: dict[str, Any] = json.loads((BENCHMARKS / "results" / f"{name}.json").read_text(encoding="utf-8"))
    return result


def machine(result: dict[str, Any]) -> str:
    """What a result was measured on."""
    return f"{result['hardware']['cores']} cores of an {result['hardware']['processor']}"


def summary() -> str:
    """What was learnt, an experiment a line, for the README."""
    lines = [
        "| task | before | after (worst seed) | random | optimum | minutes | hardware |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, runs in runs_by_name().items():
        after = [run["expected_return_after"] for run in runs]
        baselines, hardware = runs[0]["baselines"], runs[0]["hardware"]
        native = "bfloat16" if "with native bfloat16" in hardware["processor"] else "float32"
        cells = [
            TITLES.get(name, name).removesuffix(", bfloat16").removesuffix(" in bfloat16"),
            number(statistics.mean(run["expected_return_before"] for run in runs)),
            f"{number(statistics.mean(after))} ({number(min(after))})",
            *(number(baselines[baseline]) if baseline in baselines else "" for baseline in ("random", "optimum")),
            f"{statistics.mean(run['minutes'] for run in runs):.1f}",
            f"{hardware['cores']} cores, {native}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def speed() -> str:
    """Acting on what users do, the worst as well as the best, and learning end to end, for the README."""
    result, learnt = speed_result("workloads-bfloat16"), speed_result("end-to-end-bfloat16")
    lines = ["| acting | turns per second | times `generate` | of the hardware's limit |", "|---|---|---|---|"]
    for name, label in _WORKLOADS.items():
        row = result["workloads"][name]
        over = f"{row['over_generate']:.1f}" if "over_generate" in row else ""
        lines.append(f"| {label} | {row['turns_per_second']['median']:.1f} | {over} | {of_limit(result, name):.2f} |")
    times = {name: learnt[name]["ours_over"] for name in ("trl_1.16", "agilerl_2.58", "llamagym_0.1.1")}
    return "\n".join(
        [
            *lines,
            "",
            f"Acting and learning together: {times['trl_1.16']:.0f} times TRL 1.16's GRPOTrainer and "
            f"{times['agilerl_2.58']:.0f} times AgileRL 2.58's LLM PPO",
            f"on the same task, {times['llamagym_0.1.1']:.0f} times LlamaGym 0.1.1 on its own script. On",
            f"{machine(result)}. The limit is a bare forward pass; for one environment, memory's bandwidth.",
        ]
    )


Sections = dict[str, Callable[[], str]]
PAGES: dict[Path, Sections] = {
    ROOT / "README.md": {"summary": summary, "speed": speed},
    ROOT / "docs" / "benchmarks.md": {
        "results": results,
        "ablations": ablations,
        "workloads": workloads,
        "end-to-end": end_to_end,
        "benchmarks": benchmarks,
        "pieces": pieces,
    },
    ROOT / "docs" / "models.md": {"models": models},
}
"""By page, what stands between `<!-- name:begin -->` and `<!-- name:end -->`, by name."""


def render(page: str, text: str, sections: Sections) -> str:
    """A page's text with every section made anew.

    Raises:
        ValueError: The markers of a section are not there, each once and in order.
    """
    for name, make in sections.items():
        begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->\n"
        if text.count(begin) != 1 or text.count(end) != 1 or text.index(end) < text.index(begin):
            raise ValueError(f"{page} must hold the lines {begin!r} and {end!r} once each, in this order. Add them.")
        before, rest = text.split(begin)
        text = f"{before}{begin}{make()}\n{end}{rest.split(end)[1]}"
    return text


def main(argv: list[str]) -> int:
    """Rewrite or check; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a page is out of date")
    check = parser.parse_args(argv).check
    outdated = 0
    for path, sections in PAGES.items():
        current = path.read_text(encoding="utf-8")
        fresh = render(path.name, current, sections)
        if fresh == current:
            continue
        if check:
            outdated = 1
            print(f"{path.name} is out of date. Run python scripts/readme_tables.py", file=sys.stderr)
        else:
            path.write_text(fresh, encoding="utf-8")
    return outdated


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
