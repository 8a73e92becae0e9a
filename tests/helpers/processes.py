"""Runs a function in several processes that learn together, as a launcher would start them."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

# One process imports what takes seconds; the others are forked from it before any of it has started a thread.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "llamagym",
        "peft",
        "accelerate",
        "transformers.models.llama.modeling_llama",
        "tests.helpers.agents",
        "tests.helpers.resumed_run",
    ]
)
# What a rank that was killed returns.
KILLED = "killed"


def together(count: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Runs a function on every rank; returns for each what it returned or raised, or `KILLED`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pipes, processes = [], []
    for rank in range(count):
        ours, theirs = _CONTEXT.Pipe()
        process = _CONTEXT.Process(target=_run, args=(theirs, rank, count, port, function, args), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        return [_received(pipe) for pipe in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _received(pipe: Connection) -> Any:
    if not pipe.poll(540):
        return TimeoutError("no answer within nine minutes")
    try:
        return pipe.recv()
    except EOFError:
        return KILLED


def _run(
    pipe: Connection, rank: int, count: int, port: int, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    import torch

    # As in this process: threads split sums, which rounds differently.
    torch.set_num_threads(int(os.environ.get("LLAMAGYM_TEST_THREADS", "1")))
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    try:
        answer = function(*args)
    except BaseException as error:
        answer = error
    pipe.send(answer)
