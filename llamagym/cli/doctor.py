"""Examines a model, the installation and this machine, for the command `doctor`."""

from __future__ import annotations

import sys
from typing import Any

import click

from ..agent.agent import Agent
from ..agent.preflight import Check, Report
from ..errors import LlamaGymError
from ..models.loading import load_model_and_tokenizer


class ProbeAgent(Agent):
    """Walks through a maze: choices at a fork, else free text."""

    def get_system_prompt(self) -> str:
        """Returns one line."""
        return "You walk through a maze. Answer with one word: left or right."

    def format_observation(self, observation: Any) -> str:
        """Returns the observation unchanged."""
        return str(observation)

    def get_action_choices(self, observation: Any) -> list[str] | None:
        """Returns two choices for observations with the word "fork", None for others."""
        return ["left", "right"] if "fork" in observation else None

    def extract_action(self, response: str) -> str:
        """Returns the reply."""
        return response


def examine(model: str, device: str = "auto", dtype: str = "auto") -> Report:
    """Checks a model, including loading it."""
    try:
        loaded, tokenizer, used_device = load_model_and_tokenizer(model, device, dtype)
    except LlamaGymError as error:
        return Report((Check("model", False, str(error)),))
    loading = Check("model", True, f"{model}, {loaded.pretrained_model.dtype} on {used_device}")
    try:
        agent = ProbeAgent(loaded, tokenizer, used_device, {"max_new_tokens": 8}, seed=0)
    except LlamaGymError as error:
        return Report((Check("template", False, str(error)),))
    template = Check("template", True, "conversations can be appended to")
    report = agent.preflight(["fork 1", "fork 2", "a room", "another room"])
    return Report((loading, template, *report.checks))


def doctor(*, model: str, device: str, dtype: str) -> None:
    """Checks a model, the installation and this machine; the arguments are the command's options."""
    report = examine(model, device, dtype)
    verdict = "All checks passed." if report.passed else f"Failed: {', '.join(report.failing)}."
    click.echo(f"{report}\n{verdict}")
    sys.exit(0 if report.passed else 1)
