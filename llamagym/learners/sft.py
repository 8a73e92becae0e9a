"""Supervised fine-tuning on demonstrations, by TRL's `SFTTrainer`: the warm start.

TRL gives loop, optimiser, schedule and clipping; the loss is the policy's own: the negative log-probability of the
demonstrated replies, token by token, as `Policy.evaluate` has it. So what is trained is what acts: the same ids, an
activated LoRA from each reply's opening on, no dropout. And what makes acting fast makes this fast: histories are read
once and shared, the frozen layers run once (a usual step of TRL's reads each sample's whole prompt again).

Nothing else is changed. TRL and transformers patch `forward`, set token ids and `use_cache` in configurations, tag the
model, cast adapters of quantised models and seed every generator; all of it is put back.
"""

from __future__ import annotations

import logging
import math
import random
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PrinterCallback
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from ..conversation.episode import Episode, Segment
from ..errors import ConfigError
from ..models.lora import is_fresh, set_aside_
from ..options import Options
from ..policy.policy import Policy
from .guard import diverged

logger = logging.getLogger(__name__)

# Tokens in one forward pass.
_NODES = 1024


@dataclass(frozen=True)
class WarmStartConfig(Options):
    """How demonstrations are learnt.

    Attributes:
        epochs: Passes over the demonstrations.
        learning_rate: Of AdamW, to begin with; it falls linearly to 0.
        batch_size: Conversations per optimiser step (turns, where the agent's context is a turn).
        max_grad_norm: Gradient clipping by norm.
        seed: Of the demonstrations' order.
    """

    epochs: int = 4
    learning_rate: float = 1e-3
    batch_size: int = 32
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

    A fresh LoRA is first pointed at what differs between the observations; what it has learnt is set aside afterwards
    (see `adapter`). The value head is left alone: its features are standardised at the first update, once they are the
    trained adapter's.

    Args:
        policy: Whose trainable weights are updated.
        tokenizer: The model's.
        episodes: Demonstrations.
        config: How to learn.

    Returns:
        `loss_before` and `loss_after` (mean negative log-probability of a reply's token under the policy),
        `entropy_before` and `entropy_after` (in nats, of the distributions that these tokens are drawn from),
        `token_accuracy` (share of these tokens that the policy, after its own past, would now sample, in
        expectation), `samples` (replies) and `learn_s`.

    Raises:
        ConfigError: Several processes run at once.
        DivergedError: What the model says afterwards is not finite; the caller puts the weights back.
    """
    started = time.perf_counter()
    segments = [segment for episode in episodes for segment in episode.segments()]
    logger.info("Learning from %d demonstrations, %d times.", len(episodes), config.epochs)
    policy.fit_inputs(segments, critic=False)
    before = _measure(policy, segments)
    was_fresh = policy.aims_lora and is_fresh(policy.model.pretrained_model)
    _train(policy, tokenizer, segments, config)
    after = _measure(policy, segments)
    if not all(map(math.isfinite, after.values())):
        raise diverged(f"After {config.epochs} epochs on demonstrations the loss is {after['loss']}")
    if was_fresh:
        # Neither replies nor their probabilities change by that.
        set_aside_(policy.model.pretrained_model)
    policy.num_updates += 1
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
    for chunk in policy.chunks(segments, _NODES):
        now = policy.evaluate(chunk)
        sums["loss"] -= now.logprobs[now.mask].sum().item()
        sums["entropy"] += now.entropy[now.mask].sum().item()
        sums["accuracy"] += now.logprobs[now.mask].exp().sum().item()
        sums["count"] += now.mask.sum().item()
    return {name: total / sums["count"] for name, total in sums.items()}


def _train(
    policy: Policy, tokenizer: PreTrainedTokenizerBase, segments: Sequence[Segment], config: WarmStartConfig
) -> None:
    with _otherwise_untouched(policy.model.pretrained_model), tempfile.TemporaryDirectory() as folder:
        dtypes = [(weight, weight.dtype) for weight in policy.model.parameters()]
        trainer = _Trainer(policy, tokenizer, segments, _trainer_config(folder, policy.device, config))
        if trainer.accelerator.num_processes > 1:
            raise ConfigError(
                f"{trainer.accelerator.num_processes} processes would each learn for themselves. Start warm in one, "
                "save the model, and load it in all."
            )
        for weight, dtype in dtypes:
            weight.data = weight.data.to(dtype)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    policy.model.eval()


def _trainer_config(folder: str, device: torch.device, config: WarmStartConfig) -> SFTConfig:
    with warnings.catch_warnings():
        # transformers has renamed gradient_checkpointing; TRL, and earlier versions, know only the old name.
        warnings.simplefilter("ignore", FutureWarning)
        return SFTConfig(
            output_dir=folder,
            num_train_epochs=config.epochs,
            learning_rate=config.learning_rate,
            per_device_train_batch_size=config.batch_size,
            max_grad_norm=config.max_grad_norm,
            seed=config.seed % 2**32,  # transformers seeds NumPy's old generator, which takes no more.
            use_cpu=device.type == "cpu",
            dataloader_pin_memory=False,
            remove_unused_columns=False,
            dataset_kwargs={"skip_prepare_dataset": True},
            # As in acting: the weights' own dtype, nothing computed twice.
            bf16=False,
            gradient_checkpointing=False,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )


class _Trainer(SFTTrainer):
    """TRL's trainer on recorded segments, with the policy's loss."""

    def __init__(
        self, policy: Policy, tokenizer: PreTrainedTokenizerBase, segments: Sequence[Segment], args: SFTConfig
    ) -> None:
        self._policy = policy
        super().__init__(
            policy.model.pretrained_model,
            args,
            # A dataset holds plain data only: rows are drawn, and looked up here.
            data_collator=lambda rows: {"segments": [segments[row["index"]] for row in rows]},
            train_dataset=Dataset.from_dict({"index": list(range(len(segments)))}),
            processing_class=tokenizer,
        )

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        """Mean negative log-probability of the replies' tokens; the trainer has just switched dropout on."""
        model.eval()
        parts = [self._policy.evaluate(chunk) for chunk in self._policy.chunks(inputs["segments"], _NODES)]
        return -torch.cat([now.logprobs[now.mask] for now in parts]).mean()

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Not counted: there is no rectangle of ids to count them by."""
        return 0


@contextmanager
def _otherwise_untouched(model: Any) -> Iterator[None]:
    """Put back what training changes besides weights: attributes of the model, and the global random generators."""
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    changed = (model, base, base.config, base.config.get_text_config(), base.generation_config)
    attributes = [(thing, dict(vars(thing))) for thing in changed]
    random_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(random_state)
        np.random.set_state(numpy_state)
        for thing, before in attributes:
            vars(thing).clear()
            vars(thing).update(before)
