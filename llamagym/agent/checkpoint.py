"""Saves and restores everything that learning continues from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

from .. import distributed
from ..errors import ConfigError, excerpt
from ..models.lora import undo_extension_on_error
from ..options import as_json, user_path
from ..saving import checkpoints
from ..saving.atomic import atomic_folder
from ..saving.state_files import as_checkpoint_error, check_same_types, read_state, saveable_state, write_state
from ..text.episode import map_weights_versions
from .collector import Collector

# Name of a checkpoint's state files.
_STATE = "state"
# Entries of a checkpoint's manifest that the library writes.
_RESERVED_FACTS = frozenset({"options", "kind", "schema", "llamagym", "files"})
# Options that may differ from the saved ones: the random numbers of a checkpoint continue whatever the seeds are.
_MAY_DIFFER = frozenset({"seed", "max_tokens_per_pass"})
# Options that the saved state depends on: the learner, its state, and the content of conversations.
_MUST_MATCH = frozenset({"algorithm", "critic", "init_kl_coef", "replay_config_dict", "context"})


def write_checkpoint(
    collector: Collector,
    folder: str | Path,
    loop: Mapping[str, Any] | None,
    facts: Mapping[str, Any] | None,
) -> None:
    """Writes a checkpoint; see `Agent.save_checkpoint`.

    Args:
        collector: The agent's collector.
        folder: As for `Agent.save_checkpoint`.
        loop: As for `Agent.save_checkpoint`.
        facts: As for `Agent.save_checkpoint`.
    """
    for name, value in (("loop", loop), ("facts", facts)):
        if not (value is None or isinstance(value, Mapping)):
            raise ConfigError(f"{name} must be a dictionary or None, got {excerpt(value)} ({type(value).__name__}).")
    reserved = sorted(_RESERVED_FACTS & set(facts or ()))
    if reserved:
        raise ConfigError(f"facts has {reserved}, which llamagym writes itself. Use other names.")
    try:
        manifest_entries = {"options": collector.identity, **as_json(dict(facts or {}))}
        json.dumps(manifest_entries)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"facts={excerpt(facts)} cannot be written as JSON: {error}.") from error
    loop_state = saveable_state(dict(loop or {}), "loop")
    policy = collector.actor.policy
    policy.drop_caches()
    version = policy.weights_version
    own = {
        "acting": collector.actor.own_state_dict(),
        "version": version,
        "rng": policy.rng.get_state(),
        "loop": loop_state,
    }
    of_others = distributed.gather_objects(own)[1:]
    if distributed.is_main_process():
        with atomic_folder(folder, checkpoints.KIND, manifest_entries) as whole:
            write_state(whole, _STATE, {"agent": collector.state_dict(), "loop": own["loop"], "others": of_others})
    # No process continues before the checkpoint is complete.
    distributed.gather_objects(None)


def check_identity(collector: Collector, folder: Path, allow_changes: Sequence[str] = ()) -> None:
    """Rejects a checkpoint of another agent class or with other options.

    Args:
        collector: The agent's collector.
        folder: The checkpoint.
        allow_changes: As for `Agent.load_checkpoint`.

    Raises:
        CheckpointError: The class or an option differs.
    """
    checkpoints.check_options(folder, "options", collector.identity, _MAY_DIFFER, _MUST_MATCH, allow_changes)


@contextmanager
def loading_checkpoint(
    collector: Collector,
    folder: str | Path,
    keep_episodes: bool = False,
    allow_changes: Sequence[str] = (),
) -> Iterator[dict[str, Any]]:
    """While open, the agent has the state of a checkpoint; an exception restores its own state.

    For callers whose loop may reject the rest of the checkpoint. The learner's state is held twice while it is open.

    Args:
        collector: The agent's collector.
        folder: As for `Agent.load_checkpoint`.
        keep_episodes: As for `Agent.load_checkpoint`.
        allow_changes: As for `Agent.load_checkpoint`.

    Yields:
        The `loop` that was saved.

    Raises:
        CheckpointError: As for `Agent.load_checkpoint`.
    """
    folder = user_path(folder, "folder")
    with as_checkpoint_error(folder):
        folder = checkpoints.find(folder)
    check_identity(collector, folder, allow_changes)
    state = read_state(folder, _STATE)
    actor = collector.actor
    with _unchanged_on_error(collector):
        with as_checkpoint_error(folder, f"{_STATE}.json"), actor.lock:
            check_same_types(state["agent"], collector.state_dict())
            actor.check_state(state["agent"], "model" in allow_changes)
            collector.load_state_dict(state["agent"])
            loop = _restore_own_part(collector, state)
            is_same_count = distributed.world_size() == 1 + len(state.get("others", []))
            if not (keep_episodes and is_same_count):
                actor.discard_episodes(list(actor.conversations))
            if not is_same_count:
                collector.keep_complete_groups()
        yield loop


def _restore_own_part(collector: Collector, state: Mapping[str, Any]) -> dict[str, Any]:
    """Restores the part of a checkpoint that belongs to this process; returns its loop's state."""
    others = state.get("others", [])
    loop: dict[str, Any] = dict(state["loop"])
    rank = distributed.rank()
    if rank == 0:
        return loop
    actor = collector.actor
    if rank > len(others):
        distributed.reseed_by_rank_(actor.policy.rng)
        return loop
    own = others[rank - 1]
    actor.load_own_state_dict(own["acting"])
    for conversation in actor.conversations.values():
        conversation.turns = map_weights_versions(conversation.turns, {own["version"]: actor.policy.weights_version})
    actor.policy.rng.set_state(own["rng"])
    return dict(own["loop"])


@contextmanager
def _unchanged_on_error(collector: Collector) -> Iterator[None]:
    """While open, an exception restores the agent's state; the learner's state is held twice meanwhile."""
    actor = collector.actor
    with actor.lock:
        before = deepcopy(collector.state_dict())
    try:
        with undo_extension_on_error(actor.policy.model.pretrained_model):
            yield
    except BaseException:
        with actor.lock:
            collector.load_state_dict(before)
        raise
