"""Learning without a critic: episodes that began alike are compared (GRPO, RLOO), or none are (REINFORCE).

A turn is credited with what it earned: the discounted return from it on, or the whole episode's. Its baseline is the
mean of the same over the group's other members, at the same turn index. Members that have ended count as 0, since they
earn nothing more, so a turn that only one member reaches has a baseline too. What the others earn does not depend on
this turn's action, given what was seen before it; so the baseline removes variance and adds no bias, even where members
share their random numbers after the start.

A member that ends after its group was learned from is compared with what the others had earned: those are the longest
episodes, and without them a policy would learn from short ones only.

Without a critic nothing can be said of what an episode that was cut off would still have earned: it counts as 0.

Departures from DeepSeekMath (https://arxiv.org/abs/2402.03300): the loss is a mean over a minibatch's decisions, not
first over each reply, so that long replies are not taken lightly; a member's own return is not part of its baseline;
and by default credit is the return from the turn on.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Hashable, Sequence
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
from .rollout import Sampled, Targets
from .state import Stateful

# Groups that were learned from, and whose members may still be under way.
_REMEMBERED = 1024


@dataclass(frozen=True)
class GRPOConfig(LearnerConfig):
    """How GRPO learns, beside what `LearnerConfig` says. The KL to the reference is a term of the loss (k3).

    Attributes:
        epochs: Passes over a batch, as far as `target_kl` allows.
        group_size: Episodes of one start that are compared; a group waits until it has as many. Members that end after
            it was learned from are compared with these.
        credit: "return_to_go" credits a turn with the discounted return from it on, "episode" with the whole one.
        baseline: What a turn's credit is compared with: "std" the mean of the others, in units of the group's deviation
            (DeepSeekMath, but for the own return in the mean), "leave_one_out" the mean of the others (RLOO), "none"
            nothing.
        whiten_advantages: Normalize advantages to mean 0 and deviation 1 over a batch. Useful with "leave_one_out",
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
    """REINFORCE (Williams 1992, https://doi.org/10.1007/BF00992696), returns normalized over the batch.

    One step on a batch, from where it was sampled: every ratio is 1, so nothing is clipped. (Turns that older weights
    sampled, in episodes that the last update interrupted, are weighted by their ratio.)
    """

    mini_batch_size: int = field(default=sys.maxsize, init=False)
    epochs: int = field(default=1, init=False)
    cliprange: float = field(default=math.inf, init=False)
    group_size: int = field(default=1, init=False)
    baseline: GroupBaseline | Literal["none"] = field(default="none", init=False)
    whiten_advantages: bool = True


class LearnedGroup(NamedTuple):
    """What the members of a group had earned when it was learned from.

    Attributes:
        version: Number of the weights' state that it was learned from with.
        credits: Mean credit of its members, by turn.
        deviations: Standard deviation of their credits, by turn; 0 where none of them had anything to decide.
        members: How many there were.
    """

    version: int
    credits: list[float]
    deviations: list[float]
    members: int

    def deviation_with(self, differences: list[float]) -> float:
        """The deviation at the turn where members differ most, with one more member.

        Args:
            differences: How far that one's credits are from the mean, by turn; 0 where it had nothing to decide.
        """
        deviations = []
        for difference, deviation in zip_longest(differences, self.deviations, fillvalue=0.0):
            squares = (self.members - 1) * deviation**2 + self.members / (self.members + 1) * difference**2
            deviations.append(math.sqrt(squares / self.members))
        return max(deviations)


class LearnedGroups(Stateful):
    """The groups that were learned from last, for members that end later.

    Attributes:
        records: The groups as JSON holds them, the oldest first.
    """

    saved = ("records",)

    def __init__(self) -> None:
        """Begin with none."""
        self._groups: dict[Hashable, LearnedGroup] = {}

    @property
    def records(self) -> list[list[Any]]:
        """The groups as JSON holds them, the oldest first."""
        return [[group, *learned] for group, learned in self._groups.items()]

    @records.setter
    def records(self, records: Sequence[Sequence[Any]]) -> None:
        self._groups = {key_from(group): LearnedGroup(*learned) for group, *learned in records}

    def add(self, group: Hashable, learned: LearnedGroup) -> None:
        """Remember a group, and forget the oldest of too many; episodes without a group are not one start."""
        if group is None:
            return
        self._groups.pop(group, None)
        self._groups[group] = learned
        if len(self._groups) > _REMEMBERED:
            del self._groups[next(iter(self._groups))]

    def of_late(self, episode: Episode) -> LearnedGroup | None:
        """The group of an episode that began before, and ended after it was learned from; None of any other."""
        learned = self._groups.get(episode.group)
        began = episode.all_turns[0].reply.weights_version
        return learned if learned is not None and began <= learned.version else None


class GRPO(Learner[Targets]):
    """Learns from finished episodes, without a critic."""

    config: GRPOConfig
    has_critic = False

    def __init__(self, policy: Policy, config: GRPOConfig) -> None:
        """Prepare optimizer and reference.

        Args:
            policy: Whose trainable weights are updated; its value head is left alone.
            config: How; a `ReinforceConfig` makes it REINFORCE.

        Raises:
            ConfigError: An argument has the wrong type.
        """
        check_arguments(GRPO.__init__, locals())
        self._learned = LearnedGroups()
        # Whether late members of the batch did better or worse than the groups that they are compared with.
        self._late_differ = False
        super().__init__(policy, config, config.epochs)

    @property
    def _update_state(self) -> tuple[str, ...]:
        """Names of the attributes that an update changes, beside weights and optimizer."""
        return (*super()._update_state, "_learned")

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
        """Groups that are complete, and late members of those that were learned from."""
        if self.config.baseline == "none":
            return super()._units(finished)
        late = [episode for episode in finished if self._learned.of_late(episode)]
        in_time = [episode for episode in finished if not self._learned.of_late(episode)]
        groups = [[in_time[index] for index in rows] for rows in _groups(in_time)]
        complete = [group for group in groups if len(group) >= self.config.group_size]
        return [*([episode] for episode in late), *complete]

    def _compute_targets(self, episodes: Sequence[Episode], sampled: Sampled) -> tuple[Targets, Stats]:
        """Advantages over the group.

        Raises:
            EpisodeError: No two episodes share a group, so there is nothing to compare.
        """
        config, stats = self.config, Stats()
        # Equal returns may be sums of different rewards; float32 would add up to different numbers.
        advantages = discounted_returns(sampled.rewards.double(), config.gamma)
        if config.credit == "episode":
            advantages = advantages[:, :1].expand_as(advantages)
        if config.baseline != "none":
            advantages, stats = self._compared(episodes, advantages, sampled)
        advantages = self._scaled(advantages, sampled.decides, episodes)
        return Targets(advantages[sampled.real].float()), stats

    @property
    def _centers_advantages(self) -> bool:
        """Groups have had their own mean removed; what is 0 in one must stay 0."""
        return self.config.baseline == "none"

    def _holds_information(self, returns: Returns, episodes: Sequence[Episode]) -> bool:
        """Whether anything in the batch, or a difference from an earlier group, tells a good action from a bad one."""
        return super()._holds_information(returns, episodes) or self._late_differ

    def _compared(self, episodes: Sequence[Episode], credits: Tensor, sampled: Sampled) -> tuple[Tensor, Stats]:
        """Credits (E, T) less the baseline, and how many groups there were; remembers the groups."""
        config = self.config
        learned = {index: group for index, each in enumerate(episodes) if (group := self._learned.of_late(each))}
        in_time = [index for index in range(len(episodes)) if index not in learned]
        groups = [[in_time[row] for row in rows] for rows in _groups([episodes[index] for index in in_time])]
        groups = [members for members in groups if len(members) > 1]
        if not groups and not learned:
            raise EpisodeError(
                f"None of {len(episodes)} episodes shares its group with another, so there is nothing to compare. "
                "Play several from each start and pass their groups to terminate_episodes()."
            )
        advantages = torch.zeros_like(credits)
        self._late_differ = False
        for index, group in learned.items():
            # After its last turn a group earned nothing more; an episode's credit is that of its every turn.
            after = group.credits[-1] if config.credit == "episode" else 0.0
            turns = len(episodes[index].turns)
            baseline = [*group.credits, *[after] * turns][:turns]
            above_group = credits[index, :turns] - credits.new_tensor(baseline)
            above_group = above_group.masked_fill(~sampled.decides[index, :turns], 0.0)
            # What differs by less is the rounding of rewards in float32.
            if above_group.abs().max() <= torch.finfo(torch.float32).eps * credits.abs().max():
                continue
            self._late_differ = True
            scale = group.deviation_with(above_group.tolist()) + 1e-4 if config.baseline == "std" else 1.0
            advantages[index, :turns] = above_group / scale
        assert config.baseline != "none", "without a baseline nothing is compared"
        for members in groups:
            decides = sampled.decides[members]
            advantages[members] = group_advantages(credits[members], config.baseline, decides)
            longest = max(len(episodes[index].turns) for index in members)
            of_group = credits[members, :longest]
            deviations = of_group.std(0) * decides[:, :longest].any(0)
            version = self.policy.weights_version
            earned = LearnedGroup(version, of_group.mean(0).tolist(), deviations.tolist(), len(members))
            self._learned.add(episodes[members[0]].group, earned)
        flat = sum(not advantages[members].any() for members in groups)
        return advantages, {"groups": float(len(groups)), "flat_groups": flat / len(groups) if groups else math.nan}


def _groups(episodes: Sequence[Episode]) -> list[list[int]]:
    """Indices of the episodes of each group, the group that came first first."""
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for index, episode in enumerate(episodes):
        groups[episode.group].append(index)
    return list(groups.values())
