"""The command `doctor`: looks over a model, the installation and this machine."""

from __future__ import annotations

import sys
from typing import Any

import click

from ..agent.agent import Agent
from ..agent.preflight import Check, Report
from ..errors import LlamaGymError
from ..models.loading import load_model_and_tokenizer
from ..models.registry import EMBEDDED_NAME


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


@click.command()
@click.option("--model", default=EMBEDDED_NAME, show_default=True, help="Registered name, folder or hub id.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda or mps.")
@click.option("--dtype", default="auto", show_default=True, help="auto, float32, bfloat16 or float16.")
def doctor(model: str, device: str, dtype: str) -> None:
    """Look over a model, the installation and this machine."""
    report = examine(model, device, dtype)
    verdict = "All is well." if report.passed else f"Not as it should be: {', '.join(report.failing)}."
    click.echo(f"{report}\n{verdict}")
    sys.exit(0 if report.passed else 1)
