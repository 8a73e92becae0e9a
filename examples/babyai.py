"""Train a language model to find its way in BabyAI's grid worlds; needs pip install 'llamagym[minigrid]'.

python examples/babyai.py                                    go to the red ball, the embedded 135M model
python examples/babyai.py --level BabyAI-PickupLoc-v0 --all-actions
python examples/babyai.py --level MiniGrid-MemoryS7-v0 --context episode --max-steps 40 --shown-episodes 2000
"""

from __future__ import annotations

import functools
import re
from typing import Any

import gymnasium as gym
import script
from gymnasium.wrappers import TransformReward
from imitation import WarmStart, imitate
from memory_player import make_player

from llamagym import Agent, evaluate
from llamagym.envs.babyai import ACTIONS, MOVES, make_babyai

THING = re.compile(r"(?:red|green|blue|purple|yellow|grey) (?:ball|box|door|key)")


class BabyAIAgent(Agent):
    """Reads the mission and what it sees; says what it looks for, and where to go."""

    actions: tuple[str, ...] = MOVES

    def get_system_prompt(self) -> str:
        """The task, in a line."""
        return f"You walk through rooms to fulfil a mission. Answer with one of: {', '.join(self.actions)}."

    def format_observation(self, observation: str) -> str:
        """The environment's own words."""
        return observation

    def get_action_choices(self, observation: str) -> list[str]:
        """The thing that the mission names, if it names one, and an action: after its name the model finds the way."""
        _, _, mission = observation.partition("Mission: ")
        return [" ".join([*THING.findall(mission)[-1:], action]) for action in self.actions]

    def extract_action(self, response: str) -> int:
        """The action's number."""
        return next(number for number, action in enumerate(self.actions) if response.endswith(action))


class AllActionsAgent(BabyAIAgent):
    """Picks up, drops and opens as well."""

    actions = ACTIONS


def make_scored(*how: Any) -> gym.Env[Any, Any]:
    """A level with a reward of 1 for success, however late, so that the mean return is the success rate."""
    return TransformReward(make_babyai(*how), lambda reward: 1.0 if float(reward) > 0 else 0.0)


def main() -> None:
    """Load, learn, and report."""
    options = script.parser(__doc__, eval_every=10, eval_episodes=256)
    options.add_argument("--level", default="BabyAI-GoToRedBallNoDists-v0", help="id of a BabyAI level")
    options.add_argument("--all-actions", action="store_true", help="not only turning and going: for other missions")
    options.add_argument("--context", choices=("turn", "episode"), default="turn", help="what the agent sees")
    options.add_argument("--max-steps", type=int, help="of an episode; default: the level's own limit")
    options.add_argument("--shown-episodes", type=int, default=0, help="imitate so many first; memory levels only")
    args = script.parse(options, episodes=12_000)
    # In a conversation only the first observation contains the mission.
    how = args.level, args.all_actions, args.context == "turn", args.max_steps
    train_in, score_in = functools.partial(make_babyai, *how), functools.partial(make_scored, *how)
    baselines = {"random": evaluate("random", score_in, episodes=200, seed=script.HELD_OUT_SEED).mean, "optimum": 1.0}
    kind = AllActionsAgent if args.all_actions else BabyAIAgent
    agent = script.load(args, kind, args.context)
    imitation = WarmStart(lambda: imitate(agent, train_in(), make_player, args.shown_episodes))
    warm_start = [imitation] if args.shown_episodes else []
    script.learn(args, agent, train_in, script.evaluation(score_in, args), baselines, warm_start)


if __name__ == "__main__":
    script.run(main)
