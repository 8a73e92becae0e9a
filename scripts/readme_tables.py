"""Regenerate the tables in README.md from what they describe.

python scripts/readme_tables.py            rewrites README.md
python scripts/readme_tables.py --check    exits with 1 if it is out of date
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from llamagym import model_registry

README = Path(__file__).resolve().parent.parent / "README.md"


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


SECTIONS: dict[str, Callable[[], str]] = {"models": models}
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
