"""Train a language model to guess a number from 1 to 16 in five tries, which takes remembering all answers.

python examples/guess_number.py
"""

from __future__ import annotations

import script

from llamagym import Agent, evaluate
from llamagym.envs.guess_number import GuessTheNumber

NUMBERS = [str(number) for number in range(1, 17)]


class Guesser(Agent):
    """Reads the whole conversation; says a number."""

    def get_system_prompt(self) -> str:
        """The task, in a line."""
        return "Find the number. Answer with a number only."

    def format_observation(self, observation: str) -> str:
        """The environment's own words."""
        return observation

    def get_action_choices(self, observation: str) -> list[str]:
        """All numbers: nothing says which are still possible."""
        return NUMBERS

    def extract_action(self, response: str) -> int:
        """The number itself."""
        return int(response)


def main() -> None:
    """Load, learn, and report."""
    args = script.parse(script.parser(__doc__, eval_every=10, eval_episodes=256), episodes=20_000)
    baselines = {
        "random": evaluate("random", GuessTheNumber, episodes=200, seed=script.HELD_OUT_SEED).mean,
        "optimum": 1.0,
    }
    agent = script.load(args, Guesser, "episode")
    script.learn(args, agent, GuessTheNumber, script.evaluation(GuessTheNumber, args), baselines)


if __name__ == "__main__":
    script.run(main)
