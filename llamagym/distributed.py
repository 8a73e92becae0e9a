"""Data-parallel training with several processes (ranks), through `accelerate` and `torch.distributed`.

Every rank acts in its own environments. Trainable weights and finished episodes are equal on all ranks, bit for bit,
and so are all decisions based on them (batches, minibatches, advantages, early stopping). Only the computation is
divided: each rank processes its share of a minibatch, gradients are summed, and all ranks make the same step.

Models are not wrapped in DDP or FSDP. The engine calls a model's layers one by one, and the number of calls depends on
each rank's caches and replies, so a wrapper that communicates in each layer would deadlock.

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

# Long enough for the main process to evaluate or to write files. A process that ends is noticed at once, since its
# connections close.
_TIMEOUT_S = 600
# Engines of accelerate that shard a model, by the environment variable that its launcher sets.
_SHARDING_ENGINES = {
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism_config",
}


def accelerator(device: torch.device) -> Accelerator:
    """Joins the other processes, if there are any, and returns the Accelerator.

    A script that joined them before with another timeout keeps its timeout.

    Args:
        device: Device of this process's model.

    Raises:
        ConfigError: The launcher was configured to shard the model, or a script joined only a part of the processes.
        RankError: The other processes did not join in time.
    """
    for variable, engine in _SHARDING_ENGINES.items():
        if os.environ.get(variable, "").lower() in ("1", "true"):
            raise ConfigError(
                f"accelerate is configured to use {engine} ({variable}), which shards each layer's weights over "
                "processes, so that all of them must compute a layer at the same time. Here every process runs its own "
                "contexts, as often as its caches and replies require, so they would deadlock. Launch with "
                "scripts/accelerate/ddp.yaml, with which each process holds the whole model."
            )
    timeout = InitProcessGroupKwargs(timeout=timedelta(seconds=_TIMEOUT_S))
    with _rank_error_on_failure():
        # An agent on another device may have joined before; each agent computes on its own weights' device.
        joined = Accelerator(cpu=device.type == "cpu" and not is_initialized(), kwargs_handlers=[timeout])
    if world_size() != _launched_processes():
        raise ConfigError(
            f"This is one of {_launched_processes()} processes (WORLD_SIZE), but accelerate has joined {world_size()} "
            "of them: an Accelerator or PartialState was created before the agent. On a CPU create it with cpu=True, "
            "or leave it to the agent."
        )
    return joined


def _launched_processes() -> int:
    """Returns the number of processes that the launcher started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def world_size() -> int:
    """Returns the number of processes that learn together."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def rank() -> int:
    """Returns the rank of this process; rank 0 writes files."""
    return distributed.get_rank() if world_size() > 1 else 0


def is_main_process() -> bool:
    """Whether this is the process that writes files and prints; True if there is only one."""
    return rank() == 0


def gather_objects(value: T) -> list[T]:
    """Returns the values of all processes, in order of rank. All processes must call it equally often."""
    if world_size() == 1:
        return [value]
    with _rank_error_on_failure():
        gathered: list[T] = gather_object([value])
    return gathered


def mean(value: float) -> float:
    """Returns the mean of a number over the processes."""
    return sum(gather_objects(float(value))) / world_size()


@torch.no_grad()
def sum_(tensors: Iterable[Tensor]) -> None:
    """Replaces tensors with their sums over the processes, bit for bit equal on all; their shapes must be equal."""
    if world_size() > 1:
        with _rank_error_on_failure():
            _replace_(list(tensors), lambda flat: reduce(flat, "sum"))


@torch.no_grad()
def broadcast_(tensors: Iterable[Tensor]) -> None:
    """Replaces tensors with those of rank 0."""
    if world_size() > 1:
        with _rank_error_on_failure():
            _replace_(list(tensors), lambda flat: broadcast(flat, 0))


def reseed_by_rank_(generator: torch.Generator) -> None:
    """Reseeds a generator that is equal on all processes, differently on each; rank 0 keeps its state."""
    if not is_main_process():
        drawn = int(torch.randint(2**62, (), generator=generator))
        (state,) = np.random.SeedSequence((drawn, rank())).generate_state(1, np.uint64).tolist()
        generator.manual_seed(state >> 1)


@contextmanager
def main_process_first() -> Iterator[None]:
    """While open, the other processes wait until the main process has left the block, for instance after a download."""
    if not is_main_process():
        gather_objects(None)
    yield
    if is_main_process():
        gather_objects(None)


def check_equal_weights(weights: Iterable[Tensor]) -> None:
    """Raises a `RankError` if weights differ between processes, by the sums of their bits."""
    if world_size() == 1:
        return
    sums = gather_objects([int(weight.detach().contiguous().view(torch.int32).sum()) for weight in weights])
    different = [number for number, others in enumerate(sums) if others != sums[0]]
    if different:
        raise RankError(
            f"The weights of processes {different} differ from those of process 0, although all made the same steps. "
            "Change weights equally on all processes, and run them on equal machines with equal software; then resume "
            "from the last checkpoint."
        )


def _replace_(tensors: list[Tensor], collective: Callable[[Tensor], Any]) -> None:
    """Replaces tensors with the result of a collective, which is called once per dtype on their concatenation."""
    device = PartialState().device
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        same_dtype = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = collective(torch.cat([tensor.detach().flatten() for tensor in same_dtype]).to(device))
        parts = flat.split([tensor.numel() for tensor in same_dtype])
        for tensor, part in zip(same_dtype, parts, strict=True):
            new = part.view(tensor.shape).to(tensor.device)
            # Copying equal numbers would raise the tensor's version, and caches would count that as a change.
            if not tensor.equal(new):
                tensor.copy_(new)


@contextmanager
def _rank_error_on_failure() -> Iterator[None]:
    """While open, errors of torch.distributed become a `RankError`."""
    try:
        yield
    except RuntimeError as error:
        if _launched_processes() == 1:
            raise
        raise RankError(
            f"Process {os.environ.get('RANK')} of {_launched_processes()} has lost another one: it has ended, or did "
            f"not answer in time ({_TIMEOUT_S} s unless your script joined them with another timeout). If it failed, "
            "its output shows the error. Start all processes again with resume=True; any number of processes can "
            f"continue from the last checkpoint. ({error})"
        ) from error
