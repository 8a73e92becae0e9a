"""A run that goes on from its checkpoints until it is killed; prints how many updates there have been after each.

python -m tests.helpers.endless_run FOLDER
"""

from __future__ import annotations

import sys

from llamagym import train
from tests.helpers.agents import ChoiceAgent, make_agent
from tests.helpers.resumed_run import SIZES, DiceEnv


def report(stats: dict[str, float]) -> None:
    """Print a line."""
    sys.stdout.write(f"{stats['updates']:.0f}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    agent = make_agent(ChoiceAgent, ppo=SIZES, context="turn")
    options = {"checkpoint_dir": sys.argv[1], "checkpoint_every": 1, "resume": True}
    train(agent, DiceEnv, episodes=10**9, num_envs=2, seed=0, on_update=report, **options)
