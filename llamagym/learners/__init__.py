"""From finished episodes to an update: PPO, GRPO, supervised learning and what they share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from ..errors import ConfigError, did_you_mean
from ..policy.policy import Policy
from .base import Learner
from .config import LearnerConfig
from .grpo import GRPO, GRPOConfig, ReinforceConfig
from .ppo import PPO, PPOConfig

Algorithm = Literal["ppo", "grpo", "reinforce"]
_CONFIGS: dict[str, type[PPOConfig | GRPOConfig]] = {"ppo": PPOConfig, "grpo": GRPOConfig, "reinforce": ReinforceConfig}


def make_learner(
    policy: Policy,
    algorithm: Algorithm,
    options: Mapping[str, Mapping[str, Any] | LearnerConfig | None],
    seed: int | None = None,
) -> Learner[Any]:
    """Creates the learner of a policy.

    Args:
        policy: The policy whose weights are updated.
        algorithm: Name of the algorithm.
        options: Options by algorithm, as a mapping or a configuration, or None.
        seed: Seed of the minibatches' order, unless the options have one.

    Raises:
        ConfigError: The algorithm or an option is unknown, or options of another algorithm are passed.
    """
    if algorithm not in _CONFIGS:
        raise ConfigError(f"algorithm={algorithm!r}. {did_you_mean(str(algorithm), _CONFIGS)}")
    for other, other_options in options.items():
        if other_options and other != algorithm:
            raise ConfigError(
                f"{other}_config_dict={other_options} has no effect on algorithm={algorithm!r}. Pass "
                f"{algorithm}_config_dict, or algorithm={other!r}."
            )
    own_options = options.get(algorithm) or {}
    if seed is not None and isinstance(own_options, Mapping):
        own_options = {"seed": seed, **own_options}
    config = _CONFIGS[algorithm].from_dict(own_options)
    return PPO(policy, config) if isinstance(config, PPOConfig) else GRPO(policy, config)
