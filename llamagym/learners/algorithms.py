"""The learning algorithms by the type of their configuration and by name."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..errors import ConfigError, did_you_mean, excerpt
from ..policy.policy import Policy
from .base import Learner
from .config import LearnerConfig
from .grpo import GRPO, GRPOConfig, ReinforceConfig
from .ppo import PPO, PPOConfig

logger = logging.getLogger(__name__)

# A subclass stands before its base class.
_CONFIGS: dict[str, type[PPOConfig | GRPOConfig]] = {"ppo": PPOConfig, "reinforce": ReinforceConfig, "grpo": GRPOConfig}
# Constructor arguments of earlier versions of `Agent` that chose the algorithm.
OLD_ARGUMENTS = frozenset({"algorithm", "grpo_config_dict", "reinforce_config_dict", "use_target_kl"})


def make_learner(policy: Policy, config: LearnerConfig) -> Learner[Any]:
    """Returns the learner of a policy: PPO, GRPO or REINFORCE, by the type of its configuration.

    Args:
        policy: The policy that it updates.
        config: A `PPOConfig`, `GRPOConfig` or `ReinforceConfig`.
    """
    if isinstance(config, PPOConfig):
        return PPO(policy, config)
    assert isinstance(config, GRPOConfig)
    return GRPO(policy, config)


def learner_config(
    learner: LearnerConfig | None, ppo_options: Mapping[str, Any] | PPOConfig | None, old: Mapping[str, Any]
) -> LearnerConfig:
    """Returns the configuration that the arguments of `Agent` name.

    Args:
        learner: Its argument `learner`.
        ppo_options: Its argument `ppo_config_dict`.
        old: Its arguments of earlier versions (`OLD_ARGUMENTS`), each of which is accepted with a logged message.

    Raises:
        ConfigError: An option is unknown or out of range, or two arguments contradict each other.
    """
    if learner is not None:
        others = set(old)
        if ppo_options:
            others.add("ppo_config_dict")
        if not isinstance(learner, (PPOConfig, GRPOConfig)):
            raise ConfigError(
                f"learner must be a configuration, got {excerpt(learner)} ({type(learner).__name__}). Pass "
                "PPOConfig(...), GRPOConfig(...) or ReinforceConfig(...)."
            )
        if others:
            names = " and ".join(sorted(others))
            raise ConfigError(f"learner={type(learner).__name__}(...) and {names} are both set. Pass learner= only.")
        return learner
    algorithm = old.get("algorithm", "ppo")
    if not isinstance(algorithm, str) or algorithm not in _CONFIGS:
        raise ConfigError(f"algorithm={excerpt(algorithm)}. {did_you_mean(str(algorithm), _CONFIGS)}")
    options = {"ppo": ppo_options, "grpo": old.get("grpo_config_dict"), "reinforce": old.get("reinforce_config_dict")}
    for other, values in options.items():
        if not isinstance(values, (Mapping, LearnerConfig, type(None))):
            raise ConfigError(
                f"{other}_config_dict must be a dictionary or a configuration, got {excerpt(values)} "
                f"({type(values).__name__}). Pass learner={_CONFIGS[other].__name__}(...) instead."
            )
        if values and other != algorithm:
            raise ConfigError(
                f"{other}_config_dict={values} has no effect on algorithm={algorithm!r}. Pass "
                f"learner={_CONFIGS[other].__name__}(...)."
            )
    config = _CONFIGS[algorithm].from_dict(options[algorithm] or {})
    if "use_target_kl" in old:
        config = _with_target_kl(config, old["use_target_kl"])
    if old:
        arguments = "target_kl=None" if old.get("use_target_kl") is False else "..."
        logger.warning(
            "Accepted for now: %s. Pass learner=%s(%s) instead.",
            ", ".join(sorted(old)),
            _CONFIGS[algorithm].__name__,
            arguments,
        )
    return config


def _with_target_kl(config: PPOConfig | GRPOConfig, is_used: object) -> PPOConfig | GRPOConfig:
    """Returns a configuration with (True) or without (False) a limit of the KL divergence per update."""
    if not isinstance(is_used, bool):
        raise ConfigError(f"use_target_kl must be True or False, got {excerpt(is_used)} ({type(is_used).__name__}).")
    if not is_used:
        return replace(config, target_kl=None)
    if config.target_kl is None:
        raise ConfigError("use_target_kl=True contradicts target_kl=None. Pass a number as target_kl in learner=.")
    return config


def config_record(config: LearnerConfig) -> dict[str, Any]:
    """Returns a configuration as saved files hold it: its options and the algorithm's name."""
    algorithm = next(name for name, kind in _CONFIGS.items() if isinstance(config, kind))
    return {"algorithm": algorithm, **config.to_dict()}


def old_arguments(config: LearnerConfig) -> dict[str, Any]:
    """Returns a configuration as arguments of earlier versions, which other old arguments can override."""
    options = config_record(config)
    algorithm = options.pop("algorithm")
    if algorithm == "ppo":
        return {"ppo_config_dict": options}
    return {"algorithm": algorithm, f"{algorithm}_config_dict": options}


def config_from(record: Mapping[str, Any]) -> LearnerConfig:
    """Returns the configuration that `config_record` recorded.

    Raises:
        ConfigError: An option or the algorithm is unknown.
    """
    options = dict(record)
    algorithm = options.pop("algorithm", None)
    if not isinstance(algorithm, str) or algorithm not in _CONFIGS:
        raise ConfigError(f"algorithm={excerpt(algorithm)} is unknown. {did_you_mean(str(algorithm), _CONFIGS)}")
    return _CONFIGS[algorithm].from_dict(options)
