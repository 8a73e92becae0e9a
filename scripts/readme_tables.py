"""Regenerate the tables in README.md and docs/ from result files and the registry.

python scripts/readme_tables.py            rewrites the pages
python scripts/readme_tables.py --check    exits with 1 if one is out of date
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from llamagym.models import registry

sys.path.insert(0, str(Path(__file__).resolve().parent / "benchmarks"))
import learning_tables
import speed_tables
import support_tables
from runs import table_row

ROOT = Path(__file__).resolve().parent.parent


def models() -> str:
    """The registry, one entry per line."""
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
        lines.append(table_row(name, entry.family, parameters, lora, sizes, entry.template_notes))
    return "\n".join(lines)


Sections = dict[str, Callable[[], str]]
PAGES: dict[Path, Sections] = {
    ROOT / "README.md": {"summary": learning_tables.summary},
    ROOT / "docs" / "benchmarks.md": {
        "results": learning_tables.results,
        "shortfalls": learning_tables.shortfalls,
        "ablations": learning_tables.ablations,
        "comparisons": learning_tables.comparisons,
        "sparse-rewards": learning_tables.sparse_rewards,
        "batch-sizes": learning_tables.batch_sizes,
        "workloads": speed_tables.workloads,
        "end-to-end": speed_tables.end_to_end,
        "benchmarks": speed_tables.benchmarks,
        "pieces": speed_tables.pieces,
    },
    ROOT / "docs" / "models.md": {
        "models": models,
        "architectures": support_tables.architectures,
        "adapters": support_tables.adapters,
    },
}
"""By page, the functions that write the text between `<!-- name:begin -->` and `<!-- name:end -->`."""


def render(page: str, text: str, sections: Sections) -> str:
    """A page's text with every section regenerated.

    Raises:
        ValueError: The markers of a section do not occur once each, in order.
    """
    for name, make in sections.items():
        begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->\n"
        if text.count(begin) != 1 or text.count(end) != 1 or text.index(end) < text.index(begin):
            raise ValueError(f"{page} must hold the lines {begin!r} and {end!r} once each, in this order. Add them.")
        before, rest = text.split(begin)
        text = f"{before}{begin}{make()}\n{end}{rest.split(end)[1]}"
    return text


def main(argv: list[str]) -> int:
    """Rewrite or check; returns the exit code."""
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
