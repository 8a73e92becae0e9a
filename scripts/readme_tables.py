"""Regenerate the tables in README.md from what they describe.

python scripts/readme_tables.py            rewrites README.md
python scripts/readme_tables.py --check    exits with 1 if it is out of date
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch

from llamagym import model_registry

README = Path(__file__).resolve().parent.parent / "README.md"


def models() -> str:
    """The registry, an entry a line."""
    lines = [
        "| name | family | parameters | LoRA on | weights in GiB: fp32 / 16 bits / 4 bits |",
        "|---|---|---|---|---|",
    ]
    for entry in model_registry.entries():
        modules = entry.lora_target_modules
        lora = f"`{modules}`" if isinstance(modules, str) else ", ".join(f"`{name}`" for name in modules)
        names = f"`{entry.name}`" + (f" (`{entry.hub_id}`)" if entry.hub_id and entry.hub_id != entry.name else "")
        if entry.parameter_count is None:
            lines.append(f"| {names}: any other of the family | {entry.family} | | {lora} | |")
            continue
        memory = [
            entry.memory_gib(torch.float32),
            entry.memory_gib(torch.bfloat16),
            entry.memory_gib(quantization="4bit"),
        ]
        sizes = " / ".join(f"{gib:.1f}" for gib in memory)
        lines.append(f"| {names} | {entry.family} | {entry.parameter_count / 1e6:,.0f} M | {lora} | {sizes} |")
    return "\n".join(lines)


SECTIONS: dict[str, Callable[[], str]] = {"models": models}


def render(text: str) -> str:
    """The README's text with every section made anew."""
    for name, make in SECTIONS.items():
        begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}{make()}\n{end}{after}"
    return text


def main(argv: list[str]) -> int:
    """Rewrite or check; the exit code."""
    current = README.read_text(encoding="utf-8")
    fresh = render(current)
    if argv == ["--check"]:
        if fresh != current:
            print("README.md is out of date. Run python scripts/readme_tables.py", file=sys.stderr)
        return int(fresh != current)
    README.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
