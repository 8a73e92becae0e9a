"""Train a language model to find a code of three colours in six guesses, which takes remembering all answers.

python examples/mastermind.py
"""

from __future__ import annotations

import functools

import script

from llamagym import Agent
from llamagym.envs.mastermind import Mastermind

CODES = Mastermind().codes


class CodeBreaker(Agent):
    """Reads the whole conversation; says a code."""

    def get_system_prompt(self) -> str:
        """The task, in a line."""
        return "Find the code. Answer with three colours only."

    def format_observation(self, observation: str) -> str:
        """The environment's own words."""
        return observation

    def get_action_choices(self, observation: str) -> list[str]:
        """All codes: nothing says which are still possible."""
        return list(CODES)

    def extract_action(self, response: str) -> int:
        """The code's number."""
        return CODES.index(response)


def main() -> None:
    """Load, learn, and report."""
    args = script.parser(__doc__, episodes=40_000, eval_every=10, eval_episodes=256).parse_args()
    baselines = {"random": script.random_return(Mastermind), "optimum": 1.0}
    agent = script.load(args, CodeBreaker, "episode")
    # A game's one reward tells too little to learn from; scored is only whether the code is found.
    train_in = functools.partial(Mastermind, reward_consistent=True)
    script.learn(args, agent, train_in, script.play_held_out(agent, Mastermind, args), baselines)


if __name__ == "__main__":
    script.run(main)
