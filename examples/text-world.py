"""Train a language model to play text adventures it has not seen; needs pip install 'llamagym[textworld]'.

python examples/text-world.py                        find the coin at the end of a chain of rooms
python examples/text-world.py --game locked_door     take the key, unlock and open the door, go through
python examples/text-world.py --printed              read what the game prints, and remember it
python examples/text-world.py --game locked_door --free-text        write the commands as well
"""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import script
from imitation import WarmStart

from llamagym import Agent, demonstrations_path, evaluate
from llamagym.envs.textworld import KINDS, TextWorldEnv, make_games

# Seeds of the games to learn from, and of those to be tested on.
_TRAINING_SEED, _TEST_SEED = 0, 10_000


class TextWorldAgent(Agent):
    """Sees its last command and those that are possible now; says what to do."""

    def get_system_prompt(self) -> str:
        """The task, in a line."""
        return "You play a text adventure. Answer with one of the possible commands."

    def format_observation(self, observation: dict[str, Any]) -> str:
        """Commands, without the story: rooms that the training games lack read alike."""
        possible = ", ".join(observation["admissible_commands"])
        return f"You did: {observation['last_command'] or 'nothing'}. You can: {possible}. What do you do?"

    def get_action_choices(self, observation: dict[str, Any]) -> list[str]:
        """The possible commands."""
        return list(observation["admissible_commands"])

    def extract_action(self, response: str) -> str:
        """The command itself."""
        return response


class Reader(TextWorldAgent):
    """Reads what the game prints, in a conversation that it sees whole; says one of the possible commands."""

    def get_system_prompt(self) -> str:
        """The task, in a line."""
        return "You play a text adventure. Answer with a command."

    def format_observation(self, observation: dict[str, Any]) -> str:
        """The game's own words."""
        return str(observation["text"])


class Writer(Reader):
    """Writes its commands; the game says which of them it does not understand."""

    get_action_choices = Agent.get_action_choices


def main() -> None:
    """Make the games, load, learn, and report."""
    options = script.parser(__doc__, eval_every=10, eval_episodes=100)
    options.add_argument("--printed", action="store_true", help="read what the game prints, the whole conversation")
    options.add_argument("--free-text", action="store_true", help="write commands, not choose; implies --printed")
    options.add_argument("--game", choices=KINDS, default="coin_collector")
    options.add_argument("--level", type=int, default=5, help="of the coin collector: number of rooms")
    options.add_argument("--max-steps", type=int, default=25, help="of an episode")
    options.add_argument("--games", type=int, default=50, help="number to learn from, and number to be tested on")
    options.add_argument("--games-dir", type=Path, default=Path("runs/textworld-games"), help="where games are kept")
    args = script.parse(options, episodes=3_000)
    seen, unseen = (
        make_games(args.game, range(seed, seed + args.games), args.games_dir, args.level)
        for seed in (_TRAINING_SEED, _TEST_SEED)
    )
    if args.free_text or args.printed:
        kind = Writer if args.free_text else Reader
        agent = script.load(args, kind, "episode", generate_config_dict={"max_new_tokens": 12})
    else:
        agent = script.load(args, TextWorldAgent)
    test_in = functools.partial(TextWorldEnv, unseen, args.max_steps)
    draw = random.Random(0).choice
    chance = evaluate(
        lambda observation: draw(observation["admissible_commands"]), test_in, episodes=200, seed=script.HELD_OUT_SEED
    )
    baselines = {"random": chance.mean, "optimum": 1.0}
    train_in = functools.partial(TextWorldEnv, seen, args.max_steps)
    commands = WarmStart(lambda: agent.sft_from_jsonl(demonstrations_path("format_text-world_commands")))
    warm_start = [commands] if args.free_text else []
    script.learn(args, agent, train_in, script.evaluation(test_in, args), baselines, warm_start)


if __name__ == "__main__":
    script.run(main)
