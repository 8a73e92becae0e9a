"""Supervised fine-tuning on demonstrations, by TRL's `SFTTrainer`: the warm start.

TRL gives loop, optimizer, schedule and clipping; the loss is the policy's own: the negative log-probability of the
demonstrated replies, token by token, as `Policy.evaluate` has it. So what is trained is what acts: the same ids, an
activated LoRA from each reply's opening on, no dropout. And what makes acting fast makes this fast: histories are read
once and shared, the frozen layers run once (a usual step of TRL's reads each sample's whole prompt again).

Nothing but weights is changed: what else TRL and transformers touch is put back (`trl_internals`).
"""

from __future__ import annotations

import logging
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ..errors import ConfigError
from ..models.lora import freeze_and_extend_, is_fresh
from ..models.peft_internals import has_variants
from ..options import Options
from ..policy.policy import Policy
from ..text.episode import Episode, Segment, segments_of
from .safe_optimizer import diverged
from .trl_internals import TRAINER, LossTrainer, nothing_but_weights_changed, trainer_config

logger = logging.getLogger(__name__)

# Conversations that losses are measured on. To measure all, before and after, takes as long as to learn from them once.
_MEASURED = 256


@dataclass(frozen=True)
class WarmStartConfig(Options):
    """How demonstrations are learned.

    Attributes:
        epochs: Passes over the demonstrations.
        learning_rate: Of AdamW, to begin with; it falls linearly to 0.
        batch_size: Replies per optimizer step, on average: conversations stay whole, and a step takes at least one.
        max_grad_norm: Gradient clipping by norm.
        seed: Of the demonstrations' order.
    """

    epochs: int = 4
    learning_rate: float = 1e-3
    batch_size: int = 4
    max_grad_norm: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Check types and ranges."""
        super().__post_init__()
        self._require_at_least(1, "epochs", "batch_size")
        self._require_positive("learning_rate", "max_grad_norm")
        self._require_rate("learning_rate")


def fine_tune(
    policy: Policy, tokenizer: PreTrainedTokenizerBase, episodes: Sequence[Episode], config: WarmStartConfig
) -> dict[str, float]:
    """Raise the likelihood of the episodes' replies, token by token, whatever their rewards.

    A fresh LoRA is first pointed at what differs between the observations; what it has learned is frozen afterwards
    (see `lora`). The value head is left alone: its features are standardised at the first update, once they are the
    trained adapter's.

    Args:
        policy: Whose trainable weights are updated.
        tokenizer: The model's.
        episodes: Demonstrations.
        config: How to learn.

    Returns:
        Of at most 256 conversations, spread evenly over all: `loss_before` and `loss_after` (mean negative
        log-probability of a reply's token under the policy), `entropy_before` and `entropy_after` (in nats, of the
        distributions that these tokens are drawn from), `token_accuracy` (share of these tokens that the policy, after
        its own past, would now sample, in expectation). Of all: `samples` (replies) and `learn_s`.

    Raises:
        ConfigError: Several processes run at once.
        ModelLoadError: The installed TRL's trainer has changed.
        DivergedError: What the model says afterwards is not finite; the caller puts the weights back.
    """
    TRAINER.require()
    started = time.perf_counter()
    segments = segments_of(episodes)
    logger.info("Learning from %d demonstrations, %d times.", len(episodes), config.epochs)
    policy.initialize_from_data(segments, critic=False)
    measured = segments[:: math.ceil(len(segments) / _MEASURED)]
    before = _measure(policy, measured)
    pretrained = policy.model.pretrained_model
    # A variant of LoRA has more than its two matrices, which are what is extended.
    was_fresh = policy.aims_lora and is_fresh(pretrained) and not has_variants(pretrained)
    with policy.trees.kept():
        _train(policy, tokenizer, segments, config)
    after = _measure(policy, measured)
    if not all(map(math.isfinite, after.values())):
        raise diverged(f"After {config.epochs} epochs on demonstrations the loss is {after['loss']}")
    if was_fresh:
        # Neither replies nor their probabilities change by that.
        freeze_and_extend_(pretrained)
    if not (policy.calibration is None or policy.calibration.is_frozen or policy.num_updates):
        # What the model finds likely anyway is what was demonstrated now; without it the agent would act otherwise.
        policy.calibration = None
    # What the rewards start from now.
    policy.reference = None
    return {
        "loss_before": before["loss"],
        "loss_after": after["loss"],
        "entropy_before": before["entropy"],
        "entropy_after": after["entropy"],
        "token_accuracy": after["accuracy"],
        "samples": float(sum(len(segment.turns) for segment in segments)),
        "learn_s": time.perf_counter() - started,
    }


@torch.no_grad()
def _measure(policy: Policy, segments: Sequence[Segment]) -> dict[str, float]:
    """Means over the replies' tokens."""
    sums = dict.fromkeys(("loss", "entropy", "accuracy", "count"), 0.0)
    for chunk in policy.chunks(segments):
        now = policy.evaluate(chunk)
        sums["loss"] -= now.logprobs[now.mask].sum().item()
        sums["entropy"] += now.entropy[now.mask].sum().item()
        sums["accuracy"] += now.logprobs[now.mask].exp().sum().item()
        sums["count"] += now.mask.sum().item()
    return {name: total / sums["count"] for name, total in sums.items()}


def _train(
    policy: Policy, tokenizer: PreTrainedTokenizerBase, segments: Sequence[Segment], config: WarmStartConfig
) -> None:
    def loss(chosen: list[Segment]) -> Tensor:
        """Mean negative log-probability of the replies' tokens."""
        parts = [policy.evaluate(chunk) for chunk in policy.chunks(chosen)]
        return -torch.cat([now.logprobs[now.mask] for now in parts]).mean()

    replies_each = sum(len(segment.turns) for segment in segments) / len(segments)
    model = policy.model.pretrained_model
    with nothing_but_weights_changed(model), tempfile.TemporaryDirectory() as folder:
        options = trainer_config(
            folder,
            num_train_epochs=config.epochs,
            learning_rate=config.learning_rate,
            per_device_train_batch_size=max(1, round(config.batch_size / replies_each)),
            max_grad_norm=config.max_grad_norm,
            seed=config.seed % 2**32,  # transformers seeds NumPy's old generator, which takes no more.
            use_cpu=policy.device.type == "cpu",
        )
        trainer = LossTrainer(model, tokenizer, segments, loss, options)
        if trainer.accelerator.num_processes > 1:
            raise ConfigError(
                f"{trainer.accelerator.num_processes} processes would each learn for themselves. Start warm in one, "
                "save the model, and load it in all."
            )
        trainer.train()
    policy.model.eval()
