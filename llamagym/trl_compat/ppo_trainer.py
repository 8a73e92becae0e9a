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
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from itertools import chain
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from .. import distributed
from ..errors import ConfigError, did_you_mean
from ..learners.checks import check_precision, check_samples, check_trainable, check_trainer
from ..learners.losses import (
    KLEstimator,
    clipped_surrogate,
    clipped_value_loss,
    explained_variance,
    gae,
    kl_estimate,
    masked_mean,
    masked_whiten,
)
from ..learners.ppo import PPOConfig, Sizes
from ..learners.safe_optimizer import SafeOptimizer
from ..learners.schedules import AdaptiveKLController
from ..learners.state import attributes_undone_on_error
from ..models.hardware import PASS_TOKENS
from ..models.lock import lock_of
from ..models.lora import mask_frozen_gradients_
from ..models.value_head import AutoModelForCausalLMWithValueHead
from ..options import check_arguments, explains_wrong_calls
from ..policy.choices import entropy_from_logits
from .samples import Samples, pack, read

logger = logging.getLogger(__name__)

KLPenalty = Literal["kl", "abs", "mse"]
_ESTIMATORS: dict[KLPenalty, KLEstimator] = {"kl": "k1", "abs": "abs", "mse": "k2"}
# The loop over epochs ends once the KL of an epoch's last minibatch exceeds the target by this factor.
_KL_TOLERANCE = 1.5


@runtime_checkable
class Shuffler(Protocol):
    """What draws the order of the samples; a `numpy.random.Generator` is one."""

    def permutation(self, x: int, /) -> np.ndarray:
        """The numbers below `x` in a random order."""


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

    @explains_wrong_calls(positional=5)
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
        """Prepare optimizer and reference.

        For TRL's numbers also set what TRL has no separate option for: `value_learning_rate` equal to
        `learning_rate`, `entropy_coef=0`, and `max_grad_norm=math.inf` where TRL's was None. `target_kl` other
        than None is TRL's `early_stopping=True`.

        Args:
            config: How to learn; a step is one token, a batch is `batch_size` responses (None: 128, in minibatches of
                32). Nor is the critic's rate measured in the size of returns here: None is 3e-3, of its range 0.2.
            model: Whose trainable weights are updated.
            ref_model: The reference. None takes the policy without its adapter or, where it has none, a frozen copy.
            tokenizer: Whose padding id fills batches; without one it is 0. Padding never influences a result.
            kl_penalty: What a token pays, d being its log-probability under the policy less that under the
                reference: "kl" d, "abs" its absolute value, "mse" half its square.
            ratio_threshold: A minibatch whose mean ratio of new to old probability exceeds this gives no gradient.
            rng: Draws the order of the samples, once an epoch; None is numpy's generator seeded with `config.seed`.

        Raises:
            ConfigError: `kl_penalty` is unknown, `config` puts the KL into the loss or solves for the critic, an
                argument is of another type, or weights that learn have fewer than 32 bits.
        """
        arguments = dict(locals())
        check_trainer(config, PPOConfig, model, ref_model)
        check_arguments(PPOTrainer.__init__, arguments)
        if ratio_threshold <= 0:
            raise ConfigError(f"ratio_threshold={ratio_threshold} is not positive.")
        check_trainable(model)
        if kl_penalty not in _ESTIMATORS:
            raise ConfigError(f"kl_penalty={kl_penalty!r}. {did_you_mean(str(kl_penalty), get_args(KLPenalty))}")
        if config.kl_placement != "reward":
            raise ConfigError(
                f"kl_placement={config.kl_placement!r}, but PPOTrainer knows the KL as a part of the reward only, as "
                "TRL did. Use kl_placement='reward'."
            )
        if config.critic == "lstd":
            raise ConfigError(
                "critic='lstd', but PPOTrainer's value head learns by gradient steps, as TRL's did. Leave critic out."
            )
        self.config = config
        self._sizes = Sizes.of(config)
        self.model = model
        self.tokenizer = tokenizer
        if ref_model is None and not model.is_peft_model:
            ref_model = deepcopy(model).requires_grad_(False)
        self.ref_model = None if ref_model is None else ref_model.eval()
        self.accelerator = distributed.accelerator(model.device)
        # TRL's early stopping undoes nothing; only what is not finite is undone.
        self._safe_optimizer = SafeOptimizer(
            self._learning_weights(),
            (config.learning_rate, self._sizes.value_learning_rate),
            self.accelerator,
            config.max_grad_norm,
            clips_jointly=True,
        )
        self._kl_controller = AdaptiveKLController(config.init_kl_coef, config.target, config.horizon)
        self._estimator = _ESTIMATORS[kl_penalty]
        self._ratio_threshold = ratio_threshold
        self._rng: Shuffler = np.random.default_rng(config.seed) if rng is None else rng

    def _learning_weights(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """The model's weights that learn, and the value head's."""
        mask_frozen_gradients_(self.model.pretrained_model)
        body = [weight for weight in self.model.pretrained_model.parameters() if weight.requires_grad]
        head = list(self.model.v_head.parameters())
        check_precision(body + head)
        return body, head

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Adam, with one parameter group for the model and one for the value head."""
        adam: torch.optim.Optimizer = self._safe_optimizer.adam
        return adam

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
            DivergedError: Several steps in a row had losses or gradients that are not finite, or the last step of
                several calls in a row left the model's output so; the model is as before.
        """
        started = time.perf_counter()
        embeddings: Any = self.model.pretrained_model.get_input_embeddings()
        check_samples(queries, responses, scores, self._sizes.batch, len(embeddings.weight))
        with lock_of(self.model):
            if not self._safe_optimizer.holds(chain(*self._learning_weights())):
                logger.warning("the trainable weights were replaced: the optimizer starts again")
                self._safe_optimizer.restart(self._learning_weights())
            self._safe_optimizer.begin()
            self.model.zero_grad()
            # Dropout would make the ratio of new to old probability differ from 1 before anything was learned.
            self.model.eval()
            controller = attributes_undone_on_error(self, {"_kl_controller": deepcopy})
            with self._safe_optimizer.undone_on_error(self._safe_optimizer.weights), controller:
                batch, stats = self._prepare(queries, responses, torch.tensor([float(score) for score in scores]))
                stats |= self._optimize(batch)
                if self.config.adap_kl_ctrl:
                    self._kl_controller.update(stats["ref_kl"], len(queries) * distributed.count())
        return stats | {"learn_s": time.perf_counter() - started}

    @torch.no_grad()
    def _prepare(
        self, queries: Sequence[Tensor], responses: Sequence[Tensor], scores: Tensor
    ) -> tuple[Samples, dict[str, float]]:
        """Log-probabilities and values as the step begins, then rewards, advantages and returns."""
        config, device = self.config, self.model.device
        pad_id = getattr(self.tokenizer, "pad_token_id", None) or 0
        ids, attention, mask = (part.to(device) for part in pack(queries, responses, pad_id))
        logprobs, reference, values = (torch.zeros(mask.shape, device=device) for _ in range(3))
        every = torch.arange(len(ids), device=device)
        for rows in self._chunks(every, ids):
            logprobs[rows], values[rows], _ = read(self.model, ids[rows], attention[rows], mask[rows])
            with self._without_adapter():
                reference[rows], _, _ = read(self.ref_model or self.model, ids[rows], attention[rows], mask[rows])
        kl = kl_estimate(logprobs, reference, self._estimator)
        rewards = -self.kl_coef * kl
        penalty_mean = masked_mean(rewards, mask).item()
        rewards[every, attention.sum(1) - 2] += scores.to(device)
        advantages, returns = gae(rewards, values, mask, config.gamma, config.lam)
        if config.whiten_advantages:
            advantages = masked_whiten(advantages, mask)
        return Samples(ids, attention, mask, logprobs, values, advantages, returns), {
            "ref_kl": distributed.mean(kl.sum(1).mean().item()),
            "kl_coef": self.kl_coef,
            "score_mean": scores.mean().item(),
            "score_std": scores.std(correction=0).item(),
            "penalty_mean": penalty_mean,
            "explained_variance": explained_variance(values[mask], returns[mask]),
        }

    def _optimize(self, batch: Samples) -> dict[str, float]:
        config, device = self.config, batch.ids.device
        steps: list[dict[str, float]] = []
        epochs, stopped = 0, False
        while epochs < config.ppo_epochs and not stopped:
            order = torch.as_tensor(self._rng.permutation(len(batch.ids)), device=device)
            for rows in torch.split(order, self._sizes.mini_batch):
                steps.append(self._step(rows, batch))
            epochs += 1
            if config.target_kl is not None:
                moved = distributed.mean(steps[-1]["policy_kl"])
                stopped = moved > _KL_TOLERANCE * config.target_kl
        if made := [step for step in steps if not step["skipped"]]:
            is_undone = self._safe_optimizer.record_kl(0.0 if self._is_output_finite(batch) else math.inf)
            self._safe_optimizer.end()
            if is_undone:
                logger.warning("after the last step the model's output is not finite: that step is undone")
                self._safe_optimizer.undo()
                made[-1]["skipped"] = 1.0
        return {name: float(np.mean([step[name] for step in steps])) for name in steps[0]} | {
            "ratio_error": steps[0]["ratio_error"],
            "skipped": sum(step["skipped"] for step in steps),
            "optimizer_steps": float(len(steps)),
            "epochs": float(epochs),
            "stopped_early": float(stopped),
        }

    @torch.no_grad()
    def _is_output_finite(self, batch: Samples) -> bool:
        """Whether the model's output for the shortest sample is finite; no later minibatch shows it."""
        shortest = batch.rows(batch.attention.sum(1).argmin()[None])
        output = read(self.model, shortest.ids, shortest.attention, shortest.mask)
        return all(distributed.gather_objects(all(bool(part.isfinite().all()) for part in output)))

    def _step(self, rows: Tensor, batch: Samples) -> dict[str, float]:
        """One optimizer step on some rows; the chunks' losses add up to the mean over all their response tokens."""
        stats: dict[str, float] = defaultdict(float)
        ratio_error, total = 0.0, batch.mask[rows].sum().item()
        for index in self._chunks(rows, batch.ids):
            chunk = batch.rows(index)
            share = chunk.mask.sum().item() / total
            loss, parts, error = self._loss(chunk)
            self.accelerator.backward(share / distributed.count() * loss)
            for name, value in parts.items():
                stats[name] += share * value
            ratio_error = max(ratio_error, error)
        is_finite = self._safe_optimizer.accepts(stats)
        skipped = not is_finite or stats["mean_ratio"] > self._ratio_threshold
        del stats["mean_ratio"]
        if skipped:
            why = f"its mean probability ratio exceeds {self._ratio_threshold:g}" if is_finite else "it is not finite"
            logger.warning("a minibatch is skipped: %s", why)
            stats["policy_loss"] = stats["value_loss"] = 0.0
            # As in TRL the optimizer still takes its step: its moments decay, and carry the weights a little on.
            self._safe_optimizer.adam.zero_grad(set_to_none=False)
        else:
            self._safe_optimizer.keep_weights()
        self._safe_optimizer.sum_gradients_()
        # Learning rates are those of the groups, which a scheduler may change.
        (norm,) = self._safe_optimizer.step()
        return {**stats, "grad_norm": norm, "ratio_error": ratio_error, "skipped": float(skipped)}

    def _loss(self, batch: Samples) -> tuple[Tensor, dict[str, float], float]:
        """The loss of some rows, its parts, and the largest |ratio - 1|."""
        config, mask = self.config, batch.mask
        logprobs, values, logits = read(self.model, batch.ids, batch.attention, mask)
        policy = clipped_surrogate(logprobs, batch.logprobs, batch.advantages, mask, config.cliprange)
        value = clipped_value_loss(values, batch.values, batch.returns, mask, self._sizes.cliprange_value)
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
        # Logits of all tokens are held, so no more on an accelerator.
        most = self.config.max_tokens_per_pass or PASS_TOKENS
        return torch.split(rows, max(1, most // ids.shape[1]))

    def _without_adapter(self) -> AbstractContextManager[None]:
        """The policy as its own reference, while the context lasts; nothing where there is a reference model."""
        if self.ref_model is None and self.model.is_peft_model:
            pretrained: Any = self.model.pretrained_model
            context: AbstractContextManager[None] = pretrained.disable_adapter()
            return context
        return nullcontext()
