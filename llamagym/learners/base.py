"""The base class of learners and the update that they share.

A learner turns episodes into an update of the policy: `update(episodes) -> stats`. Learners differ in their targets
(`compute_targets`) and in whether a value loss is added. Every token of a reply shares its turn's advantage, and a
minibatch's loss is a mean over its decisions, so long replies weigh more than short ones.

Shapes: N turns, L decisions per turn, E episodes, T turns of the longest episode.
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
from .batches import Batching, epochs_of_minibatches, minibatches
from .checks import check_episodes, check_precision, check_trainable
from .config import LearnerConfig
from .losses import ValueLoss, clipped_surrogate, kl_estimate, masked_mean
from .rollout import Rollout, Targets, collect, kl_of_decisions, measure_kl, outcomes, own_share, ratio_errors
from .safe_optimizer import SafeOptimizer
from .schedules import AdaptiveKLController, Cooldown, RateController
from .state import attributes_undone_on_error, restore, state_of

logger = logging.getLogger(__name__)

Stats = dict[str, float]
# Statistics in the line of an update; counts of steps are shown only if they are not zero.
_SHOWN_STATS = ("return_mean", "success_rate", "expected_return", "eval_return", "entropy", "approx_kl")
_SHOWN_COUNTS = ("skipped_steps", "replay_skipped_steps")


class UpdateStats(Stats):
    """Statistics of an update by name; empty if no update ran. `print` shows the most important ones on one line.

    >>> print(UpdateStats({"updates": 3, "turns": 800, "episodes": 512, "return_mean": -0.21, "loss": 0.1}))
    update 3: 800 turns, 512 episodes, return_mean -0.21
    """

    def __str__(self) -> str:
        """Returns one line."""
        if not self:
            return "no update"
        return f"update {self.get('updates', 0):.0f}: {', '.join([*self._counts(), *self.shown()])}"

    def _counts(self) -> list[str]:
        return [f"{self[name]:,.0f} {name}" for name in ("turns", "episodes") if name in self]

    def shown(self) -> list[str]:
        """Returns name and value of the most important statistics."""
        # Callbacks may add texts under these names.
        parts = [f"{name} {self[name]:.3g}" for name in _SHOWN_STATS if isinstance(self.get(name), (int, float))]
        return parts + [f"{name} {self[name]:.0f}" for name in _SHOWN_COUNTS if self.get(name)]


TargetsT = TypeVar("TargetsT", bound=Targets)

# A run has a few hundred steps, and the first gradients are the largest; a beta2 of 0.999 would never forget them.
_ADAM_BETAS = (0.9, 0.95)
# A nearly certain policy has hardly any gradients; this keeps the next one from making a full step.
_ADAM_EPS = 1e-5
# Without `mini_batch_size`: minibatches per batch, and the fewest turns of one.
_MINIBATCHES = 4
_MIN_MINIBATCH_TURNS = 64
# The entropy bonus is at most this times the mean absolute advantage. Otherwise it alone could set the direction of
# Adam's steps, which have full size however small the coefficient.
_MAX_BONUS_SHARE = 0.1
# State that an update changes, beside weights and optimizer; the names are keys of saved states.
_UPDATE_STATE = ("_whiten", "_information", "_rate", "_kl", "_rng")


class Learner(Batching, ABC, Generic[TargetsT]):
    """Learns from episodes.

    Attributes:
        policy: The policy that is updated.
        config: The learner's options.
        epochs: Passes over a batch, as far as `target_kl` allows.
        learning_rates: Learning rate of the policy and, with a gradient critic, of the value head.
        has_critic: Whether the value head is learned, so that truncated episodes can be bootstrapped.
        optimizer: Moves the policy's trainable weights and, with a gradient critic, the value head.
        cooldown: Scales learning rates down at the end of a run, whose progress `train` reports to it.
        advantages: Advantages of the latest batch, one list of turns per episode; for transcripts.
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
        self.epochs = epochs
        self.advantages: list[list[float]] = []
        # None: the policy's default for its model and device.
        self._max_tokens_per_pass = config.max_tokens_per_pass
        self.learning_rates = [config.learning_rate]
        if value_learning_rate is not None:
            self.learning_rates.append(value_learning_rate)
        distributed.broadcast_(self.updated_tensors())
        self._whiten = Whitening()
        self._information = Information()
        mask_frozen_gradients_(policy.model.pretrained_model)
        self.optimizer = SafeOptimizer(
            self._learning_weights(),
            self.learning_rates,
            self.accelerator,
            config.max_grad_norm,
            config.target_kl,
            betas=_ADAM_BETAS,
            eps=_ADAM_EPS,
        )
        self._rate = RateController(config.target_kl)
        self.cooldown = Cooldown(config.cooldown)
        self._kl = AdaptiveKLController(config.init_kl_coef, config.target, config.horizon)
        self._rng = np.random.default_rng(config.seed or 0)

    def reset_optimizer(self) -> None:
        """Restarts the optimizer on the policy's current weights: a warm start replaces them."""
        mask_frozen_gradients_(self.policy.model.pretrained_model)
        self.optimizer.restart(self._learning_weights())

    def _learning_weights(self) -> list[list[nn.Parameter]]:
        """The policy's trainable weights, and the value head's if gradient steps train it."""
        policy_weights = [weight for weight in self.policy.model.pretrained_model.parameters() if weight.requires_grad]
        groups = [policy_weights, list(self.policy.model.v_head.parameters())][: len(self.learning_rates)]
        check_precision(weight for group in groups for weight in group)
        return groups

    def updated_tensors(self) -> list[Tensor]:
        """All tensors that an update may change in place: trainable weights, value head and its buffers."""
        policy_weights = self._learning_weights()[0]
        head = self.policy.model.v_head
        return [*policy_weights, *head.parameters(), *head.buffers()]

    @property
    def pass_tokens(self) -> int:
        """Maximum tokens of one forward and backward pass."""
        return self._max_tokens_per_pass or self.policy.pass_tokens

    @property
    def needs_features(self) -> bool:
        """Whether `compute_targets` needs the critic's features."""
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

    @property
    def _value_coef(self) -> float:
        """Weight of the value loss."""
        return 0.0

    @property
    def _value_scale(self) -> float:
        """Factor of the value head's learning rate: the typical size of returns unless a rate was passed."""
        return 1.0

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """While open, an exception restores weights, optimizer, controllers and counters."""
        policy_state = attributes_undone_on_error(self.policy, {"num_updates": int, "reference": copy})
        own_state = attributes_undone_on_error(self, dict.fromkeys(self._update_state, deepcopy))
        with self.optimizer.undone_on_error(self.updated_tensors()), own_state, policy_state:
            yield

    def state_dict(self) -> dict[str, Any]:
        """The state to save, without weights."""
        return {
            "max_tokens_per_pass": self._max_tokens_per_pass,
            "learning": state_of(self, ("optimizer", *self._update_state)),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned, after the policy has its weights."""
        self.reset_optimizer()
        # The saved learner may have run out of memory and made its passes smaller.
        if state["max_tokens_per_pass"]:
            self._max_tokens_per_pass = min(self.pass_tokens, state["max_tokens_per_pass"])
        restore(self, state["learning"])

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
                    with self.undone_on_error(), self.policy.trees.cached():
                        return self._update(episodes)
                except (MemoryError, RuntimeError) as error:
                    # Other processes are in the middle of the same update and would not repeat it.
                    if not is_out_of_memory(error) or self.pass_tokens == 1 or distributed.world_size() > 1:
                        raise
                self._max_tokens_per_pass = self.pass_tokens // 2
                logger.warning(
                    "memory has run out: from now on a pass takes %d tokens (max_tokens_per_pass)", self.pass_tokens
                )

    def _update(self, episodes: Sequence[Episode]) -> Stats:
        """One update from top to bottom: rollout, targets, minibatch steps inside the trust region, statistics."""
        config = self.config
        policy = self.policy
        optimizer = self.optimizer
        started = time.perf_counter()
        tokens_before = policy.tokens_forwarded
        segments = segments_of(episodes)
        self._prepare(segments)

        # Log-probabilities and values under the policy before the update, then advantages.
        has_reference = bool(config.init_kl_coef)
        rollout = collect(policy, episodes, segments, self.pass_tokens, has_reference, self.needs_features)
        targets, stats = self.compute_targets(episodes, rollout)
        if not math.isnan(rollout.sampler_kl):
            stats["sampler_kl"] = rollout.sampler_kl
        by_episode = targets.advantages.split([len(episode.turns) for episode in episodes])
        self.advantages = [advantages.tolist() for advantages in by_episode]

        # Turns with a single possible reply teach only the critic: the policy cannot move there.
        deciding = [segment for segment in segments if any(turn.decision_count for turn in segment.turns)]
        trained = segments if self._has_gradient_critic else deciding
        size = config.mini_batch_size or max(_MIN_MINIBATCH_TURNS, math.ceil(len(targets.advantages) / _MINIBATCHES))
        schedule = epochs_of_minibatches(trained, size, self.epochs, self._rng)
        kl_share = 1.0 if targets.is_flat else step_share(targets.advantages, segments, rollout.entropy)
        takes_steps = self._has_gradient_critic or not targets.is_flat
        if not takes_steps:
            # One pass for statistics alone. Without information, a step of Adam would still have full size.
            schedule = iter([segments])

        history: dict[str, list[float]] = defaultdict(list)
        first_errors: list[float] = []
        left_trust_region = False
        for minibatch in schedule:
            decision_count = sum(turn.decision_count for segment in minibatch for turn in segment.turns)
            turn_count = sum(len(segment.turns) for segment in minibatch)
            entropy_coef = self._bounded_entropy_coef(minibatch, rollout, targets)
            losses: Stats = defaultdict(float)
            errors: list[float] = []
            for chunk in policy.chunks(own_share(minibatch), self.pass_tokens):
                with torch.set_grad_enabled(takes_steps):
                    current = policy.evaluate(chunk)
                rows = rows_of(chunk)
                mask = current.mask
                old_logprobs = rollout.old_logprobs[rows, : mask.shape[1]].to(mask.device)
                importance = rollout.importance[rows, : mask.shape[1]]
                advantages = (targets.advantages[rows, None] * importance).to(mask.device)
                # Weights with which the chunks' means sum to the minibatch's mean.
                decision_share = mask.sum().item() / max(decision_count, 1)
                turn_share = len(rows) / turn_count

                surrogate = clipped_surrogate(current.logprobs, old_logprobs, advantages, mask, config.cliprange)
                entropy = masked_mean(current.entropy, mask)
                loss = decision_share * (surrogate.loss - entropy_coef * entropy)
                has_no_advantage = advantages == 0
                if has_no_advantage.any():
                    # Steps for other turns must not change the policy where the advantage is zero.
                    loss = loss + decision_share * masked_mean(
                        kl_estimate(old_logprobs, current.logprobs, "k3") * has_no_advantage, mask
                    )
                if config.kl_in_loss:
                    coefficient = decision_share * self._kl.value
                    loss = loss + coefficient * self._reference_kl(current, rows, rollout, old_logprobs)
                # A chunk without decisions has no means, and is left out of the averages.
                if mask.any():
                    losses["policy_loss"] += decision_share * surrogate.loss.item()
                    losses["entropy"] += decision_share * entropy.item()
                    losses["entropy_coef"] += decision_share * entropy_coef
                    approx_kl = masked_mean(kl_of_decisions(rollout, rows, current), mask)
                    losses["approx_kl"] += decision_share * approx_kl.item()
                    losses["clip_fraction"] += decision_share * surrogate.clip_fraction.item()
                critic = self._value_loss(current, rows, rollout, targets)
                if critic is not None:
                    losses["value_loss"] += turn_share * critic.loss.item()
                    losses["value_clip_fraction"] += turn_share * critic.clip_fraction.item()
                    # Gradients are clipped as if the typical return was 1.
                    loss = loss + turn_share * self._value_coef / self._value_scale * critic.loss
                if loss.requires_grad:
                    self.accelerator.backward(loss)
                if not optimizer.steps:
                    errors += ratio_errors(rollout, rows, current)
                # Frees the chunk's graph, which would otherwise live until the next chunk has built its own.
                del current, surrogate, entropy, loss, critic

            optimizer.sum_gradients_()
            if not decision_count:
                self._drop_policy_gradients()
            losses, errors = _over_processes(losses, errors)
            first_errors = first_errors or errors
            if not takes_steps:
                losses |= {"grad_norm": 0.0, "entropy_coef": 0.0}
            elif not optimizer.accepts(losses):
                optimizer.adam.zero_grad()
                continue
            else:
                kl = losses.pop("approx_kl", None)
                # Before the first step the KL is only rounding error.
                if kl is not None and optimizer.steps:
                    left_trust_region = optimizer.record_kl(kl, kl_share)
                if left_trust_region:
                    break
                # A minibatch without decisions has no KL and steps the critic alone. Then the weights from before the
                # policy's last step are kept until its KL is known.
                if kl is not None or not optimizer.steps:
                    optimizer.keep_weights()
                losses["grad_norm"] = self._step(kl_share, targets.is_flat)
            for name, value in losses.items():
                history[name].append(value)
        if optimizer.steps and deciding and not left_trust_region:
            # No later minibatch measures the last step's KL.
            probe = minibatches(deciding, size, self._rng)[0]
            optimizer.record_kl(measure_kl(policy, probe, rollout, self.pass_tokens), kl_share)
        stats |= {name: float(np.mean(values)) for name, values in history.items()}
        stats |= {"approx_kl": optimizer.kl, "ratio_error": max(first_errors, default=math.nan)}
        stats |= self._end_steps(kl_share, targets.is_flat)

        policy.num_updates += 1
        if has_reference:
            stats |= self._adapt_kl_coef(rollout)
        distributed.check_equal_weights(self.updated_tensors())
        return stats | {
            **outcomes(episodes),
            "flat_batch": float(targets.is_flat),
            "updates": float(policy.num_updates),
            "learn_tokens": float(sum(distributed.gather_objects(policy.tokens_forwarded - tokens_before))),
            "learn_s": time.perf_counter() - started,
        }

    def _prepare(self, segments: Sequence[Segment]) -> None:
        """Makes optimizer, data-dependent initialization and reference ready for an update on these segments."""
        if not self.optimizer.holds(weight for group in self._learning_weights() for weight in group):
            logger.warning("the trainable weights were replaced: the optimizer starts again")
            self.reset_optimizer()
        self.optimizer.begin()
        self.policy.model.zero_grad()
        if not self.policy.is_initialized_from_data:
            self.policy.initialize_from_data(segments)
            version = self.policy.weights_version
            distributed.broadcast_(self.updated_tensors())
            if self.policy.weights_version != version:
                # On other hardware they were rounded differently than in the first process.
                self.policy.drop_caches(version)
        if self.config.init_kl_coef:
            self.policy.fix_reference()

    @abstractmethod
    def compute_targets(self, episodes: Sequence[Episode], rollout: Rollout) -> tuple[TargetsT, Stats]:
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

    def _bounded_entropy_coef(self, minibatch: list[Segment], rollout: Rollout, targets: TargetsT) -> float:
        """The weight of the entropy bonus, per nat, bounded by the mean absolute advantage of the decisions."""
        rows = torch.tensor(rows_of(minibatch), dtype=torch.long)
        rows = rows[rollout.deciding_rows[rows]]
        if not len(rows):
            return 0.0
        largest = _MAX_BONUS_SHARE * targets.advantages[rows].abs().mean().item()
        return min(self.config.entropy_coef * self.cooldown.scale, largest)

    def _reference_kl(self, current: Evaluation, rows: list[int], rollout: Rollout, old_logprobs: Tensor) -> Tensor:
        """Mean k3 per decision to the reference, in nats; a scalar with gradients.

        It is weighted by the ratio, so that value and gradient stay unbiased once the policy has moved.
        """
        reference = rollout.ref_logprobs[rows, : current.mask.shape[1]].to(current.mask.device)
        ratio = (current.logprobs - old_logprobs).exp()
        return masked_mean(ratio * kl_estimate(current.logprobs, reference, "k3"), current.mask)

    def _value_loss(
        self, current: Evaluation, rows: list[int], rollout: Rollout, targets: TargetsT
    ) -> ValueLoss | None:
        """The critic's loss on some turns; None if no gradient steps train the value head.

        Args:
            current: Evaluation of these turns under the current weights.
            rows: The turns' rows in the batch.
            rollout: The batch.
            targets: The batch's targets.
        """
        return None

    def _drop_policy_gradients(self) -> None:
        """Removes the policy's gradients, so that Adam leaves it alone; with zeros its momentum would move it."""
        for weight in self.optimizer.param_groups[0]["params"]:
            weight.grad = None

    def _step(self, kl_share: float, only_critic: bool) -> float:
        """Makes one optimizer step on the gradients at hand; returns the norm of the policy's gradient.

        Args:
            kl_share: Share of a full step's KL. The KL is in proportion to the square of the learning rate.
            only_critic: Whether the policy stays as it is.
        """
        if only_critic:
            self._drop_policy_gradients()
        warmup = min(1.0, (self.optimizer.total_steps + 1) / self.config.warmup_steps)
        schedule = warmup * self.cooldown.scale
        scales = (self._rate.scale * math.sqrt(kl_share), self._value_scale)
        rates = [rate * scale * schedule for rate, scale in zip(self.learning_rates, scales, strict=False)]
        return self.optimizer.step(rates)[0]

    def _end_steps(self, kl_share: float, is_flat: bool) -> Stats:
        """Adapts the learning rate, and undoes the last step if it left the trust region.

        Args:
            kl_share: Share of a full step's KL that the batch supports.
            is_flat: Whether all advantages were 0, so that the policy has made no step.

        Returns:
            Statistics of the update's steps.
        """
        optimizer = self.optimizer
        # Without a step no KL was measured, so the rate stays.
        if optimizer.steps:
            optimizer.end()
            is_warm = optimizer.total_steps >= self.config.warmup_steps
            self._rate.update(optimizer.largest_kl / kl_share, is_warm and not is_flat and not self._whiten.is_small)
        is_undone = optimizer.is_too_far(kl_share)
        if is_undone:
            logger.info("approx_kl %.4f, target_kl %s: a step is undone", optimizer.largest_kl, self.config.target_kl)
            optimizer.undo()
        policy_share = 0.0 if is_flat else kl_share
        rate = self.config.learning_rate * self._rate.scale * self.cooldown.scale
        return {
            "step_share": policy_share,
            "learning_rate": rate * math.sqrt(policy_share),
            "optimizer_steps": float(optimizer.steps),
            "skipped_steps": float(optimizer.skipped),
            "stopped_early": float(is_undone),
        }

    def _adapt_kl_coef(self, rollout: Rollout) -> Stats:
        """Adapts the coefficient of the KL to the reference; returns the one used and the KL, in nats per turn."""
        reference_kl = rollout.ref_kl[rollout.deciding_rows]
        stats = {"kl_coef": self._kl.value, "ref_kl": reference_kl.mean().item()}
        if self.config.adap_kl_ctrl:
            self._kl.update(stats["ref_kl"], len(reference_kl))
        return stats


def _over_processes(losses: Stats, errors: list[float]) -> tuple[Stats, list[float]]:
    """A minibatch's losses summed over processes by name, and the errors of all processes that are numbers."""
    losses_of_ranks, errors_of_ranks = zip(*distributed.gather_objects((dict(losses), errors)), strict=True)
    names = dict.fromkeys(name for of_rank in losses_of_ranks for name in of_rank)
    sums = {name: sum(of_rank.get(name, 0.0) for of_rank in losses_of_ranks) for name in names}
    return sums, [error for of_rank in errors_of_ranks for error in of_rank if not math.isnan(error)]
