"""Number of turns to solve a task whose first reward a random policy finds after about 16 updates.

python scripts/benchmarks/sparse_rewards.py --seeds 0 1 2
python scripts/benchmarks/sparse_rewards.py --seeds 0 1 2 --name before     # with another version on PYTHONPATH

A lock has five dials with four positions each, and opens for one of 1,024 combinations. An episode sets all dials, and
its only reward is 1 if the lock opens. Batches hold 64 episodes, so the first reward takes 16 updates on average. Most
updates before and long after it see equal returns only. The agent's prompt and observations do not reveal the
combination. A run ends when 95 of 100 consecutive episodes open the lock, or after 400,000 turns.

The script uses only APIs that earlier versions have, too. Each run writes results/sparse-rewards/NAME-seedN.json.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import gymnasium as gym
import numpy as np
from common import RESULTS, command, git, setting

import llamagym
from llamagym import Agent, Callback, load_model_and_tokenizer, train

FOLDER = RESULTS / "sparse-rewards"
COLORS = ("red", "green", "blue", "yellow")
DIALS = 5
EPISODES_PER_BATCH = 64
MOST_TURNS = 400_000
# The task is solved with `OPENINGS` openings in the latest `WINDOW` episodes.
OPENINGS, WINDOW = 95, 100


class Lock(gym.Env[int, int]):
    """Sets one dial per step; the reward is 1 at the end if all are right."""

    observation_space = gym.spaces.Discrete(DIALS + 1)
    action_space = gym.spaces.Discrete(len(COLORS))

    def __init__(self, combination: tuple[int, ...]) -> None:
        """Creates a lock with a combination."""
        self._combination = combination
        self._dial = 0
        self._is_right = True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        """Start at the first dial."""
        super().reset(seed=seed)
        self._dial = 0
        self._is_right = True
        return self._dial, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        """Set a dial."""
        self._is_right = self._is_right and action == self._combination[self._dial]
        self._dial += 1
        is_last = self._dial == DIALS
        return self._dial, float(is_last and self._is_right), is_last, False, {}


class LockAgent(Agent):
    """Names a color for each dial."""

    def get_system_prompt(self) -> str:
        """The task."""
        return "You open a lock with five dials. Answer with one color: red, green, blue or yellow."

    def format_observation(self, observation: int) -> str:
        """The number of the next dial."""
        return f"Dial {observation + 1}."

    def get_action_choices(self, observation: int) -> list[str]:
        """The colors."""
        return list(COLORS)

    def extract_action(self, response: str) -> int:
        """The color's number."""
        return COLORS.index(response)


class UntilSolved(Callback):
    """Ends a run once the task is solved; counts turns and updates and records the entropy."""

    def __init__(self) -> None:
        """Creates the counters."""
        self.latest: deque[float] = deque(maxlen=WINDOW)
        self.is_solved = False
        self.turns = 0
        self.turns_to_first_reward: int | None = None
        self.updates = 0
        self.entropy: list[float] = []

    def on_episode_end(self, run: Any, episode: Any) -> bool:
        """Counts an episode; returns False once the task is solved."""
        self.turns += DIALS
        self.latest.append(episode.total_reward)
        if episode.total_reward and self.turns_to_first_reward is None:
            self.turns_to_first_reward = self.turns
        # Other environments may end an episode in the same step, after the one that solves the task.
        self.is_solved = self.is_solved or sum(self.latest) >= OPENINGS
        return not self.is_solved

    def on_update(self, run: Any, statistics: dict[str, float]) -> None:
        """Records the entropy."""
        self.updates += 1
        self.entropy.append(round(statistics["entropy"], 4))


def run(seed: int) -> dict[str, Any]:
    """Train until the task is solved or the turns are used up."""
    generator = random.Random(seed)
    combination = tuple(generator.randrange(len(COLORS)) for _ in range(DIALS))
    model, tokenizer, device = load_model_and_tokenizer("smollm2-135m")
    options = {"batch_size": EPISODES_PER_BATCH * DIALS}
    agent = LockAgent(model, tokenizer, device, context="turn", seed=seed, ppo_config_dict=options)
    progress = UntilSolved()
    result = train(agent, lambda: Lock(combination), turns=MOST_TURNS, num_envs=64, seed=seed, callbacks=[progress])
    return {
        "seed": seed,
        "combination": [COLORS[position] for position in combination],
        "is_solved": progress.is_solved,
        "turns": progress.turns,
        "turns_to_first_reward": progress.turns_to_first_reward,
        "updates": progress.updates,
        "mean_return_of_last_episodes": float(np.mean(progress.latest)),
        "minutes": round(result.minutes, 1),
        "entropy": progress.entropy,
    }


def main() -> None:
    """Run each seed in its own process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--name", default="now", help="prefix of the result files")
    args = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for seed in args.seeds:
        where = setting()
        where["llamagym"] = git("-C", str(llamagym.__path__[0]), "rev-parse", "HEAD")
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            result = pool.submit(run, seed).result()
        path = FOLDER / f"{args.name}-seed{seed}.json"
        path.write_text(json.dumps({"command": command(), **where, **result}, indent=1) + "\n")
        print({name: value for name, value in result.items() if name != "entropy"}, flush=True)


if __name__ == "__main__":
    main()
