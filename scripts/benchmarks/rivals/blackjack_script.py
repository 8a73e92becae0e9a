"""LlamaGym's own Blackjack example, as far as it takes time: one environment, whole episodes, free text.

`Agent` is that of the library which the interpreter has: LlamaGym 0.1.1's or ours.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import gymnasium as gym

from llamagym import Agent

BATCH, TURNS = 8, 16
LORA = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "bias": "none", "task_type": "CAUSAL_LM"}
GENERATE = {
    "generate/max_new_tokens": 32,
    "generate/do_sample": True,
    "generate/top_p": 0.6,
    "generate/top_k": 0,
    "generate/temperature": 0.9,
}


class ScriptAgent(Agent):
    """Sees the hand in a sentence; says an action by its number."""

    def get_system_prompt(self) -> str:
        """The rules, at the example's length."""
        return (
            "You play blackjack for money. At every turn you see your sum, the dealer's card and whether you have a "
            "usable ace. Decide whether to stay with your sum or to take another card. "
            "Write 'Action: 0' to stay or 'Action: 1' to take a card."
        )

    def format_observation(self, observation: tuple[int, int, bool]) -> str:
        """A sentence."""
        ace = "one" if observation[2] else "no"
        return f"Your sum is {observation[0]}. The dealer shows {observation[1]}. You have {ace} usable ace."

    def extract_action(self, response: str) -> int:
        """The number, else what the words say."""
        found = re.search(r"Action: ([01])", response)
        return int(found.group(1)) if found else int("stay" not in response.lower())


def script_work(model: Any, tokenizer: Any) -> Callable[[], float]:
    """Plays episodes until `TURNS` turns were taken, learning from each `BATCH` of them; returns the turns."""
    batch = {"batch_size": BATCH, "mini_batch_size": BATCH}
    agent, env = (
        ScriptAgent(model, tokenizer, "cpu", GENERATE, batch),
        gym.make("Blackjack-v1", natural=False, sab=False),
    )
    env.reset(seed=0)

    def work() -> float:
        turns = 0
        while turns < TURNS:
            (observation, _), done = env.reset(), False
            while not done:
                action = agent.act(observation)
                observation, reward, terminated, truncated, _ = env.step(action)
                agent.assign_reward(float(reward))
                turns, done = turns + 1, terminated or truncated
            agent.terminate_episode()
        return turns

    return work
