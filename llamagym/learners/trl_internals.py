"""What this library needs of TRL, and of the trainer that it extends, beyond their documented interface.

`tests/test_internals.py` checks each of these against the installed version, and what happens without it.
"""

from __future__ import annotations

import inspect
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PrinterCallback
from trl import SFTConfig, SFTTrainer  # type: ignore[attr-defined]

from ..models.private_apis import PrivateApi


class _Config(SFTConfig):
    """Leaves a model where it lies; the trainer's own choice is the first device that it knows."""

    @property
    def place_model_on_device(self) -> bool:
        return False


def trainer_config(folder: str, **options: Any) -> SFTConfig:
    """Options of a trainer that computes in the weights' own dtype, logs and saves nothing, and takes rows as they are.

    One device computes, wherever there are several: the trainer would take a batch for each.

    Args:
        folder: Where TRL may write; nothing is kept there.
        options: Further ones of TRL's.
    """
    with warnings.catch_warnings():
        # transformers has renamed gradient_checkpointing; TRL, and earlier versions, know only the old name.
        warnings.simplefilter("ignore", FutureWarning)
        config = _Config(
            output_dir=folder,
            dataloader_pin_memory=False,
            remove_unused_columns=False,
            dataset_kwargs={"skip_prepare_dataset": True},
            bf16=False,
            gradient_checkpointing=False,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **options,
        )
    config._n_gpu = min(config.n_gpu, 1)
    return config


class LossTrainer(SFTTrainer):
    """TRL's loop, optimizer, schedule and clipping, with a loss that is computed elsewhere."""

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        tokenizer: PreTrainedTokenizerBase,
        rows: Sequence[Any],
        loss: Callable[[list[Any]], Tensor],
        args: SFTConfig,
    ) -> None:
        """Train `model` on rows of any kind; `loss` is given those of one step."""
        self._loss = loss
        dtypes = [(weight, weight.dtype) for weight in model.parameters()]
        super().__init__(
            model,
            args,
            # A dataset holds plain data only: rows are drawn, and looked up here.
            data_collator=lambda drawn: {"rows": [rows[row["index"]] for row in drawn]},
            train_dataset=Dataset.from_dict({"index": list(range(len(rows)))}),
            processing_class=tokenizer,
        )
        # TRL casts adapters of quantized models.
        for weight, dtype in dtypes:
            weight.data = weight.data.to(dtype)
        self.remove_callback(PrinterCallback)
        self.accelerator.device_placement = False

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        """The loss of a step's rows; the trainer has just switched dropout on."""
        model.eval()
        # The trainer adds losses up where it would have put the model.
        return self._loss(inputs["rows"]).to(self.args.device)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Not counted: there is no rectangle of ids to count them by."""
        return 0


def _trainer_is_as_expected() -> bool:
    # To build a configuration would reset the process's Accelerator, which the learner uses.
    count: Any = SFTConfig.n_gpu
    reads_count = "_n_gpu" in count.fget.__code__.co_names
    has_hooks = callable(SFTTrainer.floating_point_ops) and SFTConfig.place_model_on_device is not None
    taken = inspect.signature(SFTTrainer.compute_loss).parameters
    return reads_count and has_hooks and [*taken][:3] == ["self", "model", "inputs"]


TRAINER = PrivateApi(
    "trl",
    "SFTTrainer.compute_loss, floating_point_ops, SFTConfig._n_gpu, place_model_on_device",
    "Demonstrations cannot be learned from: install a version of TRL that this version of llamagym was tested with "
    "(see requirements/base.txt).",
    _trainer_is_as_expected,
)


@contextmanager
def nothing_but_weights_changed(model: Any) -> Iterator[None]:
    """Put back what training changes besides weights: attributes of the model, and the global random generators.

    TRL and transformers patch `forward`, set token ids and `use_cache` in configurations, tag the model and seed every
    generator.
    """
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
