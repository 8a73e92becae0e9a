"""Learning from demonstrations before learning from rewards."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium

from llamagym import Agent, Callback, Run

Player = Callable[[Any], int]
"""Chooses an action for an observation."""


class WarmStart(Callback):
    """Trains the agent once, before the first step; a resumed run has done so already."""

    def __init__(self, learn: Callable[[], dict[str, float]]) -> None:
        """`learn` trains the agent and returns statistics."""
        self.stats: dict[str, float] = {}
        self._learn = learn

    def on_training_start(self, run: Run) -> None:
        """Train and print the statistics."""
        if not run.is_resumed:
            self.stats = self._learn()
            print("Warm start: " + ", ".join(f"{name} {value:.4g}" for name, value in self.stats.items()))

    def state_dict(self) -> dict[str, Any]:
        """The statistics, for the checkpoint."""
        return self.stats

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The statistics of the run that is resumed."""
        self.stats = state


def imitate(
    agent: Agent, env: gymnasium.Env, make_player: Callable[[gymnasium.Env, int], Player], episodes: int
) -> dict[str, float]:
    """Fine-tune an agent on episodes of a player who knows more than it does.

    Args:
        agent: The agent; its choices are in the order of the environment's actions.
        env: The environment, reset with seeds 0, 1, ...
        make_player: Makes the player of an episode from the environment after its reset, and from the seed.
        episodes: Number of episodes.

    Returns:
        Statistics of the fine-tuning.
    """
    lines = []
    for seed in range(episodes):
        observation, _ = env.reset(seed=seed)
        player = make_player(env, seed)
        messages = []
        done = False
        while not done:
            action = player(observation)
            messages.append({"role": "user", "content": agent.format_observation(observation)})
            messages.append({"role": "assistant", "content": agent.get_action_choices(observation)[action]})
            observation, _, terminated, truncated, _ = env.step(action)
            done = terminated or truncated
        lines.append(json.dumps({"messages": messages}))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "episodes.jsonl"
        path.write_text("\n".join(lines), encoding="utf-8")
        return agent.sft_from_jsonl(path, epochs=1)
