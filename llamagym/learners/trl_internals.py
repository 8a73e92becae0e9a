"""Undocumented parts of TRL and of transformers' trainer that supervised fine-tuning uses.

`tests/models/test_internals.py` checks each of them against the installed version, and the error if it is missing.
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
    """Leaves the model on its device; the trainer would move it to the first one."""

    @property
    def place_model_on_device(self) -> bool:
        return False


def trainer_config(folder: str, **options: Any) -> SFTConfig:
    """Options of a trainer that computes in the weights' own dtype, logs and saves nothing, and keeps rows as they are.

    It uses one device; with several the trainer would take a batch for each.

    Args:
        folder: Temporary folder that TRL may write to.
        options: Further options of `SFTConfig`.
    """
    with warnings.catch_warnings():
        # transformers has renamed gradient_checkpointing; TRL and earlier versions have only the old name.
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
    """TRL's loop, optimizer, schedule and clipping, with a loss function of the caller."""

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        tokenizer: PreTrainedTokenizerBase,
        rows: Sequence[Any],
        loss: Callable[[list[Any]], Tensor],
        args: SFTConfig,
    ) -> None:
        """Creates the trainer.

        Args:
            model: The model to train.
            tokenizer: Its tokenizer.
            rows: Training rows of any type.
            loss: Computes the loss of the rows of one step.
            args: Options from `trainer_config`.
        """
        self._loss = loss
        dtypes = [(weight, weight.dtype) for weight in model.parameters()]
        super().__init__(
            model,
            args,
            # A dataset holds plain data only, so it holds indices of rows.
            data_collator=lambda items: {"rows": [rows[item["index"]] for item in items]},
            train_dataset=Dataset.from_dict({"index": list(range(len(rows)))}),
            processing_class=tokenizer,
        )
        # TRL casts adapters of quantized models.
        for weight, dtype in dtypes:
            weight.data = weight.data.to(dtype)
        self.remove_callback(PrinterCallback)
        self.accelerator.device_placement = False

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        """Computes the loss of a step's rows. The trainer has just switched dropout on."""
        model.eval()
        # The trainer sums losses on the device that it would have moved the model to.
        return self._loss(inputs["rows"]).to(self.args.device)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Returns 0: there is no rectangle of ids to count operations by."""
        return 0


def _trainer_is_as_expected() -> bool:
    # Creating a configuration would reset the process's Accelerator, which the learner uses.
    n_gpu: Any = SFTConfig.n_gpu
    reads_n_gpu = "_n_gpu" in n_gpu.fget.__code__.co_names
    has_hooks = callable(SFTTrainer.floating_point_ops) and SFTConfig.place_model_on_device is not None
    parameters = list(inspect.signature(SFTTrainer.compute_loss).parameters)
    return reads_n_gpu and has_hooks and parameters[:3] == ["self", "model", "inputs"]


TRAINER = PrivateApi(
    "trl",
    "SFTTrainer.compute_loss, floating_point_ops, SFTConfig._n_gpu, place_model_on_device",
    "Demonstrations cannot be learned from: install a version of TRL that this version of llamagym was tested with "
    "(see requirements/base.txt).",
    _trainer_is_as_expected,
)


@contextmanager
def nothing_but_weights_changed(model: Any) -> Iterator[None]:
    """While open, training changes weights only; attributes of the model and global random generators are restored.

    TRL and transformers patch `forward`, set token ids and `use_cache` in configurations, tag the model and seed every
    generator.
    """
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    owners = (model, base, base.config, base.config.get_text_config(), base.generation_config)
    attributes = [(owner, dict(vars(owner))) for owner in owners]
    random_state = random.getstate()
    numpy_state = np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(random_state)
        np.random.set_state(numpy_state)
        for owner, before in attributes:
            vars(owner).clear()
            vars(owner).update(before)
