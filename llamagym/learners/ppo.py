"""Proximal policy optimization over the turns of episodes.

Departures from the PPO paper: the value is read at the last prompt token of a turn and one turn is one step of GAE,
however many tokens the reply has. The value head learns on detached features, apart from the policy. The update itself
is `Learner._update` in `base`.
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
from .losses import ValueLoss, clipped_value_loss, discounted_returns, explained_variance, gae, typical_size
from .lstd import fit, split
from .rollout import Rollout, Targets

# Default learning rate and clipping range of the value head, in units of the typical size of returns.
_VALUE_RATE = 5e-4
_VALUE_RANGE = 0.2


@dataclass(frozen=True)
class PPOConfig(LearnerConfig):
    """Options of PPO, beside those of `LearnerConfig`; names follow TRL 0.11.

    Attributes:
        ppo_epochs: Passes over a batch, as far as `target_kl` allows.
        critic: Training of the value head: "lstd" solves for its weights (see `lstd`), "gradient" takes steps, with the
            next three options. None: "gradient" if a learning rate or a clipping range is passed, else "lstd".
        value_learning_rate: Learning rate of the value head, in reward units. None: 5e-4 times the typical return.
        cliprange_value: Largest distance of a value from its estimate before the update, in reward units. None: a
            fifth of the typical return.
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
        """Checks types and ranges."""
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
    """TRL's defaults for steps on samples, for options that PPO on episodes derives from the batch when None."""

    batch: int
    mini_batch: int
    value_learning_rate: float
    cliprange_value: float

    @classmethod
    def of(cls, config: PPOConfig) -> Sizes:
        """The configuration's numbers, or TRL's defaults where it has None."""
        return cls(
            128 if config.batch_size is None else config.batch_size,
            32 if config.mini_batch_size is None else config.mini_batch_size,
            3e-3 if config.value_learning_rate is None else config.value_learning_rate,
            0.2 if config.cliprange_value is None else config.cliprange_value,
        )


@dataclass(frozen=True)
class ValueTargets(Targets):
    """Training targets of a batch's turns, for actor and critic.

    Attributes:
        returns: Targets of the values, float (N,).
    """

    returns: Tensor


class PPO(Learner[ValueTargets]):
    """Learns from finished episodes, with a critic."""

    config: PPOConfig
    has_critic = True

    def __init__(self, policy: Policy, config: PPOConfig) -> None:
        """Creates the optimizer.

        Args:
            policy: The policy whose trainable weights and value head are updated.
            config: The options.

        Raises:
            ConfigError: An argument has the wrong type.
        """
        check_arguments(PPO.__init__, locals())
        rate = _VALUE_RATE if config.value_learning_rate is None else config.value_learning_rate
        # Of the latest batch.
        self._typical_return = 1.0
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
    def _value_coef(self) -> float:
        """Weight of the value loss."""
        return self.config.vf_coef

    @property
    def _value_scale(self) -> float:
        """Factor of the value head's learning rate: the typical size of returns unless a rate was passed."""
        return self._typical_return if self.config.value_learning_rate is None else 1.0

    def compute_targets(self, episodes: Sequence[Episode], rollout: Rollout) -> tuple[ValueTargets, Stats]:
        """Subtracts the KL penalty from rewards, then computes values, advantages and returns."""
        config = self.config
        real = rollout.real
        rewards = rollout.rewards.clone()
        values = torch.zeros_like(rewards)
        if config.init_kl_coef and config.kl_placement == "reward":
            rewards[real] -= self._kl.value * rollout.ref_kl
        if config.solves_for_values:
            fitted = fit(
                self.policy.model.v_head,
                rollout.features,
                [len(episode.turns) for episode in episodes],
                rewards[real],
                rollout.final_features,
                rollout.bootstrapped,
                split([episode.turns[0].prompt.ids for episode in episodes], self._rng),
                config.gamma,
                config.lam,
            )
            values[real] = fitted.of_turns
            final_values = fitted.of_finals
        else:
            values[real] = rollout.old_values
            final_values = rollout.final_values
            self._typical_return = typical_size(discounted_returns(_rewards_of_finished(episodes), config.gamma))
        advantages, returns = gae(rewards, values, real, config.gamma, config.lam, final_values)
        advantages = self._scaled(advantages, rollout.decides, episodes)
        targets = ValueTargets(advantages[real], returns[real])
        return targets, {"explained_variance": explained_variance(values[real], targets.returns)}

    def _value_loss(
        self, current: Evaluation, rows: list[int], rollout: Rollout, targets: ValueTargets
    ) -> ValueLoss | None:
        """The clipped value loss on some turns; None with LSTD."""
        if self.config.solves_for_values:
            return None
        old_values = rollout.old_values[rows].to(current.values.device)
        returns = targets.returns[rows].to(current.values.device)
        every_turn = torch.ones_like(current.values, dtype=torch.bool)
        clip_range = self.config.cliprange_value
        if clip_range is None:
            clip_range = _VALUE_RANGE * self._typical_return
        return clipped_value_loss(current.values, old_values, returns, every_turn, clip_range)


def _rewards_of_finished(episodes: Sequence[Episode]) -> Tensor:
    """Reward and penalty of each turn of the finished episodes, float (E, T), 0 after an episode's end."""
    rewards = [
        torch.tensor([turn.reward + turn.penalty for turn in episode.all_turns])
        for episode in episodes
        if episode.is_over
    ]
    return pad_sequence(rewards, batch_first=True)
