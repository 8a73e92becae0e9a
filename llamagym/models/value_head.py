"""A causal language model with a value head, as TRL's `AutoModelForCausalLMWithValueHead`, which TRL removed in 1.13.

Names, the forward pass and the keys `v_head.summary.*` are TRL's, and models that TRL saved can be loaded. There are
three differences from TRL:

- The linear layer starts at zero, so every value is 0 and the critic's first errors are returns, not noise.
- Features are standardized before the linear layer, with constants that are measured once and saved. The scales of
  hidden states differ by orders of magnitude between dimensions, so one learning rate would not suit them all.
- There is no dropout: the same input must give the same value in every pass.

A saved model consists of the files that transformers or PEFT write (full weights or adapter), `value_head.safetensors`,
and a manifest. The next save replaces the files that the manifest lists.
"""

from __future__ import annotations

import logging
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers  # imports its Auto classes and PreTrainedModel on first use, which takes a second
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from ..errors import CheckpointError, ConfigError, LlamaGymError, ModelLoadError, excerpt, reason_of
from ..saving.atomic import atomic_folder
from ..saving.manifest import SCHEMA, check_files, read_manifest
from ..saving.paths import user_folder
from .adapters import read_adapter_config
from .hardware import is_quantized, quantization_config
from .hub import (
    ADAPTER_CONFIG,
    check_indexes,
    check_model_file,
    find_file,
    first_line,
    local_path,
    read_tensors,
    tensor_files,
    upload,
)
from .peft_internals import embedding_layer_names
from .quiet import loading_quietly

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from transformers import PretrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)

KIND = "model"
VALUE_HEAD_FILE = "value_head.safetensors"
_PREFIX = "v_head."
_LAYER_NUMBER = re.compile(r"\.\d+\.")
_HUB_KEYWORDS = ("token", "revision", "cache_dir", "local_files_only")
# Options of loading that a configuration also has, and that do not change the shapes of layers.
_SHAPELESS_OPTIONS = {"dtype", "torch_dtype", "quantization_config"}
# Upper limit of the average deviation of features over the deviation that a feature is divided by.
_MAX_GAIN = 100.0


class ValueHead(nn.Module):
    """A linear layer from standardized hidden states to values.

    Attributes:
        summary: The linear layer, float32, initialized to zero.
        feature_mean: Mean that is subtracted from the features, float32 (H,); 0 until `standardize_`.
        feature_std: Deviation that the features are divided by, float32 (H,); 1 until `standardize_`.
    """

    feature_mean: Tensor
    feature_std: Tensor

    def __init__(self, hidden_size: int) -> None:
        """Creates the value head for hidden states of `hidden_size` dimensions."""
        super().__init__()
        self.summary = nn.Linear(hidden_size, 1, dtype=torch.float32)
        nn.init.zeros_(self.summary.weight)
        nn.init.zeros_(self.summary.bias)
        self.register_buffer("feature_mean", torch.zeros(hidden_size))
        self.register_buffer("feature_std", torch.ones(hidden_size))

    def forward(self, hidden: Tensor) -> Tensor:
        """Computes values from hidden states.

        Args:
            hidden: Hidden states of any dtype, (..., H). Detach them to keep the critic's gradient out of the model.

        Returns:
            Values (..., 1) in the head's dtype, float32 unless it was moved to another.
        """
        features = (hidden.to(self.summary.weight) - self.feature_mean) / self.feature_std
        values: Tensor = self.summary(features)
        return values

    @torch.no_grad()
    def standardize_(self, features: Tensor) -> None:
        """Sets the constants of standardization to the mean and the deviation of a sample, before training.

        Deviations below a hundredth of their root mean square are raised to it, so that a feature that hardly varies in
        the sample cannot dominate later. Without any deviation, as in a sample of one, features are only centered.

        Args:
            features: Hidden states from which values are computed, (M, H) with M >= 1, all finite.

        Raises:
            ValueError: `features` has another shape, or contains NaN or infinity.
        """
        size = self.feature_mean.numel()
        if features.ndim != 2 or not features.shape[0] or features.shape[1] != size:
            raise ValueError(f"features have shape {tuple(features.shape)}; expected (M, {size}) with M >= 1.")
        features = features.to(self.feature_mean)
        if not features.isfinite().all():
            raise ValueError("features contain NaN or infinity; the model's hidden states have overflowed.")
        deviation = features.std(dim=0) if len(features) > 1 else torch.zeros_like(features[0])
        floor = deviation.square().mean().sqrt() / _MAX_GAIN
        self.feature_mean.copy_(features.mean(dim=0))
        self.feature_std.copy_(deviation.clamp_min(floor) if floor > 0 else torch.ones_like(deviation))

    def load_saved(self, tensors: dict[str, Tensor]) -> None:
        """Loads saved tensors; models that TRL saved have no constants of standardization, so their features stay raw.

        Args:
            tensors: `summary.weight` and `summary.bias`, and optionally `feature_mean` and `feature_std`.

        Raises:
            ModelLoadError: The tensors of the linear layer are incomplete or of another width.
        """
        try:
            self.load_state_dict({"feature_mean": self.feature_mean, "feature_std": self.feature_std, **tensors})
        except RuntimeError as error:
            shapes = {key: tuple(value.shape) for key, value in tensors.items()}
            raise ModelLoadError(
                f"the saved value head {shapes} does not fit a model of {self.summary.in_features} features. "
                "Load it with the model that it was saved with."
            ) from error


class AutoModelForCausalLMWithValueHead(nn.Module):
    """A causal language model with a value head on its last hidden state, with or without an adapter.

    Attributes:
        pretrained_model: The language model, or PEFT's wrapper around it.
        v_head: The value head.
        lora_depth_is_open: Whether the first agent with this model determines how many layers LoRA adapts (see `lora`).
    """

    def __init__(self, pretrained_model: PreTrainedModel | PeftModel) -> None:
        """Adds a new value head to `pretrained_model`.

        Raises:
            ModelLoadError: It is not a model, or has no language-modeling head. Pass names and folders to
                `from_pretrained`.
        """
        if not isinstance(pretrained_model, nn.Module):
            raise ModelLoadError(
                f"pretrained_model must be a model, got {excerpt(pretrained_model)}. Pass names and folders to "
                "AutoModelForCausalLMWithValueHead.from_pretrained()."
            )
        super().__init__()
        check_head(pretrained_model)
        self.pretrained_model = pretrained_model
        self.lora_depth_is_open = False
        self.v_head = ValueHead(pretrained_model.config.get_text_config().hidden_size).to(pretrained_model.device)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path | PreTrainedModel | PeftModel,
        peft_config: PeftConfig | None = None,
        *,
        base_model: str | Path | PreTrainedModel | None = None,
        load_in_8bit: bool = False,
        load_in_4bit: bool = False,
        **kwargs: Any,
    ) -> AutoModelForCausalLMWithValueHead:
        """Loads a model, its adapter if it has one, and its value head if it has one, else a new one.

        Args:
            pretrained_model_name_or_path: A folder or a hub id of a causal language model, of an adapter, or of a
                model that `save_pretrained` wrote (ours or TRL's); or a model that is already loaded.
            peft_config: The adapter to add to a model that has none.
            base_model: The base of an adapter: a folder, a hub id or a model; None takes the one that the adapter's
                configuration names.
            load_in_8bit: Whether to quantize the base to 8 bits with bitsandbytes (CUDA only).
            load_in_4bit: Whether to quantize the base to 4 bits (NF4; CUDA only).
            **kwargs: Options of `AutoModelForCausalLM.from_pretrained`, e.g. `dtype`, `device_map`, `token`.

        Returns:
            The model, in evaluation mode: dropout is off, since it would make old and new policy differ.

        Raises:
            ConfigError: `peft_config` is not a configuration of PEFT.
            ModelLoadError: Weights are missing or do not fit, the adapter's target modules do not exist, or the model
                already has an adapter and `peft_config` is not None.
            CheckpointError: Weights that `save_pretrained` wrote are damaged.
        """
        source = pretrained_model_name_or_path
        if not (peft_config is None or hasattr(peft_config, "peft_type")):
            raise ConfigError(
                f"peft_config must be a configuration of PEFT or None, got {excerpt(peft_config)} "
                f"({type(peft_config).__name__}). Pass one such as peft.LoraConfig()."
            )
        if kwargs.get("token") is None:
            kwargs.pop("token", None)
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
        if is_quantized(load_in_8bit, load_in_4bit, device_type, peft_config):
            dtype = kwargs.get("dtype", torch.bfloat16)
            kwargs = {"device_map": {"": 0}, **kwargs, "quantization_config": quantization_config(load_in_8bit, dtype)}
        v_head: dict[str, Tensor] = {}
        model: PreTrainedModel | PeftModel
        with loading_quietly(), _as_load_error(source):
            if isinstance(source, nn.Module):
                if kwargs:
                    raise ModelLoadError(
                        f"{sorted(kwargs)} cannot be applied to a model that is already loaded; drop them."
                    )
                model = source
            else:
                source = _resolve(source)
                hub = {key: kwargs[key] for key in _HUB_KEYWORDS if key in kwargs}
                adapter = find_file(source, ADAPTER_CONFIG, hub)
                if adapter is None:
                    model = _load_base(source, kwargs)
                else:
                    model = _load_adapter(source, read_adapter_config(adapter), base_model, kwargs, hub)
                files = tensor_files(source, VALUE_HEAD_FILE, _PREFIX, hub, is_adapter=adapter is not None)
                for file in files:
                    v_head.update(read_tensors(file, _PREFIX))
        if peft_config is not None:
            with loading_quietly():
                model = _add_adapter(model, peft_config)
        result = cls(model)
        if v_head:
            result.v_head.load_saved(v_head)
        return result.eval()

    @property
    def config(self) -> PretrainedConfig:
        """The language model's configuration."""
        return self.pretrained_model.config

    @property
    def device(self) -> torch.device:
        """The device of the language model."""
        device: torch.device = self.pretrained_model.device
        return device

    @property
    def is_peft_model(self) -> bool:
        """Whether the language model has an adapter."""
        from peft import PeftModel  # takes more than a second to import

        return isinstance(self.pretrained_model, PeftModel)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Computes logits, language modeling loss and values, as TRL does.

        Args:
            input_ids: Token ids, int64 (B, T).
            attention_mask: 1 at real tokens, 0 at padding, int64 (B, T).
            **kwargs: Arguments of the language model, e.g. `labels` or `past_key_values`.

        Returns:
            Logits, float32 (B, T, V); the loss, float32 scalar, or None without `labels`; values, float32 (B, T).
        """
        output = self.pretrained_model(
            input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=True, **kwargs
        )
        values = self.v_head(output.hidden_states[-1]).squeeze(-1)
        return output.logits.float(), output.loss, values

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the language model's `generate`."""
        generate: Any = self.pretrained_model.generate
        return generate(*args, **kwargs)

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """Saves the adapter, or the full weights of a model without one, and the value head.

        Args:
            save_directory: Target folder: new, empty, an earlier save of this method, or one that holds only files of
                other names, such as a tokenizer's. It is replaced in one step; other files stay.
            **kwargs: Options of the language model's `save_pretrained`.

        Raises:
            ConfigError: The folder's path is invalid.
            CheckpointError: The folder holds something else, or cannot be written; it is unchanged.
        """
        folder = user_folder(save_directory, "save_directory")
        if kwargs.get("push_to_hub"):
            kwargs.setdefault("repo_id", folder.name)
        with atomic_folder(folder, KIND) as scratch:
            self.write_files(scratch, **kwargs)

    def write_files(self, folder: Path, **kwargs: Any) -> None:
        """Writes the files of `save_pretrained` to an existing folder.

        Args:
            folder: The folder.
            **kwargs: Options of the language model's `save_pretrained`.
        """
        if self.is_peft_model:
            # By default, PEFT asks the hub whether the vocabulary was resized; nothing here resizes it.
            targets = getattr(self.pretrained_model.active_peft_config, "target_modules", None) or ()
            kwargs.setdefault("save_embedding_layers", not embedding_layer_names().isdisjoint(targets))
        self.pretrained_model.save_pretrained(str(folder), **kwargs)
        v_head = {_PREFIX + key: value.detach().cpu().contiguous() for key, value in self.v_head.state_dict().items()}
        save_file(v_head, folder / VALUE_HEAD_FILE, metadata={"format": "pt"})

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str = "Upload model with value head",
        private: bool | None = None,
        token: str | None = None,
    ) -> str:
        """Uploads the files of `save_pretrained`, without the manifest, to a repository on the hub, which may be new.

        Args:
            repo_id: The repository, "user/name".
            commit_message: First line of the commit message.
            private: Whether a new repository is private; None is the account's default.
            token: Access token; None takes `HF_TOKEN` or the last login.

        Returns:
            The URL of the commit.
        """
        with tempfile.TemporaryDirectory() as folder:
            self.write_files(Path(folder))
            return upload(Path(folder), repo_id, commit_message, private, token)


def check_head(model: Any) -> None:
    """Rejects a model without a language-modeling head.

    Raises:
        ModelLoadError: The model has none; the message names its class.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if base.get_output_embeddings() is None:
        raise ModelLoadError(
            f"{type(base).__name__} has no language-modeling head, so it writes no replies. Load the model with "
            "AutoModelForCausalLM."
        )


@contextmanager
def _as_load_error(source: Any) -> Iterator[None]:
    """While open, turns errors of transformers, PEFT and safetensors into a ModelLoadError that names the model."""
    try:
        yield
    except (LlamaGymError, MemoryError, torch.OutOfMemoryError):
        raise
    except SafetensorError as error:
        raise ModelLoadError(
            f"the weights of {str(source)!r} are damaged: {first_line(error)} Download or save them again."
        ) from error
    except Exception as error:
        raise ModelLoadError(
            f"cannot load a causal language model from {str(source)!r} ({reason_of(error)}).{_advice(error)}"
        ) from error


def _advice(error: Exception) -> str:
    """Advice on an error of another library; empty if its message gives the reason."""
    if isinstance(error, OSError):
        return ""
    if isinstance(error, TypeError) and "unexpected keyword argument" in str(error):
        return " Drop that option."
    return (
        " Check the name, and that the configuration fits the weights and, of an adapter, its base; if that has moved, "
        "pass base_model."
    )


def _resolve(name: str | Path) -> str:
    """Returns the folder or hub id that the name of a model refers to, with `~` expanded.

    Raises:
        ModelLoadError: It is not a name, it can only be a path and nothing exists there, or it is a file.
        CheckpointError: It is a folder that `save_pretrained` wrote, and its weights are damaged.
    """
    if not isinstance(name, (str, Path)):
        raise ModelLoadError(
            f"The model must be a folder, a hub id or a loaded model, got {excerpt(name)} ({type(name).__name__})."
        )
    path = local_path(name)
    if path is None:
        return str(name)
    if path.is_file():
        check_model_file(path)
        raise ModelLoadError(
            f"{str(path)!r} is a GGUF file, which must be converted. Pass it to load_model_and_tokenizer."
        )
    _check_weights(path)
    return str(path)


def _check_weights(folder: Path) -> None:
    """Rejects damaged weights in a folder that `save_pretrained` wrote. Users may edit its other files."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError:  # it has none, or an unrelated file of this name
        return
    # Earlier versions saved models of the same kind in another format.
    if manifest["kind"] == KIND and manifest["schema"] == SCHEMA:
        files = manifest["files"].items()
        check_files(folder, {name: entry for name, entry in files if name.endswith((".safetensors", ".bin"))})


def _load_base(source: str | Path, kwargs: dict[str, Any]) -> PreTrainedModel:
    """Loads a language model, and rejects missing weights and weights of other shapes or of more layers."""
    # Never asks on the terminal whether to run a repository's code. Mismatched shapes are reported below.
    options = {"trust_remote_code": False, **kwargs, "ignore_mismatched_sizes": True}
    if Path(source).is_dir():
        check_indexes(Path(source) / (kwargs.get("subfolder") or ""))
    with _as_load_error(source):
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(source, output_loading_info=True, **options)
    model: PreTrainedModel
    model, report = loaded
    # transformers initializes missing weights at random, and the result would look like a bad model.
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelLoadError(
            f"{str(source)!r} lacks {len(missing)} weights of {type(model).__name__}, among them {missing[0]!r}. "
            "Check that the folder is complete and that its config.json fits the weights."
        )
    mismatched = sorted(report["mismatched_keys"])
    if mismatched and not kwargs.get("ignore_mismatched_sizes"):
        key, saved, expected = mismatched[0]
        raise ModelLoadError(
            f"{str(source)!r} holds {len(mismatched)} weights of other shapes than {type(model).__name__} has by its "
            f"config.json, among them {key!r}: {tuple(saved)}, expected {tuple(expected)}. Check that the two fit."
        )
    # The value head of a model that TRL saved is read later.
    unused = sorted(key for key in report["unexpected_keys"] if not key.startswith(_PREFIX))
    # Unused weights of layers mean that config.json describes a smaller model. Other unused weights, such as old
    # buffers, are harmless.
    of_layers = [key for key in unused if _LAYER_NUMBER.sub(".0.", key) in model.state_dict()]
    is_overridden = "config" in kwargs or any(hasattr(model.config, key) for key in kwargs.keys() - _SHAPELESS_OPTIONS)
    if of_layers and not is_overridden:
        raise ModelLoadError(
            f"{str(source)!r} holds {len(of_layers)} weights of layers that {type(model).__name__} lacks by its "
            f"config.json, among them {of_layers[0]!r}. Check that the two fit."
        )
    if unused:
        logger.warning("%d weights in %s are not used, among them %s.", len(unused), str(source), unused[0])
    return model


def _load_adapter(
    source: str | Path,
    config: dict[str, Any],
    base_model: str | Path | PreTrainedModel | None,
    kwargs: dict[str, Any],
    hub: dict[str, Any],
) -> PeftModel:
    """Loads an adapter, on a given base or on the one that its configuration names."""
    from peft import PeftModel

    if not isinstance(base_model, transformers.PreTrainedModel):
        where = base_model or config.get("base_model_name_or_path")
        if not where:
            raise ModelLoadError(f"the adapter in {str(source)!r} does not name its base. Pass base_model.")
        # The caller's revision is one of the adapter's repository; the adapter's configuration has its base's.
        options = dict(kwargs)
        options.pop("revision", None)
        if config.get("revision") and not base_model:
            options["revision"] = config["revision"]
        try:
            base = _resolve(where)
        except ModelLoadError as error:
            raise ModelLoadError(
                f"the base of the adapter in {str(source)!r} is missing: {error} If it has moved, pass base_model."
            ) from error
        base_model = _load_base(base, options)
    model = PeftModel.from_pretrained(_prepare(base_model), str(source), is_trainable=True, **hub)
    # Removes the module and class of the base, which AutoPeftModel would import, from later saves.
    for adapter_config in model.peft_config.values():
        adapter_config.auto_mapping = None
    return model


def _add_adapter(model: PreTrainedModel | PeftModel, peft_config: PeftConfig) -> PeftModel:
    """Adds an adapter to a model that has none."""
    from peft import PeftModel, get_peft_model

    if isinstance(model, PeftModel):
        raise ModelLoadError(
            "peft_config was passed for a model that already has an adapter. Drop peft_config to continue training "
            "that adapter, or load its base to train a new one."
        )
    if peft_config.task_type is None:
        # Otherwise PEFT saves the module of the base, which AutoPeftModel imports.
        peft_config = copy(peft_config)
        peft_config.task_type = "CAUSAL_LM"
    # Listed first, because an adapter that fails may have replaced some of them.
    linear = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    try:
        wrapped = get_peft_model(_prepare(model), peft_config)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(
            f"cannot attach the adapter to {type(model).__name__}: {error} Its linear modules are {sorted(linear)}; "
            "name some of them as peft_config.target_modules."
        ) from error
    assert isinstance(wrapped, PeftModel)
    return wrapped


def _prepare(model: PreTrainedModel) -> PreTrainedModel:
    """Prepares a quantized base for training an adapter: freezes it, and converts other weights to float32."""
    if getattr(model, "hf_quantizer", None) is None:
        return model
    from peft import prepare_model_for_kbit_training

    # Gradient checkpointing would switch the KV cache off, which sampling and shared prefixes need.
    prepared: PreTrainedModel = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    return prepared
