"""The rollout batch: log-probabilities of its turns when they were sampled, and under the current weights.

Long episodes span several updates, so older weights sampled their first turns; a server's engine rounds differently.
Such turns are off-policy. The trust region is always measured from the policy before the update, and they
have the importance weight p_before / p_sampled, at most 2 (the decoupled objective of Hilton et al. 2022,
https://arxiv.org/abs/2110.00641).

Shapes: N turns, L decisions per turn, E episodes, T turns of the longest episode; M branch points on the way to a
choice, K targets per branch point.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .. import distributed
from ..policy.choices import logprobs_on_the_way
from ..policy.evaluation import Evaluation, divided
from ..policy.policy import Policy
from ..text.episode import Episode, Segment, Turn, rows_of
from .losses import categorical_kl, kl_estimate

# Bounds the variance that turns of older weights add.
_MAX_IMPORTANCE = 2.0


@dataclass(frozen=True)
class Rollout:
    """A batch's turns as tensors; a turn's row is its place in the order of episodes and turns.

    Attributes:
        off_policy: True at turns that older weights or another engine sampled, bool (N,).
        sampler_kl: KL from another engine to the built-in one with equal weights, in nats per token; NaN
            if that sampled all turns.
        old_logprobs: Log-probabilities under the policy before the update, float (N, L).
        importance: Importance weight p_before / p_sampled of each decision, at most 2, float (N, L).
        old_values: The critic's estimates before the update, in reward units, float (N,).
        features: The critic's features, float (N, H); (N, 0) if not requested.
        bootstrapped: True at truncated and unfinished episodes, whose final state has a value, bool (E,).
        final_values: The critic's estimates of these states before the update, float (E,); 0 elsewhere.
        final_features: The critic's features of these states, float (E, H); (E, 0) if not requested.
        ref_logprobs: Log-probabilities under the reference, float (N, L); `old_logprobs` without one.
        ref_kl: k1 to the reference, in nats per turn, float (N,); 0 without one.
        rewards: Reward and penalty after each turn, float (E, T), 0 after an episode's end.
        real: True at the turns that were played, bool (E, T). `x[real]` is x (E, T) by rows, (N,).
        decides: True at those of them that had more than one possible reply, bool (E, T).
        branches: Log-probability of each target at the branch points on the way to a choice, under the policy before
            the update, float (N, M, K), -inf for padding.
    """

    off_policy: Tensor
    sampler_kl: float
    old_logprobs: Tensor
    importance: Tensor
    old_values: Tensor
    features: Tensor
    bootstrapped: Tensor
    final_values: Tensor
    final_features: Tensor
    ref_logprobs: Tensor
    ref_kl: Tensor
    rewards: Tensor
    real: Tensor
    decides: Tensor
    branches: Tensor

    @property
    def deciding_rows(self) -> Tensor:
        """True at the rows of turns that had more than one possible reply, bool (N,)."""
        return self.decides[self.real]

    @property
    def entropy(self) -> float:
        """Mean entropy of a whole reply under the policy before the update, in nats, over turns that decide something.

        Estimated without bias by the mean negative log-probability of what was sampled. 0 if nothing was decided.
        """
        if not self.deciding_rows.any():
            return 0.0
        return -self.old_logprobs[self.deciding_rows].sum(1).mean().item()


@dataclass(frozen=True)
class Targets:
    """Training targets of a batch's turns.

    Attributes:
        advantages: Advantage of each turn, float (N,); all 0 if the batch holds no information.
    """

    advantages: Tensor

    @property
    def is_flat(self) -> bool:
        """Whether all advantages are 0."""
        return not self.advantages.any()


def collect(
    policy: Policy,
    episodes: Sequence[Episode],
    segments: Sequence[Segment],
    max_tokens: int,
    with_reference: bool,
    with_features: bool = False,
) -> Rollout:
    """Lays a batch out as tensors; off-policy turns are evaluated again, by all processes together.

    Args:
        policy: The policy before the update.
        episodes: The batch.
        segments: Its segments, from `segments_of`.
        max_tokens: Maximum tokens of one forward pass.
        with_reference: Whether to evaluate the reference.
        with_features: Whether to return the critic's features.
    """
    turns = [turn for episode in episodes for turn in episode.turns]
    sampled_logprobs, mask = _padded([turn.reply.logprobs for turn in turns])
    version = policy.weights_version
    has_current_weights = torch.tensor([turn.reply.weights_version == version for turn in turns])
    by_other_engine = torch.tensor([turn.reply.value is None for turn in turns])
    off_policy = ~has_current_weights | by_other_engine
    before = _Before(
        logprobs=sampled_logprobs.clone(),
        values=torch.tensor([turn.reply.value or 0.0 for turn in turns]),
        branches=_sampled_branches(turns),
        features=torch.zeros(len(turns), policy.model.v_head.summary.in_features if with_features else 0),
    )
    _evaluate_again(policy, before, segments, off_policy, max_tokens, with_features)
    comparable = mask & (has_current_weights & by_other_engine)[:, None]
    sampler_kl = kl_estimate(sampled_logprobs[comparable], before.logprobs[comparable], "k3").mean().item()
    bootstrapped, final_values, final_features = _read_final_states(policy, episodes, before.features.shape[1])
    ref_logprobs = before.logprobs
    ref_kl = torch.zeros(len(turns))
    if with_reference:
        ref_logprobs = torch.zeros_like(before.logprobs)
        for rows, current in evaluate_chunks(policy, own_share(segments), max_tokens, reference=True):
            ref_logprobs[rows, : current.mask.shape[1]] = current.logprobs.cpu()
        distributed.sum_([ref_logprobs])
        ref_kl = kl_estimate(before.logprobs, ref_logprobs, "k1").masked_fill(~mask, 0.0).sum(1)
    rewards, real, decides = _padded_turns(episodes)
    return Rollout(
        off_policy=off_policy,
        sampler_kl=sampler_kl,
        old_logprobs=before.logprobs,
        importance=(before.logprobs - sampled_logprobs).exp().clamp_max(_MAX_IMPORTANCE),
        old_values=before.values,
        features=before.features,
        bootstrapped=bootstrapped,
        final_values=final_values,
        final_features=final_features,
        ref_logprobs=ref_logprobs,
        ref_kl=ref_kl,
        rewards=rewards,
        real=real,
        decides=decides,
        branches=before.branches,
    )


@dataclass(frozen=True)
class _Before:
    """Outputs of the policy before the update, as in `Rollout`; `_evaluate_again` replaces rows of off-policy turns."""

    logprobs: Tensor
    values: Tensor
    branches: Tensor
    features: Tensor


def _padded(rows: Sequence[Sequence[float]]) -> tuple[Tensor, Tensor]:
    """Rows of different lengths as a tensor, float (N, L), and a mask that is True at their entries, bool (N, L)."""
    lengths = torch.tensor([len(row) for row in rows])
    width = max(map(len, rows))
    # One tensor of padded lists takes less time than a tensor for each row.
    values = torch.tensor([[*row, *[0.0] * (width - len(row))] for row in rows])
    return values, torch.arange(width) < lengths[:, None]


def _evaluate_again(
    policy: Policy,
    before: _Before,
    segments: Sequence[Segment],
    off_policy: Tensor,
    max_tokens: int,
    with_features: bool,
) -> None:
    """Evaluates segments with off-policy turns and replaces what was recorded of these turns, in place.

    Args:
        policy: The policy before the update.
        before: Outputs recorded when turns were sampled.
        segments: The batch.
        off_policy: True at turns that other weights or another engine sampled, bool (N,).
        max_tokens: Maximum tokens of one forward pass.
        with_features: Whether to fill in the critic's features, of every turn.
    """
    if not with_features:
        segments = [segment for segment in segments if off_policy[list(segment.rows)].any()]
    if not segments:
        return
    logprobs = torch.zeros_like(before.logprobs)
    values = torch.zeros_like(before.values)
    # Summed over processes as probabilities, since log-probabilities of padding are infinite.
    probabilities = torch.zeros_like(before.branches)
    for rows, current in evaluate_chunks(policy, own_share(segments), max_tokens):
        if with_features:
            before.features[rows] = current.features.float().cpu()
        logprobs[rows, : current.mask.shape[1]] = current.logprobs.cpu()
        values[rows] = current.values.cpu()
        probabilities[rows, : current.branches.shape[1], : current.branches.shape[2]] = current.branches.exp().cpu()
    distributed.sum_([before.features, logprobs, values, probabilities])
    before.logprobs[off_policy] = logprobs[off_policy]
    before.values[off_policy] = values[off_policy]
    before.branches[off_policy] = probabilities[off_policy].log()


def _read_final_states(policy: Policy, episodes: Sequence[Episode], width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Values the states after episodes that were cut off.

    Args:
        policy: The policy before the update.
        episodes: The batch.
        width: Number of the critic's features; 0 if not requested.

    Returns:
        `bootstrapped`, `final_values` and `final_features` of `Rollout`.
    """
    bootstrapped = torch.zeros(len(episodes), dtype=torch.bool)
    values = torch.zeros(len(episodes))
    features = torch.zeros(len(episodes), width)
    own_rows: list[int] = []
    own_finals: list[Segment] = []
    for row, episode in enumerate(episodes):
        final = episode.final_segment()
        if final is None:
            continue
        bootstrapped[row] = True
        # Each process reads its share. If all read all, each would round differently.
        if row % distributed.world_size() == distributed.rank():
            own_rows.append(row)
            own_finals.append(final)
    if own_rows:
        reading = policy.read_critic(own_finals)
        values[own_rows] = reading.values
        if width:
            features[own_rows] = reading.features
    distributed.sum_([values, features])
    return bootstrapped, values, features


def _padded_turns(episodes: Sequence[Episode]) -> tuple[Tensor, Tensor, Tensor]:
    """`rewards`, `real` and `decides` of `Rollout`, each (E, T)."""
    rewards = torch.zeros(len(episodes), max(len(episode.turns) for episode in episodes))
    real = torch.zeros_like(rewards, dtype=torch.bool)
    decides = torch.zeros_like(real)
    for index, episode in enumerate(episodes):
        length = len(episode.turns)
        rewards[index, :length] = torch.tensor([turn.reward + turn.penalty for turn in episode.turns])
        real[index, :length] = True
        decides[index, :length] = torch.tensor([turn.decision_count > 0 for turn in episode.turns])
    return rewards, real, decides


def _sampled_branches(turns: Sequence[Turn]) -> Tensor:
    """Log-probabilities at the branch points on the way to each turn's choice when it was sampled, (N, M, K)."""
    cache: dict[tuple[object, ...], Tensor] = {}
    of_turns = []
    for turn in turns:
        choices = turn.prompt.choices
        reply = turn.reply
        if choices is None or reply.choice_index is None:
            of_turns.append(torch.zeros(0, 0))
            continue
        key = (choices, reply.choice_logprobs, reply.choice_index)
        if key not in cache:
            cache[key] = logprobs_on_the_way(*key)
        of_turns.append(cache[key])
    branch_count = max(len(of_turn) for of_turn in of_turns)
    target_count = max(of_turn.shape[1] for of_turn in of_turns)
    branches = torch.full((len(turns), branch_count, target_count), -torch.inf)
    for row, of_turn in enumerate(of_turns):
        branches[row, : of_turn.shape[0], : of_turn.shape[1]] = of_turn
    return branches


def outcomes(episodes: Sequence[Episode]) -> dict[str, float]:
    """Statistics of a batch's finished episodes, and of all turns."""
    turns = [turn for episode in episodes for turn in episode.turns]
    over = [episode for episode in episodes if episode.is_over]
    returns = [episode.total_reward for episode in over]
    return {
        "return_mean": float(np.mean(returns)),
        "return_std": float(np.std(returns)),
        "reward_mean": float(np.mean([turn.reward for turn in turns])),
        "invalid_rate": float(np.mean([not turn.valid for turn in turns])),
        "episodes": float(len(over)),
        "turns": float(len(turns)),
        "deciding_turns": float(sum(turn.decision_count > 0 for turn in turns)),
        "turns_per_episode": float(np.mean([len(episode.all_turns) for episode in over])),
    }


def own_share(segments: Sequence[Segment]) -> Sequence[Segment]:
    """This process's share of the segments that all of them have to evaluate together."""
    if distributed.world_size() == 1:
        return segments
    return divided(segments, distributed.world_size())[distributed.rank()]


def is_finite(current: Evaluation) -> bool:
    """Whether log-probabilities, entropies and values are finite."""
    return all(bool(part.isfinite().all()) for part in (current.logprobs, current.entropy, current.values))


def shortest_opening(segments: Iterable[Segment]) -> list[Segment]:
    """The shortest first turn of any segment, as the cheapest way to check the policy's output."""
    return [min((Segment(segment.turns[:1]) for segment in segments), key=lambda opening: opening.token_count)]


@torch.no_grad()
def evaluate_chunks(
    policy: Policy, segments: Sequence[Segment], max_tokens: int, reference: bool = False
) -> Iterator[tuple[list[int], Evaluation]]:
    """Evaluates policy or reference on chunks of `max_tokens`; yields the rows and the evaluation of each chunk."""
    for chunk in policy.chunks(segments, max_tokens):
        yield rows_of(chunk), policy.evaluate(chunk, reference)


def kl_of_decisions(rollout: Rollout, rows: list[int], current: Evaluation) -> Tensor:
    """KL of each decision from the policy before the update to the current one, in nats, (N, L); without gradients.

    For a choice it is the sum of the exact KLs at the branch points on its way: the exact KL over all choices with one
    branch point, an unbiased estimate with several. For a token of free text, whose distribution over the vocabulary is
    not kept, it is the binary estimate.

    Args:
        rollout: The batch.
        rows: The turns' rows in the batch.
        current: Evaluation of these turns under the current weights.
    """
    logprobs = current.logprobs.detach()
    old = rollout.old_logprobs[rows, : logprobs.shape[1]].to(logprobs)
    kl = kl_estimate(old, logprobs, "binary")
    _, branch_count, target_count = current.branches.shape
    old_branches = rollout.branches[rows, :branch_count, :target_count].to(logprobs)
    of_choices = categorical_kl(old_branches, current.branches).sum(1)
    is_choice = (current.branches > -torch.inf).flatten(1).any(1)
    kl[:, 0] = torch.where(is_choice, of_choices, kl[:, 0])
    return kl


def ratio_errors(rollout: Rollout, rows: list[int], current: Evaluation) -> list[float]:
    """The largest |ratio - 1| among on-policy turns, as a list; empty without any."""
    fresh = [index for index, row in enumerate(rows) if not rollout.off_policy[row]]
    if not fresh:
        return []
    logprobs = current.logprobs[fresh].detach()
    old_logprobs = rollout.old_logprobs[[rows[index] for index in fresh], : logprobs.shape[1]].to(logprobs.device)
    return [((logprobs - old_logprobs).exp() - 1).abs().max().item()]


def measure_kl(policy: Policy, segments: list[Segment], rollout: Rollout, max_tokens: int) -> float:
    """Mean KL per decision on these segments, in nats; infinite if the output is not finite."""
    total = 0.0
    count = 0.0
    for rows, current in evaluate_chunks(policy, own_share(segments), max_tokens):
        if not is_finite(current):
            total += math.inf
        total += kl_of_decisions(rollout, rows, current)[current.mask].sum().item()
        count += current.mask.sum().item()
    totals, counts = zip(*distributed.gather_objects((total, count)), strict=True)
    return sum(totals) / max(sum(counts), 1.0)
