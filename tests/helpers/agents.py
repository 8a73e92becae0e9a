"""Small agents and environments that the tests share."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import torch

from llamagym import Agent, GRPOConfig, ReinforceConfig
from llamagym.agent.actor import Actor
from llamagym.agent.agent import collector_of
from llamagym.models.lora import set_lora_depth_
from llamagym.policy.calibration import Calibration
from tests.helpers.tiny import tiny_model, tiny_tokenizer


class WordAgent(Agent):
    """Answers in free text; the action is the reply."""

    def get_system_prompt(self) -> str:
        return "Say something."

    def format_observation(self, observation: Any) -> str:
        return f"Observation {observation}"

    def extract_action(self, response: str) -> str:
        return response


class ChoiceAgent(WordAgent):
    """Chooses among strings of several tokens, some beginning alike; the action is the string's index."""

    choices: tuple[str, ...] = ("go left", "go right", "stay")

    def get_action_choices(self, observation: Any) -> list[str] | None:
        return list(self.choices)

    def extract_action(self, response: str) -> int:
        return self.choices.index(response)


# Small steps that no trust region stops, rewards that are not discounted: what is expected can be said exactly.
PLAIN = {"learning_rate": 3e-4, "target_kl": None, "gamma": 1.0}


def make_agent(
    kind: type[Agent] = WordAgent,
    family: str = "llama",
    activated: bool = True,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Any:
    """An agent on a tiny model; its adapter and value head are moved off zero, so that nothing is trivially equal.

    Args:
        kind: Its class.
        family: Of the model.
        activated: Whether LoRA acts from the reply on, or on every token.
        dtype: Of the frozen weights; those that learn are in float32, as ever.
        options: Of the agent.
    """
    model = tiny_model(family, activated=activated)
    for weight in model.parameters():
        weight.data = weight.data if weight.requires_grad else weight.data.to(dtype)
    # While it is fresh.
    set_lora_depth_(model, sees_one_turn=options.get("context") == "turn")
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name or "v_head" in name:
                weight.normal_(std=0.2, generator=rng)
    settings = {"max_new_tokens": 6, **options.pop("generate", {})}
    algorithm = options.pop("algorithm", "ppo")
    epochs = {
        "ppo": {"ppo_epochs": 2},
        "grpo": {"epochs": 2},
        "reinforce": {},
    }[algorithm]
    sizes = {"batch_size": 4} if algorithm == "reinforce" else {"batch_size": 4, "mini_batch_size": 4}
    learner_options = {**PLAIN, **epochs, **sizes, **options.pop(algorithm, {})}
    if algorithm == "ppo":
        options["ppo_config_dict"] = learner_options
    else:
        options["learner"] = {"grpo": GRPOConfig, "reinforce": ReinforceConfig}[algorithm].from_dict(learner_options)
    return kind(model, tiny_tokenizer(family), None, settings, **{"seed": 0, **options})


def actor_of(agent: Agent) -> Actor:
    """The part of an agent that acts and holds the conversations."""
    return collector_of(agent).actor


def settled(agent: Agent) -> Any:
    """The agent as if it had learned: choices are measured once, where they are offered first."""
    agent.policy.calibration = Calibration(is_frozen=True)
    return agent


def experienced(agent: Agent) -> Any:
    """The agent as if it had met other returns: it also learns from a batch of one episode."""
    agent.learner._information._latest = [[[1e9] * 100, [1e9] * 100]]  # type: ignore[attr-defined]
    return agent


def touch_weights(agent: Agent) -> None:
    """Change all weights that learn, by nothing: what was computed with them counts as outdated."""
    with torch.no_grad():
        for weight in agent.policy.model.parameters():
            if weight.requires_grad:
                weight.add_(0.0)


class CountdownEnv(gym.Env):
    """Shows how many steps are left; ends after `length` steps, by termination or by truncation."""

    observation_space = gym.spaces.Discrete(100)
    action_space = gym.spaces.Discrete(3)

    def __init__(self, length: int = 3, truncates: bool = False) -> None:
        self.length, self.truncates = length, truncates

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.int64, dict]:
        super().reset(seed=seed)
        self.left = self.length
        return np.int64(self.left), {}

    def step(self, action: int) -> tuple[np.int64, float, bool, bool, dict]:
        self.left -= 1
        over = self.left == 0
        return np.int64(self.left), float(action), over and not self.truncates, over and self.truncates, {}
