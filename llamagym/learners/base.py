"""The base class of learners: options, minibatches, the clipped surrogate, the optimizer's steps, statistics.

A learner turns episodes into an update of the policy: `update(episodes) -> stats`. Learners differ in their targets
(`_compute_targets`) and in extra loss terms. Every token of a reply shares its turn's advantage, and a minibatch's loss
is a mean over its decisions, so long replies weigh more than short ones.

Shapes: N turns, L decisions a turn, E episodes, T turns of the longest episode.
"""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from .. import distributed
from ..models.hardware import is_out_of_memory
from ..models.lora import mask_frozen_gradients_
from ..policy.evaluation import Evaluation
from ..policy.policy import Policy
from ..text.episode import Episode, Segment, rows_of, segments_of
from .advantages import Information, Returns, Whitening, step_share
from .batches import Batching, minibatches
from .checks import check_episodes, check_precision, check_trainable
from .config import LearnerConfig
from .controllers import AdaptiveKLController, Cooldown, RateController
from .losses import clipped_surrogate, kl_estimate, masked_mean
from .rollout import Sampled, Targets, collect, kl_of_decisions, measure_kl, outcomes, own_share
from .safe_optimizer import SafeOptimizer
from .state import attributes_undone_on_error, restore, state_of

logger = logging.getLogger(__name__)

Stats = dict[str, float]
# A run has a few hundred steps, and the first gradients are the largest; a beta2 of 0.999 would never forget them.
_ADAM_BETAS = (0.9, 0.95)
# Where no size is given: minibatches of a batch, and the fewest turns of one.
_MINIBATCHES, _LEAST_TURNS = 4, 64
# The entropy bonus is at most this times the mean absolute advantage. Otherwise it alone could set the direction of
# Adam's steps, which have full size however small the coefficient.
_LARGEST_BONUS = 0.1
# State that an update changes, beside weights and optimizer.
_UPDATE_STATE = ("_whiten", "_information", "_rate", "_entropy_coef", "_kl", "_rng")
# A nearly certain policy has hardly any gradients; this keeps the next one from making a full step.
_ADAM_EPS = 1e-5


TargetsT = TypeVar("TargetsT", bound=Targets)


class Learner(Batching, ABC, Generic[TargetsT]):
    """Learns from episodes.

    Attributes:
        policy: The policy that is updated.
        config: The learner's options.
        epochs: Passes over a batch, as far as `target_kl` allows.
        has_critic: Whether the value head is learned, so that truncated episodes can be bootstrapped.
        optimizer: Moves the policy's trainable weights and, with a gradient critic, the value head.
        cooldown: Scales learning rates down at the end of a run, whose progress `train` reports to it.
        advantages: Advantages of the latest batch's turns, by the turn's `id`; for transcripts.
    """

    has_critic: ClassVar[bool]

    def __init__(
        self, policy: Policy, config: LearnerConfig, epochs: int, value_learning_rate: float | None = None
    ) -> None:
        """Creates the optimizer.

        Args:
            policy: The policy whose trainable weights are updated.
            config: The learner's options.
            epochs: Passes over a batch.
            value_learning_rate: Learning rate of the value head; None if no gradient steps train it.
        """
        check_trainable(policy.model)
        self.policy = policy
        self.config = config
        self.accelerator = distributed.accelerator(policy.device)
        self.epochs, self._nodes = epochs, config.microbatch_nodes
        self._rates = [config.learning_rate, *([] if value_learning_rate is None else [value_learning_rate])]
        distributed.broadcast_(self._updated_tensors())
        self._whiten = Whitening()
        self._information = Information()
        self.advantages: dict[int, float] = {}
        mask_frozen_gradients_(policy.model.pretrained_model)
        self.optimizer = SafeOptimizer(
            self._learning_weights(),
            self._rates,
            self.accelerator,
            config.max_grad_norm,
            config.target_kl,
            betas=_ADAM_BETAS,
            eps=_ADAM_EPS,
        )
        self._rate = RateController(config.target_kl)
        self._entropy_coef = config.entropy_coef
        self.cooldown = Cooldown(config.cooldown)
        self._kl = AdaptiveKLController(config.init_kl_coef, config.target, config.horizon)
        self._rng = np.random.default_rng(config.seed or 0)

    def reset_optimizer(self) -> None:
        """Restarts the optimizer on the policy's current weights: a warm start replaces them."""
        mask_frozen_gradients_(self.policy.model.pretrained_model)
        self.optimizer.restart(self._learning_weights())

    def _learning_weights(self) -> list[list[nn.Parameter]]:
        """The policy's trainable weights, and the value head's if gradient steps train it."""
        body = [p for p in self.policy.model.pretrained_model.parameters() if p.requires_grad]
        parts = [body, list(self.policy.model.v_head.parameters())][: len(self._rates)]
        check_precision(weight for part in parts for weight in part)
        return parts

    def _updated_tensors(self) -> list[Tensor]:
        """All tensors that an update may change in place: trainable weights, value head and its buffers."""
        body, head = self._learning_weights()[0], self.policy.model.v_head
        return [*body, *head.parameters(), *head.buffers()]

    @property
    def pass_tokens(self) -> int:
        """Tokens in one forward and backward pass."""
        return self._nodes or self.policy.pass_tokens

    @property
    def needs_features(self) -> bool:
        """Whether `_compute_targets` needs the critic's features."""
        return False

    @property
    def _has_gradient_critic(self) -> bool:
        """Whether the value head learns by gradient steps."""
        return False

    @property
    def _centers_advantages(self) -> bool:
        """Whether whitening removes the batch's mean."""
        return True

    @property
    def _update_state(self) -> tuple[str, ...]:
        """Names of the attributes that an update changes, beside weights and optimizer."""
        return _UPDATE_STATE

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """While open, an exception restores weights, optimizer, controllers and counters."""
        counted = attributes_undone_on_error(self.policy, {"num_updates": int, "reference": copy})
        state = attributes_undone_on_error(self, dict.fromkeys(self._update_state, deepcopy))
        with self.optimizer.undone_on_error(self._updated_tensors()), state, counted:
            yield

    def state_dict(self) -> dict[str, Any]:
        """The state to save, without weights."""
        return {"nodes": self._nodes, "learning": state_of(self, ("optimizer", *self._update_state))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned, after the policy has its weights."""
        self.reset_optimizer()
        if state["nodes"]:  # memory may have run out before
            self._nodes = min(self.pass_tokens, state["nodes"])
        restore(self, state["learning"])

    @property
    def _value_scale(self) -> float:
        """Factor of the value head's learning rate: the typical size of returns where no rate was passed."""
        return 1.0

    @property
    def _bonus(self) -> float:
        """The weight of the entropy bonus, per nat."""
        return self._entropy_coef * self.cooldown.scale

    def update(self, episodes: Sequence[Episode]) -> Stats:
        """Updates the policy once on a batch; the same in all processes. After an error everything is as before.

        Args:
            episodes: The batch; at least one episode has ended.

        Returns:
            Statistics, explained in docs/statistics.md.

        Raises:
            EpisodeError: The batch is empty.
            DivergedError: Several steps in a row had losses or gradients that are not finite.
        """
        check_episodes(episodes)
        with self.policy.lock:
            while True:
                try:
                    with self.undone_on_error(), self.policy.trees.kept():
                        return self._update(episodes)
                except (MemoryError, RuntimeError) as error:
                    # Other processes are in the middle of the same update and would not repeat it.
                    if not is_out_of_memory(error) or self.pass_tokens == 1 or distributed.world_size() > 1:
                        raise
                self._nodes = self.pass_tokens // 2
                logger.warning("memory has run out: from now on a pass takes %d tokens (microbatch_nodes)", self._nodes)

    def _update(self, episodes: Sequence[Episode]) -> Stats:
        config, started, forwarded = self.config, time.perf_counter(), self.policy.tokens_forwarded
        segments = segments_of(episodes)
        if not self.optimizer.holds(weight for part in self._learning_weights() for weight in part):
            logger.warning("the trainable weights were replaced: the optimizer starts again")
            self.reset_optimizer()
        self.optimizer.begin()
        self.policy.model.zero_grad()
        if not self.policy.is_initialized_from_data:
            self.policy.initialize_from_data(segments)
            version = self.policy.weights_version
            distributed.broadcast_(self._updated_tensors())
            if self.policy.weights_version != version:
                # On other hardware they were rounded differently than in the first process.
                self.policy.drop_caches(version)
        if config.init_kl_coef:
            self.policy.fix_reference()
        sampled = collect(
            self.policy, episodes, segments, self.pass_tokens, bool(config.init_kl_coef), self.needs_features
        )
        targets, stats = self._compute_targets(episodes, sampled)
        turns = [turn for episode in episodes for turn in episode.turns]
        self.advantages = dict(zip(map(id, turns), targets.advantages.tolist(), strict=True))
        stats |= self._optimize(segments, sampled, targets)
        self.policy.num_updates += 1
        if config.init_kl_coef:
            of_decisions = sampled.ref_kl[sampled.deciding_rows]
            stats["kl_coef"], stats["ref_kl"] = self._kl.value, of_decisions.mean().item()
            if config.adap_kl_ctrl:
                self._kl.update(stats["ref_kl"], len(of_decisions))
        distributed.check_equal_weights(self._updated_tensors())
        return stats | {
            **outcomes(episodes),
            "flat_batch": float(targets.is_flat),
            "updates": float(self.policy.num_updates),
            "learn_tokens": float(sum(distributed.gather_objects(self.policy.tokens_forwarded - forwarded))),
            "learn_s": time.perf_counter() - started,
        }

    @abstractmethod
    def _compute_targets(self, episodes: Sequence[Episode], sampled: Sampled) -> tuple[TargetsT, Stats]:
        """Computes the targets of each turn, and statistics about them."""

    def _scaled(self, advantages: Tensor, mask: Tensor, episodes: Sequence[Episode]) -> Tensor:
        """Advantages, float (E, T), whitened if the options say so; all 0 if the episodes hold no information.

        Args:
            advantages: Float (E, T).
            mask: True at turns that leave something to decide, bool (E, T); elsewhere advantages become 0.
            episodes: The batch.
        """
        advantages = advantages.masked_fill(~mask, 0.0)
        returns = Returns(episodes, self.config.gamma)
        if not self._holds_information(returns, episodes):
            return torch.zeros_like(advantages)
        if not self.config.whiten_advantages:
            return advantages
        return self._whiten(advantages, mask, returns, self._centers_advantages)

    def _holds_information(self, returns: Returns, episodes: Sequence[Episode]) -> bool:
        """Whether anything in the batch tells a good action from a bad one."""
        return self._information.is_in(returns, episodes)

    def _optimize(self, segments: list[Segment], sampled: Sampled, targets: TargetsT) -> Stats:
        if targets.is_flat and not self._has_gradient_critic:
            return self._without_steps(segments, sampled, targets)
        share = 1.0 if targets.is_flat else step_share(targets.advantages, segments, sampled.entropy)
        # Turns that leave nothing to decide teach the critic only, and the policy cannot move there.
        deciding = [segment for segment in segments if any(turn.decision_count for turn in segment.turns)]
        if not self._has_gradient_critic:
            segments = deciding
        optimizer = self.optimizer
        sums: dict[str, list[float]] = defaultdict(list)
        ratio_error = math.nan
        size = self.config.mini_batch_size or max(_LEAST_TURNS, math.ceil(len(targets.advantages) / _MINIBATCHES))
        for minibatch in (m for _ in range(self.epochs) for m in minibatches(segments, size, self._rng)):
            stats, error = self._backward(minibatch, sampled, targets, first=not optimizer.steps)
            if math.isnan(ratio_error):
                ratio_error = error
            if not optimizer.accepts(stats):
                optimizer.adam.zero_grad()
                continue
            # A minibatch without decisions has no KL and steps the critic alone; then the weights before the policy's
            # last step are kept until its KL is known.
            has_decisions = "approx_kl" in stats
            if has_decisions:
                kl = stats.pop("approx_kl")
                # Before the first step the KL is rounding.
                if optimizer.steps and optimizer.record_kl(kl, share):
                    break
            if has_decisions or not optimizer.steps:
                optimizer.keep_weights()
            for name, value in stats.items():
                sums[name].append(value)
            sums["grad_norm"].append(self._step(share, targets.is_flat))
        else:
            # No later minibatch measures the last step's KL.
            if optimizer.steps and deciding:
                probe = minibatches(deciding, size, self._rng)[0]
                optimizer.record_kl(measure_kl(self.policy, probe, sampled, self.pass_tokens), share)
        # Without a step no KL was measured, so the rate stays.
        if optimizer.steps:
            optimizer.end()
            may_rise = optimizer.total_steps >= self.config.warmup_steps
            may_rise = may_rise and not targets.is_flat and not self._whiten.is_small
            self._rate.update(optimizer.largest_kl / share, may_rise)
        if stopped := optimizer.is_too_far(share):
            logger.info("approx_kl %.4f, target_kl %s: a step is undone", optimizer.largest_kl, self.config.target_kl)
            optimizer.undo()
        means = {name: float(np.mean(values)) for name, values in sums.items()}
        if not targets.is_flat:
            self._entropy_coef *= self.config.entropy_decay
        policy_share = 0.0 if targets.is_flat else share
        rate = self.config.learning_rate * self._rate.scale * self.cooldown.scale
        return means | {
            "approx_kl": optimizer.kl,
            "ratio_error": ratio_error,
            "step_share": policy_share,
            "learning_rate": rate * math.sqrt(policy_share),
            "optimizer_steps": float(optimizer.steps),
            "skipped_steps": float(optimizer.skipped),
            "stopped_early": float(stopped),
        }

    @torch.no_grad()
    def _without_steps(self, segments: list[Segment], sampled: Sampled, targets: TargetsT) -> Stats:
        """Statistics of a batch without information. No step is made, since Adam's would have full size."""
        stats, ratio_error = self._backward(segments, sampled, targets, first=True)
        return stats | {
            "approx_kl": 0.0,
            "grad_norm": 0.0,
            "entropy_coef": 0.0,
            "ratio_error": ratio_error,
            "step_share": 0.0,
            "learning_rate": 0.0,
            "optimizer_steps": 0.0,
            "skipped_steps": 0.0,
            "stopped_early": 0.0,
        }

    def _backward(
        self, minibatch: list[Segment], sampled: Sampled, targets: TargetsT, first: bool
    ) -> tuple[Stats, float]:
        """Computes a minibatch's gradients, summed over processes.

        Returns:
            The minibatch's statistics; before the `first` step the largest |ratio - 1|, otherwise NaN.
        """
        decision_count = sum(turn.decision_count for segment in minibatch for turn in segment.turns)
        turn_count = sum(len(segment.turns) for segment in minibatch)
        stats: dict[str, float] = defaultdict(float)
        errors: list[float] = []
        bonus = self._entropy_bonus(minibatch, sampled, targets)
        for chunk in self.policy.chunks(own_share(minibatch), self.pass_tokens):
            rows = rows_of(chunk)
            now = self.policy.evaluate(chunk)
            decision_share = now.mask.sum().item() / max(decision_count, 1)
            turn_share = len(rows) / turn_count
            loss, parts = self._loss(now, rows, sampled, targets, bonus, decision_share, turn_share)
            if loss.requires_grad:
                self.accelerator.backward(loss)
            for name, value in parts.items():
                stats[name] += value
            if first:
                errors += _ratio_errors(now, rows, sampled)
        self.optimizer.sum_gradients_()
        if not decision_count:
            # Without gradients Adam leaves the policy alone; with zeros its momentum would move it.
            for weight in self.optimizer.param_groups[0]["params"]:
                weight.grad = None
        stats_of_ranks, errors_of_ranks = zip(*distributed.gather_objects((dict(stats), errors)), strict=True)
        names = dict.fromkeys(name for of_rank in stats_of_ranks for name in of_rank)
        sums = {name: sum(of_rank.get(name, 0.0) for of_rank in stats_of_ranks) for name in names}
        finite = [error for of_rank in errors_of_ranks for error in of_rank if not math.isnan(error)]
        return sums, max(finite, default=math.nan)

    def _entropy_bonus(self, minibatch: list[Segment], sampled: Sampled, targets: TargetsT) -> float:
        """The weight of the entropy bonus, bounded by the mean absolute advantage of the minibatch's decisions."""
        rows = torch.tensor(rows_of(minibatch), dtype=torch.long)
        rows = rows[sampled.deciding_rows[rows]]
        if not len(rows):
            return 0.0
        return min(self._bonus, _LARGEST_BONUS * targets.advantages[rows].abs().mean().item())

    def _loss(
        self,
        now: Evaluation,
        rows: list[int],
        sampled: Sampled,
        targets: TargetsT,
        bonus: float,
        decision_share: float,
        turn_share: float,
    ) -> tuple[Tensor, Stats]:
        """The loss of a microbatch and its parts, weighted so that a minibatch's microbatches add up to its mean.

        Args:
            now: Evaluation of the microbatch's turns under the current weights.
            rows: The turns' rows in `sampled` and `targets`.
            sampled: The whole batch.
            targets: The whole batch's targets.
            bonus: Weight of the entropy bonus, per nat.
            decision_share: The microbatch's share of the minibatch's decisions.
            turn_share: Its share of the minibatch's turns.
        """
        config, device, mask = self.config, now.logprobs.device, now.mask
        old = sampled.old_logprobs[rows, : mask.shape[1]].to(device)
        advantages = (targets.advantages[rows, None] * sampled.weights[rows, : mask.shape[1]]).to(device)
        policy = clipped_surrogate(now.logprobs, old, advantages, mask, config.cliprange)
        entropy = masked_mean(now.entropy, mask)
        loss = decision_share * (policy.loss - bonus * entropy)
        has_no_advantage = advantages == 0
        if has_no_advantage.any():
            # Steps for other turns must not change the policy where the advantage is zero.
            k3 = masked_mean(kl_estimate(old, now.logprobs, "k3") * has_no_advantage, mask)
            loss = loss + decision_share * k3
        if config.kl_in_loss:
            reference = sampled.ref_logprobs[rows, : mask.shape[1]].to(device)
            # Weighted by the ratio, so that value and gradient stay unbiased once the policy has moved.
            ratio = (now.logprobs - old).exp()
            k3 = masked_mean(ratio * kl_estimate(now.logprobs, reference, "k3"), mask)
            loss = loss + decision_share * self._kl.value * k3
        if not mask.any():
            # Without decisions there are no means, and averages leave this microbatch out.
            return loss, Stats()
        stats = {
            "policy_loss": decision_share * policy.loss.item(),
            "entropy": decision_share * entropy.item(),
            "entropy_coef": decision_share * bonus,
            "approx_kl": decision_share * masked_mean(kl_of_decisions(sampled, rows, now), mask).item(),
            "clip_fraction": decision_share * policy.clip_fraction.item(),
        }
        return loss, stats

    def _step(self, share: float, only_critic: bool) -> float:
        """Makes one optimizer step on the gradients at hand; returns the norm of the policy's gradient.

        Args:
            share: Share of a full step's KL. The KL is in proportion to the square of the learning rate.
            only_critic: Whether the policy stays as it is: Adam leaves weights without gradients alone.
        """
        if only_critic:
            for weight in self.optimizer.param_groups[0]["params"]:
                weight.grad = None
        warmup = min(1.0, (self.optimizer.total_steps + 1) / self.config.warmup_steps)
        scales = self._rate.scale * math.sqrt(share), self._value_scale
        schedule = warmup * self.cooldown.scale
        rates = [rate * scale * schedule for rate, scale in zip(self._rates, scales, strict=False)]
        return self.optimizer.step(rates)[0]


def _ratio_errors(now: Evaluation, rows: list[int], sampled: Sampled) -> list[float]:
    """The largest |ratio - 1| among turns that the current weights sampled, in a list; empty without such turns."""
    current = [index for index, row in enumerate(rows) if not sampled.outdated[row]]
    if not current:
        return []
    old = sampled.old_logprobs[[rows[index] for index in current], : now.logprobs.shape[1]].to(now.logprobs.device)
    return [((now.logprobs[current].detach() - old).exp() - 1).abs().max().item()]
