"""Turns a second where a step takes 50 ms: copies stepped in turn, in processes, and in two halves of processes.

python scripts/benchmarks/slow_environments.py [--dtype bfloat16] [--envs 16] [--free-text] [--repeated]

"In turn" is the naive loop: one process, one copy after the other. "At once" steps all copies at the same time, in
processes of their own, while the agent waits. With "overlap" it acts in one half while the other half steps.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import gymnasium as gym
from common import parser_of, rates_in_turn, save
from workload import BlackjackAgent, dtype_of, make_agent

from llamagym.agent.agent import collector_of
from llamagym.training import Callback, Run, train

STEP_S, STEPS = 0.05, 12


class SlowTable(gym.Env):
    """Hands that come and go, 50 ms each; they show what Blackjack does and never end by themselves."""

    observation_space = gym.spaces.Tuple((gym.spaces.Discrete(32), gym.spaces.Discrete(11), gym.spaces.Discrete(2)))
    action_space = gym.spaces.Discrete(2)

    def _hand(self) -> tuple[int, int, int]:
        return (
            int(self.np_random.integers(12, 22)),
            int(self.np_random.integers(1, 11)),
            int(self.np_random.integers(2)),
        )

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[tuple[int, int, int], dict]:
        """Deal the first hand."""
        super().reset(seed=seed)
        self.left = STEPS
        return self._hand(), {}

    def step(self, action: int) -> tuple[tuple[int, int, int], float, bool, bool, dict]:
        """Deal another one, slowly."""
        time.sleep(STEP_S)
        self.left -= 1
        return self._hand(), float(action), self.left == 0, False, {}


class Clock(Callback):
    """Notes when the first step and the last one ended."""

    def on_training_start(self, run: Run) -> None:
        """Nothing has ended yet."""
        self.first = self.last = self.first_turns = 0.0

    def on_step(self, run: Run) -> None:
        """Look at the clock."""
        self.last = time.perf_counter()
        if not self.first:
            self.first, self.first_turns = self.last, run.turns


def rate(agent: BlackjackAgent, envs: int, repeated: bool, options: dict) -> Callable[[], float]:
    """Measures turns a second of an episode in each copy, without updates and without the time to start processes."""
    seed = iter(range(1000))

    def measured() -> float:
        clock = Clock()
        if not repeated:
            agent.policy.weights_changed()
        result = train(agent, SlowTable, episodes=envs, num_envs=envs, seed=next(seed), callbacks=clock, **options)
        collector_of(agent).buffer.clear()
        # The first step is where processes have started.
        return (result.turns - clock.first_turns) / (clock.last - clock.first)

    return measured


def main() -> None:
    """Measure all, in turn."""
    parser = parser_of(__doc__)
    parser.add_argument("--envs", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=4, help="the first is not counted")
    parser.add_argument("--free-text", action="store_true", help="instead of choices")
    parser.add_argument("--repeated", action="store_true", help="all observations have been met, as in a long batch")
    args = parser.parse_args()
    ways: dict[str, dict] = {"in turn": {}, "at once": {"env_timeout": 600.0}, "overlap": {"overlap": True}}
    agent = make_agent(args.free_text, dtype=args.dtype)
    rates = rates_in_turn({name: rate(agent, args.envs, args.repeated, way) for name, way in ways.items()}, args.rounds)
    over = {name: of_one["median"] / rates["in turn"]["median"] for name, of_one in rates.items()}
    setting = {"dtype": dtype_of(agent), "free_text": args.free_text, "environments": args.envs, "step_s": STEP_S}
    save(
        "slow-environments" + "-repeated" * args.repeated,
        {**setting, "load": os.getloadavg(), "turns_per_second": rates, "over_in_turn": over},
    )


if __name__ == "__main__":
    main()
