"""Which learner an algorithm's name stands for."""

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
    """Build the learner of a policy.

    Args:
        policy: Whose weights it updates.
        algorithm: Its name.
        options: Per algorithm its options, by name or as its configuration, or None; those of another algorithm are
            refused.
        seed: Of the minibatches' order, where the options name none.

    Raises:
        ConfigError: The algorithm or an option is unknown, or options of another algorithm are given.
    """
    if algorithm not in _CONFIGS:
        raise ConfigError(f"algorithm={algorithm!r}. {did_you_mean(str(algorithm), _CONFIGS)}")
    for other, given in options.items():
        if given and other != algorithm:
            raise ConfigError(
                f"{other}_config_dict={given} has no effect on algorithm={algorithm!r}. Pass {algorithm}_config_dict, "
                f"or algorithm={other!r}."
            )
    given = options.get(algorithm) or {}
    if seed is not None and isinstance(given, Mapping):
        given = {"seed": seed, **given}
    config = _CONFIGS[algorithm].from_dict(given)
    return PPO(policy, config) if isinstance(config, PPOConfig) else GRPO(policy, config)
