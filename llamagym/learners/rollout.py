"""The rollout batch: log-probabilities of its turns when they were sampled, and under the current weights.

Long episodes span several updates, so older weights sampled their first turns. How far an update may go
is measured from the policy before it, whoever sampled; turns of older weights count by how much more likely that policy
makes them (the decoupled objective of Hilton et al. 2022, https://arxiv.org/abs/2110.00641, weights truncated).

Shapes: N turns, L decisions a turn, E episodes, T turns of the longest episode; M branches on the way to a choice, K
targets of a branch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..conversation.episode import Episode, Segment, Turn, rows_of
from ..policy.choices import logprobs_on_the_way
from ..policy.chunks import shares
from ..policy.evaluation import Evaluation
from ..policy.policy import Policy
from . import ranks
from .losses import categorical_kl, kl_estimate

# A turn that the policy has come to like this much more since it was sampled counts no more than that.
_LARGEST_WEIGHT = 2.0


@dataclass(frozen=True)
class Sampled:
    """A batch's turns, as tensors.

    Attributes:
        outdated: True at turns that other weights sampled than those before the update, bool (N,).
        old_logprobs: Log-probabilities under the policy before the update, float (N, L).
        weights: How much more likely that is to decide so than the policy that sampled, at most 2, float (N, L).
        old_values: The critic's estimates before the update, in reward units, float (N,).
        features: What these are read from, float (N, H); (N, 0) if they were not requested.
        bootstrapped: True at episodes that were cut off and have a state to value after their last turn, bool (E,).
        final_values: The critic's estimates of these states before the update, float (E,); 0 elsewhere.
        final_features: What these are read from, float (E, H); (E, 0) if they were not requested.
        ref_logprobs: The same under the reference, where there is one.
        ref_kl: k1 to the reference, in nats per turn, float (N,); 0 without one.
        rewards: Reward and penalty after each turn, float (E, T), 0 after an episode's end.
        real: True at the turns that were played, bool (E, T). `x[real]` is x (E, T) by rows, (N,).
        decides: True at those of them that had more than one possible reply, bool (E, T).
        branches: Log-probability of each target of the branches on the way to a choice, under the policy before the
            update, float (N, M, K), -inf for padding.
    """

    outdated: Tensor
    old_logprobs: Tensor
    weights: Tensor
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
    """What the turns of a batch are trained towards.

    Attributes:
        advantages: How much better a turn did than expected, float (N,). All 0 where a batch holds no information.
    """

    advantages: Tensor

    @property
    def is_flat(self) -> bool:
        """Whether no turn did better or worse than another."""
        return not self.advantages.any()


def collect(
    policy: Policy,
    episodes: Sequence[Episode],
    segments: Sequence[Segment],
    nodes: int,
    with_reference: bool,
    with_features: bool = False,
) -> Sampled:
    """What was sampled, and what the policy and the reference say of it now; each process reads its share.

    Args:
        policy: Which has yet to learn from the batch.
        episodes: The batch.
        segments: These, cut where contexts begin.
        nodes: Tokens in one forward pass.
        with_reference: Whether to ask the reference at all.
        with_features: Whether the critic's features are wanted.
    """
    turns = [turn for episode in episodes for turn in episode.turns]
    said = [turn.reply.logprobs for turn in turns]
    width = max(map(len, said))
    sampled = torch.tensor([[*logprobs, *[0.0] * (width - len(logprobs))] for logprobs in said])
    mask = torch.arange(width) < torch.tensor(list(map(len, said)))[:, None]
    old, values = sampled.clone(), torch.tensor([turn.reply.value for turn in turns])
    version = policy.weights_version
    outdated = torch.tensor([turn.reply.weights_version != version for turn in turns])
    branches = _sampled_branches(turns)
    mixed = [segment for segment in segments if outdated[list(segment.rows)].any()]
    features = torch.zeros(len(turns), policy.model.v_head.summary.in_features if with_features else 0)
    if asked := segments if with_features else mixed:
        again, now_values = torch.zeros_like(old), torch.zeros_like(values)
        # As probabilities, since those of all processes are added up.
        now_branches = torch.zeros_like(branches)
        for rows, now in evaluate_chunks(policy, own_share(asked), nodes):
            if with_features:
                features[rows] = now.features.float().cpu()
            again[rows, : now.mask.shape[1]], now_values[rows] = now.logprobs.cpu(), now.values.cpu()
            now_branches[rows, : now.branches.shape[1], : now.branches.shape[2]] = now.branches.exp().cpu()
        ranks.sum_([features, again, now_values, now_branches])
        old[outdated], values[outdated] = again[outdated], now_values[outdated]
        branches[outdated] = now_branches[outdated].log()
    finals = [episode.final_segment() for episode in episodes]
    bootstrapped = torch.tensor([final is not None for final in finals])
    final_values = torch.zeros(len(episodes))
    final_features = torch.zeros(len(episodes), features.shape[1])
    # Each process reads its share: read by all, they would be rounded differently in each.
    own = [row for row, final in enumerate(finals) if final is not None and row % ranks.count() == ranks.rank()]
    if own:
        of_finals = policy.read_critic([final for final in (finals[row] for row in own) if final is not None])
        final_values[own] = of_finals.values
        if with_features:
            final_features[own] = of_finals.features
    ranks.sum_([final_values, final_features])
    weights = (old - sampled).exp().clamp_max(_LARGEST_WEIGHT)
    reference, kl = old, torch.zeros(len(turns))
    if with_reference:
        reference = torch.zeros_like(old)
        for rows, now in evaluate_chunks(policy, own_share(segments), nodes, reference=True):
            reference[rows, : now.mask.shape[1]] = now.logprobs.cpu()
        ranks.sum_([reference])
        kl = kl_estimate(old, reference, "k1").masked_fill(~mask, 0.0).sum(1)
    # Episodes and segments list the turns in the same order, so the mask's order is the rows' order.
    rewards = torch.zeros(len(episodes), max(len(episode.turns) for episode in episodes))
    real = torch.zeros_like(rewards, dtype=torch.bool)
    decides = torch.zeros_like(real)
    for index, episode in enumerate(episodes):
        rewards[index, : len(episode.turns)] = torch.tensor([turn.reward + turn.penalty for turn in episode.turns])
        real[index, : len(episode.turns)] = True
        decides[index, : len(episode.turns)] = torch.tensor([turn.decision_count > 0 for turn in episode.turns])
    return Sampled(
        outdated,
        old,
        weights,
        values,
        features,
        bootstrapped,
        final_values,
        final_features,
        reference,
        kl,
        rewards,
        real,
        decides,
        branches,
    )


def _sampled_branches(turns: Sequence[Turn]) -> Tensor:
    """What the branches on the way to each turn's choice offered when it was sampled, (N, M, K); see `Sampled`.

    Where a reply does not say that, the numbers mean nothing.
    """
    known: dict[tuple[object, ...], Tensor] = {}
    of_turns = []
    for turn in turns:
        choices, reply = turn.prompt.choices, turn.reply
        if choices is None or reply.choice_index is None:
            of_turns.append(torch.zeros(0, 0))
            continue
        logprobs = reply.choice_logprobs or (0.0,) * len(choices)
        key = (choices, logprobs, reply.choice_index)
        if key not in known:
            known[key] = logprobs_on_the_way(*key)
        of_turns.append(known[key])
    most = max(len(of_turn) for of_turn in of_turns)
    widest = max(of_turn.shape[1] for of_turn in of_turns)
    branches = torch.full((len(turns), most, widest), -torch.inf)
    for row, of_turn in enumerate(of_turns):
        branches[row, : of_turn.shape[0], : of_turn.shape[1]] = of_turn
    return branches


def outcomes(episodes: Sequence[Episode]) -> dict[str, float]:
    """How a batch's episodes went, those that are over; of turns, all."""
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
    return segments if ranks.count() == 1 else shares(segments, ranks.count())[ranks.rank()]


def is_finite(now: Evaluation) -> bool:
    """Whether all that a policy says of some turns is finite."""
    return all(bool(part.isfinite().all()) for part in (now.logprobs, now.entropy, now.values))


def shortest_opening(segments: Iterable[Segment]) -> list[Segment]:
    """The first turn of one of the contexts: the least that can be read to see what the policy says now."""
    return [min((Segment(segment.turns[:1]) for segment in segments), key=lambda opening: opening.token_count)]


@torch.no_grad()
def evaluate_chunks(
    policy: Policy, segments: Sequence[Segment], nodes: int, reference: bool = False
) -> Iterator[tuple[list[int], Evaluation]]:
    """Evaluates policy or reference on the segments, `nodes` tokens at a time; yields rows with their evaluation."""
    for chunk in policy.chunks(segments, nodes):
        yield rows_of(chunk), policy.evaluate(chunk, reference)


def kl_of_decisions(sampled: Sampled, rows: list[int], now: Evaluation) -> Tensor:
    """KL of each decision from the policy before the update to the one now, in nats, (N, L); without gradients.

    Of a choice it is exact at each branch on the way to the one that was taken: the exact KL of the choice where they
    part at one place, an unbiased estimate of it where they part at several, since the way is drawn from the policy
    (from an older one in turns of older weights). Of a token of free text, whose distribution over the vocabulary is
    not kept, it is the binary estimate.

    Args:
        sampled: The batch.
        rows: The turns' rows in it.
        now: What the current weights say of these turns.
    """
    logprobs = now.logprobs.detach()
    old = sampled.old_logprobs[rows, : logprobs.shape[1]].to(logprobs)
    kl = kl_estimate(old, logprobs, "binary")
    _, branches, targets = now.branches.shape
    old_branches = sampled.branches[rows, :branches, :targets].to(logprobs)
    of_choices = categorical_kl(old_branches, now.branches).sum(1)
    is_choice = (now.branches > -torch.inf).flatten(1).any(1)
    kl[:, 0] = torch.where(is_choice, of_choices, kl[:, 0])
    return kl


def measure_kl(policy: Policy, segments: list[Segment], sampled: Sampled, nodes: int) -> float:
    """How far the policy has moved there, in nats per decision; infinite where what it says is not finite."""
    total = count = 0.0
    for rows, now in evaluate_chunks(policy, own_share(segments), nodes):
        total += 0.0 if is_finite(now) else math.inf
        total += kl_of_decisions(sampled, rows, now)[now.mask].sum().item()
        count += now.mask.sum().item()
    totals, counts = zip(*ranks.gather_objects((total, count)), strict=True)
    return sum(totals) / max(sum(counts), 1.0)
