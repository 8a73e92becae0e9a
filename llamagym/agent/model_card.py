"""The model card: what was trained, how well it does, and how to use it without this library."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..models.generation import GenerationConfig
from ..options import json_safe

# Said before the lines that use it.
_NO_CHOICE_YET = (
    "Its class can offer choices, but had offered none when it was saved, so the lines below write free text. How "
    "likely each choice is depends on a prior, which is measured on the first observations that offer choices. Let the "
    "agent choose once and save it again: this card then shows the lines for choices."
)


# What Markdown gives a meaning to within a line, addresses of pages and of people included.
_MARKUP = re.compile(r"[\\`*_\[\]<>|~&#$!:@]|(?<=www)\.")
# Characters of a name or value.
_LONGEST = 500


@dataclass(frozen=True)
class Card:
    """What a card says.

    Attributes:
        agent: Name of the agent's class.
        base: Where the base model is found; empty for a model whose weights are all here.
        dtype: Of the base, such as bfloat16.
        system_prompt: Opens every conversation.
        prefix: Opens every reply.
        generation: How replies are drawn.
        end_ids: Every token id that ends a reply.
        closing_id: The one of them that ends a choice.
        choices: Text and token ids of each choice that was ever offered.
        prior: What their tokens are measured against, by the ids up to each, -1 ending a choice; empty for nothing.
        deviation: What differences from that are divided by.
        offers_choices: Whether the agent's class offers choices; else replies are free text.
        environment: What it acts in.
        settings: Options of the agent that differ from their defaults.
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
        """The card in Markdown, its facts for the hub on top."""
        head = ["---", f"library_name: {'peft' if self.base else 'transformers'}", "pipeline_tag: text-generation"]
        # JSON's strings are YAML's, too.
        head += [f"base_model: {json.dumps(self.base)}"] if self.base else []
        head += ["tags:", "- reinforcement-learning", "- llamagym", "---", ""]
        where = f" in {_plain(self.environment)}" if self.environment else ""
        body = [
            f"# {_plain(self.agent)}",
            "",
            f"A language model that learned by acting{where}, trained with llamagym.",
            "",
        ]
        if self.results:
            body += ["## Results", "", *_table(self.results)]
        body += ["## Settings", "", *_table(self.settings)] if self.settings else []
        body += ["## Use", "", "With llamagym, and the class that formats its observations:", ""]
        name = self.agent if self.agent.isidentifier() else "YourAgent"
        body += ["```python", f'agent = {name}.load("path/to/this/folder")', "agent.eval()", "```", ""]
        body += [_NO_CHOICE_YET, ""] if self.offers_choices and not self.choices else []
        body += ["Without:", "", "```python", *self._code(), "```", ""]
        return "\n".join(head + body)

    def _code(self) -> list[str]:
        """Lines that load the model and take one reply; `folder` and `observation` are the reader's."""
        load = f'AutoModelForCausalLM.from_pretrained({self.base!r} or folder, dtype="{self.dtype}")'
        imports = ["import functools", ""] if self.choices else []
        imports += ["import torch", "from transformers import AutoModelForCausalLM, AutoTokenizer"]
        if self.base:
            imports.insert(-1, "from peft import PeftModel")
            load = f"PeftModel.from_pretrained({load.replace(' or folder', '')}, folder)"
        return [
            *imports,
            "",
            "tokenizer = AutoTokenizer.from_pretrained(folder)",
            f"model = {load}.eval()",
            f"messages = [{_message('system', self.system_prompt)}, " if self.system_prompt else "messages = [",
            '    {"role": "user", "content": observation}]',
            "options = dict(tokenize=False, add_generation_prompt=True, enable_thinking=False)",
            f"text = tokenizer.apply_chat_template(messages, **options) + {_literal(self.prefix)}",
            'prompt = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids',
            *(self._choosing() if self.choices else self._writing()),
        ]

    def _writing(self) -> list[str]:
        drawn = self.generation
        how: dict[str, Any] = {"max_new_tokens": drawn.max_new_tokens, "do_sample": drawn.do_sample}
        if drawn.do_sample:
            how |= {"temperature": drawn.temperature, "top_k": drawn.top_k, "top_p": drawn.top_p}
        # What is not named here comes from the base's generation_config.json, in some families a penalty.
        how |= {"repetition_penalty": 1.0, "eos_token_id": list(self.end_ids)}
        return [
            f"how = dict({', '.join(f'{name}={value!r}' for name, value in how.items())})",
            "ids = model.generate(input_ids=prompt, **how)",
            "reply = tokenizer.decode(ids[0, prompt.shape[1] :], skip_special_tokens=True)",
        ]

    def _choosing(self) -> list[str]:
        rows = [f"    ({_literal(text)}, {list(ids)})," for text, ids in self.choices]
        prior = [f"    {path}: {likelier!r}," for path, likelier in self.prior.items()]
        return [
            "choices = [  # text and token ids; leave out those that are not admissible now",
            *rows,
            "]",
            *(
                [
                    "prior = {  # relative log-probability of the last token after the others, in a first turn",
                    *prior,
                    "}",
                ]
                if prior
                else []
            ),
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
            *(["    scores = scores - torch.tensor([prior[(*path, token)] for token in counts])"] if prior else []),
            f"    scores = scores / {self.generation.temperature * self.deviation}"
            + (" + torch.tensor(list(counts.values())).log()" if prior else ""),
            "    return dict(zip(counts, scores.softmax(0)))",
            "",
            "probabilities = torch.ones(len(written))",
            "for number, tokens in enumerate(written):",
            "    for at in range(len(tokens)):",
            "        probabilities[number] *= next_token(tokens[:at])[tokens[at]]",
        ]


def _literal(text: str) -> str:
    """A text as Python writes it, on one line; what cannot be printed is escaped."""
    return _escaped(json.dumps(text, ensure_ascii=False))


def _message(role: str, content: str) -> str:
    return _escaped(json.dumps({"role": role, "content": content}, ensure_ascii=False))


def _escaped(code: str) -> str:
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in code)


def _plain(value: Any) -> str:
    r"""A value as it reads, within a line of Markdown: markup, HTML and further lines are text.

    >>> print(_plain("<b>|\n# *x*"))
    \<b\>\| \# \*x\*
    """
    text = str(json_safe(value, _LONGEST))[:_LONGEST]
    text = "".join(char if char.isprintable() else " " for char in text)
    return _MARKUP.sub(r"\\\g<0>", " ".join(text.split()))


def _table(rows: Mapping[str, Any]) -> Sequence[str]:
    return ["| | |", "|---|---|", *(f"| {_plain(name)} | {_plain(value)} |" for name, value in rows.items()), ""]
