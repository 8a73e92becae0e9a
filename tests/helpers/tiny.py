"""Tiny random models and tokenizers of every registry family, built without a network.

The classes and the templates' habits are the real ones: grouped key-value heads, sliding windows, tied embeddings,
several end tokens, refused system roles, thinking that is dropped from earlier turns. Only the sizes are small.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    LlamaConfig,
    Phi3Config,
    PhiConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from llamagym.models.registry import FAMILIES, PLAIN_CHAT_TEMPLATE, lookup_by_architecture, lora_config
from llamagym.models.value_head import AutoModelForCausalLMWithValueHead
from llamagym.text.chat_template import invocation_tokens

__all__ = ["FAMILIES", "tiny_base_model", "tiny_config", "tiny_model", "tiny_tokenizer"]

_CHATML_TURNS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _chatml(default_system: str) -> str:
    """ChatML that opens with `default_system` where the conversation brings no system message."""
    opening = f"<|im_start|>system\n{default_system}<|im_end|>\n"
    return "{% if messages[0].role != 'system' %}{{ '" + opening + "' }}{% endif %}" + _CHATML_TURNS


# As Llama 3: headers, content stripped, each message closed by <|eot_id|>.
_LLAMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# As Phi-3: a conversation that is not continued is closed with the end-of-text token.
_PHI3 = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
# As Gemma: no system role, strict alternation, the assistant is called model, content stripped.
_GEMMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
    "{{ m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
# As Qwen3: thinking stays only in replies after the last user message, and the last message always shows a thinking
# block, an empty one if need be; enable_thinking=False opens the reply with an empty block.
_QWEN3 = (
    "{% set ns = namespace(last_user=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last_user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set thought, answer = '', m.content %}"
    "{% if '</think>' in m.content %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set answer = m.content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>assistant\n' }}"
    "{% if loop.index0 > ns.last_user and (loop.last or thought) %}"
    "{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}"
    "{{ answer + '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{% endif %}"
)

# Per family: chat template, bos, eos, pad, further special tokens. Ids follow the 256 bytes in the order named here.
_TOKENIZERS: dict[str, tuple[str | None, str | None, str, str, tuple[str, ...]]] = {
    "llama": (
        _LLAMA,
        "<|begin_of_text|>",
        "<|eot_id|>",
        "<|end_of_text|>",
        ("<|start_header_id|>", "<|end_header_id|>"),
    ),
    "phi": (None, "<|endoftext|>", "<|endoftext|>", "<|endoftext|>", ()),
    "phi3": (_PHI3, "<s>", "<|endoftext|>", "<|endoftext|>", ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>")),
    "smollm": (_chatml("You are a helpful AI assistant."), "<|im_start|>", "<|im_end|>", "<|im_end|>", ()),
    "qwen2": (_chatml("You are a helpful assistant."), None, "<|im_end|>", "<|endoftext|>", ("<|im_start|>",)),
    "qwen3": (_QWEN3, None, "<|im_end|>", "<|endoftext|>", ("<|im_start|>",)),
    "gemma": (_GEMMA, "<bos>", "<end_of_turn>", "<pad>", ("<start_of_turn>", "<eos>")),
}
# Further ids that end a reply, beside the tokenizer's eos, as the family's generation_config.json lists them.
_MORE_END_TOKENS = {
    "llama": ("<|end_of_text|>",),
    "phi3": ("<|end|>",),
    "qwen2": ("<|endoftext|>",),
    "gemma": ("<eos>",),
}


def tiny_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges: one token a byte, so any text works; special tokens come on top.

    Args:
        family: One of `FAMILIES`. "phi" has no template of its own and gets the registry's plain one, as loading does.
    """
    template, bos, eos, pad, more = _TOKENIZERS[family]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    specials = dict.fromkeys(token for token in (bos, eos, pad, *more) if token)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=bos, eos_token=eos, pad_token=pad, model_max_length=2048
    )
    tokenizer.chat_template = template or PLAIN_CHAT_TEMPLATE
    return tokenizer


def tiny_config(family: str) -> PretrainedConfig:
    """A configuration of the family's real architecture: 4 layers, width 32, 4 heads of 8, 2 key-value heads."""
    tokenizer = tiny_tokenizer(family)
    common: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 2048,
        # Ten times the usual spread: logits differ visibly, so a wrong position or mask shows.
        "initializer_range": 0.2,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if family == "phi":
        common["partial_rotary_factor"] = 0.5
        return PhiConfig(**common, tie_word_embeddings=False)
    common["num_key_value_heads"] = 2
    if family == "llama":
        return LlamaConfig(**common, tie_word_embeddings=False)
    if family == "phi3":
        return Phi3Config(**common, sliding_window=64, tie_word_embeddings=False)
    if family == "smollm":
        # Nothing but the name tells a SmolLM from a Llama.
        common["name_or_path"] = "tiny-smollm"
        return LlamaConfig(**common, tie_word_embeddings=True)
    if family == "qwen2":
        # Layers 2 and 3 see a window of 64 tokens, layers 0 and 1 everything.
        window: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}
        return Qwen2Config(**common, **window, tie_word_embeddings=True)
    if family == "qwen3":
        return Qwen3Config(**common, head_dim=8, tie_word_embeddings=True)
    if family == "gemma":
        return GemmaConfig(**common, head_dim=8, tie_word_embeddings=True)
    raise ValueError(f"unknown family {family!r}; expected one of {FAMILIES}.")


def tiny_base_model(family: str, seed: int = 0) -> Any:
    """The bare language model of `tiny_config`, in evaluation mode; the global random state is left alone.

    float32, but float16 holds the weights, as it holds those of published models.
    """
    tokenizer = tiny_tokenizer(family)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.float32)
        for weight in model.parameters():
            weight.data = weight.data.half().float()
    ends = (tokenizer.eos_token, *_MORE_END_TOKENS.get(family, ()))
    model.generation_config.eos_token_id = [tokenizer.convert_tokens_to_ids(token) for token in ends]
    return model.eval()


def tiny_model(family: str, seed: int = 0, activated: bool = True) -> AutoModelForCausalLMWithValueHead:
    """The language model with the registry's LoRA and a value head, as `load_model_and_tokenizer` makes it.

    LoRA's B matrices are zero, as ever at the start: the adapted model equals its base.

    Args:
        family: One of `FAMILIES`.
        seed: Of the random weights, LoRA's A matrices included.
        activated: Whether LoRA acts from the reply on, as the registry's does, or on every token.
    """
    return copy.deepcopy(_made(family, seed, activated))


@cache
def _made(family: str, seed: int, activated: bool) -> AutoModelForCausalLMWithValueHead:
    """The model that `tiny_model` copies: a copy takes a third of the time."""
    invocation = invocation_tokens(tiny_tokenizer(family)) if activated else None
    base = tiny_base_model(family, seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft_config = lora_config(lookup_by_architecture(base.config), base.config, invocation)
        model = AutoModelForCausalLMWithValueHead.from_pretrained(base, peft_config)
    model.lora_depth_is_open = True
    return model
