"""Run an example with one thing about its agent changed, for the ablations and comparisons.

python scripts/benchmarks/learning/variant.py bare-numbers taxi --seed 0
python scripts/benchmarks/learning/variant.py no-calibration blackjack --episodes 250000
"""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
import script

from llamagym import Agent

VARIANTS = ("bare-numbers", "no-calibration")


def numbers_only(agent: Agent, observation: Any) -> str:
    """The environment's own numbers without words; measures the effect of textual observations."""
    return " ".join(map(str, np.ravel(observation)))


def main() -> None:
    """Change how the example makes its agent, then run it with the rest of the command line."""
    if len(sys.argv) < 3 or sys.argv[1] not in VARIANTS:
        sys.exit(f"Usage: variant.py VARIANT EXAMPLE [OPTIONS], with one of {', '.join(VARIANTS)} as VARIANT.")
    variant, example, *options = sys.argv[1:]
    load = script.load

    def load_numbers(args: Any, kind: type[Agent], *positional: Any, **named: Any) -> Any:
        changed = type(kind.__name__, (kind,), {"format_observation": numbers_only})
        return load(args, changed, *positional, **named)

    script.load = load_numbers if variant == "bare-numbers" else functools.partial(load, calibrate_choices=False)
    sys.argv = [f"{example}.py", *options]
    script.run(importlib.import_module(example).main)


if __name__ == "__main__":
    main()
