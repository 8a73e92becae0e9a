"""Train a language model to find a code of three colors in six guesses, from all answers so far.

python examples/mastermind.py                       from rewards alone, which taught next to nothing in 85 minutes
python examples/mastermind.py --shown-games 10000   imitates games of a player who rules codes out, before it acts
"""

from __future__ import annotations

import functools
import random

import gymnasium
import script
from imitation import WarmStart, imitate

from llamagym import Agent, evaluate
from llamagym.envs.mastermind import Mastermind, compare

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


class Player:
    """Draws its first guess, and then takes the first code that no answer so far rules out.

    Were the first guess always the same, the last answer alone would tell the next one, and nothing need be remembered.
    """

    def __init__(self, env: gymnasium.Env, seed: int) -> None:
        """Begin a game."""
        self._possible, self._guess = list(CODES), random.Random(seed).choice(CODES)

    def __call__(self, said: str) -> int:
        """Rule out, and guess."""
        pegs, answered, _ = said.partition(":")
        if answered:
            answer = pegs.split().count("black"), pegs.split().count("white")
            self._possible = [code for code in self._possible if compare(self._guess, code) == answer]
            self._guess = self._possible[0]
        return CODES.index(self._guess)


def main() -> None:
    """Load, learn, and report."""
    options = script.parser(__doc__, eval_every=10, eval_episodes=256)
    options.add_argument("--shown-games", type=int, default=0, help="number of games to imitate first")
    args = script.parse(options, episodes=40_000)
    baselines = {"random": evaluate("random", Mastermind, episodes=200, seed=script.HELD_OUT_SEED).mean, "optimum": 1.0}
    agent = script.load(args, CodeBreaker, "episode")
    # A game's one reward tells too little to learn from; scored is only whether the code is found.
    train_in = functools.partial(Mastermind, reward_consistent=True)
    imitation = WarmStart(lambda: imitate(agent, Mastermind(), Player, args.shown_games))
    warm_start = [imitation] if args.shown_games else []
    script.learn(args, agent, train_in, script.evaluation(Mastermind, args), baselines, warm_start)


if __name__ == "__main__":
    script.run(main)
