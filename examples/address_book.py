"""Train a language model to answer questions by calling a tool, in free text and with the whole conversation in view.

python examples/address_book.py
"""

from __future__ import annotations

import random

import script
from imitation import WarmStart

from llamagym import Agent, demonstrations_path
from llamagym.envs.address_book import AddressBook, random_call

FORMAT = demonstrations_path("format_address_book")


class Clerk(Agent):
    """Reads the whole conversation; writes a call or the answer."""

    def get_system_prompt(self) -> str:
        """The task and its tool, in two lines."""
        return "Answer the question. Say find and a name to look up a person or a city. Say answer and a colour to end."

    def format_observation(self, observation: str) -> str:
        """The question, or what the tool returned."""
        return observation

    def extract_action(self, response: str) -> str:
        """The reply itself: the environment says how calls are written."""
        return response


def random_calls(episodes: int = 256) -> float:
    """Share of episodes that random calls answer right."""
    rng, env, right = random.Random(0), AddressBook(), 0.0
    for seed in range(episodes):
        said, done = env.reset(seed=script.HELD_OUT_SEED + seed)[0], False
        while not done:
            told, reward, done, _, _ = env.step(random_call(rng, said))
            said, right = said + told, right + reward
    return right / episodes


def main() -> None:
    """Load, show the format by random calls, learn, and report."""
    args = script.parse(script.parser(__doc__, eval_every=5, eval_episodes=256), episodes=5_000)
    agent = script.load(args, Clerk, "episode", generate_config_dict={"max_new_tokens": 8})
    baselines = {"random": random_calls(), "optimum": 1.0}
    warm_start = [WarmStart(lambda: agent.sft_from_jsonl(FORMAT))]
    script.learn(args, agent, AddressBook, script.evaluation(AddressBook, args), baselines, warm_start)


if __name__ == "__main__":
    script.run(main)
