"""Saves an agent as a folder that plain transformers and PEFT load: weights, tokenizer, options, model card.

The card names the settings and the results, and shows code that uses the agent without this library.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedTokenizerBase

from ..errors import CheckpointError, ConfigError
from ..models.gguf_adapter import GGUF_ADAPTER, GGUF_BASE, GGUF_MODEL, GGUF_PRESET, write_gguf_adapter
from ..models.loading import embedded_gguf, load_model_and_tokenizer, resolve_device
from ..models.lora import is_activated
from ..models.registry import EMBEDDED_NAME, GenerationConfig, lookup
from ..models.value_head import AutoModelForCausalLMWithValueHead
from ..options import json_safe
from ..policy.saved import choices_record
from ..saving.atomic import verify
from ..saving.paths import require_files_inside
from ..saving.state_files import read_state, write_state
from ..text.chat_template import end_ids
from .actor import Actor
from .text_interface import TextInterface

KIND = "agent"
GGUF_KIND = "gguf-agent"
STATE = "agent"


def write_export(
    agent: TextInterface,
    actor: Actor,
    folder: Path,
    options: Mapping[str, Any],
    environment: str = "",
    results: Mapping[str, Any] | None = None,
    merged: bool = False,
) -> None:
    """Writes an agent's files into a folder.

    Args:
        agent: The agent.
        actor: The agent's actor.
        folder: An empty folder.
        options: The agent's constructor options as JSON values.
        environment: Name of the environment, for the card.
        results: Measurements by name, for the card.
        merged: Whether to merge a LoRA into the weights and write these.

    Raises:
        ConfigError: `merged` is True, and there is no adapter that can be merged.
    """
    policy = actor.policy
    tokenizer = actor.tokenizer
    model = _merged(policy.model) if merged else policy.model
    pretrained: Any = model.pretrained_model
    model.write_files(folder)
    tokenizer.save_pretrained(str(folder))
    dtype = str(pretrained.dtype).removeprefix("torch.")
    state = {
        "options": options,
        **choices_record(policy),
        "rng": policy.rng.get_state(),
        "class": type(agent).__name__,
        "dtype": dtype,
        "device": policy.device.type,
    }
    write_state(folder, STATE, state)
    ends = end_ids(pretrained, tokenizer)
    calibration = policy.calibration
    card = Card(
        agent=type(agent).__name__,
        base=str(pretrained.active_peft_config.base_model_name_or_path) if model.is_peft_model else "",
        dtype=dtype,
        system_prompt=agent.get_system_prompt(),
        prefix=options["response_prefix"],
        generation=policy.generation,
        end_ids=ends,
        closing_id=actor.chat_template.closing_id(ends),
        choices=[(str(tokenizer.decode(list(ids))), ids) for ids in policy.offered],
        prior=calibration.prior if calibration else {},
        deviation=calibration.deviation if calibration else 1.0,
        offers_choices=type(agent).get_action_choices is not TextInterface.get_action_choices,
        environment=environment,
        settings={name: value for name, value in options.items() if value not in (None, "", {})},
        results=results or {},
    )
    (folder / "README.md").write_text(card.text(), encoding="utf-8")


def write_gguf(agent: TextInterface, actor: Actor, folder: Path) -> None:
    """Writes an agent's adapter, and its base where that is the embedded model, as GGUF files into a folder.

    Args:
        agent: The agent.
        actor: The agent's actor.
        folder: An empty folder.

    Raises:
        ConfigError: The adapter cannot be written as GGUF.
    """
    model = actor.policy.model
    write_gguf_adapter(model, folder / GGUF_ADAPTER)
    pretrained: Any = model.pretrained_model
    config = pretrained.active_peft_config
    prefix = actor.hooks.response_prefix
    if prefix and is_activated(pretrained):
        _reject_invocation(actor.tokenizer, prefix, config.alora_invocation_tokens)
    base = str(config.base_model_name_or_path or "")
    entry = lookup(base)
    has_base = entry is not None and entry.name == EMBEDDED_NAME
    if has_base:
        shutil.copyfile(embedded_gguf(), folder / GGUF_BASE)
    preset = f"version = 1\n\n[{GGUF_MODEL}]\nmodel = {GGUF_BASE}\nlora = {GGUF_ADAPTER}\n"
    (folder / GGUF_PRESET).write_text(preset, encoding="utf-8")
    text = _gguf_text(agent, actor, None if has_base else base)
    (folder / "README.md").write_text(text, encoding="utf-8")


def _reject_invocation(tokenizer: Any, prefix: str, invocation_tokens: Sequence[int]) -> None:
    """Rejects a prefix of replies in which an activated LoRA's invocation tokens occur.

    llama.cpp would apply the adapter from there on, not from the generation prompt on.
    """
    ids = tokenizer(prefix, add_special_tokens=False)["input_ids"]
    count = len(invocation_tokens)
    for start in range(len(ids) - count + 1):
        if ids[start : start + count] == list(invocation_tokens):
            raise ConfigError(
                f"response_prefix={prefix!r} contains the adapter's invocation tokens, "
                f"{tokenizer.decode(invocation_tokens)!r}, so llama.cpp would apply the adapter to other tokens than "
                "learning did. Train with a plain LoraConfig, or with another prefix."
            )


def _gguf_text(agent: TextInterface, actor: Actor, missing_base: str | None) -> str:
    """The README of a folder of GGUF files; `missing_base` is the base's name if the folder lacks it."""
    generation = actor.policy.generation
    lines = [f"# {_plain(type(agent).__name__)}", "", "An agent trained with llamagym, for llama.cpp:", ""]
    lines += ["```sh", f"llama-server -m {GGUF_BASE} --lora {GGUF_ADAPTER} --jinja", "```", ""]
    lines += [
        f"To write replies while the agent learns: `llama-server --models-preset {GGUF_PRESET} --parallel 1`.",
        "",
    ]
    if missing_base is not None:
        # A folder's name only: its path says more about this machine than about the model.
        name = Path(missing_base).name if Path(missing_base).is_absolute() else missing_base
        known = f", {_plain(name)}," if name else ""
        lines += [
            f"`{GGUF_BASE}` is not included. It is the model that was trained{known} as a GGUF file: the file that it",
            "was loaded from, a download, or what llama.cpp's `convert_hf_to_gguf.py` makes of it.",
            "",
        ]
    system_prompt = agent.get_system_prompt()
    if system_prompt:
        lines += ["The first message of every conversation:", ""]
        lines += ["```json", _message("system", system_prompt), "```", ""]
    tokens = f"Replies have at most {generation.max_new_tokens} tokens"
    sampling = f"sampled at temperature {generation.temperature}" if generation.do_sample else "the most likely ones"
    lines.append(f"{tokens}, {sampling}.")
    prefix = actor.hooks.response_prefix
    if prefix:
        lines += ["", "Every reply begins with:", "", "```json", _literal(prefix), "```"]
    if type(agent).get_action_choices is not TextInterface.get_action_choices:
        lines += [
            "",
            "This agent can offer choices. llama.cpp knows neither them nor their calibration, and writes free text:",
            "restrict it with a grammar, and expect other probabilities.",
        ]
    return "\n".join(lines) + "\n"


def read_export(
    folder: Path, device: str | torch.device, dtype: str | torch.dtype, model: AutoModelForCausalLMWithValueHead | None
) -> tuple[AutoModelForCausalLMWithValueHead, PreTrainedTokenizerBase, dict[str, Any]]:
    """Reads a folder that `write_export` wrote.

    Args:
        folder: The folder.
        device: As for `load_model_and_tokenizer`.
        dtype: As for `load_model_and_tokenizer`, but "auto" is the saved dtype, on a device of the same type.
        model: The model, if it cannot be loaded by its base's name.

    Returns:
        Model, tokenizer, and the agent's state.

    Raises:
        CheckpointError: The folder is damaged, something else, or of a later version.
    """
    verify(folder, KIND)
    require_files_inside(folder)
    state = read_state(folder, STATE)
    names = {"model", "tokenizer", "device", "sft_warm_start"} & state["options"].keys()
    if names:
        raise CheckpointError(f"{str(folder / STATE)!r} has options that are never saved: {sorted(names)}.")
    tokenizer: Any
    if model is not None:
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        return model, tokenizer, state
    if dtype == "auto" and resolve_device(device).type == state.get("device"):
        dtype = str(state["dtype"])
    loaded, tokenizer, _ = load_model_and_tokenizer(folder, device, dtype)
    return loaded, tokenizer, state


def _merged(model: AutoModelForCausalLMWithValueHead) -> AutoModelForCausalLMWithValueHead:
    """Returns a copy of a model whose LoRA is merged into its weights.

    Raises:
        ConfigError: There is no adapter that can be merged.
    """
    if not model.is_peft_model:
        raise ConfigError("merged=True, but there is no adapter to merge: all weights are the model's own. Drop it.")
    if is_activated(model.pretrained_model) or getattr(model.pretrained_model, "is_quantized", False):
        raise ConfigError(
            "merged=True, but this adapter cannot be merged: an activated LoRA changes replies and leaves what comes "
            "before them alone, and a quantized base would be rounded again. Drop it, and load the adapter with PEFT."
        )
    copied: Any = deepcopy(model)
    copied.pretrained_model = copied.pretrained_model.merge_and_unload()
    result: AutoModelForCausalLMWithValueHead = copied
    return result


# Note for the card of an agent that has not offered choices yet.
_NO_CHOICE_YET = (
    "Its class can offer choices, but had offered none when it was saved, so the lines below write free text. How "
    "likely each choice is depends on a prior, which is measured on the first observations that offer choices. Let the "
    "agent choose once and save it again: this card then shows the lines for choices."
)
# Characters that have a meaning in a line of Markdown, those of links and mentions included.
_MARKUP = re.compile(r"[\\`*_\[\]<>|~&#$!:@]|(?<=www)\.")
# Maximum length of a name or value on the card.
_MAX_CARD_LENGTH = 500


@dataclass(frozen=True)
class Card:
    """Facts about an agent, and their text in Markdown.

    Attributes:
        agent: Name of the agent's class.
        base: Name or folder of the base model; empty for a model without an adapter.
        dtype: Dtype of the base model's weights, such as bfloat16.
        system_prompt: First message of every conversation.
        prefix: Fixed text that every reply begins with.
        generation: How replies are sampled.
        end_ids: The token ids that end a reply.
        closing_id: The end id that closes a choice.
        choices: Text and token ids of each choice that was ever offered.
        prior: Prior log-probability of a choice's token, by the token ids up to it, where -1 stands for the end of a
            choice; empty without calibration.
        deviation: Divisor of the differences from the prior.
        offers_choices: Whether the agent's class offers choices; otherwise replies are free text.
        environment: Name of the environment.
        settings: Options of the agent that are not empty.
        results: Measurements by name.
    """

    agent: str
    base: str
    dtype: str
    system_prompt: str
    prefix: str
    generation: GenerationConfig
    end_ids: Sequence[int]
    closing_id: int
    choices: Sequence[tuple[str, tuple[int, ...]]]
    prior: Mapping[tuple[int, ...], float]
    deviation: float
    offers_choices: bool
    environment: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    results: Mapping[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        """Returns the card in Markdown, with the hub's metadata on top."""
        lines = ["---", f"library_name: {'peft' if self.base else 'transformers'}", "pipeline_tag: text-generation"]
        if self.base:
            # A JSON string is a YAML string.
            lines.append(f"base_model: {json.dumps(self.base)}")
        lines += ["tags:", "- reinforcement-learning", "- llamagym", "---", ""]
        where = f" in {_plain(self.environment)}" if self.environment else ""
        lines += [f"# {_plain(self.agent)}", ""]
        lines += [f"A language model that learned by acting{where}, trained with llamagym.", ""]
        if self.results:
            lines += ["## Results", "", *_table(self.results)]
        if self.settings:
            lines += ["## Settings", "", *_table(self.settings)]
        lines += ["## Use", "", "With llamagym, and the class that formats its observations:", ""]
        name = self.agent if self.agent.isidentifier() else "YourAgent"
        lines += ["```python", f'agent = {name}.load("path/to/this/folder")', "agent.eval()", "```", ""]
        if self.offers_choices and not self.choices:
            lines += [_NO_CHOICE_YET, ""]
        lines += ["Without:", "", "```python", *self._code(), "```", ""]
        return "\n".join(lines)

    def _code(self) -> list[str]:
        """Returns lines that load the model and sample one reply, given `folder` and `observation`."""
        lines = []
        if self.choices:
            lines += ["import functools", ""]
        lines.append("import torch")
        if self.base:
            lines.append("from peft import PeftModel")
            base = f'AutoModelForCausalLM.from_pretrained({self.base!r}, dtype="{self.dtype}")'
            load = f"PeftModel.from_pretrained({base}, folder)"
        else:
            load = f'AutoModelForCausalLM.from_pretrained(folder, dtype="{self.dtype}")'
        lines += [
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            "tokenizer = AutoTokenizer.from_pretrained(folder)",
            f"model = {load}.eval()",
            f"messages = [{_message('system', self.system_prompt)}, " if self.system_prompt else "messages = [",
            '    {"role": "user", "content": observation}]',
            "options = dict(tokenize=False, add_generation_prompt=True, enable_thinking=False)",
            f"text = tokenizer.apply_chat_template(messages, **options) + {_literal(self.prefix)}",
            'prompt = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids',
        ]
        lines += self._choice_code() if self.choices else self._free_text_code()
        return lines

    def _free_text_code(self) -> list[str]:
        """Returns lines that sample a reply in free text."""
        config = self.generation
        options: dict[str, Any] = {"max_new_tokens": config.max_new_tokens, "do_sample": config.do_sample}
        if config.do_sample:
            options |= {"temperature": config.temperature, "top_k": config.top_k, "top_p": config.top_p}
        # Options that are not named come from the base's generation_config.json, which may set a repetition penalty.
        options |= {"repetition_penalty": 1.0, "eos_token_id": list(self.end_ids)}
        return [
            f"how = dict({', '.join(f'{name}={value!r}' for name, value in options.items())})",
            "ids = model.generate(input_ids=prompt, **how)",
            "reply = tokenizer.decode(ids[0, prompt.shape[1] :], skip_special_tokens=True)",
        ]

    def _choice_code(self) -> list[str]:
        """Returns lines that compute the probability of each choice."""
        lines = ["choices = [  # text and token ids; leave out those that are not admissible now"]
        lines += [f"    ({_literal(text)}, {list(ids)})," for text, ids in self.choices]
        lines.append("]")
        if self.prior:
            lines.append("prior = {  # relative log-probability of the last token after the others, in a first turn")
            lines += [f"    {path}: {logprob!r}," for path, logprob in self.prior.items()]
            lines.append("}")
        lines += [
            "written = [(*tokens, -1) for _, tokens in choices]  # -1 ends a choice",
            "",
            "@functools.cache",
            "def next_token(path):",
            '    """How likely each token is after these, among those that some choice goes on with."""',
            "    counts = {}",
            "    for tokens in written:",
            "        if tokens[: len(path)] == path:",
            "            counts[tokens[len(path)]] = counts.get(tokens[len(path)], 0) + 1",
            "    if len(counts) == 1:",
            "        return {token: torch.tensor(1.0) for token in counts}",
            "    ids = torch.cat([prompt, torch.tensor([path], dtype=torch.long)], 1)",
            "    logits = model(input_ids=ids).logits[0, -1].float().log_softmax(-1)",
            f"    scores = torch.stack([logits[{self.closing_id} if token == -1 else token] for token in counts])",
        ]
        scaled = f"    scores = scores / {self.generation.temperature * self.deviation}"
        if self.prior:
            lines.append("    scores = scores - torch.tensor([prior[(*path, token)] for token in counts])")
            scaled += " + torch.tensor(list(counts.values())).log()"
        lines += [
            scaled,
            "    return dict(zip(counts, scores.softmax(0)))",
            "",
            "probabilities = torch.ones(len(written))",
            "for number, tokens in enumerate(written):",
            "    for at in range(len(tokens)):",
            "        probabilities[number] *= next_token(tokens[:at])[tokens[at]]",
        ]
        return lines


def _literal(text: str) -> str:
    """Returns a text as a Python literal on one line, with unprintable characters escaped."""
    return _escaped(json.dumps(text, ensure_ascii=False))


def _message(role: str, content: str) -> str:
    return _escaped(json.dumps({"role": role, "content": content}, ensure_ascii=False))


def _escaped(code: str) -> str:
    escaped = ""
    for char in code:
        escaped += char if char.isprintable() else char.encode("unicode_escape").decode()
    return escaped


def _plain(value: Any) -> str:
    r"""Returns a value as plain text in one line of Markdown; markup and HTML are escaped.

    >>> print(_plain("<b>|\n# *x*"))
    \<b\>\| \# \*x\*
    """
    text = str(json_safe(value, _MAX_CARD_LENGTH))[:_MAX_CARD_LENGTH]
    for char in set(text):
        if not char.isprintable():
            text = text.replace(char, " ")
    return _MARKUP.sub(r"\\\g<0>", " ".join(text.split()))


def _table(rows: Mapping[str, Any]) -> list[str]:
    lines = [f"| {_plain(name)} | {_plain(value)} |" for name, value in rows.items()]
    return ["| | |", "|---|---|", *lines, ""]
