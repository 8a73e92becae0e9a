"""Undocumented APIs of dependencies that the library uses; one test each, so that a failure names the API."""

from __future__ import annotations

import ast
from pathlib import Path

import numba
import numpy as np
import pytest
import torch
from torch import nn

import llamagym
from llamagym.engine.cpu import fused_layer, numba_internals
from llamagym.learners import trl_internals
from llamagym.models import peft_internals, torch_internals, transformers_internals
from tests.helpers.rounding import assert_within_rounding
from tests.helpers.tiny import tiny_base_model, tiny_model, tiny_tokenizer

# Attributes with an underscore that belong to Python or to PyTorch's documented way to subclass.
OURS = {"_asdict", "_exit", "_replace"}


def test_gguf_progress_bar_is_hidden_and_restored(monkeypatch):
    from transformers import modeling_gguf_pytorch_utils as reader

    usual = reader.tqdm
    with transformers_internals.gguf_progress_hidden():
        assert reader.tqdm([1]).disable
    assert reader.tqdm is usual
    # Of a version without the bar nothing is expected.
    monkeypatch.delattr(reader, "tqdm")
    with transformers_internals.gguf_progress_hidden():
        pass
    assert not hasattr(reader, "tqdm")


def test_recognizes_hooks_that_capture_outputs():
    model = tiny_base_model("llama")
    layer = model.model.layers[0]
    layer.register_forward_hook(lambda *_: None)
    model(torch.tensor([[1, 2]]), output_hidden_states=True, output_attentions=False)
    hooks = list(layer._forward_hooks.values())
    assert [transformers_internals.captures_outputs(hook) for hook in hooks] == [False, True]


def test_lora_is_removed_from_other_layers():
    model = tiny_model("llama").pretrained_model
    peft_internals.restrict_lora_to_layers_(model, {3})
    found = {name for name, module in model.named_modules() if hasattr(module, "lora_A")}
    assert found == {f"base_model.model.{name}" for name in model.base_model.targeted_module_names}
    assert {name.split(".layers.")[1][0] for name in found} == {"3"}
    assert len(found) == 3


@pytest.mark.parametrize(
    "attribute", ["active_adapters", "lora_A", "lora_B", "lora_bias", "lora_dropout", "lora_variant"]
)
def test_lora_layers_have(attribute):
    layers = peft_internals.lora_layers(tiny_model("llama").pretrained_model)
    assert layers
    assert all(hasattr(layer, attribute) for layer in layers)


@pytest.mark.parametrize("attribute", ["base_layer", "disable_adapters", "merged", "merged_adapters", "r", "scaling"])
def test_adapted_layers_have(attribute):
    layers = peft_internals.lora_layers(tiny_model("llama").pretrained_model)
    assert all(hasattr(layer, attribute) for layer in layers)


def test_an_activated_lora_has_a_variant_and_a_plain_one_has_none():
    for activated in (True, False):
        layers = peft_internals.lora_layers(tiny_model("llama", activated=activated).pretrained_model)
        assert all(bool(layer.lora_variant) == activated for layer in layers)


def test_active_lora_is_counted_and_its_rank_doubled():
    model = tiny_model("llama").pretrained_model
    pairs = peft_internals.lora_matrices(model)
    assert len(pairs) == peft_internals.count_active_lora(model) > 0
    ranks = [dict(layer.r) for layer in peft_internals.lora_layers(model)]
    peft_internals.double_ranks_(model)
    assert [layer.r for layer in peft_internals.lora_layers(model)] == [{"default": 2 * of["default"]} for of in ranks]


def test_adapters_by_module_finds_the_adapted_layer():
    model = tiny_model("llama").pretrained_model
    adapters = peft_internals.adapters_by_module(model)
    for layer in peft_internals.lora_layers(model):
        assert adapters[peft_internals.base_of(layer)] is layer
        assert peft_internals.merged_into(layer) == ()


def test_merged_adapters_are_detected():
    model = tiny_model("llama", activated=False).pretrained_model
    model.merge_adapter()
    assert all(peft_internals.merged_into(layer) == ("default",) for layer in peft_internals.lora_layers(model))


def test_adapter_state_changes_with_what_adapters_do():
    model = tiny_model("llama", activated=False).pretrained_model
    states = []
    for change in (
        lambda: None,
        model.merge_adapter,
        model.unmerge_adapter,
        model.base_model.disable_adapter_layers,
        model.base_model.enable_adapter_layers,
        lambda: [layer.scale_layer(2.0) for layer in peft_internals.lora_layers(model)],
    ):
        change()
        states.append([peft_internals.adapter_state(layer) for layer in peft_internals.tuner_layers(model)])
    usual, merged, unmerged, disabled, enabled, scaled = states
    assert usual
    assert usual == unmerged == enabled
    assert all(state != usual for state in (merged, disabled, scaled))


def test_lora_matrices_are_recognized_by_name():
    model = tiny_model("llama").pretrained_model
    names = {id(weight): name for name, weight in model.named_parameters()}
    pairs = peft_internals.lora_matrices(model)
    assert all(peft_internals.is_lora_a(names[id(down.weight)]) for down, _ in pairs)
    assert all(peft_internals.is_lora_b(names[id(up.weight)]) for _, up in pairs)
    assert sum(map(peft_internals.is_lora_weight, names.values())) == 2 * len(pairs) < len(names)


def test_peft_names_embedding_layers():
    assert "embed_tokens" in peft_internals.embedding_layer_names()


def test_the_loss_trainer_uses_the_given_loss(tmp_path):
    model = tiny_model("llama").pretrained_model
    weight = next(weight for weight in model.parameters() if weight.requires_grad)
    before, forward, seen = weight.detach().clone(), model.forward, []

    def loss(rows):
        seen.extend(rows)
        assert not model.training
        return weight.sum()

    with trl_internals.nothing_but_weights_changed(model):
        config = trl_internals.trainer_config(str(tmp_path), num_train_epochs=1, learning_rate=1.0, use_cpu=True)
        trl_internals.LossTrainer(model, tiny_tokenizer("llama"), ["a", "b"], loss, config).train()
    assert sorted(seen) == ["a", "b"]
    assert not torch.equal(weight, before)
    assert model.forward == forward


def test_attention_functions_are_known_by_name():
    config = tiny_model("llama").pretrained_model.config
    assert transformers_internals.attention_name(config) == "sdpa"
    assert transformers_internals.has_attention("sdpa")
    assert not transformers_internals.has_attention("nothing of this name")
    transformers_internals.register_attention("ours", len)
    assert transformers_internals.attention_function("ours") is len
    with transformers_internals.using_attention(config, "ours"):
        assert transformers_internals.attention_name(config) == "ours"
    assert transformers_internals.attention_name(config) == "sdpa"


@pytest.mark.numerical
def test_rotary_embedding_rotates_halves_of_heads():
    query, key = torch.randn(2, 1, 1, 3, 4).unbind()
    angle = torch.rand(1, 3, 2).repeat(1, 1, 2)
    angles = angle.cos(), angle.sin()
    for before, after in ((part, fused_layer.rotate(part, angles)) for part in (query, key)):
        low, high = before.double().chunk(2, -1)
        cosines, sines = angle.cos()[:, None, :, :2], angle.sin()[:, None, :, :2]
        expected = torch.cat([low * cosines - high * sines, high * cosines + low * sines], dim=-1)
        assert_within_rounding(after, expected, torch.float32, 3)


def test_an_initialized_cache_layer_accepts_entries():
    layer = transformers_internals.InitializedLayer(torch.zeros(1, dtype=torch.bfloat16))
    assert (layer.dtype, layer.is_initialized) == (torch.bfloat16, True)
    layer.keys = layer.values = torch.zeros(1, 1, 0, 2, dtype=torch.bfloat16)
    keys, _ = layer.update(*torch.ones(2, 1, 1, 3, 2, dtype=torch.bfloat16).unbind())
    assert keys.shape == (1, 1, 3, 2)


@pytest.mark.numerical
@pytest.mark.parametrize("pack", ["pack", "pack_float16"])
@pytest.mark.kernels
def test_packed_products_equal_plain_ones(pack):
    weight, inputs = torch.randn(6, 4).half().float(), torch.randn(3, 4)
    if not torch_internals.can_pack(weight):
        pytest.skip("this machine does not pack weights")
    product = getattr(torch_internals, pack)(weight)(inputs)
    scale = inputs.double().abs() @ weight.T.double().abs()
    assert_within_rounding(product, inputs.double() @ weight.T.double(), torch.float32, 4, scale)


def test_kernels_read_tensors_by_address_and_are_cached_on_disk(tmp_path, monkeypatch):
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))

    @numba.njit
    def add_one(address, kind):
        numbers = numba.carray(numba_internals.pointer(address), (3,), kind.dtype)
        numbers += 1

    assert numba_internals.cache_folder(add_one) is None
    numba_internals.cache_on_disk(add_one)
    tensor = torch.zeros(3)
    add_one(tensor.data_ptr(), np.empty(0, np.float32))
    assert tensor.tolist() == [1, 1, 1]
    folder = numba_internals.cache_folder(add_one)
    assert folder is not None
    assert list(folder.glob("*.nbc"))


def test_numba_has_threads_that_several_threads_may_use():
    assert numba_internals.has_thread_pool()


def test_in_place_changes_and_hooks_are_detected():
    layer = nn.Linear(2, 2)
    before = torch_internals.versions_of([layer.weight])
    with torch.no_grad():
        layer.weight.add_(1)
    assert torch_internals.versions_of([layer.weight]) > before
    assert layer.weight in torch_internals.containers_of(layer)[1].values()
    assert layer in torch_internals.containers_of(nn.Sequential(layer))[0].values()
    assert not any(torch_internals.forward_hooks_of(layer))
    layer.register_forward_pre_hook(print)
    assert any(torch_internals.forward_hooks_of(layer))


def test_a_shallow_copy_shares_parameters_and_not_modules():
    body = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    copied = torch_internals.shallow_copy(body)
    copied[1] = nn.Identity()
    assert isinstance(body[1], nn.Linear)
    assert copied[0] is body[0]


def test_only_internals_files_use_private_attributes():
    """Of a name that another object gives: `self._x` and a file's own `_x` are ours."""
    library = Path(llamagym.__file__).parent
    files = [path for path in library.rglob("*.py") if not path.name.endswith("_internals.py")]
    ours = {
        name
        for path in files
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for name in [
            *([node.attr] if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) else []),
            *([node.name] if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else []),
            *([node.target.id] if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) else []),
            *(
                [target.id for target in node.targets if isinstance(target, ast.Name)]
                if isinstance(node, ast.Assign)
                else []
            ),
        ]
    }
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                assert node.attr in ours | OURS, f"{path.relative_to(library)}, line {node.lineno}: {node.attr}"
