"""Learning without a critic: episodes that began alike are compared (GRPO, RLOO), or none are (REINFORCE).

A turn is credited with what it earned: the discounted return from it on, or the whole episode's. Its baseline is the
mean of the same over the group, at the same turn index. Every member counts at every index: an episode that has ended
earns nothing more, which is a fact and not a gap, so a turn that only one member reaches has a baseline too. What the
others earn does not depend on this turn's action, given what was seen before it; so the baseline takes variance away
and adds no bias, even where members share their random numbers after the start.

Without a critic nothing can be said of what an episode that was cut off would still have earned: it counts as 0.

Departures from DeepSeekMath (https://arxiv.org/abs/2402.03300): the loss is a mean over a minibatch's decisions, not
first over each reply, so that long replies are not taken lightly; and by default credit is the return from the turn on.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from ..conversation.episode import Episode
from ..errors import EpisodeError
from ..options import check_arguments
from ..policy.policy import Policy
from .base import Learner, Stats
from .config import LearnerConfig
from .losses import GroupBaseline, discounted_returns, group_advantages
from .rollout import Sampled, Targets


@dataclass(frozen=True)
class GRPOConfig(LearnerConfig):
    """How GRPO learns, beside what `LearnerConfig` says. The KL to the reference is a term of the loss (k3).

    Attributes:
        epochs: Passes over a batch, as far as `target_kl` allows.
        group_size: Episodes of one start that are compared; a group waits until it has as many.
        credit: "return_to_go" credits a turn with the discounted return from it on, "episode" with the whole one.
        baseline: What a turn's credit is compared with: "std" the group's mean, in units of its deviation
            (DeepSeekMath), "leave_one_out" the mean of the others (RLOO), "none" nothing.
        whiten_advantages: Normalise advantages to mean 0 and deviation 1 over a batch. Useful with "leave_one_out",
            whose advantages are in reward units, so that `entropy_coef` means the same whatever these are.
    """

    epochs: int = 4
    group_size: int = 8
    credit: Literal["return_to_go", "episode"] = "return_to_go"
    baseline: GroupBaseline | Literal["none"] = "std"
    whiten_advantages: bool = False

    def __post_init__(self) -> None:
        """Check the ranges."""
        super().__post_init__()
        self._require_at_least(1, "epochs")
        self._require_at_least(1 if self.baseline == "none" else 2, "group_size")
        self._require_one_of(["return_to_go", "episode"], "credit")
        self._require_one_of(["std", "leave_one_out", "none"], "baseline")


@dataclass(frozen=True)
class ReinforceConfig(GRPOConfig):
    """REINFORCE (Williams 1992, https://doi.org/10.1007/BF00992696), returns normalised over the batch.

    One step on a batch, from where it was sampled: every ratio is 1, so nothing is clipped. (Turns that older weights
    sampled, in episodes that the last update interrupted, are weighted by their ratio.)
    """

    mini_batch_size: int = field(default=sys.maxsize, init=False)
    epochs: int = field(default=1, init=False)
    cliprange: float = field(default=math.inf, init=False)
    group_size: int = field(default=1, init=False)
    baseline: GroupBaseline | Literal["none"] = field(default="none", init=False)
    whiten_advantages: bool = True


class GRPO(Learner[Targets]):
    """Learns from finished episodes, without a critic."""

    config: GRPOConfig
    has_critic = False

    def __init__(self, policy: Policy, config: GRPOConfig) -> None:
        """Prepare optimiser and reference.

        Args:
            policy: Whose trainable weights are updated; its value head is left alone.
            config: How; a `ReinforceConfig` makes it REINFORCE.

        Raises:
            ConfigError: An argument has the wrong type.
        """
        check_arguments(GRPO.__init__, locals())
        super().__init__(policy, config, config.epochs)

    @property
    def group_size(self) -> int:
        """Episodes of one start that are compared."""
        return 1 if self.config.baseline == "none" else self.config.group_size

    def why_no_update(self, finished: Sequence[Episode]) -> str:
        """Why no update has run yet: how full the batch is, and which episodes wait for the rest of their group."""
        waiting = len(finished) - sum(map(len, self._units(finished)))
        rest = f" {waiting} more wait until their group has {self.config.group_size}." if waiting else ""
        return super().why_no_update(finished) + rest

    def _units(self, finished: Sequence[Episode]) -> list[list[Episode]]:
        """Groups that are complete."""
        if self.config.baseline == "none":
            return super()._units(finished)
        members = [[finished[index] for index in rows] for rows in _groups(finished)]
        return [group for group in members if len(group) >= self.config.group_size]

    def _credit(self, episodes: Sequence[Episode], sampled: Sampled) -> tuple[Targets, Stats]:
        """Advantages over the group.

        Raises:
            EpisodeError: No two episodes share a group, so there is nothing to compare.
        """
        config, stats = self.config, Stats()
        advantages = discounted_returns(sampled.rewards, config.gamma)
        if config.credit == "episode":
            advantages = advantages[:, :1].expand_as(sampled.rewards)
        if config.baseline != "none":
            credits, advantages = advantages, torch.zeros_like(sampled.rewards)
            compared = [members for members in _groups(episodes) if len(members) > 1]
            if not compared:
                raise EpisodeError(
                    f"None of {len(episodes)} episodes shares its group with another, so there is nothing to compare. "
                    "Play several from each start and pass their groups to terminate_episodes()."
                )
            for members in compared:
                advantages[members] = group_advantages(credits[members], config.baseline)
            flat = sum(bool((credits[members] == credits[members[0]]).all()) for members in compared)
            stats = {"groups": float(len(compared)), "flat_groups": flat / len(compared)}
        if config.whiten_advantages:
            advantages = self._whiten(advantages, sampled.real)
        return Targets(advantages[sampled.real]), stats


def _groups(episodes: Sequence[Episode]) -> list[list[int]]:
    """Indices of the episodes of each group, the group that came first first."""
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for index, episode in enumerate(episodes):
        groups[episode.group].append(index)
    return list(groups.values())
