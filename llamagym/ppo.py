"""Proximal policy optimisation over the turns of episodes.

Departures from the PPO paper: the value is read at the last prompt token of a turn and one turn is one step of GAE,
however many tokens the reply has; every token of a reply shares its turn's advantage. The value head learns on
detached features with its own learning rate. Turns that other weights sampled (episodes under way during an update)
keep the log-probabilities of their sampling, so the ratio corrects for them.
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from .conversation import Episode, Segment, Turn
from .errors import ConfigError, did_you_mean
from .losses import (
    clipped_surrogate,
    clipped_value_loss,
    explained_variance,
    gae,
    kl_estimate,
    masked_mean,
    masked_whiten,
)
from .policy import Evaluation, Policy

logger = logging.getLogger(__name__)

Stats = dict[str, float]
# An update stops once the KL of a minibatch exceeds the target by this factor.
_KL_TOLERANCE = 1.5
# The learning rate follows the KL in these steps, and stays within this factor of its start (Schulman et al. 2017,
# section 4, steer the KL's coefficient so).
_RATE_STEP, _RATE_RANGE = 1.5, 10.0
# A run has some hundred steps, and its first gradients are the largest: the usual 0.999 would remember them throughout.
_ADAM_BETAS = (0.9, 0.95)


@dataclass(frozen=True)
class PPOConfig:
    """How PPO learns; names follow TRL 0.11.

    Attributes:
        batch_size: An update runs when finished episodes hold at least this many turns.
        mini_batch_size: Turns per optimiser step; a batch that is smaller makes one step.
        ppo_epochs: Passes over a batch.
        learning_rate: Of the policy's weights (Adam).
        warmup_steps: Optimiser steps over which both learning rates rise: Adam's first steps are full ones, however
            unsure the gradient.
        value_learning_rate: Of the value head.
        gamma: Discount per turn.
        lam: GAE's lambda.
        cliprange: Epsilon of the clipped surrogate.
        cliprange_value: How far a value may move from its estimate at sampling, in reward units.
        vf_coef: Weight of the value loss.
        entropy_coef: Weight of the entropy bonus, per nat.
        init_kl_coef: Weight of the KL to the reference policy, to begin with; 0 needs no reference.
        kl_placement: "reward" subtracts k1 from each turn's reward, "loss" adds k3.
        adap_kl_ctrl: Whether the coefficient follows `target` (Ziegler et al. 2019, https://arxiv.org/abs/1909.08593).
        target: KL to the reference, in nats per turn, that the coefficient steers to.
        horizon: Turns over which it does.
        target_kl: KL by which an update should move the policy. It ends early at 1.5 times that; after an update that
            went beyond the target the policy's learning rate falls, after one that stayed below half of it it rises.
            None does neither.
        max_grad_norm: Gradient clipping by norm, of the policy's weights and of the value head's apart.
        whiten_advantages: Normalise advantages to mean 0 and deviation 1 over a batch.
        microbatch_nodes: Tokens in one forward and backward pass; bounds memory, changes nothing else.
        seed: Of the minibatches' order.
    """

    batch_size: int = 128
    mini_batch_size: int = 32
    ppo_epochs: int = 2
    learning_rate: float = 3e-4
    value_learning_rate: float = 3e-3
    warmup_steps: int = 20
    gamma: float = 1.0
    lam: float = 0.95
    cliprange: float = 0.2
    cliprange_value: float = 0.2
    vf_coef: float = 0.5
    entropy_coef: float = 0.01
    init_kl_coef: float = 0.0
    kl_placement: Literal["reward", "loss"] = "reward"
    adap_kl_ctrl: bool = False
    target: float = 6.0
    horizon: float = 10_000
    target_kl: float | None = None
    max_grad_norm: float = 1.0
    whiten_advantages: bool = True
    microbatch_nodes: int = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the ranges."""
        for name in ("batch_size", "mini_batch_size", "ppo_epochs", "warmup_steps", "microbatch_nodes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} is not positive. Pass at least 1.")
        for name in ("gamma", "lam"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name}={getattr(self, name)} is outside [0, 1].")
        if self.kl_placement not in ("reward", "loss"):
            raise ConfigError(
                f"kl_placement={self.kl_placement!r}. {did_you_mean(self.kl_placement, ['reward', 'loss'])}"
            )

    @classmethod
    def from_dict(cls, options: dict[str, object]) -> PPOConfig:
        """Read options by name, refusing unknown ones.

        >>> PPOConfig.from_dict({"batch_size": 64}).batch_size
        64
        """
        known = {field.name for field in fields(cls)}
        for key in options:
            if key not in known:
                raise ConfigError(f"Unknown PPO option {key!r}. {did_you_mean(key, known)}")
        return cls(**options)  # type: ignore[arg-type]


class AdaptiveKLController:
    """Proportional controller of the KL coefficient (Ziegler et al. 2019, section 2.2)."""

    def __init__(self, init_kl_coef: float, target: float, horizon: float) -> None:
        """Start at `init_kl_coef`."""
        self.value, self._target, self._horizon = init_kl_coef, target, horizon

    def update(self, kl: float, steps: int) -> None:
        """Move the coefficient after `steps` samples with this mean KL, in nats."""
        error = min(max(kl / self._target - 1, -0.2), 0.2)
        self.value *= 1 + error * steps / self._horizon


@dataclass(frozen=True)
class _Targets:
    """What each turn of a batch is trained towards, by identity of the turn."""

    row: dict[int, int]
    old_logprobs: Tensor
    ref_logprobs: Tensor
    old_values: Tensor
    advantages: Tensor
    returns: Tensor


class PPO:
    """Learns from finished episodes."""

    def __init__(self, policy: Policy, config: PPOConfig) -> None:
        """Prepare optimiser and reference.

        Args:
            policy: Whose trainable weights are updated.
            config: How.
        """
        self.policy = policy
        self.config = config
        self.accelerator = Accelerator(cpu=policy.device.type == "cpu")
        head = list(policy.model.v_head.parameters())
        body = [p for p in policy.model.pretrained_model.parameters() if p.requires_grad]
        self._body, self._head = body, head
        groups = [{"params": body, "lr": config.learning_rate}, {"params": head, "lr": config.value_learning_rate}]
        self.optimizer = self.accelerator.prepare(torch.optim.Adam(groups, betas=_ADAM_BETAS))
        self._steps, self._rate_scale = 0, 1.0
        self._kl = AdaptiveKLController(config.init_kl_coef, config.target, config.horizon)
        self._rng = np.random.default_rng(config.seed)
        if config.init_kl_coef:
            policy.enable_reference()

    def update(self, episodes: Sequence[Episode]) -> Stats:
        """One PPO update on a batch of whole episodes.

        Returns:
            Statistics; the README says how to read them.
        """
        started, forwarded = time.perf_counter(), self.policy.tokens_forwarded
        segments = [segment for episode in episodes for segment in episode.segments()]
        turns = [turn for segment in segments for turn in segment.turns]
        if self.policy.values_are_untrained:
            self.policy.fit_inputs(segments)
        targets, kl = self._prepare(episodes, segments, turns)
        stats = self._optimize(segments, targets)
        self.policy.weights_version += 1
        if self.config.init_kl_coef:
            stats["kl_coef"], stats["ref_kl"] = self._kl.value, kl
            if self.config.adap_kl_ctrl:
                self._kl.update(kl, len(turns))
        returns = [episode.total_reward for episode in episodes]
        lengths = torch.tensor([len(episode.turns) for episode in episodes], dtype=torch.float)
        rows = [targets.row[id(turn)] for turn in turns]
        return stats | {
            "return_mean": float(np.mean(returns)),
            "return_std": float(np.std(returns)),
            "reward_mean": float(np.mean([turn.reward for turn in turns])),
            "invalid_rate": float(np.mean([not turn.valid for turn in turns])),
            "explained_variance": explained_variance(targets.old_values[rows], targets.returns[rows]),
            "episodes": float(len(episodes)),
            "turns": float(len(turns)),
            "turns_per_episode": lengths.mean().item(),
            "weights_version": float(self.policy.weights_version),
            "learn_tokens": float(self.policy.tokens_forwarded - forwarded),
            "learn_s": time.perf_counter() - started,
        }

    def _prepare(
        self, episodes: Sequence[Episode], segments: list[Segment], turns: list[Turn]
    ) -> tuple[_Targets, float]:
        """Rewards with the KL penalty, then advantages and returns; also the mean KL to the reference per turn."""
        row = {id(turn): index for index, turn in enumerate(turns)}
        width = max(len(turn.reply.logprobs) for turn in turns)
        old = torch.zeros(len(turns), width)
        mask = torch.zeros(len(turns), width, dtype=torch.bool)
        for index, turn in enumerate(turns):
            old[index, : len(turn.reply.logprobs)] = torch.tensor(turn.reply.logprobs)
            mask[index, : len(turn.reply.logprobs)] = True
        reference, penalty, kl = old, torch.zeros(len(turns)), 0.0
        if self.config.init_kl_coef:
            reference = self._reference_logprobs(segments, row, torch.zeros_like(old))
            per_turn = kl_estimate(old, reference, "k1").masked_fill(~mask, 0.0).sum(1)
            kl = per_turn.mean().item()
            if self.config.kl_placement == "reward":
                penalty = self._kl.value * per_turn
        longest = max(len(episode.turns) for episode in episodes)
        rewards, values = torch.zeros(len(episodes), longest), torch.zeros(len(episodes), longest)
        real = torch.zeros(len(episodes), longest, dtype=torch.bool)
        for index, episode in enumerate(episodes):
            n = len(episode.turns)
            raw = torch.tensor([turn.reward + turn.penalty for turn in episode.turns])
            rewards[index, :n] = raw - penalty[[row[id(turn)] for turn in episode.turns]]
            values[index, :n] = torch.tensor([turn.reply.value for turn in episode.turns])
            real[index, :n] = True
        final = torch.tensor([episode.final_value for episode in episodes])
        advantages, returns = gae(rewards, values, real, self.config.gamma, self.config.lam, final)
        if self.config.whiten_advantages:
            advantages = masked_whiten(advantages, real)
        # Episodes and segments list the turns in the same order, so the mask's order is the rows' order.
        return _Targets(row, old, reference, values[real], advantages[real], returns[real]), kl

    @torch.no_grad()
    def _reference_logprobs(self, segments: list[Segment], row: dict[int, int], out: Tensor) -> Tensor:
        for chunk in self.policy.chunks(segments, self.config.microbatch_nodes):
            logprobs = self.policy.evaluate(chunk, reference=True).logprobs.cpu()
            rows = [row[id(turn)] for segment in chunk for turn in segment.turns]
            out[rows, : logprobs.shape[1]] = logprobs
        return out

    def _optimize(self, segments: list[Segment], targets: _Targets) -> Stats:
        sums: dict[str, list[float]] = defaultdict(list)
        ratio_error, stopped, largest_kl = math.nan, False, 0.0
        for _ in range(self.config.ppo_epochs):
            for minibatch in self._minibatches(segments):
                stats, fresh_error = self._backward(minibatch, targets)
                if math.isnan(ratio_error):
                    ratio_error = fresh_error
                # Averaged over processes, so that all of them stop together.
                kl = self.accelerator.reduce(torch.tensor(stats["approx_kl"], device=self.policy.device), "mean").item()
                largest_kl = max(largest_kl, kl)
                if self.config.target_kl is not None and kl > _KL_TOLERANCE * self.config.target_kl:
                    logger.info("update stopped early: approx_kl %.4f > 1.5 * %.4f", kl, self.config.target_kl)
                    self.optimizer.zero_grad()
                    stopped = True
                    break
                stats["grad_norm"] = self._step()
                for name, value in stats.items():
                    sums[name].append(value)
            if stopped:
                break
        self._steer_rate(largest_kl)
        means = {name: float(np.mean(values)) for name, values in sums.items()}
        return means | {
            "ratio_error": ratio_error,
            "learning_rate": self.config.learning_rate * self._rate_scale,
            "optimizer_steps": float(len(sums["approx_kl"])),
            "stopped_early": float(stopped),
        }

    def _steer_rate(self, kl: float) -> None:
        """Lower the learning rate after an update beyond the target KL, raise it after one below half of it."""
        target = self.config.target_kl
        if target is None or self._steps < self.config.warmup_steps:
            return
        if kl > target:
            self._rate_scale = max(self._rate_scale / _RATE_STEP, 1 / _RATE_RANGE)
        elif kl < target / 2:
            self._rate_scale = min(self._rate_scale * _RATE_STEP, _RATE_RANGE)

    def _minibatches(self, segments: list[Segment]) -> list[list[Segment]]:
        """Shuffled segments in groups of about `mini_batch_size` turns; a remainder below half joins the last group."""
        groups: list[list[Segment]] = [[]]
        left = sum(len(segment.turns) for segment in segments)
        size = 0
        for index in self._rng.permutation(len(segments)):
            groups[-1].append(segments[index])
            size += len(segments[index].turns)
            left -= len(segments[index].turns)
            if size >= self.config.mini_batch_size and left >= self.config.mini_batch_size // 2 and left:
                groups.append([])
                size = 0
        return groups

    def _backward(self, minibatch: list[Segment], targets: _Targets) -> tuple[Stats, float]:
        """Gradients of a minibatch; returns its statistics and the largest |ratio - 1| among turns just sampled."""
        decisions = sum(len(turn.reply.logprobs) for segment in minibatch for turn in segment.turns)
        turn_count = sum(len(segment.turns) for segment in minibatch)
        stats: dict[str, float] = defaultdict(float)
        fresh_error = math.nan
        for chunk in self.policy.chunks(minibatch, self.config.microbatch_nodes):
            turns = [turn for segment in chunk for turn in segment.turns]
            now = self.policy.evaluate(chunk)
            loss, parts = self._loss(now, [targets.row[id(turn)] for turn in turns], targets, decisions, turn_count)
            self.accelerator.backward(loss)
            for name, value in parts.items():
                stats[name] += value
            fresh = [i for i, turn in enumerate(turns) if turn.reply.weights_version == self.policy.weights_version]
            if fresh:
                rows = [targets.row[id(turns[i])] for i in fresh]
                old = targets.old_logprobs[rows, : now.logprobs.shape[1]].to(now.logprobs.device)
                error = ((now.logprobs[fresh].detach() - old).exp() - 1).abs().max().item()
                fresh_error = error if math.isnan(fresh_error) else max(fresh_error, error)
        return dict(stats), fresh_error

    def _step(self) -> float:
        """One optimiser step on the gradients at hand; returns the norm of the policy's."""
        if self.accelerator.num_processes > 1:
            for weight in (*self._body, *self._head):
                if weight.grad is not None:
                    weight.grad = self.accelerator.reduce(weight.grad, "mean")
        # Each by its own norm: the value head's gradient is far the larger and would scale the policy's away.
        norm = self.accelerator.clip_grad_norm_(self._body, self.config.max_grad_norm)
        self.accelerator.clip_grad_norm_(self._head, self.config.max_grad_norm)
        self._steps += 1
        rise = min(1.0, self._steps / self.config.warmup_steps)
        rates = self.config.learning_rate * self._rate_scale, self.config.value_learning_rate
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * rise
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)

    def _loss(
        self, now: Evaluation, rows: list[int], targets: _Targets, decisions: int, turn_count: int
    ) -> tuple[Tensor, Stats]:
        """The loss of a microbatch, weighted so that a minibatch's microbatches add up to its mean."""
        config, device, mask = self.config, now.logprobs.device, now.mask
        width = mask.shape[1]
        old = targets.old_logprobs[rows, :width].to(device)
        advantages = targets.advantages[rows, None].to(device).expand_as(mask)
        policy = clipped_surrogate(now.logprobs, old, advantages, mask, config.cliprange)
        every = torch.ones_like(now.values, dtype=torch.bool)
        old_values, returns = targets.old_values[rows].to(device), targets.returns[rows].to(device)
        value = clipped_value_loss(now.values, old_values, returns, every, config.cliprange_value)
        entropy = masked_mean(now.entropy, mask)
        by_decision = mask.sum().item() / decisions
        by_turn = len(rows) / turn_count
        loss = by_decision * (policy.loss - config.entropy_coef * entropy) + by_turn * config.vf_coef * value.loss
        if config.init_kl_coef and config.kl_placement == "loss":
            reference = targets.ref_logprobs[rows, :width].to(device)
            # Weighted by the ratio, so that value and gradient stay unbiased once the policy has left its samples.
            ratio = (now.logprobs - old).exp()
            k3 = masked_mean(ratio * kl_estimate(now.logprobs, reference, "k3"), mask)
            loss = loss + by_decision * self._kl.value * k3
        stats = {
            "policy_loss": by_decision * policy.loss.item(),
            "value_loss": by_turn * value.loss.item(),
            "entropy": by_decision * entropy.item(),
            "approx_kl": by_decision * policy.approx_kl.item(),
            "clip_fraction": by_decision * policy.clip_fraction.item(),
            "value_clip_fraction": by_turn * value.clip_fraction.item(),
        }
        return loss, stats
