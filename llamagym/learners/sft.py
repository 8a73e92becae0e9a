"""Supervised fine-tuning on demonstrations, by TRL's `SFTTrainer`: the warm start.

TRL provides loop, optimizer, schedule and clipping. The loss is the policy's own: the negative log-probability of the
demonstrated replies, token by token, by `Policy.evaluate`. So the policy that is trained is the one that acts: the same
ids, an activated LoRA from each reply's opening on, no dropout. Histories are read once and shared, while a usual step
of TRL reads each sample's whole prompt again.

Only weights are changed; everything else that TRL and transformers modify is restored (`trl_internals`).
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

# Number of conversations for the losses before and after. Measuring all would take as long as an epoch.
MAX_MEASURED = 256


@dataclass(frozen=True)
class WarmStartConfig(Options):
    """Options of supervised fine-tuning.

    Attributes:
        epochs: Passes over the demonstrations.
        learning_rate: Initial learning rate of AdamW; it falls linearly to 0.
        batch_size: Average number of replies per optimizer step: a step takes whole conversations, at least one.
        max_grad_norm: Gradient clipping by norm.
        seed: Seed of the demonstrations' order.
    """

    epochs: int = 4
    learning_rate: float = 1e-3
    batch_size: int = 4
    max_grad_norm: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Checks types and ranges."""
        super().__post_init__()
        self._require_at_least(1, "epochs", "batch_size")
        self._require_positive("learning_rate", "max_grad_norm")
        self._require_rate("learning_rate")


def fine_tune(
    policy: Policy, tokenizer: PreTrainedTokenizerBase, episodes: Sequence[Episode], config: WarmStartConfig
) -> dict[str, float]:
    """Raises the likelihood of the episodes' replies, token by token, regardless of rewards.

    A fresh LoRA is first initialized to what differs between the observations; what it has learned is frozen afterwards
    (see `lora`). The value head stays as it is: its features are standardized at the first update, when they are those
    of the trained adapter.

    Args:
        policy: The policy whose trainable weights are updated.
        tokenizer: The model's tokenizer.
        episodes: Demonstrations.
        config: The options.

    Returns:
        Over at most 256 conversations, evenly spaced: `loss_before` and `loss_after` (mean negative log-probability of
        a reply's token), `entropy_before` and `entropy_after` (of the tokens' distributions, in nats) and
        `token_accuracy` (mean probability of a reply's token afterwards). Over all: `samples` (replies) and `learn_s`.

    Raises:
        ConfigError: Several processes run at once.
        ModelLoadError: The trainer of the installed TRL has changed.
        DivergedError: The model's output is not finite afterwards; the caller restores the weights.
    """
    TRAINER.require()
    started = time.perf_counter()
    segments = segments_of(episodes)
    logger.info("Learning from %d demonstrations, %d times.", len(episodes), config.epochs)
    policy.initialize_from_data(segments, critic=False)
    measured = segments[:: math.ceil(len(segments) / MAX_MEASURED)]
    before = measure(policy, measured)
    pretrained = policy.model.pretrained_model
    # Only plain LoRA is extended: a variant has more than two matrices.
    was_fresh = policy.aims_lora and is_fresh(pretrained) and not has_variants(pretrained)
    with policy.trees.cached():
        _train(policy, tokenizer, segments, config)
    after = measure(policy, measured)
    if not all(map(math.isfinite, after.values())):
        raise diverged(f"After {config.epochs} epochs on demonstrations the loss is {after['loss']}")
    if was_fresh:
        # This changes neither replies nor their probabilities.
        freeze_and_extend_(pretrained)
    if policy.calibration is not None and not policy.calibration.is_frozen and not policy.num_updates:
        # The demonstrated preferences must count; calibration would subtract them.
        policy.calibration = None
    # Learning from rewards starts from the fine-tuned policy.
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
def measure(policy: Policy, segments: Sequence[Segment]) -> dict[str, float]:
    """Mean loss, entropy and accuracy over the replies' tokens."""
    sums = dict.fromkeys(("loss", "entropy", "accuracy", "count"), 0.0)
    for chunk in policy.chunks(segments):
        current = policy.evaluate(chunk)
        logprobs = current.logprobs[current.mask]
        sums["loss"] -= logprobs.sum().item()
        sums["entropy"] += current.entropy[current.mask].sum().item()
        sums["accuracy"] += logprobs.exp().sum().item()
        sums["count"] += current.mask.sum().item()
    return {name: total / sums["count"] for name, total in sums.items()}


def _train(
    policy: Policy, tokenizer: PreTrainedTokenizerBase, segments: Sequence[Segment], config: WarmStartConfig
) -> None:
    """Runs TRL's trainer with the policy's loss."""

    def loss(batch: list[Segment]) -> Tensor:
        """Mean negative log-probability of the replies' tokens."""
        evaluations = [policy.evaluate(chunk) for chunk in policy.chunks(batch)]
        return -torch.cat([evaluation.logprobs[evaluation.mask] for evaluation in evaluations]).mean()

    replies_per_conversation = sum(len(segment.turns) for segment in segments) / len(segments)
    model = policy.model.pretrained_model
    with nothing_but_weights_changed(model), tempfile.TemporaryDirectory() as folder:
        options = trainer_config(
            folder,
            num_train_epochs=config.epochs,
            learning_rate=config.learning_rate,
            per_device_train_batch_size=max(1, round(config.batch_size / replies_per_conversation)),
            max_grad_norm=config.max_grad_norm,
            # NumPy's legacy generator, which transformers seeds, takes 32 bits.
            seed=config.seed % 2**32,
            use_cpu=policy.device.type == "cpu",
        )
        trainer = LossTrainer(model, tokenizer, segments, loss, options)
        if trainer.accelerator.num_processes > 1:
            raise ConfigError(
                f"A warm start takes one process, got {trainer.accelerator.num_processes}. Save its model and load it "
                "in all of them."
            )
        trainer.train()
    policy.model.eval()
