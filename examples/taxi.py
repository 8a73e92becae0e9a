"""Train a language model to drive a taxi: fetch a passenger, bring them where they want to go.

python examples/taxi.py
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import script

from llamagym import Agent, evaluate

ACTIONS = ("south", "north", "east", "west", "pick up", "drop off")
"""By the environment's number."""
PLACES = ("red", "green", "yellow", "blue", "in the taxi")
"""Locations and destinations of passengers, by the environment's number."""

# Knows what a state means; nobody drives this one.
_TAXI: Any = gym.make("Taxi-v4").unwrapped


class Driver(Agent):
    """Reads where taxi, passenger and destination are; says what to do."""

    def get_system_prompt(self) -> str:
        """The task, in a line."""
        return "You drive a taxi. Fetch the passenger, then bring them to their destination. Answer with one action."

    def format_observation(self, observation: int) -> str:
        """The state in words.

        >>> Driver.format_observation(None, 0)
        'Taxi at row 1, column 1. Passenger: red. Destination: red.'
        """
        row, column, passenger, destination = _TAXI.decode(int(observation))
        place = f"Taxi at row {row + 1}, column {column + 1}."
        return f"{place} Passenger: {PLACES[passenger]}. Destination: {PLACES[destination]}."

    def get_action_choices(self, observation: int) -> list[str]:
        """All; the environment's masks leave out those that change nothing, such as driving into a wall."""
        return list(ACTIONS)

    def extract_action(self, response: str) -> int:
        """The action's number."""
        return ACTIONS.index(response)


def make() -> gym.Env[Any, Any]:
    """The environment, of at most 200 steps."""
    return gym.make("Taxi-v4")


def best_return() -> float:
    """The mean return of shortest ways, by value iteration over all states."""
    best = np.full(_TAXI.observation_space.n, -1e3)
    for _ in range(100):
        best = np.array(
            [
                max(reward + (0.0 if done else best[after]) for [(_, after, reward, done)] in actions.values())
                for actions in _TAXI.P.values()
            ]
        )
    return float(_TAXI.initial_state_distrib @ best)


def main() -> None:
    """Load, learn, and report."""
    options = script.parser(__doc__, eval_every=10, eval_episodes=256)
    args = script.parse(options, episodes=100_000, minutes=15)
    baselines = {
        "random": evaluate("random", make, episodes=200, seed=script.HELD_OUT_SEED).mean,
        "optimum": best_return(),
    }
    agent = script.load(args, Driver)
    script.learn(args, agent, make, script.evaluation(make, args), baselines)


if __name__ == "__main__":
    script.run(main)
