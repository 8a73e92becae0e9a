"""The library's behavior after a private API of a dependency has changed: each is broken here in turn."""

from __future__ import annotations

import ast
import json
import logging
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import numba
import numba.core.dispatcher
import peft.tuners.lora
import peft.tuners.lora.variants
import peft.tuners.tuners_utils
import peft.utils.constants
import pytest
import torch
import transformers
import trl
from peft import LoraModel
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers.models.llama import modeling_llama

import llamagym
from llamagym import AutoModelForCausalLMWithValueHead, load_model_and_tokenizer
from llamagym.engine import verification
from llamagym.engine.acceleration import is_enabled
from llamagym.engine.cpu import fused_layer, numba_internals
from llamagym.errors import ModelLoadError
from llamagym.learners import trl_internals
from llamagym.models import peft_internals, torch_internals, transformers_internals
from llamagym.models.lora import freeze_and_extend_
from llamagym.models.private_apis import DECLARED, PrivateApi, changed_apis
from tests.helpers.agents import ChoiceAgent, WordAgent, make_agent
from tests.helpers.tiny import tiny_base_model, tiny_model, tiny_tokenizer

LIBRARY = Path(llamagym.__file__).parent
# Documented, though not at a package's top level.
DOCUMENTED = {"numba.extending"}


class Hidden:
    """An attribute that everyone sees but this library."""

    def __init__(self, owner: type, name: str) -> None:
        self.name, self.original = name, getattr(owner, name, None)

    def __get__(self, instance: Any, owner: type) -> Any:  # noqa: D105
        if instance is None:
            return self.original
        if is_called_by_library():
            # nn.Module finds modules even after an AttributeError.
            kind = TypeError if self.name in vars(instance).get("_modules", {}) else AttributeError
            raise kind(f"{type(instance).__name__} has no attribute {self.name!r}")
        if hasattr(self.original, "__get__"):
            return self.original.__get__(instance, owner)
        own = vars(instance)
        return own[self.name] if self.name in own else own["_modules"][self.name]

    def __set__(self, instance: Any, value: Any) -> None:  # noqa: D105
        if hasattr(self.original, "__set__"):
            self.original.__set__(instance, value)
        else:
            vars(instance)[self.name] = value


class HidingModule(ModuleType):
    """A module with a name that everyone can import but this library."""

    def __init__(self, original: ModuleType, name: str) -> None:
        super().__init__(original.__name__)
        vars(self).update({other: value for other, value in vars(original).items() if other != name})
        self.hidden = name, getattr(original, name)

    def __getattr__(self, name: str) -> Any:  # noqa: D105
        hidden, value = vars(self).get("hidden", (None, None))
        if name != hidden or is_called_by_library():
            raise AttributeError(name)
        return value


def is_called_by_library() -> bool:
    """Whether the caller's caller is a function of this library."""
    frame = sys._getframe(2)
    while frame.f_code.co_name == "__getattribute__" and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_globals["__name__"].startswith("llamagym.")


def other_signature(one: Any) -> None:
    """Takes another number of arguments than what it stands for."""


def other_result(*arguments: Any) -> Any:
    """Returns something else than what it stands for."""
    return torch.zeros(2, 3)


# The API, where it is, its name there, and what is there instead; without that, it is gone or hidden from this library.
LAYERS = peft_internals.ADAPTER_LAYERS
BROKEN: list[tuple[PrivateApi, Any, str, Any]] = [
    (torch_internals.FLOAT16_PACKING, torch.ops.quantized, "linear_prepack_fp16", other_signature),
    (torch_internals.FLOAT16_PACKING, torch.ops.quantized, "linear_dynamic_fp16", other_result),
    (torch_internals.PACKING, torch.ops.mkldnn, "_reorder_linear_weight", other_signature),
    (torch_internals.PACKING, torch.ops.mkldnn, "_linear_pointwise", other_result),
    (torch_internals.BFLOAT16_PRODUCTS, torch.ops.mkldnn, "_is_mkldnn_bf16_supported", other_signature),
    (torch_internals.VERSION_COUNTERS, torch.Tensor, "_version", Hidden),
    (torch_internals.CONTAINERS, nn.Module, "_modules", Hidden),
    (torch_internals.CONTAINERS, nn.Module, "_parameters", Hidden),
    (torch_internals.CONTAINERS, nn.Module, "_buffers", Hidden),
    (torch_internals.HOOKS, nn.Module, "_forward_hooks", Hidden),
    (torch_internals.HOOKS, nn.Module, "_forward_pre_hooks", Hidden),
    *[
        (LAYERS, LoraLayer, name, Hidden)
        for name in ("lora_A", "lora_B", "lora_bias", "lora_dropout", "r", "scaling", "base_layer")
    ],
    *[
        (LAYERS, LoraLayer, name, Hidden)
        for name in ("active_adapters", "disable_adapters", "merged", "merged_adapters")
    ],
    (LAYERS, peft.tuners.lora, "LoraLayer", None),
    (LAYERS, peft.tuners.lora, "Linear", None),
    (LAYERS, peft.tuners.tuners_utils, "BaseTunerLayer", None),
    (peft_internals.ACTIVATED_VARIANT, peft.tuners.lora.variants, "ALoraLinearVariant", None),
    (peft_internals.TARGETS, LoraModel, "targeted_module_names", Hidden),
    (transformers_internals.ATTENTION_NAME, transformers.PretrainedConfig, "_attn_implementation", Hidden),
    (transformers_internals.DECODER_LAYER, modeling_llama, "LlamaDecoderLayer", None),
    *[
        (transformers_internals.DECODER_LAYER, modeling_llama.LlamaDecoderLayer, name, Hidden)
        for name in ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
    ],
]
ELSEWHERE = {
    peft_internals.ACTIVATION,
    peft_internals.EMBEDDING_NAMES,
    transformers_internals.CACHE_LAYER,
    numba_internals.THREAD_POOLS,
    numba_internals.CACHE,
    trl_internals.TRAINER,
}
OF_KERNELS = {
    torch_internals.FLOAT16_PACKING,
    torch_internals.PACKING,
    torch_internals.BFLOAT16_PRODUCTS,
    torch_internals.HOOKS,
    peft_internals.ACTIVATED_VARIANT,
    transformers_internals.DECODER_LAYER,
}
IN_BFLOAT16 = {torch_internals.PACKING, torch_internals.BFLOAT16_PRODUCTS}


def forget_checks():
    for api in DECLARED:
        for name in ("works", "_fault"):
            vars(api).pop(name, None)


@pytest.fixture(autouse=True)
def _fresh_checks(monkeypatch):
    """Results of checks in other tests do not count here, and those of these tests do not count elsewhere."""
    monkeypatch.setattr(verification, "FINDINGS", {})
    forget_checks()
    yield
    forget_checks()


def break_(monkeypatch, where, name, instead):
    if instead is None and isinstance(where, ModuleType):
        monkeypatch.setitem(sys.modules, where.__name__, HidingModule(where, name))
    elif instead is None:
        monkeypatch.delattr(where, name)
    else:
        monkeypatch.setattr(where, name, Hidden(where, name) if instead is Hidden else instead, raising=False)


def check_warning(caplog, api):
    """Exactly one warning, which names the API and the installed version."""
    (record,) = [record for record in caplog.records if record.name == "llamagym.models.private_apis"]
    assert record.levelno == logging.WARNING
    assert api.name in record.message
    assert f"{api.package} {version(api.package)}" in record.message
    assert changed_apis() == [f"{api.package} {version(api.package)}: {api.name}"]


def act_and_learn(agent):
    for _ in range(2):
        agent.act_batch(["a", "b"])
        agent.assign_rewards([1.0, -1.0])
        agent.terminate_episodes([0, 1])
    assert agent.policy.num_updates == 1
    assert all(weight.isfinite().all() for weight in agent.policy.model.parameters())


@pytest.mark.parametrize("kind", [WordAgent, ChoiceAgent])
@pytest.mark.parametrize(("api", "where", "name", "instead"), BROKEN, ids=[f"{b[0].package}-{b[2]}" for b in BROKEN])
def test_acts_and_learns_without_a_private_api(monkeypatch, caplog, api, where, name, instead, kind):
    if api in OF_KERNELS and not is_enabled():
        pytest.skip("kernels use it, which LLAMAGYM_CPU_KERNELS=0 switches off")
    dtype = torch.bfloat16 if api in IN_BFLOAT16 else torch.float32
    if api in IN_BFLOAT16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this processor does not multiply packed bfloat16 weights")
    # The registry's models let the agent decide how many layers LoRA adapts, while it is fresh.
    model = tiny_model("llama")
    for weight in model.parameters():
        weight.data = weight.data if weight.requires_grad else weight.data.to(dtype)
    tokenizer = tiny_tokenizer("llama")
    break_(monkeypatch, where, name, instead)
    sizes = {"batch_size": 4, "mini_batch_size": 4}
    agent = kind(model, tokenizer, None, {"max_new_tokens": 4}, sizes, context="turn", seed=0)
    act_and_learn(agent)
    check_warning(caplog, api)


def test_every_private_api_has_a_test_that_breaks_it():
    assert {row[0] for row in BROKEN} | ELSEWHERE == set(DECLARED)


def test_every_private_api_is_declared():
    """Names with an underscore and imports from inside a package, in the files that may have them."""
    declared = " ".join(api.name for api in DECLARED)
    for path in LIBRARY.rglob("*_internals.py"):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        names = {node.attr for node in nodes if isinstance(node, ast.Attribute) and not is_own(node)}
        names |= {node.value for node in nodes if isinstance(node, ast.Constant) and is_name(node.value)}
        private = {name for name in names if name.startswith("_") and not name.startswith("__")}
        imported = [node for node in nodes if isinstance(node, ast.ImportFrom) and is_deep(node)]
        private |= {alias.name for node in imported for alias in node.names}
        assert [name for name in private if name not in declared] == [], path.name


def is_own(node):
    return isinstance(node.value, ast.Name) and node.value.id == "self"


def is_deep(node):
    """Whether an import is from inside one of the packages, and not documented."""
    packages = {api.package for api in DECLARED}
    parts = (node.module or "").split(".")
    return not node.level and len(parts) > 1 and parts[0] in packages and node.module not in DOCUMENTED


def is_name(value):
    return isinstance(value, str) and value.isidentifier()


@pytest.mark.parametrize("kind", [AttributeError, TypeError])
def test_a_check_that_raises_counts_as_a_change(caplog, kind, request):
    def check():
        raise kind("gone")

    api = PrivateApi("torch", "some name", "Something takes longer.", check)
    request.addfinalizer(lambda: DECLARED.remove(api))
    assert [api.works, api.works] == [False, False]
    check_warning(caplog, api)
    with pytest.raises(ModelLoadError, match=r"some name \(\w+: gone\)"):
        api.require()


@pytest.mark.kernels
def test_layers_that_compute_something_else_run_unfused(monkeypatch, caplog):
    monkeypatch.setattr(fused_layer.FusedLayer, "run", lambda self, hidden, *_, **__: 2 * hidden)
    act_and_learn(make_agent(context="turn"))
    check_warning(caplog, transformers_internals.DECODER_LAYER)


def test_changed_weights_are_detected_by_checksum(monkeypatch):
    break_(monkeypatch, torch.Tensor, "_version", Hidden)
    break_(monkeypatch, nn.Module, "_modules", Hidden)
    policy = make_agent().policy
    seen = [policy.weights_version]
    with torch.no_grad():
        next(policy.model.pretrained_model.parameters()).mul_(1.5)
    seen.append(policy.weights_version)
    policy.model.v_head.added = nn.Identity()
    seen.append(policy.weights_version)
    assert len(set(seen)) == 3
    assert policy.weights_version == seen[-1]


def test_changed_adapters_are_detected_by_their_attributes(monkeypatch):
    break_(monkeypatch, LoraLayer, "r", Hidden)
    agent = make_agent(activated=False)
    model: Any = agent.policy.model.pretrained_model
    seen = [agent.policy.weights_version]
    for change in (
        model.base_model.disable_adapter_layers,
        model.base_model.enable_adapter_layers,
        model.merge_adapter,
    ):
        change()
        seen.append(agent.policy.weights_version)
    assert len(set(seen)) == 4
    with pytest.raises(ModelLoadError, match="lora_A"):
        freeze_and_extend_(model)


def test_rejects_an_activated_lora_that_cannot_be_switched(monkeypatch, caplog):
    break_(monkeypatch, LoraLayer, "lora_variant", Hidden)
    with pytest.raises(ModelLoadError, match=f"peft {version('peft')} has changed a private API, LoraLayer.lora_v"):
        make_agent()
    act_and_learn(make_agent(activated=False))
    assert not caplog.records


def test_the_registry_falls_back_to_a_plain_lora(monkeypatch, caplog, tmp_path):
    tiny_base_model("llama").save_pretrained(tmp_path)
    tiny_tokenizer("llama").save_pretrained(tmp_path)
    break_(monkeypatch, LoraLayer, "lora_variant", Hidden)
    model, *_ = load_model_and_tokenizer(str(tmp_path), device="cpu")
    assert model.pretrained_model.active_peft_config.alora_invocation_tokens is None
    check_warning(caplog, peft_internals.ACTIVATION)


def test_saves_adapters_without_peft_embedding_names(monkeypatch, caplog, tmp_path):
    break_(monkeypatch, peft.utils.constants, "EMBEDDING_LAYER_NAMES", None)
    tiny_model("llama").save_pretrained(tmp_path)
    check_warning(caplog, peft_internals.EMBEDDING_NAMES)
    base = tiny_base_model("llama")
    assert AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path, base_model=base).is_peft_model


@pytest.mark.parametrize("instead", [other_signature, other_result])
def test_rejects_changed_cache_layers(monkeypatch, instead):
    monkeypatch.setattr(transformers.DynamicLayer, "update", instead)
    with pytest.raises(ModelLoadError, match=f"transformers {version('transformers')} has changed .* DynamicLayer"):
        make_agent()


@pytest.mark.parametrize("name", ["enable_caching", "stats"])
def test_kernels_run_without_a_cache(monkeypatch, caplog, name):
    monkeypatch.delattr(numba.core.dispatcher.Dispatcher, name)
    kernel = numba.njit(lambda number: number + 1)
    numba_internals.cache_on_disk(kernel)
    assert numba_internals.cache_folder(kernel) is None
    assert kernel(1) == 2
    check_warning(caplog, numba_internals.CACHE)


def test_kernels_run_in_one_thread_without_a_thread_pool(monkeypatch, caplog):
    monkeypatch.setattr(numba_internals, "_POOLS", "numba.gone")
    assert [numba_internals.has_thread_pool(), numba_internals.has_thread_pool()] == [False, False]
    check_warning(caplog, numba_internals.THREAD_POOLS)


@pytest.mark.parametrize(
    ("where", "name", "instead"),
    [
        (trl.SFTTrainer, "compute_loss", other_signature),
        (transformers.Trainer, "floating_point_ops", None),
        (transformers.TrainingArguments, "place_model_on_device", None),
        (transformers.TrainingArguments, "n_gpu", property(lambda config: 1)),
    ],
)
def test_rejects_a_changed_trainer_before_training(monkeypatch, tmp_path, where, name, instead):
    agent = make_agent()
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "demonstrations.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    before = [weight.clone() for weight in agent.policy.model.parameters()]
    break_(monkeypatch, where, name, instead)
    with pytest.raises(ModelLoadError, match=f"trl {version('trl')} has changed"):
        agent.sft_from_jsonl(tmp_path / "demonstrations.jsonl")
    assert all(map(torch.equal, before, agent.policy.model.parameters()))
