"""Train a language model to cross the slippery frozen lake, and know exactly how often it arrives.

python examples/frozenlake.py                    the embedded 135M model, minutes on a laptop
"""

from __future__ import annotations

import numpy as np
import script
from frozenlake_exact import ACTIONS, CELLS, STATES, baseline_returns, policy_map, success_probability

from llamagym import Agent

# What lies one step to the left, below, to the right and above: row and column change by so much.
_STEPS = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
_NAMES = {"S": "ice", "F": "ice", "H": "hole", "G": "goal"}


class FrozenLakeAgent(Agent):
    """Sees where it stands and what is next to it; says where to go."""

    def get_system_prompt(self) -> str:
        """The task, in a line."""
        return (
            "You cross a slippery frozen lake to the goal and avoid the holes. You may slip sideways. "
            "Answer with one word: left, down, right or up."
        )

    def format_observation(self, observation: int) -> str:
        """Row, column, and the four neighbors."""
        row, column = divmod(int(observation), 4)
        around = []
        for word, (down, right) in _STEPS.items():
            there = (row + down, column + right)
            inside = all(0 <= place < 4 for place in there)
            around.append(f"{word} {_NAMES[CELLS[4 * there[0] + there[1]]] if inside else 'wall'}")
        return f"Row {row + 1}, column {column + 1}: {', '.join(around)}"

    def get_action_choices(self, observation: int) -> list[str]:
        """The four directions."""
        return list(ACTIONS)

    def extract_action(self, response: str) -> int:
        """The direction's number."""
        return ACTIONS.index(response)

    def states(self) -> dict[tuple[str, str], int]:
        """The cells, which the report shows as a picture of the policy."""
        return {(f"row {state // 4 + 1}", f"column {state % 4 + 1}"): state for state in STATES}


def policy_of(agent: Agent, greedy: bool) -> dict[int, list[float]]:
    """Probability of each action in each cell."""
    rows = [list(chances.values()) for chances in agent.action_probabilities(STATES)]
    return {
        state: np.eye(4)[np.argmax(row)].tolist() if greedy else row for state, row in zip(STATES, rows, strict=True)
    }


def exact_return(agent: Agent, greedy: bool) -> float:
    """Probability of reaching the goal."""
    return success_probability(policy_of(agent, greedy))


def show(agent: Agent) -> str:
    """The lake with the likeliest action in each cell."""
    return policy_map(policy_of(agent, greedy=False))


def main() -> None:
    """Load, learn, and report."""
    args = script.parse(script.parser(__doc__, eval_every=1), episodes=30_000)
    agent = script.load(args, FrozenLakeAgent)
    script.learn(args, agent, "FrozenLake-v1", exact_return, baseline_returns(), show=show)


if __name__ == "__main__":
    script.run(main)
