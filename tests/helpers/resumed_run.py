"""Runs that are stopped and go on in another process; prints what each did.

python -m tests.helpers.resumed_run FOLDER UPDATES [resume]
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from llamagym import Agent, AutoModelForCausalLMWithValueHead, GRPOConfig, PPOConfig, train
from tests.helpers.agents import ChoiceAgent, WordAgent
from tests.helpers.tiny import tiny_base_model, tiny_model, tiny_tokenizer

SIZES = {"batch_size": 8, "mini_batch_size": 4, "learning_rate": 0.01, "warmup_steps": 1, "target_kl": None}
SIZES["cooldown"] = 1.0  # each update at a rate of its own
_REFERENCE = {"init_kl_coef": 0.2, "adap_kl_ctrl": True, "target": 0.01, "horizon": 20}


class Talker(WordAgent):
    """Any text names an action."""

    def extract_action(self, response: str) -> int:
        return len(response) % 3


class DiceEnv(gym.Env):
    """Episodes of 2 to 5 steps with random observations and rewards; every third is truncated."""

    observation_space = gym.spaces.Discrete(100)
    action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.int64, dict]:
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(2, 6))
        return np.int64(self.np_random.integers(100)), {}

    def step(self, action: int) -> tuple[np.int64, float, bool, bool, dict]:
        self.left -= 1
        shown, drawn = self.np_random.integers(100), self.np_random.integers(3)
        over, cut = self.left == 0, self.left == 0 and drawn == 0
        return np.int64(shown), float(action == drawn), over and not cut, cut, {}


CASES: dict[str, tuple[type[Agent], dict[str, Any]]] = {
    "ppo": (ChoiceAgent, {"ppo": {"target_kl": 0.01}}),
    "gradient critic": (ChoiceAgent, {"ppo": {"critic": "gradient"}}),
    "grpo": (ChoiceAgent, {"algorithm": "grpo", "grpo": {"group_size": 2}}),
    "replay": (ChoiceAgent, {"replay_config_dict": {"episodes": 3, "batch_size": 4}}),
    "adaptive KL": (ChoiceAgent, {"ppo": _REFERENCE}),
    "all weights": (ChoiceAgent, {"ppo": _REFERENCE, "adapter": False}),
    "plain LoRA": (ChoiceAgent, {"activated": False}),
    "warm start": (ChoiceAgent, {}),
    "warm start, adaptive KL": (ChoiceAgent, {"ppo": _REFERENCE}),
    "free text": (Talker, {}),
    "whole conversations": (Talker, {"context": "episode"}),
    "choices in whole conversations": (ChoiceAgent, {"context": "episode"}),
}


def make(kind: type[Agent], adapter: bool = True, activated: bool = True, **options: Any) -> Agent:
    """An agent as every process makes it."""
    torch.manual_seed(0)
    if adapter:
        model = tiny_model("llama", activated=activated)
    else:
        model = AutoModelForCausalLMWithValueHead.from_pretrained(tiny_base_model("llama"))
    algorithm = options.pop("algorithm", "ppo")
    config = {"ppo": PPOConfig, "grpo": GRPOConfig}[algorithm]
    options["learner"] = config.from_dict(SIZES | options.pop(algorithm, {}))
    return kind(
        model, tiny_tokenizer("llama"), None, {"max_new_tokens": 4}, **{"context": "turn", "seed": 0, **options}
    )


def demonstrations(folder: Path) -> Path:
    """A file of them."""
    path = folder / "demonstrations.jsonl"
    said = [{"role": "user", "content": "Observation 7"}, {"role": "assistant", "content": "go right"}]
    path.write_text(json.dumps({"messages": said}) + "\n")
    return path


def run(name: str, folder: Path, updates: int, resume: bool) -> dict[str, Any]:
    """Make a case's agent, which learns for so many updates."""
    kind, options = CASES[name]
    agent = make(kind, **dict(options))
    if name.startswith("warm start") and not resume:
        agent.sft_from_jsonl(demonstrations(folder), epochs=1)
    return learn(agent, updates, checkpoint_dir=folder / name, resume=resume)


def learn(agent: Agent, updates: int, **options: Any) -> dict[str, Any]:
    """Learn for so many updates; returns all that tells one run from another."""
    actions: list[Any] = []
    act = agent.act_batch
    agent.act_batch = lambda *args: actions.append(act(*args)) or actions[-1]  # type: ignore[method-assign,func-returns-value]
    counts: list[int] = []

    def count(stats: dict[str, float]) -> bool:
        counts.append(len(actions))
        return len(counts) < updates

    result = train(
        agent, DiceEnv, episodes=1000, **{"num_envs": 4, "on_update": count, "checkpoint_every": 1, **options}
    )
    digest = hashlib.sha256()
    for weight in (*agent.policy.model.parameters(), *agent.policy.model.v_head.buffers()):
        digest.update(weight.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    stats = [{key: value for key, value in of.items() if not key.endswith("_s")} for of in result.updates]
    calibration = agent.policy.calibration
    prior = sorted(calibration.prior.items()) if calibration else None
    return {
        "weights": digest.hexdigest(),
        "stats": stats,
        "returns": result.returns,
        "turns": result.turns,
        "prior": prior,
        # Since the last update but one.
        "actions": actions[counts[-2] if len(counts) > 1 else 0 :],
    }


if __name__ == "__main__":
    done = {name: run(name, Path(sys.argv[1]), int(sys.argv[2]), "resume" in sys.argv) for name in CASES}
    sys.stdout.write(json.dumps(done) + "\n")
