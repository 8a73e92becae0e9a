"""Throughput with environments whose step takes 50 ms: stepped sequentially, in processes, and with overlap.

python scripts/benchmarks/slow_environments.py [--dtype bfloat16] [--envs 16] [--free-text] [--repeated]

"In turn" is the naive loop: one process, one environment after the other. "At once" steps all environments in parallel
processes while the agent waits. With "overlap" the agent acts in one half while the other half steps.
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
    """Random hands with Blackjack's observations; a step takes 50 ms, and an episode has a fixed length."""

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
        """Deal another hand after a delay."""
        time.sleep(STEP_S)
        self.left -= 1
        return self._hand(), float(action), self.left == 0, False, {}


class Clock(Callback):
    """Records when the first and the last step ended."""

    def on_training_start(self, run: Run) -> None:
        """Resets the times."""
        self.first = self.last = self.first_turns = 0.0

    def on_step(self, run: Run) -> None:
        """Records the time."""
        self.last = time.perf_counter()
        if not self.first:
            self.first, self.first_turns = self.last, run.turns


def rate(agent: BlackjackAgent, envs: int, repeated: bool, options: dict) -> Callable[[], float]:
    """A function that measures turns per second over one episode in each environment, without updates and start-up."""
    seed = iter(range(1000))

    def measured() -> float:
        clock = Clock()
        if not repeated:
            agent.policy.weights_changed()
        result = train(agent, SlowTable, episodes=envs, num_envs=envs, seed=next(seed), callbacks=clock, **options)
        collector_of(agent).buffer.clear()
        # All processes have started by the end of the first step.
        return (result.turns - clock.first_turns) / (clock.last - clock.first)

    return measured


def main() -> None:
    """Measure all three modes in alternation."""
    parser = parser_of(__doc__)
    parser.add_argument("--envs", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=4, help="number of rounds; the first is not counted")
    parser.add_argument("--free-text", action="store_true", help="reply in free text instead of choices")
    parser.add_argument(
        "--repeated", action="store_true", help="keep caches, so that observations repeat as in a long batch"
    )
    args = parser.parse_args()
    modes: dict[str, dict] = {"in turn": {}, "at once": {"env_timeout": 600.0}, "overlap": {"overlap": True}}
    agent = make_agent(args.free_text, dtype=args.dtype)
    rates = rates_in_turn(
        {name: rate(agent, args.envs, args.repeated, mode) for name, mode in modes.items()}, args.rounds
    )
    over = {name: of_one["median"] / rates["in turn"]["median"] for name, of_one in rates.items()}
    setting = {"dtype": dtype_of(agent), "free_text": args.free_text, "environments": args.envs, "step_s": STEP_S}
    save(
        "slow-environments" + "-repeated" * args.repeated,
        {**setting, "load": os.getloadavg(), "turns_per_second": rates, "over_in_turn": over},
    )


if __name__ == "__main__":
    main()
