"""Train a language model to balance a pole on a cart.

python examples/cartpole.py                                      the embedded 135M model
python examples/cartpole.py --two-decimals                       observations that hardly ever come again
python examples/cartpole.py --model Qwen/Qwen2.5-0.5B-Instruct   another instruct model
"""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import script

from llamagym import Agent, evaluate

# Cart position (m) and velocity (m/s), pole angle (degrees) and angular velocity (degrees/s): each is rounded to a
# multiple of its step and held within its limit. A linear controller that sees only that balances for 500 steps.
_STEPS = np.array([0.5, 0.5, 2.0, 20.0])
_LIMITS = np.array([2.0, 1.5, 6.0, 60.0])
_DEGREES = np.array([1.0, 1.0, 180 / np.pi, 180 / np.pi])


def rounded(observation: np.ndarray) -> list[float]:
    """Position, velocity, angle and angular velocity as the agent is told them, in m, m/s, degrees and degrees/s.

    >>> rounded(np.array([-0.1, 0.3, -0.05, 2.0]))
    [0.0, 0.5, -2.0, 60.0]
    """
    steps = np.rint(observation * _DEGREES / _STEPS)
    # Adding zero turns -0.0 into 0.0.
    return (np.clip(steps * _STEPS, -_LIMITS, _LIMITS) + 0.0).tolist()


def _side(value: float, none: str) -> str:
    """A signed number in words.

    >>> _side(-0.5, "centre"), _side(0.0, "centre")
    ('left 0.5', 'centre')
    """
    return none if value == 0 else f"{'left' if value < 0 else 'right'} {abs(value):g}"


class CartPoleAgent(Agent):
    """Sees cart and pole, coarsely rounded; says which way to push."""

    def get_system_prompt(self) -> str:
        """The task, in a line."""
        return (
            "You balance a pole that stands on a cart by pushing the cart. Keep the pole upright and the cart near the "
            "centre. Answer with one word: left or right."
        )

    def format_observation(self, observation: np.ndarray) -> str:
        """Where cart and pole are, and which way each moves."""
        position, velocity, angle, turning = rounded(observation)
        cart = f"cart {_side(position, 'centre')}, moving {_side(velocity, 'nowhere')}"
        return f"{cart}; pole {_side(angle, 'upright')}, falling {_side(turning, 'nowhere')}"

    def get_action_choices(self, observation: np.ndarray) -> list[str]:
        """The two directions."""
        return ["left", "right"]

    def extract_action(self, response: str) -> int:
        """0 pushes to the left, 1 to the right."""
        return ["left", "right"].index(response)


class TwoDecimalsAgent(CartPoleAgent):
    """Sees position (m), velocity (m/s), angle (radians) and angular velocity (radians/s), each to two decimals.

    They are told in hundredths, without points or words, since hardly any of them comes again: each turn's text has to
    be read, and this is a third of the tokens.
    """

    def get_system_prompt(self) -> str:
        """The task, and what the numbers are."""
        numbers = "the cart's position and velocity and the pole's angle and angular velocity"
        return f"{super().get_system_prompt()} You are told, in hundredths, {numbers}; negative is left."

    def format_observation(self, observation: np.ndarray) -> str:
        """The environment's own numbers, in hundredths."""
        return " ".join(str(round(100 * float(value))) for value in observation)


def make() -> gym.Env:
    """The environment, of at most 500 steps."""
    return gym.make("CartPole-v1")


def main() -> None:
    """Load, learn, and report."""
    options = script.parser(__doc__, eval_every=10, eval_episodes=64)
    options.add_argument("--two-decimals", action="store_true", help="show the environment's own numbers, not cells")
    args = script.parse(options, episodes=4000)
    agent = script.load(args, TwoDecimalsAgent if args.two_decimals else CartPoleAgent)
    baselines = {"random": evaluate("random", make, episodes=200, seed=script.HELD_OUT_SEED).mean, "optimum": 500.0}
    script.learn(args, agent, make, script.evaluation(make, args), baselines)


if __name__ == "__main__":
    script.run(main)
