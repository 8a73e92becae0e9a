"""The command line.

python -m llamagym doctor [--model M]
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from .agent import Agent
from .errors import LlamaGymError
from .learners.preflight import Check, Report
from .models.loading import load_model_and_tokenizer
from .models.registry import EMBEDDED_NAME


class ProbeAgent(Agent):
    """Says whether it goes left or right, or whatever else it is asked."""

    def get_system_prompt(self) -> str:
        """One line."""
        return "You walk through a maze. Answer with one word: left or right."

    def format_observation(self, observation: Any) -> str:
        """As it is."""
        return str(observation)

    def get_action_choices(self, observation: Any) -> list[str] | None:
        """Two for every other observation."""
        return ["left", "right"] if "fork" in observation else None

    def extract_action(self, response: str) -> str:
        """The reply itself."""
        return response


def doctor(args: argparse.Namespace) -> int:
    """Load a model and look it over; returns the exit status."""
    report = examine(args.model, args.device, args.dtype)
    verdict = f"No fault found; no time for: {', '.join(report.left_out)}." if report.left_out else "All is well."
    if not report.passed:
        verdict = f"Not as it should be: {', '.join(report.failing)}."
    sys.stdout.write(f"{report}\n{verdict}\n")
    return 0 if report.passed else 1


def examine(model: str, device: str = "auto", dtype: str = "auto") -> Report:
    """The checks of a model, loading it included."""
    name = "model"
    try:
        loaded, tokenizer, on = load_model_and_tokenizer(model, device, dtype)
        found = f"{model}, {loaded.pretrained_model.dtype} on {on}"
        name = "template"
        agent = ProbeAgent(loaded, tokenizer, on, {"max_new_tokens": 8}, seed=0)
    except LlamaGymError as error:
        return Report((Check(name, False, str(error)),))
    checks = agent.preflight(["fork 1", "fork 2", "a room", "another room"]).checks
    template = Check("template", True, "conversations can be appended to")
    return Report((Check("model", True, found), template, *checks))


def main() -> None:
    """Run a command."""
    parser = argparse.ArgumentParser(prog="python -m llamagym")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("doctor", help="look over a model, the installation and this machine")
    command.add_argument("--model", default=EMBEDDED_NAME, help="registered name, folder or hub id")
    command.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    command.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    command.set_defaults(run=doctor)
    args = parser.parse_args()
    sys.exit(args.run(args))


if __name__ == "__main__":
    main()
