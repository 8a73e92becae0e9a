"""A causal language model with a value head: TRL's `AutoModelForCausalLMWithValueHead`, which TRL dropped in 1.13.

Names, the forward pass and the keys `v_head.summary.*` are TRL's, and checkpoints that TRL saved load here. Three
departures:

- The linear layer starts at zero, so that every value is 0 and the critic's first errors are returns, not noise.
- Features are standardised before it, with constants that are measured once and saved. A language model's hidden states
  differ in scale by orders of magnitude between dimensions; one learning rate does not suit them all otherwise.
- There is no dropout: the same input must give the same value in every pass.

On disk: what transformers or PEFT writes for the model (full weights or adapter), `value_head.safetensors`, and a
manifest; the next save replaces the files that it lists.
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
import transformers  # its Auto classes and PreTrainedModel take a second to import, which it does on first use
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from ..errors import CheckpointError, ConfigError, LlamaGymError, ModelLoadError, excerpt, reason_of
from ..saving.atomic import atomic_folder
from ..saving.manifest import SCHEMA, check_files, read_manifest
from ..saving.paths import user_folder
from .adapters import read_adapter_config
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
from .quantization import is_quantized, quantization_config
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
# Options of loading that a configuration also has, and that change no layers.
_NOT_OF_SIZE = {"dtype", "torch_dtype", "quantization_config"}
# No feature is amplified more than this many times above what its share of the average spread would give.
_MAX_GAIN = 100.0


class ValueHead(nn.Module):
    """A linear map from a hidden state to a value, over standardised features.

    Attributes:
        summary: The linear layer, float32, zero at the start.
        feature_mean: Subtracted from the features, float32 (H,); 0 until `standardize_`.
        feature_std: Divides the features, float32 (H,); 1 until `standardize_`.
    """

    feature_mean: Tensor
    feature_std: Tensor

    def __init__(self, hidden_size: int) -> None:
        """Build the head for hidden states of `hidden_size` numbers."""
        super().__init__()
        self.summary = nn.Linear(hidden_size, 1, dtype=torch.float32)
        nn.init.zeros_(self.summary.weight)
        nn.init.zeros_(self.summary.bias)
        self.register_buffer("feature_mean", torch.zeros(hidden_size))
        self.register_buffer("feature_std", torch.ones(hidden_size))

    def forward(self, hidden: Tensor) -> Tensor:
        """Values of hidden states.

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
        """Take mean and deviation of a sample as the constants of standardisation. Call it before training.

        Deviations far below the average one (their root mean square) are raised to a hundredth of it, so that a
        feature that hardly varies in the sample cannot dominate later. Where there is no deviation at all, as in a
        sample of one, features are centred only, and the bias learns what there is to learn.

        Args:
            features: Hidden states where values are read, (M, H) with M >= 1, all finite.

        Raises:
            ValueError: `features` has another shape, or holds NaN or infinity.
        """
        size = self.feature_mean.numel()
        if features.ndim != 2 or not features.shape[0] or features.shape[1] != size:
            raise ValueError(f"features have shape {tuple(features.shape)}; expected (M, {size}) with M >= 1.")
        features = features.to(self.feature_mean)
        if not features.isfinite().all():
            raise ValueError("features hold NaN or infinity; the model's hidden states have overflowed.")
        deviation = features.std(dim=0) if len(features) > 1 else torch.zeros_like(features[0])
        floor = deviation.square().mean().sqrt() / _MAX_GAIN
        self.feature_mean.copy_(features.mean(dim=0))
        self.feature_std.copy_(deviation.clamp_min(floor) if floor > 0 else torch.ones_like(deviation))

    def load_saved(self, tensors: dict[str, Tensor]) -> None:
        """Take saved tensors; TRL's checkpoints have no constants of standardisation, and the features stay raw then.

        Args:
            tensors: `summary.weight` and `summary.bias`, perhaps `feature_mean` and `feature_std`.

        Raises:
            ModelLoadError: The linear layer is incomplete or of another width.
        """
        try:
            self.load_state_dict({"feature_mean": self.feature_mean, "feature_std": self.feature_std, **tensors})
        except RuntimeError as error:
            shapes = {key: tuple(value.shape) for key, value in tensors.items()}
            raise ModelLoadError(
                f"the saved value head {shapes} does not fit a model of {self.summary.in_features} features. "
                "Load it with the model it was saved with."
            ) from error


class AutoModelForCausalLMWithValueHead(nn.Module):
    """A causal language model, with LoRA or without, and a value head on its last hidden state.

    Attributes:
        pretrained_model: The language model, or PEFT's wrapper around it.
        v_head: The value head.
        lora_depth_is_open: Whether the first agent with this model says how many layers LoRA adapts (see `lora`).
    """

    def __init__(self, pretrained_model: PreTrainedModel | PeftModel) -> None:
        """Put a fresh value head on `pretrained_model`.

        Raises:
            ModelLoadError: It is not a model, or has no language-modeling head; a name or a folder is for
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
        """Load a model, its adapter if it has one, and its value head, or a fresh one.

        Args:
            pretrained_model_name_or_path: A folder or a hub id of a causal language model, of an adapter, or of what
                `save_pretrained` wrote (ours or TRL's); or a model that is already loaded.
            peft_config: The adapter to add to a model that has none.
            base_model: Where an adapter's base is, if not where its configuration says; or the base itself.
            load_in_8bit: Quantize the base to 8 bits with bitsandbytes (CUDA only).
            load_in_4bit: Quantize the base to 4 bits (NF4; CUDA only).
            **kwargs: Passed on to `AutoModelForCausalLM.from_pretrained`, e.g. `dtype`, `device_map`, `token`.

        Returns:
            The model, in evaluation mode: dropout, which would make old and new policy differ, is off.

        Raises:
            ConfigError: `peft_config` is not a configuration of PEFT.
            ModelLoadError: Weights are missing or do not fit, the adapter finds no module, or `peft_config` meets a
                model that already has an adapter.
            CheckpointError: Weights that `save_pretrained` wrote are damaged.
        """
        source = pretrained_model_name_or_path
        if not (peft_config is None or hasattr(peft_config, "peft_type")):
            raise ConfigError(
                f"peft_config must be a configuration of PEFT or None, got {excerpt(peft_config)} "
                f"({type(peft_config).__name__}). Pass one such as peft.LoraConfig()."
            )
        kwargs = {key: value for key, value in kwargs.items() if key != "token" or value is not None}
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
        if is_quantized(load_in_8bit, load_in_4bit, device_type, peft_config):
            dtype = kwargs.get("dtype", torch.bfloat16)
            kwargs = {"device_map": {"": 0}, **kwargs, "quantization_config": quantization_config(load_in_8bit, dtype)}
        v_head: dict[str, Tensor] = {}
        model: PreTrainedModel | PeftModel
        with loading_quietly(), _errors_named(source):
            if isinstance(source, nn.Module):
                if kwargs:
                    raise ModelLoadError(
                        f"{sorted(kwargs)} cannot be applied to a model that is already loaded; drop them."
                    )
                model = source
            else:
                source = _source(source)
                hub = {key: kwargs[key] for key in _HUB_KEYWORDS if key in kwargs}
                adapter = find_file(source, ADAPTER_CONFIG, hub)
                if adapter is None:
                    model = _load_base(source, kwargs)
                else:
                    model = _load_adapter(source, read_adapter_config(adapter), base_model, kwargs, hub)
                files = tensor_files(source, VALUE_HEAD_FILE, _PREFIX, hub, is_adapter=adapter is not None)
                v_head = {key: value for file in files for key, value in read_tensors(file, _PREFIX).items()}
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
        """Where the language model lies."""
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
        """Logits, language modelling loss and values, as TRL returns them.

        Args:
            input_ids: Token ids, int64 (B, T).
            attention_mask: 1 at real tokens, 0 at padding, int64 (B, T).
            **kwargs: Passed on to the language model, e.g. `labels` or `past_key_values`.

        Returns:
            Logits, float32 (B, T, V); the loss, float32 scalar, or None without `labels`; values, float32 (B, T).
        """
        output = self.pretrained_model(
            input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=True, **kwargs
        )
        values = self.v_head(output.hidden_states[-1]).squeeze(-1)
        return output.logits.float(), output.loss, values

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The language model's `generate`."""
        generate: Any = self.pretrained_model.generate
        return generate(*args, **kwargs)

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """Write the adapter, or the full weights where there is none, and the value head.

        Args:
            save_directory: Target folder: new, empty, an earlier save of this method, or one that holds only files of
                other names, such as a tokenizer's. It is replaced in one step; other files stay.
            **kwargs: Passed on to the language model's `save_pretrained`.

        Raises:
            ConfigError: The folder's path is invalid.
            CheckpointError: The folder holds something else, or cannot be written; it is as it was.
        """
        folder = user_folder(save_directory, "save_directory")
        if kwargs.get("push_to_hub"):
            kwargs.setdefault("repo_id", folder.name)
        with atomic_folder(folder, KIND) as whole:
            self.write_files(whole, **kwargs)

    def write_files(self, folder: Path, **kwargs: Any) -> None:
        """Writes what `save_pretrained` saves into a new folder.

        Args:
            folder: The folder, which exists.
            **kwargs: Passed on to the language model's `save_pretrained`.
        """
        if self.is_peft_model:
            # PEFT's own test, whether the vocabulary was resized, asks the hub; nothing here resizes it.
            targets = getattr(self.pretrained_model.active_peft_config, "target_modules", None) or ()
            kwargs.setdefault("save_embedding_layers", not embedding_layer_names().isdisjoint(targets))
        self.pretrained_model.save_pretrained(str(folder), **kwargs)
        head = {_PREFIX + key: value.detach().cpu().contiguous() for key, value in self.v_head.state_dict().items()}
        save_file(head, folder / VALUE_HEAD_FILE, metadata={"format": "pt"})

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str = "Upload model with value head",
        private: bool | None = None,
        token: str | None = None,
    ) -> str:
        """Upload what `save_pretrained` writes, without the manifest, to the model hub; makes the repository if needed.

        Args:
            repo_id: The repository, "user/name".
            commit_message: The commit's first line.
            private: Whether a new repository is private; None leaves it to the account's default.
            token: Access token; None takes the one of the environment (`HF_TOKEN`) or of the last login.

        Returns:
            The commit's address.
        """
        with tempfile.TemporaryDirectory() as folder:
            self.write_files(Path(folder))
            return upload(Path(folder), repo_id, commit_message, private, token)


def check_head(model: Any) -> None:
    """Reject a model that predicts no tokens.

    Raises:
        ModelLoadError: It has no language-modeling head; the message names its class.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if base.get_output_embeddings() is None:
        raise ModelLoadError(
            f"{type(base).__name__} has no language-modeling head, so it writes no replies. Load the model with "
            "AutoModelForCausalLM."
        )


@contextmanager
def _errors_named(source: Any) -> Iterator[None]:
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
    """Advice on an error of another library; empty where its message gives the reason."""
    if isinstance(error, OSError):
        return ""
    if isinstance(error, TypeError) and "unexpected keyword argument" in str(error):
        return " Drop that option."
    return (
        " Check the name, and that the configuration fits the weights and, of an adapter, its base; if that has moved, "
        "pass base_model."
    )


def _source(name: str | Path) -> str:
    """The folder or hub id of a model's name, with `~` written out.

    Raises:
        ModelLoadError: It is not a name, it can only be a path and nothing is there, or it is a file.
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
            f"{str(path)!r} is a GGUF file, which must be converted. load_model_and_tokenizer converts and loads it."
        )
    _verify(path)
    return str(path)


def _verify(folder: Path) -> None:
    """Checks the weights of a folder that `save_pretrained` wrote. Users may edit its other files.

    Raises:
        CheckpointError: A file of weights is damaged.
    """
    try:
        manifest = read_manifest(folder)
    except CheckpointError:  # it has none, or a file of this name that is something else
        return
    # Models that an earlier version converted have the same kind.
    if (manifest["kind"], manifest["schema"]) == (KIND, SCHEMA):
        files = manifest["files"].items()
        check_files(folder, {name: listed for name, listed in files if name.endswith((".safetensors", ".bin"))})


def _load_base(source: str | Path, kwargs: dict[str, Any]) -> PreTrainedModel:
    # Do not ask on the terminal whether to run a repository's code. Report mismatched shapes below instead of raising
    # here.
    options = {"trust_remote_code": False, **kwargs, "ignore_mismatched_sizes": True}
    if Path(source).is_dir():
        check_indexes(Path(source) / (kwargs.get("subfolder") or ""))
    with _errors_named(source):
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(source, output_loading_info=True, **options)
    model: PreTrainedModel
    model, report = loaded
    # transformers fills what is missing with random numbers, which would pass for a bad model.
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
    # The value head of TRL's checkpoints is read later.
    unused = sorted(key for key in report["unexpected_keys"] if not key.startswith(_PREFIX))
    # Unused layer weights mean that config.json describes a smaller model. Other unused weights, such as old buffers,
    # are harmless.
    of_layers = [key for key in unused if _LAYER_NUMBER.sub(".0.", key) in model.state_dict()]
    is_overridden = "config" in kwargs or any(hasattr(model.config, key) for key in kwargs.keys() - _NOT_OF_SIZE)
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
    from peft import PeftModel

    if not isinstance(base_model, transformers.PreTrainedModel):
        where = base_model or config.get("base_model_name_or_path")
        if not where:
            raise ModelLoadError(f"the adapter in {str(source)!r} does not name its base. Pass base_model.")
        # The caller's revision is one of the adapter's repository; the adapter knows its base's.
        revision = {} if base_model or not config.get("revision") else {"revision": config["revision"]}
        options = {key: value for key, value in kwargs.items() if key != "revision"} | revision
        try:
            base = _source(where)
        except ModelLoadError as error:
            raise ModelLoadError(
                f"the base of the adapter in {str(source)!r} is missing: {error} If it has moved, pass base_model."
            ) from error
        base_model = _load_base(base, options)
    model = PeftModel.from_pretrained(_prepare(base_model), str(source), is_trainable=True, **hub)
    # The module and class of the base, which AutoPeftModel imports. Nothing here does, and no later save names them.
    for each in model.peft_config.values():
        each.auto_mapping = None
    return model


def _add_adapter(model: PreTrainedModel | PeftModel, peft_config: PeftConfig) -> PeftModel:
    from peft import PeftModel, get_peft_model

    if isinstance(model, PeftModel):
        raise ModelLoadError(
            "peft_config was given for a model that already has an adapter. Drop peft_config to go on training that "
            "adapter, or load its base to begin a new one."
        )
    if peft_config.task_type is None:
        # Otherwise PEFT saves the module of the base for AutoPeftModel to import.
        peft_config = copy(peft_config)
        peft_config.task_type = "CAUSAL_LM"
    # Before an adapter that fails has changed some of them.
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
    """Freeze a quantized base and put what is not quantized in float32, as training an adapter on it needs."""
    if getattr(model, "hf_quantizer", None) is None:
        return model
    from peft import prepare_model_for_kbit_training

    # Checkpointing would switch the key-value cache off, which sampling and shared prefixes live on.
    prepared: PreTrainedModel = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    return prepared
