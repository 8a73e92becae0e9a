"""Learning without a critic: GRPO and RLOO compare episodes from the same start, REINFORCE compares none.

A turn's credit is the discounted return from it on, or that of the whole episode. Its baseline is the mean credit of
the group's other members at the same turn index. Members that have ended count as 0, since they earn nothing more, so a
turn that only one member reaches has a baseline too. The others' returns do not depend on this turn's action, given its
observation. So the baseline reduces variance without bias, even if members share random numbers after the start.

A late member, which ends after an update on its group, is compared with the returns of that group. Late members are
the longest episodes; without them a policy would learn from short ones only. Without a critic, the rest of a truncated
episode has no estimate and counts as 0.

Departures from DeepSeekMath (https://arxiv.org/abs/2402.03300): the loss is a mean over a minibatch's decisions, not
first over each reply, so that long replies keep their weight; a member's own return is not part of its baseline; and by
default credit is the return from the turn on.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..errors import EpisodeError
from ..options import check_arguments
from ..policy.policy import Policy
from ..text.episode import Episode
from ..text.records import key_from
from .advantages import Returns
from .base import Learner, Stats
from .config import LearnerConfig
from .losses import GroupBaseline, discounted_returns, group_advantages
from .rollout import Rollout, Targets
from .state import Stateful

# Number of latest trained groups that are kept for late members.
_MAX_GROUPS = 1024


@dataclass(frozen=True)
class GRPOConfig(LearnerConfig):
    """Options of GRPO, beside those of `LearnerConfig`. The KL to the reference is a term of the loss (k3).

    Attributes:
        epochs: Passes over a batch, as far as `target_kl` allows.
        group_size: Number of episodes from one start that are compared; a group waits until it has as many. Members
            that end later are compared with these.
        credit: Credit of a turn: "return_to_go" is the discounted return from it on, "episode" that of the episode.
        baseline: Baseline of a turn's credit: "std" is the mean of the others, in units of the group's deviation
            (DeepSeekMath, without the member's own return), "leave_one_out" the mean of the others (RLOO), "none" 0.
        whiten_advantages: Whether advantages are normalized to mean 0 and deviation 1 over a batch. Useful with
            "leave_one_out", whose advantages are in reward units, so that `entropy_coef` has one meaning in any unit.
    """

    epochs: int = 4
    group_size: int = 8
    credit: Literal["return_to_go", "episode"] = "return_to_go"
    baseline: GroupBaseline | Literal["none"] = "std"
    whiten_advantages: bool = False

    def __post_init__(self) -> None:
        """Checks types and ranges."""
        super().__post_init__()
        self._require_at_least(1, "epochs")
        self._require_at_least(1 if self.baseline == "none" else 2, "group_size")
        self._require_one_of(["return_to_go", "episode"], "credit")
        self._require_one_of(["std", "leave_one_out", "none"], "baseline")


@dataclass(frozen=True)
class ReinforceConfig(GRPOConfig):
    """Options of REINFORCE (Williams 1992, https://doi.org/10.1007/BF00992696), with returns normalized over the batch.

    One on-policy step per batch: every ratio is 1, so nothing is clipped. Turns that older weights sampled, in episodes
    that the last update interrupted, have their importance weight.
    """

    mini_batch_size: int = field(default=sys.maxsize, init=False)
    epochs: int = field(default=1, init=False)
    cliprange: float = field(default=math.inf, init=False)
    group_size: int = field(default=1, init=False)
    baseline: GroupBaseline | Literal["none"] = field(default="none", init=False)
    whiten_advantages: bool = True


class TrainedGroup(NamedTuple):
    """Credits of a group's members at the update on it.

    Attributes:
        version: Number of the weights' state at that update.
        credits: Mean credit of the members, by turn.
        deviations: Standard deviation of their credits, by turn; 0 where none of them had anything to decide.
        members: Number of members.
    """

    version: int
    credits: list[float]
    deviations: list[float]
    members: int

    def deviation_with(self, differences: list[float]) -> float:
        """The deviation at the turn where members differ most, with one more member.

        Args:
            differences: The new member's credits minus the mean, by turn; 0 where it had nothing to decide.
        """
        deviations = []
        for difference, deviation in zip_longest(differences, self.deviations, fillvalue=0.0):
            squares = (self.members - 1) * deviation**2 + self.members / (self.members + 1) * difference**2
            deviations.append(math.sqrt(squares / self.members))
        return max(deviations)


class TrainedGroups(Stateful):
    """The latest groups that updates used, for members that end later.

    Attributes:
        records: The groups as JSON, the oldest first.
    """

    saved = ("records",)

    def __init__(self) -> None:
        """Starts empty."""
        self._groups: dict[Hashable, TrainedGroup] = {}

    @property
    def records(self) -> list[list[Any]]:
        """The groups as JSON, the oldest first."""
        return [[key, *group] for key, group in self._groups.items()]

    @records.setter
    def records(self, records: Sequence[Sequence[Any]]) -> None:
        self._groups = {key_from(key): TrainedGroup(*group) for key, *group in records}

    def add(self, key: Hashable, group: TrainedGroup) -> None:
        """Adds a group and evicts the oldest beyond the limit. Episodes without a key do not share a start."""
        if key is None:
            return
        self._groups.pop(key, None)
        self._groups[key] = group
        if len(self._groups) > _MAX_GROUPS:
            del self._groups[next(iter(self._groups))]

    def group_of(self, episode: Episode) -> TrainedGroup | None:
        """The group of a late member, which began before the update on it and ended after; None for others."""
        group = self._groups.get(episode.group)
        first_version = episode.all_turns[0].reply.weights_version
        return group if group is not None and first_version <= group.version else None


class GRPO(Learner[Targets]):
    """Learns from finished episodes, without a critic."""

    config: GRPOConfig
    has_critic = False

    def __init__(self, policy: Policy, config: GRPOConfig) -> None:
        """Creates the optimizer.

        Args:
            policy: The policy whose trainable weights are updated; the value head stays as it is.
            config: The options; a `ReinforceConfig` makes it REINFORCE.

        Raises:
            ConfigError: An argument has the wrong type.
        """
        check_arguments(GRPO.__init__, locals())
        self._learned = TrainedGroups()
        # Whether late members of the batch earned more or less than their groups.
        self._late_differ = False
        super().__init__(policy, config, config.epochs)

    @property
    def _update_state(self) -> tuple[str, ...]:
        """Names of the attributes that an update changes, beside weights and optimizer."""
        return (*super()._update_state, "_learned")

    @property
    def group_size(self) -> int:
        """Number of episodes from one start that are compared."""
        return 1 if self.config.baseline == "none" else self.config.group_size

    def why_no_update(self, finished: Sequence[Episode]) -> str:
        """Explains why no update has run yet: how full the batch is, and how many episodes wait for their group."""
        waiting = len(finished) - len(self._complete_indices(finished))
        reason = super().why_no_update(finished)
        return f"{reason} {waiting} more wait until their group has {self.config.group_size}." if waiting else reason

    def _complete_indices(self, finished: Sequence[Episode]) -> list[int]:
        """Indices of late members, then those of complete groups."""
        if self.config.baseline == "none":
            return super()._complete_indices(finished)
        late = self._late_members(finished)
        indices = list(late)
        for members in _grouped(finished, without=late):
            if len(members) >= self.config.group_size:
                indices += members
        return indices

    def _late_members(self, episodes: Sequence[Episode]) -> dict[int, TrainedGroup]:
        """The groups of late members, by the members' indices."""
        groups = {index: self._learned.group_of(episode) for index, episode in enumerate(episodes)}
        return {index: group for index, group in groups.items() if group is not None}

    def compute_targets(self, episodes: Sequence[Episode], rollout: Rollout) -> tuple[Targets, Stats]:
        """Computes advantages over the group.

        Raises:
            EpisodeError: No two episodes share a group, so there is nothing to compare.
        """
        stats = Stats()
        # Equal returns may be sums of different rewards, which float32 would add up to different numbers.
        advantages = discounted_returns(rollout.rewards.double(), self.config.gamma)
        if self.config.credit == "episode":
            advantages = advantages[:, :1].expand_as(advantages)
        if self.config.baseline != "none":
            advantages, stats = self._compared(episodes, advantages, rollout.decides)
        advantages = self._scaled(advantages, rollout.decides, episodes)
        return Targets(advantages[rollout.real].float()), stats

    @property
    def _centers_advantages(self) -> bool:
        """Whether whitening removes the batch's mean. Not with groups: each has lost its own mean."""
        return self.config.baseline == "none"

    def _holds_information(self, returns: Returns, episodes: Sequence[Episode]) -> bool:
        """Whether anything in the batch, or a difference from an earlier group, tells a good action from a bad one."""
        return super()._holds_information(returns, episodes) or self._late_differ

    def _compared(self, episodes: Sequence[Episode], credits: Tensor, decides: Tensor) -> tuple[Tensor, Stats]:
        """Subtracts baselines, and keeps the groups for late members.

        Args:
            episodes: The batch.
            credits: Credit of each turn, float (E, T).
            decides: True at turns with more than one possible reply, bool (E, T).

        Returns:
            Advantages, float (E, T), and the number of groups and of those without differences.
        """
        config = self.config
        assert config.baseline != "none", "without a baseline nothing is compared"
        late = self._late_members(episodes)
        groups = [members for members in _grouped(episodes, without=late) if len(members) > 1]
        if not groups and not late:
            raise EpisodeError(
                f"None of {len(episodes)} episodes shares its group with another, so there is nothing to compare. "
                "Play several from each start and pass their groups to terminate_episodes()."
            )
        advantages = torch.zeros_like(credits)
        self._late_differ = False
        for index, group in late.items():
            turns = len(episodes[index].turns)
            # After its last turn a group earned nothing more; credit for the whole episode is the same at every turn.
            after = group.credits[-1] if config.credit == "episode" else 0.0
            baseline = [*group.credits, *[after] * turns][:turns]
            above_group = credits[index, :turns] - credits.new_tensor(baseline)
            above_group = above_group.masked_fill(~decides[index, :turns], 0.0)
            # Smaller differences are the rounding of rewards in float32.
            if above_group.abs().max() <= torch.finfo(torch.float32).eps * credits.abs().max():
                continue
            self._late_differ = True
            scale = group.deviation_with(above_group.tolist()) + 1e-4 if config.baseline == "std" else 1.0
            advantages[index, :turns] = above_group / scale
        for members in groups:
            advantages[members] = group_advantages(credits[members], config.baseline, decides[members])
            longest = max(len(episodes[index].turns) for index in members)
            of_group = credits[members, :longest]
            deviations = of_group.std(0) * decides[members, :longest].any(0)
            version = self.policy.weights_version
            trained = TrainedGroup(version, of_group.mean(0).tolist(), deviations.tolist(), len(members))
            self._learned.add(episodes[members[0]].group, trained)
        flat = sum(not advantages[members].any() for members in groups)
        return advantages, {"groups": float(len(groups)), "flat_groups": flat / len(groups) if groups else math.nan}


def _grouped(episodes: Sequence[Episode], without: Collection[int]) -> list[list[int]]:
    """Indices of the episodes of each group, in order of the groups' first episodes, without some indices."""
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for index, episode in enumerate(episodes):
        if index not in without:
            groups[episode.group].append(index)
    return list(groups.values())
