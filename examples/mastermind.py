"""Train a language model to find a code of three colours in six guesses, which takes remembering all answers.

python examples/mastermind.py                       from rewards alone, which taught next to nothing in 85 minutes
python examples/mastermind.py --shown-games 4000    imitates games of a player who rules codes out, before it acts
"""

from __future__ import annotations

import functools
import json
import random
import tempfile
from pathlib import Path

import script

from llamagym import Agent
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


def shown_game(seed: int) -> list[dict[str, str]]:
    """A game in chat format whose guesses are drawn among the codes that no answer so far rules out."""
    env, draw = Mastermind(), random.Random(seed).choice
    said, _ = env.reset(seed=seed)
    possible, messages, over = list(CODES), [{"role": "user", "content": said}], False
    while not over:
        guess = draw(possible)
        said, _, over, _, _ = env.step(CODES.index(guess))
        pegs = said.partition(":")[0].split()
        answer = pegs.count("black"), pegs.count("white")
        possible = [code for code in possible if compare(guess, code) == answer]
        messages += [{"role": "assistant", "content": guess}, {"role": "user", "content": said}]
    return messages[:-1]


def main() -> None:
    """Load, learn, and report."""
    options = script.parser(__doc__, episodes=40_000, eval_every=10, eval_episodes=256)
    options.add_argument("--shown-games", type=int, default=0, help="number of games to imitate first")
    args = options.parse_args()
    baselines = {"random": script.random_return(Mastermind), "optimum": 1.0}
    agent = script.load(args, CodeBreaker, "episode")
    if args.shown_games and not args.resume:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "games.jsonl"
            games = [{"messages": shown_game(seed)} for seed in range(args.shown_games)]
            path.write_text("\n".join(map(json.dumps, games)))
            print(agent.sft_from_jsonl(path, epochs=1))
    # A game's one reward tells too little to learn from; scored is only whether the code is found.
    train_in = functools.partial(Mastermind, reward_consistent=True)
    script.learn(args, agent, train_in, script.play_held_out(agent, Mastermind, args), baselines)


if __name__ == "__main__":
    script.run(main)
