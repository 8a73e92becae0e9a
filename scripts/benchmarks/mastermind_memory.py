"""Tests whether an agent that imitated Mastermind's player uses earlier observations.

Measures the probability that the agent gives to the player's next guess. If the last observation does not determine
that guess, only earlier ones do. The run must have been kept:

python scripts/benchmarks/learning/run.py mastermind --seeds 0 --keep runs/mastermind -- --shown-games 10000
python scripts/benchmarks/mastermind_memory.py runs/mastermind/seed0
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

from common import ROOT, save

sys.path.insert(0, str(ROOT / "examples"))
from mastermind import CODES, CodeBreaker, Player
from script import HELD_OUT_SEED

from llamagym import Agent, evaluate, load_model_and_tokenizer
from llamagym.agent.agent import collector_of
from llamagym.envs.mastermind import Mastermind
from llamagym.text.episode import Reply

SEEDS = range(1_000)
"""Covers all codes and all first guesses."""


class Turn(NamedTuple):
    """An observation, and the number of the code that the player guesses after it."""

    said: str
    guess: int


Game = list[Turn]
Follows = dict[str, Counter[int]]
"""By observation, how often the player makes each guess after it."""


def play(env: Mastermind, player_seed: int, code_seed: int) -> Game:
    """Plays a game with the player, whose first guess depends on its seed."""
    said, player, turns, over = env.reset(seed=code_seed)[0], Player(env, player_seed), [], False
    while not over:
        turns.append(Turn(said, player(said)))
        said, _, over, _, _ = env.step(turns[-1].guess)
    return turns


def seeds_of_codes(env: Mastermind) -> dict[int, int]:
    """A seed for each code, by the code's number; the player finds every code with its last guess."""
    return {play(env, 0, seed)[-1].guess: seed for seed in SEEDS}


def player_games() -> list[Game]:
    """All games of the player, one for each pair of first guess and code."""
    env = Mastermind()
    first, codes = {play(env, seed, 0)[0].guess: seed for seed in SEEDS}, seeds_of_codes(env)
    assert len(first) == len(codes) == len(CODES)
    return [play(env, player_seed, code_seed) for player_seed in first.values() for code_seed in codes.values()]


def following(games: list[Game]) -> Follows:
    """Counts the player's guesses after each observation except the first."""
    follows: Follows = defaultdict(Counter)
    for game in games:
        for turn in game[1:]:
            follows[turn.said][turn.guess] += 1
    return follows


def found_from_last(games: list[Game], follows: Follows) -> float:
    """Success rate of making the most frequent guess after each observation, after the first guess of each game.

    Some observations on the way occur in no game of the player; such games count as lost.
    """
    env, found = Mastermind(), []
    seeds = seeds_of_codes(env)
    for game in games:
        env.reset(seed=seeds[game[-1].guess])
        said, _, over, _, info = env.step(game[0].guess)
        while not over and said in follows:
            said, _, over, _, info = env.step(follows[said].most_common(1)[0][0])
        found.append(info["success"])
    return statistics.mean(found)


def kind(number: int, guesses: Counter[int]) -> str:
    """The kind of a guess.

    Args:
        number: The guess's position in its game, from 0.
        guesses: The player's guesses after the same observation.
    """
    if number == 1:
        return "second"
    if len(guesses) == 1:
        return "third or later, told by the last observation"
    return "third, left open" if number == 2 else "later, left open"


def likelihoods(agent: Agent, games: list[Game]) -> list[list[float]]:
    """The agent's probability of each of the player's guesses, by game."""
    contexts = []
    for game in games:
        conversation = collector_of(agent).actor.new_conversation()
        for said, guess in game:
            contexts.append(conversation.observe(said, collector_of(agent).actor.hooks.response_prefix, CODES))
            ids = contexts[-1].prompts[-1].choices[guess]  # type: ignore[index]
            conversation.answer(Reply(ids, (0.0,), 0.0, "choice", guess, 0), CODES[guess])
    offers = iter(agent.policy.choice_logprobs(contexts))
    return [[next(offers)[turn.guess].exp().item() for turn in game] for game in games]


def main() -> None:
    """Measure the agents of a kept run: after imitation, and after learning from rewards."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run with --shown-games")
    parser.add_argument("--games", type=int, default=128, help="number of the player's games to measure likelihoods on")
    parser.add_argument("--eval-episodes", type=int, default=256, help="number of held-out games to play greedily")
    args = parser.parse_args()
    every = player_games()
    follows = following(every)
    games = random.Random(0).sample(every, args.games)
    settings = json.loads((args.run / "summary.json").read_text())["settings"]
    imitating = CodeBreaker(*load_model_and_tokenizer(settings["model"]), context="episode", seed=settings["seed"])
    imitating.load_checkpoint(args.run / "warm-start")
    agents = {"after imitation": imitating, "after rewards": CodeBreaker.load(args.run / "agent")}
    likely = {name: likelihoods(agent, games) for name, agent in agents.items()}
    of_kind: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for number, game in enumerate(games):
        for turn, (said, guess) in enumerate(game[1:], start=1):
            guesses = follows[said]
            shares = of_kind[kind(turn, guesses)]
            shares["imitation without memory"].append(guesses[guess] / guesses.total())
            shares["most frequent guess"].append(guess == guesses.most_common(1)[0][0])
            for name, of_agent in likely.items():
                shares[name].append(of_agent[number][turn])
    greedy = {
        name: evaluate(agent, Mastermind, episodes=args.eval_episodes, seed=HELD_OUT_SEED, greedy=True).mean
        for name, agent in agents.items()
    }
    result = {
        "likelihood": {
            of: {"turns": len(shares["after imitation"]), **{by: statistics.mean(shares[by]) for by in shares}}
            for of, shares in of_kind.items()
        },
        "found_by_most_frequent_guess": found_from_last(every, follows),
        "found_greedy": greedy,
    }
    save(f"mastermind-memory-{settings['shown_games']}-games-seed{settings['seed']}", result)


if __name__ == "__main__":
    main()
