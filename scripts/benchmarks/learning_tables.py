"""Tables of the learning results in `learning/results`."""

from __future__ import annotations

import statistics

from runs import (
    ABLATIONS,
    BATCH_SIZES,
    COMPARISONS,
    RESULTS,
    SPARSE_REWARDS,
    TITLES,
    Run,
    half_width,
    runs_by_name,
    table_row,
    title,
)

# The results' folder as pages in docs/ link to it.
_LINK = "../scripts/benchmarks/learning/results"
# First goal for Blackjack; always sticking returns -0.186, the optimum -0.047.
_GOAL = -0.12
# Targets, set before the runs, in any dtype; by the name of the result files.
_TARGETS = {
    "blackjack": "greedy -0.060, worst -0.075",
    "blackjack-free-text": "greedy -0.080",
    "frozenlake": "0.65",
    "cartpole": "450, worst 300",
    "text-world": "0.9",
    "babyai-defaults": "0.9",
    "taxi": "7.5",
    "guess_number": "0.95",
    "address_book": "0.8",
    "cartpole-two-decimals": "450",
    "text-world-printed": "0.9",
    "text-world-locked-door-free-text": "0.8",
    "mastermind": "0.9",
    "mastermind-10000-games": "0.9",
    "babyai-memory-shown-episodes": "0.9",
    "babyai-memory": "0.9",
    "babyai-go-to-local": "0.85",
}
# Tasks that missed their target, by the name of the result files, and the limiting factor.
_LIMITS = {
    "mastermind-10000-games": "number of imitated games; randomness of sampling",
    "mastermind": "random guesses hardly ever find the code, so hardly any episode is rewarded",
    "babyai-memory": "looking back costs steps and is unlearned before it pays",
    "cartpole-two-decimals": "half of an update's gain is overfitting to its batch; a weak critic",
    "babyai-go-to-local": "the greedy agent alternates between two views",
}
# The README's rows, by the name of the result files: short and long tasks, numbers and texts, listed and free replies.
_SHOWN_IN_README = (
    "text-world-defaults",
    "frozenlake-defaults",
    "taxi",
    "address_book",
    "cartpole-defaults",
    "text-world-locked-door-free-text",
)
# Variants of a recipe, by the name of their result files; a learning rate of 0 is the control.
_VARIANTS = {
    "blackjack-ppo": "Blackjack: PPO, the default",
    "blackjack-grpo": "Blackjack: GRPO",
    "blackjack-no-calibration": "Blackjack: choices not calibrated",
    "blackjack-no-entropy-bonus": "Blackjack: no entropy bonus",
    "blackjack-warm-start": "Blackjack: after a warm start",
    "blackjack-rate-0": "Blackjack: learning rate 0",
    "cartpole-grpo": "CartPole: GRPO, stopped after 12 minutes",
    "cartpole-two-decimals-64-environments": "CartPole to two decimals: 64 environments throughout, 58 minutes",
}
# Tasks that were learned with the model and words, with random weights, and with observations as bare numbers.
_COMPARED, _WAYS = ("blackjack", "taxi", "frozenlake"), ("words", "random", "numbers")


def summary() -> str:
    """Six tasks for the README, one per line, with links to the result files of their seeds."""
    found = runs_by_name()
    header = "| task | random | before | after (worst seed) | optimum | minutes | runs |"
    lines = [header, "|---|---|---|---|---|---|---|"]
    for name in _SHOWN_IN_README:
        runs = found[name]
        after = [run["expected_return_after"] for run in runs]
        baselines = runs[0]["baselines"]
        files = " ".join(f"[{run['seed']}](scripts/benchmarks/learning/results/{run['file']})" for run in runs)
        cells = [
            title(name, runs),
            number(baselines["random"]) if "random" in baselines else "",
            number(statistics.mean(run["expected_return_before"] for run in runs)),
            f"{number(statistics.mean(after))} ({number(min(after))})",
            number(baselines["optimum"]),
            f"{statistics.mean(map(minutes, runs)):.0f}",
            files,
        ]
        lines.append(table_row(*cells))
    return "\n".join(lines)


def results() -> str:
    """Learning results: one experiment per line, with links to its runs and their curves."""
    lines = [
        "| task | random | before | sampled (worst) | greedy (worst) | optimum | target | minutes | GiB | runs |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, runs in runs_by_name().items():
        files = [f"[{run['seed']}]({_LINK}/{run['file']})" for run in runs]
        if (RESULTS / f"{name}.png").exists():
            files.append(f"[curves]({_LINK}/{name}.png)")
        baselines = runs[0]["baselines"]
        cells = [
            title(name, runs),
            number(baselines["random"]) if "random" in baselines else "",
            number(statistics.mean(run["expected_return_before"] for run in runs)),
            *(over_seeds([run[f"expected_return_{how}"] for run in runs]) for how in ("after", "greedy")),
            number(baselines["optimum"]),
            _TARGETS.get(name.removesuffix("-bfloat16"), ""),
            f"{statistics.mean(map(minutes, runs)):.1f}",
            f"{max(run['peak_memory_gib'] for run in runs):.1f}",
            " ".join(files),
        ]
        lines.append(table_row(*cells))
    return "\n".join([*lines, "", *time_to_goal(runs_by_name()["blackjack"])])


def shortfalls() -> str:
    """Experiments that missed their target, one per line, by seed."""
    lines = ["| task | target | sampled, by seed | greedy, by seed | what limits it |", "|---|---|---|---|---|"]
    found = runs_by_name()
    for name, limit in _LIMITS.items():
        runs = found[name]
        returns = (", ".join(number(run[f"expected_return_{how}"]) for run in runs) for how in ("after", "greedy"))
        lines.append(table_row(title(name, runs), _TARGETS[name], *returns, limit))
    return "\n".join(lines)


def minutes(run: Run) -> float:
    """Minutes of learning, from demonstrations and rewards; older files lack the former."""
    return run["minutes"] + (run.get("warm_start") or {}).get("learn_s", 0.0) / 60


def time_to_goal(runs: list[Run]) -> list[str]:
    """A sentence on the minutes until Blackjack reaches its first goal."""
    reached = [first_reach(run, "minutes", ".1f") for run in runs]
    return [f"Minutes until Blackjack's sampled policy passed {_GOAL}, by seed: {', '.join(reached)}."]


def first_reach(run: Run, axis: str, style: str) -> str:
    """The point on `axis` at which a Blackjack run first reached the goal."""
    reached = (point[axis] for point in run["curve"] if point.get("expected_return", _GOAL - 1) >= _GOAL)
    return next((format(at, style) for at in reached), "never")


def ablations() -> str:
    """Ablation of the recipe: one variant per line, by seed."""
    lines = [f"| variant, by seed | before | sampled | greedy | episodes to {_GOAL} |", "|---|---|---|---|---|"]
    found = runs_by_name(ABLATIONS)
    for name in (name for name in _VARIANTS if name in found):
        runs = found[name]
        links = " ".join(f"[{run['seed']}]({_LINK}/ablations/{run['file']})" for run in runs)
        cells = [
            f"{_VARIANTS[name]} {links}",
            *(", ".join(number(run[f"expected_return_{at}"]) for run in runs) for at in ("before", "after", "greedy")),
            ", ".join(first_reach(run, "step", ",d") for run in runs) if name.startswith("blackjack") else "",
        ]
        lines.append(table_row(*cells))
    return "\n".join(lines)


def sparse_rewards() -> str:
    """Turns until a task with rare rewards is solved: one version of the library per line, by seed."""
    lines = ["| version, by seed | turns to the first reward | turns to solve | updates |", "|---|---|---|---|"]
    found = runs_by_name(SPARSE_REWARDS)
    for name in ("before", "now"):
        runs = found[name]
        links = " ".join(f"[{run['seed']}](../scripts/benchmarks/results/sparse-rewards/{run['file']})" for run in runs)
        cells = [", ".join(f"{run[key]:,}" for run in runs) for key in ("turns_to_first_reward", "turns", "updates")]
        lines.append(table_row(f"{runs[0]['llamagym'][:7]} {links}", *cells))
    return "\n".join(lines)


def batch_sizes() -> str:
    """Final return of Blackjack by batch size: one size per line, by seed."""
    lines = ["| turns per batch | return, by seed | updates | minutes of one core |", "|---|---|---|---|"]
    found = runs_by_name(BATCH_SIZES)
    for size in sorted(found, key=int):
        runs = found[size]
        folder = "../scripts/benchmarks/results/batch-sizes"
        returns = ", ".join(f"[{run['return_after']:.3f}]({folder}/{run['file']})" for run in runs)
        updates = ", ".join(f"{run['updates']:,}" for run in runs)
        minutes = ", ".join(f"{run['processor_minutes']:.0f}" for run in runs)
        lines.append(table_row(f"{int(size):,}", returns, updates, minutes))
    return "\n".join(lines)


def comparisons() -> str:
    """Contribution of the language model: one task and sampling mode per line, with links to the files."""
    lines = [
        "| task, seed 0 | | model and words | random weights | bare numbers | optimum |",
        "|---|---|---|---|---|---|",
    ]
    for how, name in (("after", "sampled"), ("greedy", "greedy")):
        for task, usual, random, numbers, optimum in _compared(how):
            files = [f"{_LINK}/comparisons/{task}-{way}-seed0.json" for way in _WAYS]
            cells = [f"[{value}]({file})" for value, file in zip((usual, random, numbers), files, strict=True)]
            lines.append(table_row(TITLES[task], name, *cells, optimum))
    return "\n".join(lines)


def _compared(how: str) -> list[tuple[str, str, str, str, str]]:
    """Each task with its returns: as usual, random weights, bare numbers, optimum."""
    found, rows = runs_by_name(COMPARISONS), []
    for task in _COMPARED:
        runs = [found[f"{task}-{way}"][0] for way in _WAYS]
        usual, random, numbers = (number(run[f"expected_return_{how}"]) for run in runs)
        rows.append((task, usual, random, numbers, number(runs[0]["baselines"]["optimum"])))
    return rows


def number(value: float) -> str:
    """Three decimals where returns are small, one where they are large."""
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def over_seeds(values: list[float]) -> str:
    """Mean, half-width of its 95 % interval and the worst; a single value stands alone."""
    if len(values) == 1:
        return number(values[0])
    return f"{number(statistics.mean(values))} ± {number(half_width(values))} ({number(min(values))})"
