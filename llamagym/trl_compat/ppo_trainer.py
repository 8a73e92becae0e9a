"""PPO over the tokens of single replies: the step-wise `PPOTrainer` of TRL up to 0.11.4, with the same numbers.

A sample is one query, one response and one score. Every response token is a step of its own: each token is penalized
by the KL to the reference, the last one gets the score, and GAE runs over the tokens. (`ppo.PPO` learns from episodes
of many turns instead.)

Departures from TRL 0.11.4: batches are padded on the right whatever the tokenizer's padding side, so that positions are
right; the gradient is clipped at every minibatch, where TRL clips only its first one; a reference model that is passed
is used even if the policy has an adapter; and statistics have llamagym's names. Score scaling, reward whitening,
response masks and the penalty "full" are left out.

Shapes: B samples, T tokens, M tokens of all responses, V vocabulary.
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
from typing import Any, Literal, NamedTuple, Protocol, get_args, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
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

logger = logging.getLogger(__name__)

KLPenalty = Literal["kl", "abs", "mse"]
_ESTIMATORS: dict[KLPenalty, KLEstimator] = {"kl": "k1", "abs": "abs", "mse": "k2"}
# Epochs end early once the KL of an epoch's last minibatch exceeds the target by this factor.
_KL_TOLERANCE = 1.5


@runtime_checkable
class Shuffler(Protocol):
    """Draws the order of the samples; `numpy.random.Generator` has this interface."""

    def permutation(self, x: int, /) -> np.ndarray:
        """Returns the numbers below `x` in random order."""


class Samples(NamedTuple):
    """A batch of queries and responses, padded on the right, with the targets of the response tokens.

    ids and attention are int64 (B, T). mask is True at t where token t + 1 belongs to the response, bool (B, T - 1).
    The others are float (B, T - 1) and defined at the mask; logprobs and values are those at the start of the step.
    """

    ids: Tensor
    attention: Tensor
    mask: Tensor
    logprobs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor

    def rows(self, index: Tensor) -> Samples:
        """Returns the samples with these indices."""
        return Samples(*(tensor[index] for tensor in self))


class PPOTrainer:
    """Trains a model on queries, its responses and their scores.

    Attributes:
        config: The configuration.
        model: The policy with its value head.
        ref_model: The frozen reference; None if the policy without its adapter is the reference.
        tokenizer: The tokenizer, or None.
        accelerator: Runs backward and gradient clipping.
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
        """Creates the optimizer and the reference.

        For TRL's numbers, also set the options that TRL does not have: `value_learning_rate` equal to `learning_rate`,
        `entropy_coef=0`, and `max_grad_norm=math.inf` where TRL's was None. Any `target_kl` corresponds to TRL's
        `early_stopping=True`.

        Args:
            config: The configuration. A step is one token, and a batch is `batch_size` responses (None: 128, in
                minibatches of 32). `value_learning_rate` and `cliprange_value` are not scaled by the size of returns
                here; None is 3e-3 and 0.2.
            model: The policy; its trainable weights are updated.
            ref_model: The reference. None uses the policy without its adapter or, if it has none, a frozen copy.
            tokenizer: Tokenizer whose padding id fills batches; None uses id 0. Padding never influences a result.
            kl_penalty: Penalty of a token, with d its log-probability under the policy minus that under the reference:
                "kl" is d, "abs" its absolute value, "mse" half its square.
            ratio_threshold: A minibatch whose mean ratio of new to old probability, over all processes, exceeds this
                gives no gradient.
            rng: Draws the order of the samples once per epoch; None uses NumPy's generator seeded with `config.seed`.

        Raises:
            ConfigError: `kl_penalty` is unknown, `config` adds the KL to the loss or uses the LSTD critic, an argument
                has another type, or trainable weights have fewer than 32 bits.
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
                f"kl_placement={config.kl_placement!r}, but PPOTrainer adds the KL to the reward only, as TRL did. Use "
                "kl_placement='reward'."
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
        # Without `target_kl`, since TRL's early stopping undoes no step; only steps to output that is not finite are.
        self._safe_optimizer = SafeOptimizer(
            self._trainable_weights(),
            (config.learning_rate, self._sizes.value_learning_rate),
            self.accelerator,
            config.max_grad_norm,
            clips_jointly=True,
        )
        self._kl_controller = AdaptiveKLController(config.init_kl_coef, config.target, config.horizon)
        self._estimator = _ESTIMATORS[kl_penalty]
        self._ratio_threshold = ratio_threshold
        self._rng: Shuffler = np.random.default_rng(config.seed or 0) if rng is None else rng

    def _trainable_weights(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Returns the trainable weights of the model and those of the value head."""
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
        """Updates the model once with a batch of responses.

        Args:
            queries: Token ids of each prompt, int64 (Q,), at least one token.
            responses: Token ids of each reply, int64 (R,), at least one token.
            scores: Score of each reply, one number each.

        Returns:
            Statistics. Means over minibatches: `policy_loss`, `value_loss` (unweighted), `approx_kl` and `policy_kl`
            (nats per token, to the policy at the start of the step), `clip_fraction`, `value_clip_fraction`,
            `entropy`, `grad_norm`. Of the batch: `ref_kl` (nats per response, by the estimator of the penalty) and
            `kl_coef` as used, `score_mean`, `score_std`, `penalty_mean` (reward units per token),
            `explained_variance`. Of the update: `ratio_error` (largest |ratio - 1| in the first minibatch),
            `optimizer_steps`, `skipped` (number of these steps without gradient), `epochs`, `stopped_early`,
            `learn_s`.

        Raises:
            ConfigError: The number of queries, responses or scores is not `batch_size`, a sequence is empty or
                contains ids that the model does not have, or a score is not one finite number.
            DivergedError: Several steps in a row had losses or gradients that are not finite, or the last step of
                several calls in a row led to output that is not finite. The model is restored.
        """
        started = time.perf_counter()
        embeddings: Any = self.model.pretrained_model.get_input_embeddings()
        check_samples(queries, responses, scores, self._sizes.batch, len(embeddings.weight))
        with lock_of(self.model):
            if not self._safe_optimizer.holds(chain(*self._trainable_weights())):
                logger.warning("the trainable weights were replaced: the optimizer starts again")
                self._safe_optimizer.restart(self._trainable_weights())
            self._safe_optimizer.begin()
            self.model.zero_grad()
            # With dropout the ratio of new to old probability would differ from 1 on the first minibatch.
            self.model.eval()
            controller_undone_on_error = attributes_undone_on_error(self, {"_kl_controller": deepcopy})
            with self._safe_optimizer.undone_on_error(self._safe_optimizer.weights), controller_undone_on_error:
                batch, stats = self._prepare(queries, responses, torch.tensor([float(score) for score in scores]))
                stats |= self._optimize(batch)
                if self.config.adap_kl_ctrl:
                    self._kl_controller.update(stats["ref_kl"], len(queries) * distributed.world_size())
        return stats | {"learn_s": time.perf_counter() - started}

    @torch.no_grad()
    def _prepare(
        self, queries: Sequence[Tensor], responses: Sequence[Tensor], scores: Tensor
    ) -> tuple[Samples, dict[str, float]]:
        """Returns the batch with its targets, and statistics of the batch."""
        config = self.config
        device = self.model.device
        pad_id = getattr(self.tokenizer, "pad_token_id", None) or 0
        ids, attention, mask = _pad(queries, responses, pad_id, device)
        logprobs = torch.zeros(mask.shape, device=device)
        ref_logprobs = torch.zeros_like(logprobs)
        values = torch.zeros_like(logprobs)
        all_rows = torch.arange(len(ids), device=device)
        for rows in self._chunks(all_rows, ids):
            inputs = ids[rows], attention[rows], mask[rows]
            logprobs[rows], values[rows], _ = _forward(self.model, *inputs)
            with self._without_adapter():
                ref_logprobs[rows], _, _ = _forward(self.ref_model or self.model, *inputs)
        kl = kl_estimate(logprobs, ref_logprobs, self._estimator)
        rewards = -self.kl_coef * kl
        penalty_mean = masked_mean(rewards, mask).item()
        # A sample of n tokens has its last response token at position n - 2 of the mask.
        rewards[all_rows, attention.sum(1) - 2] += scores.to(device)
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
        """Trains on the batch for `ppo_epochs` epochs, or fewer if the KL exceeds the target; returns statistics."""
        config = self.config
        steps: list[dict[str, float]] = []
        epochs = 0
        stopped_early = False
        while epochs < config.ppo_epochs and not stopped_early:
            order = torch.as_tensor(self._rng.permutation(len(batch.ids)), device=batch.ids.device)
            for rows in torch.split(order, self._sizes.mini_batch):
                steps.append(self._step(rows, batch))
            epochs += 1
            if config.target_kl is not None:
                policy_kl = distributed.mean(steps[-1]["policy_kl"])
                stopped_early = policy_kl > _KL_TOLERANCE * config.target_kl
        steps_with_gradient = [step for step in steps if not step["skipped"]]
        if steps_with_gradient:
            is_undone = self._safe_optimizer.record_kl(0.0 if self._is_output_finite(batch) else math.inf)
            self._safe_optimizer.end()
            if is_undone:
                logger.warning("after the last step the model's output is not finite: that step is undone")
                self._safe_optimizer.undo()
                steps_with_gradient[-1]["skipped"] = 1.0
        stats = {name: float(np.mean([step[name] for step in steps])) for name in steps[0]}
        return stats | {
            "ratio_error": steps[0]["ratio_error"],
            "skipped": sum(step["skipped"] for step in steps),
            "optimizer_steps": float(len(steps)),
            "epochs": float(epochs),
            "stopped_early": float(stopped_early),
        }

    @torch.no_grad()
    def _is_output_finite(self, batch: Samples) -> bool:
        """Whether the model's output after the last step is finite in all processes, checked on the shortest sample."""
        shortest = batch.rows(batch.attention.sum(1).argmin()[None])
        outputs = _forward(self.model, shortest.ids, shortest.attention, shortest.mask)
        is_finite = all(bool(output.isfinite().all()) for output in outputs)
        return all(distributed.gather_objects(is_finite))

    def _step(self, rows: Tensor, batch: Samples) -> dict[str, float]:
        """Makes one optimizer step on some rows; the losses of chunks add up to the mean over all response tokens."""
        stats: dict[str, float] = defaultdict(float)
        ratio_error = 0.0
        total_tokens = batch.mask[rows].sum().item()
        for chunk_rows in self._chunks(rows, batch.ids):
            chunk = batch.rows(chunk_rows)
            share = chunk.mask.sum().item() / total_tokens
            loss, chunk_stats, chunk_ratio_error = self._loss(chunk)
            self.accelerator.backward(share / distributed.world_size() * loss)
            # Frees the chunk's graph, which would otherwise live until the next chunk has built its own.
            del loss
            for name, value in chunk_stats.items():
                stats[name] += share * value
            ratio_error = max(ratio_error, chunk_ratio_error)
        mean_ratio = stats.pop("mean_ratio")
        # Both conditions are equal on all processes: later collectives depend on `skipped`.
        is_finite = self._safe_optimizer.accepts({**stats, "mean_ratio": mean_ratio})
        skipped = not is_finite or distributed.mean(mean_ratio) > self._ratio_threshold
        if skipped:
            cause = f"its mean probability ratio exceeds {self._ratio_threshold:g}" if is_finite else "it is not finite"
            logger.warning("a minibatch is skipped: %s", cause)
            stats["policy_loss"] = stats["value_loss"] = 0.0
            # As in TRL the optimizer still makes a step: its moments decay, and move the weights a little.
            self._safe_optimizer.adam.zero_grad(set_to_none=False)
        else:
            self._safe_optimizer.keep_weights()
        self._safe_optimizer.sum_gradients_()
        # No learning rates are passed: the user may have attached a scheduler to the parameter groups.
        (norm,) = self._safe_optimizer.step()
        return {**stats, "grad_norm": norm, "ratio_error": ratio_error, "skipped": float(skipped)}

    def _loss(self, batch: Samples) -> tuple[Tensor, dict[str, float], float]:
        """Returns the loss of some rows, its statistics, and the largest |ratio - 1|."""
        config = self.config
        mask = batch.mask
        logprobs, values, logits = _forward(self.model, batch.ids, batch.attention, mask)
        policy = clipped_surrogate(logprobs, batch.logprobs, batch.advantages, mask, config.cliprange)
        value = clipped_value_loss(values, batch.values, batch.returns, mask, self._sizes.cliprange_value)
        with torch.set_grad_enabled(config.entropy_coef != 0):
            entropy = entropy_from_logits(logits).mean()
        loss = policy.loss + config.vf_coef * value.loss - config.entropy_coef * entropy
        log_ratio = (logprobs - batch.logprobs).detach()
        stats = {
            "policy_loss": policy.loss,
            "value_loss": value.loss,
            "entropy": entropy,
            "approx_kl": policy.approx_kl,
            "policy_kl": masked_mean(-log_ratio, mask),
            "clip_fraction": policy.clip_fraction,
            "value_clip_fraction": value.clip_fraction,
            "mean_ratio": policy.mean_ratio,
        }
        ratio_error = log_ratio.expm1().abs().max().item()
        return loss, {name: value.item() for name, value in stats.items()}, ratio_error

    def _chunks(self, rows: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        """Splits `rows` into parts that fit one pass of the model."""
        # The same limit on every device, since a pass keeps the logits of all its tokens.
        max_tokens = self.config.max_tokens_per_pass or PASS_TOKENS
        return torch.split(rows, max(1, max_tokens // ids.shape[1]))

    def _without_adapter(self) -> AbstractContextManager[None]:
        """Context manager that disables the policy's adapter if the policy is its own reference."""
        if self.ref_model is None and self.model.is_peft_model:
            pretrained: Any = self.model.pretrained_model
            context: AbstractContextManager[None] = pretrained.disable_adapter()
            return context
        return nullcontext()


def _pad(
    queries: Sequence[Tensor], responses: Sequence[Tensor], pad_id: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns ids, attention and mask of a batch, as in `Samples`."""
    sequences = [torch.cat(pair) for pair in zip(queries, responses, strict=True)]
    ids = pad_sequence(sequences, batch_first=True, padding_value=pad_id)
    query_lengths = torch.tensor([len(query) for query in queries])[:, None]  # (B, 1)
    lengths = torch.tensor([len(sequence) for sequence in sequences])[:, None]
    positions = torch.arange(ids.shape[1])
    is_token = positions < lengths
    is_response = (positions >= query_lengths) & is_token
    return ids.to(device), is_token.long().to(device), is_response[:, 1:].to(device)


def _forward(
    model: AutoModelForCausalLMWithValueHead, ids: Tensor, attention: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns log-probabilities and values at the mask, 0 elsewhere, float32 (B, T - 1), and its logits (M, V)."""
    logits, _, values = model(input_ids=ids, attention_mask=attention)
    logits = logits[:, :-1][mask]
    response_ids = ids[:, 1:][mask]
    token_logprobs = logits.log_softmax(-1).gather(-1, response_ids[:, None])[:, 0]
    logprobs = torch.zeros(mask.shape, device=logits.device).masked_scatter(mask, token_logprobs)
    return logprobs, values[:, :-1].float().masked_fill(~mask, 0.0), logits
