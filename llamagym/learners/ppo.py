"""Proximal policy optimization over the turns of episodes.

Departures from the PPO paper: the value is read at the last prompt token of a turn and one turn is one step of GAE,
however many tokens the reply has. The value head learns on detached features, apart from the policy. What PPO shares
with other learners is in `base`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..errors import ConfigError
from ..options import check_arguments
from ..policy.evaluation import Evaluation
from ..policy.policy import Policy
from ..text.episode import Episode
from .base import Learner, Stats
from .config import LearnerConfig
from .losses import clipped_value_loss, discounted_returns, explained_variance, gae, typical_size
from .lstd import fit, split
from .rollout import Sampled, Targets

# The critic's learning rate and its clipping range where none is given, in units of the returns' size.
_VALUE_RATE, _VALUE_RANGE = 5e-4, 0.2


@dataclass(frozen=True)
class PPOConfig(LearnerConfig):
    """How PPO learns, beside what `LearnerConfig` says; names follow TRL 0.11.

    Attributes:
        ppo_epochs: Passes over a batch, as far as `target_kl` allows.
        critic: How the value head learns: "lstd" solves for its weights (see `lstd`), "gradient" takes steps, to which
            the three options that follow belong. None: "gradient" if a rate or a range is given, else "lstd".
        value_learning_rate: Of the value head, in reward units. None: 5e-4 times the size of returns.
        cliprange_value: How far a value may move from its estimate before the update, in reward units. None: a fifth
            of the size of returns.
        vf_coef: Weight of the value loss.
        lam: GAE's lambda, and LSTD's.
        kl_placement: "reward" subtracts k1 from each turn's reward, "loss" adds k3.
    """

    ppo_epochs: int = 4
    critic: Literal["lstd", "gradient"] | None = None
    value_learning_rate: float | None = None
    cliprange_value: float | None = None
    vf_coef: float = 0.5
    lam: float = 0.95
    kl_placement: Literal["reward", "loss"] = "reward"

    def __post_init__(self) -> None:
        """Check the ranges."""
        super().__post_init__()
        self._require_at_least(1, "ppo_epochs")
        self._require_finite("vf_coef")
        self._require_rate("value_learning_rate")
        self._require_positive("cliprange_value")
        self._require_fraction("lam")
        self._require_one_of(["reward", "loss"], "kl_placement")
        if self.critic is not None:
            self._require_one_of(["lstd", "gradient"], "critic")
        if self.critic == "lstd":
            for name in ("value_learning_rate", "cliprange_value"):
                value = getattr(self, name)
                if value is not None:
                    raise ConfigError(
                        f"{name}={value} has no effect with critic='lstd'. Leave it out, or pass critic='gradient'."
                    )

    @property
    def kl_in_loss(self) -> bool:
        """Whether the KL to the reference is a term of the loss."""
        return super().kl_in_loss and self.kl_placement == "loss"

    @property
    def solves_for_values(self) -> bool:
        """Whether the critic is LSTD."""
        if self.critic is None:
            return self.value_learning_rate is None and self.cliprange_value is None
        return self.critic == "lstd"


class Sizes(NamedTuple):
    """What PPO fits to episodes where a configuration says None, in numbers: TRL's, for steps on samples."""

    batch: int
    mini_batch: int
    value_learning_rate: float
    cliprange_value: float

    @classmethod
    def of(cls, config: PPOConfig) -> Sizes:
        """The configuration's own numbers, and TRL's where it has none."""
        return cls(
            128 if config.batch_size is None else config.batch_size,
            32 if config.mini_batch_size is None else config.mini_batch_size,
            3e-3 if config.value_learning_rate is None else config.value_learning_rate,
            0.2 if config.cliprange_value is None else config.cliprange_value,
        )


@dataclass(frozen=True)
class ValueTargets(Targets):
    """What the turns of a batch are trained towards, by actor and critic.

    Attributes:
        returns: What the values should have been, float (N,).
    """

    returns: Tensor


class PPO(Learner[ValueTargets]):
    """Learns from finished episodes, with a critic."""

    config: PPOConfig
    has_critic = True

    def __init__(self, policy: Policy, config: PPOConfig) -> None:
        """Prepare optimizer and reference.

        Args:
            policy: Whose trainable weights are updated.
            config: How.

        Raises:
            ConfigError: An argument has the wrong type.
        """
        check_arguments(PPO.__init__, locals())
        rate = _VALUE_RATE if config.value_learning_rate is None else config.value_learning_rate
        self._size = 1.0
        super().__init__(policy, config, config.ppo_epochs, None if config.solves_for_values else rate)

    @property
    def needs_features(self) -> bool:
        """Whether the critic is solved for."""
        return self.config.solves_for_values

    @property
    def _has_gradient_critic(self) -> bool:
        """Whether the value head learns by gradient steps."""
        return not self.config.solves_for_values

    @property
    def _value_scale(self) -> float:
        """The typical size of returns; 1 if a learning rate was passed."""
        return self._size if self.config.value_learning_rate is None else 1.0

    def _compute_targets(self, episodes: Sequence[Episode], sampled: Sampled) -> tuple[ValueTargets, Stats]:
        """Rewards with the KL penalty, then advantages and returns."""
        config, real = self.config, sampled.real
        rewards, values = sampled.rewards.clone(), torch.zeros_like(sampled.rewards)
        if config.init_kl_coef and config.kl_placement == "reward":
            rewards[real] -= self._kl.value * sampled.ref_kl
        if config.solves_for_values:
            fitted = fit(
                self.policy.model.v_head,
                sampled.features,
                [len(episode.turns) for episode in episodes],
                rewards[real],
                sampled.final_features,
                sampled.bootstrapped,
                split([episode.turns[0].prompt.ids for episode in episodes], self._rng),
                config.gamma,
                config.lam,
            )
            values[real] = fitted.of_turns
            final_values = fitted.of_finals
        else:
            values[real] = sampled.old_values
            final_values = sampled.final_values
            self._size = typical_size(discounted_returns(_rewards_of_whole(episodes), config.gamma))
        advantages, returns = gae(rewards, values, real, config.gamma, config.lam, final_values)
        advantages = self._scaled(advantages, sampled.decides, episodes)
        targets = ValueTargets(advantages[real], returns[real])
        return targets, {"explained_variance": explained_variance(values[real], targets.returns)}

    def _loss(
        self,
        now: Evaluation,
        rows: list[int],
        sampled: Sampled,
        targets: ValueTargets,
        bonus: float,
        decision_share: float,
        turn_share: float,
    ) -> tuple[Tensor, Stats]:
        """The policy's loss and the critic's."""
        loss, stats = super()._loss(now, rows, sampled, targets, bonus, decision_share, turn_share)
        if self.config.solves_for_values:
            return loss, stats
        every = torch.ones_like(now.values, dtype=torch.bool)
        old_values, returns = (each[rows].to(now.values.device) for each in (sampled.old_values, targets.returns))
        clip = _VALUE_RANGE * self._size if self.config.cliprange_value is None else self.config.cliprange_value
        value = clipped_value_loss(now.values, old_values, returns, every, clip)
        stats["value_loss"] = turn_share * value.loss.item()
        stats["value_clip_fraction"] = turn_share * value.clip_fraction.item()
        # Gradients are clipped as if returns had a size of 1.
        return loss + turn_share * self.config.vf_coef / self._value_scale * value.loss, stats


def _rewards_of_whole(episodes: Sequence[Episode]) -> Tensor:
    """Reward and penalty of each turn of the episodes that are over, float (E, T), 0 after an episode's end."""
    earned = [[turn.reward + turn.penalty for turn in episode.all_turns] for episode in episodes if episode.is_over]
    return pad_sequence([torch.tensor(rewards) for rewards in earned], batch_first=True)
