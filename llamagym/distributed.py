"""Several processes (ranks) that learn together, through `accelerate` and `torch.distributed`.

Every rank acts in environments of its own. What they have in common, bit for bit: the weights that learn, the finished
episodes, and so all that is decided from these (batches, minibatches, advantages, early stopping). What they divide
among them is computation: each rank reads its share of a minibatch, gradients are added up, and all take the same step.
Models are not wrapped (DDP, FSDP): the engine calls a model's layers one by one, as often as its caches and replies ask
for, which is another number of times on every rank; a wrapper that communicates in each layer would wait for ever.

With one process every function here returns at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate import Accelerator, PartialState
from accelerate.state import is_initialized
from accelerate.utils import InitProcessGroupKwargs, broadcast, gather_object, reduce
from torch import Tensor, distributed

from .errors import ConfigError, RankError

T = TypeVar("T")

# How long the others are waited for, in seconds: the first may evaluate or write meanwhile. A process that ends is
# noticed at once, since its connections close.
_PATIENCE = 600
# Engines of accelerate that divide a model, by the variable that its launcher sets.
_DIVIDED = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism_config",
}


def accelerator(device: torch.device) -> Accelerator:
    """Join the other processes, if there are any; a script that did so before, with another timeout, keeps that.

    Args:
        device: Where this process's model lies.

    Raises:
        ConfigError: The launcher was told to divide the model.
        RankError: The others did not come.
    """
    for variable, engine in _DIVIDED.items():
        if os.environ.get(variable, "").lower() in ("1", "true"):
            raise ConfigError(
                f"accelerate was told to use {engine} ({variable}), which divides each layer's weights over processes "
                "and lets all of them compute a layer at the same time. Here every process reads its own contexts, as "
                "often as its caches and replies ask for, so they would wait for each other for ever. Launch with "
                "scripts/accelerate/ddp.yaml: each process holds the model whole."
            )
    timeout = InitProcessGroupKwargs(timeout=timedelta(seconds=_PATIENCE))
    with _peers_answer():
        # An agent on another device may have joined before; all compute where their own weights lie.
        joined = Accelerator(cpu=device.type == "cpu" and not is_initialized(), kwargs_handlers=[timeout])
    if count() != _expected():
        raise ConfigError(
            f"This is one of {_expected()} processes (WORLD_SIZE), but accelerate has joined {count()} of them: an "
            "Accelerator or PartialState was made before the agent. On a processor make it with cpu=True, or leave it "
            "to the agent."
        )
    return joined


def _expected() -> int:
    """How many processes the launcher started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def count() -> int:
    """How many processes learn together."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def rank() -> int:
    """Which of them this one is; the first, 0, is the one that writes files."""
    return distributed.get_rank() if count() > 1 else 0


def is_main_process() -> bool:
    """Whether this is the process that writes files and prints; True if there is only one."""
    return rank() == 0


def gather_objects(value: T) -> list[T]:
    """The values of all processes, in their order, in each of them. All must call it, equally often."""
    if count() == 1:
        return [value]
    with _peers_answer():
        gathered: list[T] = gather_object([value])
    return gathered


def mean(value: float) -> float:
    """A number's mean over the processes."""
    return sum(gather_objects(float(value))) / count()


@torch.no_grad()
def sum_(tensors: Iterable[Tensor]) -> None:
    """Let tensors hold their sums over the processes, bit for bit the same on all. Shapes must be, too."""
    if count() > 1:
        with _peers_answer():
            _replace(list(tensors), lambda flat: reduce(flat, "sum"))


@torch.no_grad()
def take_first_(tensors: Iterable[Tensor]) -> None:
    """Let tensors hold what they hold in the first process."""
    if count() > 1:
        with _peers_answer():
            _replace(list(tensors), lambda flat: broadcast(flat, 0))


def diverge_(generator: torch.Generator) -> None:
    """Let a generator that is alike in all processes go on with other numbers in each; the first keeps its own."""
    if not is_main_process():
        drawn = int(torch.randint(2**62, (), generator=generator))
        (state,) = np.random.SeedSequence((drawn, rank())).generate_state(1, np.uint64).tolist()
        generator.manual_seed(state >> 1)


@contextmanager
def main_process_first() -> Iterator[None]:
    """While open, the other processes wait until the main process has left the block, such as after a download."""
    if not is_main_process():
        gather_objects(None)
    yield
    if is_main_process():
        gather_objects(None)


def check_alike(weights: Iterable[Tensor]) -> None:
    """Make sure that weights are the same in all processes, by the sums of their bits.

    Raises:
        RankError: They are not.
    """
    if count() == 1:
        return
    sums = gather_objects([int(weight.detach().contiguous().view(torch.int32).sum()) for weight in weights])
    if any(others != sums[0] for others in sums):
        different = [number for number, others in enumerate(sums) if others != sums[0]]
        raise RankError(
            f"The weights of processes {different} are no longer those of process 0, although all took the same steps. "
            "Change weights on all processes alike, and run them on like machines with like software; then resume "
            "from the last checkpoint."
        )


def _replace(tensors: list[Tensor], function: Callable[[Tensor], Any]) -> None:
    """Apply a function to all tensors of a dtype at once, laid end to end."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        alike = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = function(torch.cat([tensor.detach().flatten() for tensor in alike]).to(PartialState().device))
        for tensor, part in zip(alike, flat.split([tensor.numel() for tensor in alike]), strict=True):
            # A copy of the same numbers would count as a change.
            if not tensor.equal(part := part.view(tensor.shape).to(tensor.device)):
                tensor.copy_(part)


@contextmanager
def _peers_answer() -> Iterator[None]:
    """While open, the other processes are waited for; what torch.distributed raises says so."""
    try:
        yield
    except RuntimeError as error:
        if _expected() == 1:
            raise
        raise RankError(
            f"Process {os.environ.get('RANK')} of {_expected()} has lost another one: it has ended, or did not answer "
            f"in time ({_PATIENCE} s unless your script joined them with another timeout). Its own error, if it had "
            "one, stands in its output. Start all again with resume=True; any number of processes can go on from the "
            f"last checkpoint. ({error})"
        ) from error
