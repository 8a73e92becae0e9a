"""The model card: what was trained, how well it does, and how to use it without this library."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Card:
    """What a card says.

    Attributes:
        agent: Name of the agent's class.
        base: Where the base model is found; empty for a model whose weights are all here.
        dtype: Of the base, as PyTorch names it.
        system_prompt: Opens every conversation.
        prefix: Opens every reply.
        temperature: Replies are drawn from softmax(logits / temperature).
        max_new_tokens: Longest free-text reply.
        prior: Mean score of each choice, by its text; empty where replies are free text.
        normalization: What a choice's log-likelihood is divided by.
        environment: What it acts in.
        settings: Options of the agent that differ from their defaults.
        results: Measurements by name.
    """

    agent: str
    base: str
    dtype: str
    system_prompt: str
    prefix: str
    temperature: float
    max_new_tokens: int
    prior: Mapping[str, float]
    normalization: str = "none"
    environment: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    results: Mapping[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        """The card in Markdown, its facts for the hub on top."""
        head = ["---", f"library_name: {'peft' if self.base else 'transformers'}", "pipeline_tag: text-generation"]
        head += [f"base_model: {self.base}"] if self.base else []
        head += ["tags:", "- reinforcement-learning", "- llamagym", "---", ""]
        where = f" in {self.environment}" if self.environment else ""
        body = [f"# {self.agent}", "", f"A language model that learned by acting{where}, trained with llamagym.", ""]
        if self.results:
            body += ["## Results", "", *_table(self.results)]
        body += ["## Settings", "", *_table(self.settings)] if self.settings else []
        body += ["## Use", "", "With llamagym, and the class that formats its observations:", ""]
        body += ["```python", f'agent = {self.agent}.load("path/to/this/folder")', "agent.eval()", "```", ""]
        body += ["Without:", "", "```python", *self._code(), "```", ""]
        return "\n".join(head + body)

    def _code(self) -> list[str]:
        """Lines that load the model and take one reply; `folder` and `observation` are the reader's."""
        dtype = self.dtype.removeprefix("torch.")
        load = f'AutoModelForCausalLM.from_pretrained({self.base!r} or folder, dtype="{dtype}")'
        imports = ["import torch", "from transformers import AutoModelForCausalLM, AutoTokenizer"]
        if self.base:
            imports.insert(1, "from peft import PeftModel")
            load = f"PeftModel.from_pretrained({load.replace(' or folder', '')}, folder)"
        return [
            *imports,
            "",
            "tokenizer = AutoTokenizer.from_pretrained(folder)",
            f"model = {load}.eval()",
            f"messages = [{_message('system', self.system_prompt)}, " if self.system_prompt else "messages = [",
            '    {"role": "user", "content": observation}]',
            "options = dict(tokenize=False, add_generation_prompt=True, enable_thinking=False)",
            f"text = tokenizer.apply_chat_template(messages, **options) + {json.dumps(self.prefix)}",
            'prompt = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids',
            *(self._choosing() if self.prior else self._writing()),
        ]

    def _writing(self) -> list[str]:
        limits = f"max_new_tokens={self.max_new_tokens}, do_sample=True, top_k=0, top_p=1.0"
        return [
            f"ids = model.generate(input_ids=prompt, {limits}, temperature={self.temperature})",
            "reply = tokenizer.decode(ids[0, prompt.shape[1] :], skip_special_tokens=True)",
        ]

    def _choosing(self) -> list[str]:
        length = {"none": "1", "token": "ids.shape[1]", "word": "max(1, len(choice.split()))"}[self.normalization]
        return [
            f"prior = {json.dumps(dict(self.prior), ensure_ascii=False)}",
            "scores = []",
            "for choice in prior:  # those that are admissible now",
            '    ids = tokenizer(choice, add_special_tokens=False, return_tensors="pt").input_ids',
            "    logits = model(input_ids=torch.cat([prompt, ids], 1)).logits[:, -ids.shape[1] - 1 : -1].float()",
            "    score = logits.log_softmax(-1).gather(2, ids[..., None]).sum()",
            f"    scores.append(score / {length} - prior[choice])",
            f"probabilities = (torch.stack(scores) / {self.temperature}).softmax(0)",
        ]


def _message(role: str, content: str) -> str:
    return json.dumps({"role": role, "content": content}, ensure_ascii=False)


def _table(rows: Mapping[str, Any]) -> Sequence[str]:
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items()), ""]
