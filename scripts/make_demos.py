"""Write demonstrations: conversations in chat format, one a line.

python scripts/make_demos.py        writes every file of FILES into sft_data/

Plays the examples' worlds: pip install 'llamagym[textworld,minigrid]'.

- demo_blackjack.jsonl: basic strategy; one reply in ten is drawn at random. States come as often as the strategy meets
  them. Shows the format and most of the strategy, and leaves something to learn.
- format_blackjack.jsonl: replies drawn at random, whatever the state. Shows the format and nothing else.
- format_cartpole.jsonl and so on: the same for the other examples, in what random replies lead to.
"""

from __future__ import annotations

import functools
import importlib
import json
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import gymnasium as gym

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from address_book import Clerk
from babyai import BabyAIAgent
from blackjack import BlackjackAgent
from blackjack_exact import STATES, optimal_policy, state_visit_probabilities
from cartpole import CartPoleAgent
from cartpole import make as make_cartpole
from frozenlake import FrozenLakeAgent

from llamagym import Agent
from llamagym.envs.address_book import AddressBook, random_call
from llamagym.envs.babyai import make_babyai
from llamagym.envs.textworld import KINDS, LOOKING, TextWorldEnv, make_games

ROOT = Path(__file__).resolve().parent.parent
NOISE, SEED = 0.1, 0
WORDS = ("stick", "hit")

Demonstrations = list[dict[str, object]]


def conversation(kind: type[Agent], observation: Any, reply: str) -> dict[str, object]:
    """One turn as `{"messages": [system, user, assistant]}`, in the words of an agent's class."""
    # Its prompts need no model.
    prompts: Any = kind.__new__(kind)
    contents = prompts.get_system_prompt(), prompts.format_observation(observation), reply
    roles = "system", "user", "assistant"
    return {"messages": [{"role": role, "content": said} for role, said in zip(roles, contents, strict=True)]}


def demonstrations(count: int = 500) -> Demonstrations:
    """Blackjack by basic strategy, with some noise."""
    rng = random.Random(SEED)
    best = optimal_policy()
    visits = state_visit_probabilities(best)
    rows: Demonstrations = []
    for state in rng.choices(STATES, [visits[state] for state in STATES], k=count):
        action = rng.randrange(2) if rng.random() < NOISE else best[state]
        rows.append(conversation(BlackjackAgent, state, WORDS[action]))
    return rows


def blackjack_format(count: int = 256) -> Demonstrations:
    """Blackjack with random replies, each word as often as the other, in states of all kinds."""
    rng = random.Random(SEED)
    words = [WORDS[index % len(WORDS)] for index in range(count)]
    rng.shuffle(words)
    return [conversation(BlackjackAgent, rng.choice(STATES), word) for word in words]


def random_play(kind: type[Agent], make: Callable[[], gym.Env[Any, Any]], count: int = 128) -> Demonstrations:
    """Replies drawn evenly from an agent's choices, in an environment played so from one episode to the next."""
    rng = random.Random(SEED)
    prompts: Any = kind.__new__(kind)
    env = make()
    rows: Demonstrations = []
    observation, _ = env.reset(seed=SEED)
    while len(rows) < count:
        word = rng.choice(prompts.get_action_choices(observation))
        rows.append(conversation(kind, observation, word))
        observation, _, terminated, truncated, _ = env.step(prompts.extract_action(word))
        if terminated or truncated:
            observation, _ = env.reset()
    env.close()
    return rows


def text_world_format() -> Demonstrations:
    """Random commands in the coin collector's first games."""
    with tempfile.TemporaryDirectory() as folder:
        games = make_games("coin_collector", range(4), folder)
        # The module's name has a hyphen.
        kind = importlib.import_module("text-world").TextWorldAgent
        return random_play(kind, lambda: TextWorldEnv(games, max_steps=25))


def text_world_commands(count: int = 64) -> Demonstrations:
    """Whole conversations: random commands, among those possible, in games of both kinds as they are printed.

    Three in four do something, since play that mostly looks about never shows what is possible further on.
    """
    rng, prompts = random.Random(SEED), cast(Any, object.__new__(importlib.import_module("text-world").Writer))
    rows: Demonstrations = []
    with tempfile.TemporaryDirectory() as folder:
        games = [game for kind in KINDS for game in make_games(kind, range(8), folder)]
        env = TextWorldEnv(games, max_steps=12)
        for seed in range(count):
            observation, done = env.reset(seed=SEED + seed)[0], False
            messages = [{"role": "system", "content": prompts.get_system_prompt()}]
            while not done:
                possible = observation["admissible_commands"]
                doing = [command for command in possible if command.split()[0] not in LOOKING]
                looking = [command for command in possible if command not in doing]
                reply = rng.choice(doing if doing and rng.random() < 0.75 else looking)
                messages.append({"role": "user", "content": prompts.format_observation(observation)})
                messages.append({"role": "assistant", "content": reply})
                observation, _, terminated, truncated, _ = env.step(reply)
                done = terminated or truncated
            rows.append({"messages": messages})
        env.close()
    return rows


def address_book_format(count: int = 256) -> Demonstrations:
    """Whole conversations of random calls."""
    rng, env, prompts = random.Random(SEED), AddressBook(), cast(Any, Clerk.__new__(Clerk))
    rows: Demonstrations = []
    for seed in range(count):
        said, done = env.reset(seed=SEED + seed)[0], False
        told, messages = said, [{"role": "system", "content": prompts.get_system_prompt()}]
        while not done:
            reply = random_call(rng, told)
            messages += [{"role": "user", "content": said}, {"role": "assistant", "content": reply}]
            said, _, done, _, _ = env.step(reply)
            told += said
        rows.append({"messages": messages})
    return rows


FILES: dict[str, Callable[[], Demonstrations]] = {
    "demo_blackjack.jsonl": demonstrations,
    "format_blackjack.jsonl": blackjack_format,
    "format_cartpole.jsonl": functools.partial(random_play, CartPoleAgent, make_cartpole),
    "format_frozenlake.jsonl": functools.partial(random_play, FrozenLakeAgent, lambda: gym.make("FrozenLake-v1")),
    "format_babyai.jsonl": functools.partial(
        random_play, BabyAIAgent, lambda: make_babyai("BabyAI-GoToRedBallNoDists-v0", all_actions=False)
    ),
    "format_text-world.jsonl": text_world_format,
    "format_text-world_commands.jsonl": text_world_commands,
    "format_address_book.jsonl": address_book_format,
}


def main() -> None:
    """Write the files."""
    folder = ROOT / "sft_data"
    folder.mkdir(exist_ok=True)
    for name, make in FILES.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in make()), encoding="utf-8")


if __name__ == "__main__":
    main()
