"""PPO over the tokens of single replies: the step-wise `PPOTrainer` that TRL had until 0.11.4, with its numbers.

One query, one response, one score; every response token is a step of its own. Each token pays the KL to the reference,
the last one earns the score, and GAE runs over the tokens. (`ppo.PPO` learns from episodes of many turns instead.)

Departures from TRL 0.11.4: batches are padded on the right whatever the tokenizer's padding side, so that positions are
right; the gradient is clipped at every minibatch, where TRL stops after its first one; a reference model that is
given is used even if the policy has an adapter; and statistics carry llamagym's names. Score scaling, reward whitening,
response masks and the penalty "full" are left out.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from itertools import chain
from typing import Any, Literal, NamedTuple, Protocol, get_args

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from ..errors import ConfigError, did_you_mean
from ..models.lock import lock_of
from ..models.lora import mask_frozen_gradients_
from ..models.value_head import AutoModelForCausalLMWithValueHead
from ..policy.choices import entropy_from_logits
from .checks import check_precision, check_samples, check_trainer
from .controllers import AdaptiveKLController
from .guard import FiniteGuard
from .losses import (
    KLEstimator,
    clipped_surrogate,
    clipped_value_loss,
    explained_variance,
    gae,
    kl_estimate,
    masked_mean,
    masked_whiten,
)
from .ppo import PPOConfig
from .steps import average_gradients_, gradients_of, holds_exactly, mean_over_processes, weights_of
from .undo import undone_on_error

logger = logging.getLogger(__name__)

KLPenalty = Literal["kl", "abs", "mse"]
_ESTIMATORS: dict[KLPenalty, KLEstimator] = {"kl": "k1", "abs": "abs", "mse": "k2"}
# The loop over epochs ends once the KL of an epoch's last minibatch exceeds the target by this factor.
_KL_TOLERANCE = 1.5


class Shuffler(Protocol):
    """What draws the order of the samples; a `numpy.random.Generator` is one."""

    def permutation(self, x: int, /) -> np.ndarray:
        """The numbers below `x` in a random order."""


class _Batch(NamedTuple):
    """Queries and responses as a rectangle, padded on the right, and what the response tokens are trained towards.

    ids and attention are int64 (B, T). mask is True at t where token t + 1 belongs to the response, bool (B, T - 1).
    The rest, float (B, T - 1), belongs to the mask's positions; log-probabilities and values are those at the start.
    """

    ids: Tensor
    attention: Tensor
    mask: Tensor
    logprobs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor

    def rows(self, index: Tensor) -> _Batch:
        return _Batch(*(part[index] for part in self))


def _pack(queries: Sequence[Tensor], responses: Sequence[Tensor], pad_id: int) -> tuple[Tensor, Tensor, Tensor]:
    """The batch's ids, attention and mask."""
    ids = pad_sequence([torch.cat(pair) for pair in zip(queries, responses, strict=True)], True, pad_id)
    query_lengths = torch.tensor([len(query) for query in queries])[:, None]
    lengths = query_lengths + torch.tensor([len(response) for response in responses])[:, None]
    position = torch.arange(ids.shape[1])
    attention = (position < lengths).long()
    return ids, attention, ((position >= query_lengths) & (position < lengths))[:, 1:]


class PPOTrainer:
    """Trains a model on queries, its responses and their scores.

    Attributes:
        config: As given.
        model: The policy with its value head.
        ref_model: The frozen reference; None where the policy without its adapter is the reference.
        tokenizer: As given.
        accelerator: Runs backward and clipping.
        kl_coef: Weight of the KL penalty in the next step's rewards.
    """

    def __init__(
        self,
        config: PPOConfig,
        model: AutoModelForCausalLMWithValueHead,
        ref_model: AutoModelForCausalLMWithValueHead | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        kl_penalty: KLPenalty = "kl",
        ratio_threshold: float = 10.0,
        rng: Shuffler | None = None,
    ) -> None:
        """Prepare optimiser and reference.

        For TRL's numbers also set what TRL has no separate option for: `value_learning_rate` equal to
        `learning_rate`, `entropy_coef=0`, and `max_grad_norm=math.inf` where TRL's was None. `target_kl` other
        than None is TRL's `early_stopping=True`.

        Args:
            config: How to learn; a step is one token, a batch is `batch_size` responses.
            model: Whose trainable weights are updated.
            ref_model: The reference. None takes the policy without its adapter or, where it has none, a frozen copy.
            tokenizer: Whose padding id fills batches; without one it is 0. Padding never influences a result.
            kl_penalty: What a token pays, d being its log-probability under the policy less that under the
                reference: "kl" d, "abs" its absolute value, "mse" half its square.
            ratio_threshold: A minibatch whose mean ratio of new to old probability exceeds this gives no gradient.
            rng: Draws the order of the samples, once an epoch; None is numpy's generator seeded with `config.seed`.

        Raises:
            ConfigError: `kl_penalty` is unknown, `config` puts the KL into the loss or has another critic, an argument
                is of another type, or weights that learn have fewer than 32 bits.
        """
        check_trainer(config, PPOConfig, model, ref_model)
        if kl_penalty not in _ESTIMATORS:
            raise ConfigError(f"kl_penalty={kl_penalty!r}. {did_you_mean(str(kl_penalty), get_args(KLPenalty))}")
        if config.kl_placement != "reward":
            raise ConfigError(
                f"kl_placement={config.kl_placement!r}, but PPOTrainer knows the KL as a part of the reward only, as "
                "TRL did. Use kl_placement='reward'."
            )
        if config.critic != "gradient":
            raise ConfigError(
                f"critic={config.critic!r}, but PPOTrainer's value head learns by gradient steps, as TRL's did. Use "
                "critic='gradient'."
            )
        self.config = config
        self.model = model
        self.tokenizer = tokenizer
        if ref_model is None and not model.is_peft_model:
            ref_model = deepcopy(model).requires_grad_(False)
        self.ref_model = None if ref_model is None else ref_model.eval()
        self.accelerator = Accelerator(cpu=model.device.type == "cpu")
        self._reset_optimizer()
        self._kl_controller = AdaptiveKLController(config.init_kl_coef, config.target, config.horizon)
        self._estimator = _ESTIMATORS[kl_penalty]
        self._ratio_threshold = ratio_threshold
        self._guard = FiniteGuard()
        self._rng: Shuffler = np.random.default_rng(config.seed) if rng is None else rng

    def _reset_optimizer(self) -> None:
        """Start the optimiser on the weights that learn now."""
        mask_frozen_gradients_(self.model.pretrained_model)
        body, head = self._learning_weights()
        check_precision(body + head)
        rates = self.config.learning_rate, self.config.value_learning_rate
        groups = [{"params": part, "lr": rate} for part, rate in zip((body, head), rates, strict=True)]
        self.optimizer = self.accelerator.prepare(torch.optim.Adam(groups))

    def _learning_weights(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """The model's weights that learn, and the value head's."""
        body = [weight for weight in self.model.pretrained_model.parameters() if weight.requires_grad]
        return body, list(self.model.v_head.parameters())

    @property
    def kl_coef(self) -> float:
        """Weight of the KL penalty in the next step's rewards."""
        return self._kl_controller.value

    def step(
        self, queries: Sequence[Tensor], responses: Sequence[Tensor], scores: Sequence[Tensor | float]
    ) -> dict[str, float]:
        """Update the model once with a batch of responses.

        Args:
            queries: Token ids of each prompt, int64 (Q,), at least one token.
            responses: Token ids of each reply, int64 (R,), at least one token.
            scores: How good each reply is, one number each.

        Returns:
            Statistics, means over minibatches where they belong to one: `policy_loss`, `value_loss` (unweighted),
            `approx_kl` and `policy_kl` (nats a token, to the policy at the step's start), `clip_fraction`,
            `value_clip_fraction`, `entropy`, `grad_norm`; `ref_kl` (nats a response, by the penalty's measure) and
            `kl_coef` as used; `score_mean`, `score_std`, `penalty_mean` (reward units a token), `explained_variance`;
            `ratio_error` (largest |ratio - 1| in the first minibatch), `optimizer_steps`, `skipped` (how many of
            these had no gradient), `epochs`, `stopped_early`, `learn_s`.

        Raises:
            ConfigError: The three are not `batch_size` long, a sequence is empty or holds ids that the model does not
                know, or a score is not one finite number.
            DivergedError: Several steps in a row had losses or gradients that are not finite; the model is as before.
        """
        started = time.perf_counter()
        embeddings: Any = self.model.pretrained_model.get_input_embeddings()
        check_samples(queries, responses, scores, self.config.batch_size, len(embeddings.weight))
        steered = {"_kl_controller": deepcopy, "_guard": deepcopy}
        with lock_of(self.model):
            if not holds_exactly(self.optimizer, chain(*self._learning_weights())):
                logger.warning("the weights that learn are others than before: the optimiser starts anew")
                self._reset_optimizer()
            self.model.zero_grad()
            # Dropout would make the ratio of new to old probability differ from 1 before anything was learnt.
            self.model.eval()
            with undone_on_error(self, steered, weights_of(self.optimizer)):
                batch, stats = self._prepare(queries, responses, torch.tensor([float(score) for score in scores]))
                stats |= self._optimize(batch)
                if self.config.adap_kl_ctrl:
                    self._kl_controller.update(stats["ref_kl"], len(queries) * self.accelerator.num_processes)
        return stats | {"learn_s": time.perf_counter() - started}

    @torch.no_grad()
    def _prepare(
        self, queries: Sequence[Tensor], responses: Sequence[Tensor], scores: Tensor
    ) -> tuple[_Batch, dict[str, float]]:
        """Log-probabilities and values as the step begins, then rewards, advantages and returns."""
        config, device = self.config, self.model.device
        pad_id = getattr(self.tokenizer, "pad_token_id", None) or 0
        ids, attention, mask = (part.to(device) for part in _pack(queries, responses, pad_id))
        logprobs, reference, values = (torch.zeros(mask.shape, device=device) for _ in range(3))
        every = torch.arange(len(ids), device=device)
        for rows in self._chunks(every, ids):
            logprobs[rows], values[rows], _ = _read(self.model, ids[rows], attention[rows], mask[rows])
            with self._without_adapter():
                reference[rows], _, _ = _read(self.ref_model or self.model, ids[rows], attention[rows], mask[rows])
        kl = kl_estimate(logprobs, reference, self._estimator)
        rewards = -self.kl_coef * kl
        penalty_mean = masked_mean(rewards, mask).item()
        rewards[every, attention.sum(1) - 2] += scores.to(device)
        advantages, returns = gae(rewards, values, mask, config.gamma, config.lam)
        if config.whiten_advantages:
            advantages = masked_whiten(advantages, mask)
        return _Batch(ids, attention, mask, logprobs, values, advantages, returns), {
            "ref_kl": mean_over_processes(self.accelerator, kl.sum(1).mean().item()),
            "kl_coef": self.kl_coef,
            "score_mean": scores.mean().item(),
            "score_std": scores.std(correction=0).item(),
            "penalty_mean": penalty_mean,
            "explained_variance": explained_variance(values[mask], returns[mask]),
        }

    def _optimize(self, batch: _Batch) -> dict[str, float]:
        config, device = self.config, batch.ids.device
        steps: list[dict[str, float]] = []
        epochs, stopped = 0, False
        while epochs < config.ppo_epochs and not stopped:
            order = torch.as_tensor(self._rng.permutation(len(batch.ids)), device=device)
            for rows in torch.split(order, config.mini_batch_size):
                steps.append(self._step(rows, batch))
            epochs += 1
            if config.target_kl is not None:
                moved = mean_over_processes(self.accelerator, steps[-1]["policy_kl"])
                stopped = moved > _KL_TOLERANCE * config.target_kl
        return {name: float(np.mean([step[name] for step in steps])) for name in steps[0]} | {
            "ratio_error": steps[0]["ratio_error"],
            "skipped": sum(step["skipped"] for step in steps),
            "optimizer_steps": float(len(steps)),
            "epochs": float(epochs),
            "stopped_early": float(stopped),
        }

    def _step(self, rows: Tensor, batch: _Batch) -> dict[str, float]:
        """One optimiser step on some rows; the chunks' losses add up to the mean over all their response tokens."""
        stats: dict[str, float] = defaultdict(float)
        ratio_error, total = 0.0, batch.mask[rows].sum().item()
        for index in self._chunks(rows, batch.ids):
            chunk = batch.rows(index)
            share = chunk.mask.sum().item() / total
            loss, parts, error = self._loss(chunk)
            self.accelerator.backward(share * loss)
            for name, value in parts.items():
                stats[name] += share * value
            ratio_error = max(ratio_error, error)
        is_finite = self._guard.passes(stats, gradients_of(self.optimizer), self.accelerator)
        skipped = not is_finite or stats["mean_ratio"] > self._ratio_threshold
        del stats["mean_ratio"]
        if skipped:
            why = f"its mean probability ratio exceeds {self._ratio_threshold:g}" if is_finite else "it is not finite"
            logger.warning("a minibatch is skipped: %s", why)
            stats["policy_loss"] = stats["value_loss"] = 0.0
            # As in TRL the optimiser still takes its step: its moments decay, and carry the weights a little on.
            self.optimizer.zero_grad(set_to_none=False)
        average_gradients_(self.accelerator, self.optimizer)
        norm = self.accelerator.clip_grad_norm_(weights_of(self.optimizer), self.config.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {**stats, "grad_norm": float(norm), "ratio_error": ratio_error, "skipped": float(skipped)}

    def _loss(self, batch: _Batch) -> tuple[Tensor, dict[str, float], float]:
        """The loss of some rows, its parts, and the largest |ratio - 1|."""
        config, mask = self.config, batch.mask
        logprobs, values, logits = _read(self.model, batch.ids, batch.attention, mask)
        policy = clipped_surrogate(logprobs, batch.logprobs, batch.advantages, mask, config.cliprange)
        value = clipped_value_loss(values, batch.values, batch.returns, mask, config.cliprange_value)
        with torch.set_grad_enabled(config.entropy_coef != 0):
            entropy = entropy_from_logits(logits).mean()
        loss = policy.loss + config.vf_coef * value.loss - config.entropy_coef * entropy
        moved = (logprobs - batch.logprobs).detach()
        parts = {
            "policy_loss": policy.loss,
            "value_loss": value.loss,
            "entropy": entropy,
            "approx_kl": policy.approx_kl,
            "policy_kl": masked_mean(-moved, mask),
            "clip_fraction": policy.clip_fraction,
            "value_clip_fraction": value.clip_fraction,
            "mean_ratio": policy.mean_ratio,
        }
        return loss, {name: part.item() for name, part in parts.items()}, moved.expm1().abs().max().item()

    def _chunks(self, rows: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        """Parts of `rows` that fit one pass of the model."""
        return torch.split(rows, max(1, self.config.microbatch_nodes // ids.shape[1]))

    def _without_adapter(self) -> AbstractContextManager[None]:
        """The policy as its own reference, while the context lasts; nothing where there is a reference model."""
        if self.ref_model is None and self.model.is_peft_model:
            pretrained: Any = self.model.pretrained_model
            context: AbstractContextManager[None] = pretrained.disable_adapter()
            return context
        return nullcontext()


def _read(
    model: AutoModelForCausalLMWithValueHead, ids: Tensor, attention: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities and values at the mask, 0 elsewhere, float32 (B, T - 1), and the mask's logits (M, V)."""
    logits, _, values = model(input_ids=ids, attention_mask=attention)
    logits = logits[:, :-1][mask]
    chosen = logits.log_softmax(-1).gather(-1, ids[:, 1:][mask][:, None])[:, 0]
    logprobs = torch.zeros(mask.shape, device=logits.device).masked_scatter(mask, chosen)
    return logprobs, values[:, :-1].float().masked_fill(~mask, 0.0), logits
