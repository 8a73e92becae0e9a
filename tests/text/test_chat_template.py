"""Prompts after a reply equal the text of the whole conversation, or the template is rejected."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from llamagym import ChatTemplateError, ConfigError
from llamagym.text.chat_template import ChatTemplate, end_ids
from tests.helpers.agents import ChoiceAgent, WordAgent, actor_of, make_agent
from tests.helpers.tiny import FAMILIES, tiny_base_model, tiny_model, tiny_tokenizer

# As Mistral's: the system prompt stands in the last user message alone.
SYSTEM_LAST = (
    "{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% for m in messages if m.role != 'system' %}{% if m.role == 'user' %}"
    "{{ '[INST] ' + (system + '\n\n' if loop.last and system else '') + m.content + '[/INST]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
MESSAGES = "{% for m in messages %}{{ '<' + m.role + '>' + m.content + eos_token }}{% endfor %}"
# The first user message again in every later one.
REMINDS = (
    "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}"
    "{% if m.role == 'user' %}{{ ' (first: ' + (messages | selectattr('role', 'equalto', 'user') | first).content }}"
    "{% endif %}{{ eos_token }}{% endfor %}"
)
# As ChatGLM's: rounds are numbered.
NUMBERS = "{% for m in messages %}{{ '[Round ' ~ loop.index // 2 ~ ']' + m.content + eos_token }}{% endfor %}"
# The number of earlier messages shows from the fourth turn on alone.
LATE = MESSAGES + "{% if messages | length > 6 %}{{ '(long)' }}{% endif %}"
FIFTH = MESSAGES + "{% if (messages | length // 2) % 5 == 4 %}{{ '(fifth)' }}{% endif %}"
ENDS = "{% for m in messages %}{{ '<' + m.role + '>' + m.content }}{% if m.role == 'assistant' %}"
LENGTH = ENDS + "{{ ' [' ~ m.content | length ~ ']' }}{% endif %}{{ eos_token }}{% endfor %}"
ECHOES = ENDS + "{{ ' (you said: ' + m.content + ')' }}{% endif %}{{ eos_token }}{% endfor %}"
QUOTES = (
    "{% for m in messages %}{{ '<' + m.role + '>' }}{% if m.role == 'user' and loop.index0 > 1 %}"
    "{{ '[you said ' + messages[loop.index0 - 1].content + '] ' }}{% endif %}{{ m.content + eos_token }}{% endfor %}"
)
QUOTES_LETTERS = QUOTES.replace(".content + '] '", ".content[:5] + '] '")
FORGETS = "{{ messages[-1].role + messages[-1].content }}"


def templated(template: str, family: str = "qwen2"):
    tokenizer = tiny_tokenizer(family)
    tokenizer.chat_template = template
    return tokenizer


def said(agent: WordAgent) -> list[int]:
    """Returns all token ids of the conversation of environment 0, except for a pending prompt."""
    ids = []
    for turn in actor_of(agent).conversation(0).turns:
        ids += [*turn.prompt.ids, *turn.reply.ids]
    return ids


def agent_with(template: str, kind: type = ChoiceAgent, **options):
    agent = make_agent(kind, "qwen2", **options)
    return kind(agent.policy.model, templated(template), **options)


@pytest.mark.parametrize("system", ["Be good.", "", "probesystem and probereply"])
@pytest.mark.parametrize("template", [SYSTEM_LAST, MESSAGES, *(tiny_tokenizer(f).chat_template for f in FAMILIES)])
def test_next_prompt_equals_the_text_after_the_last_reply(template: str, system: str):
    tokenizer = templated(template, "llama")
    chat = ChatTemplate(tokenizer)
    messages = chat.first_messages(system, "one")
    for number in range(4):
        ids = chat.next_prompt(system, f"observation {number}", None)
        messages += [{"role": "assistant", "content": "REPLY"}, {"role": "user", "content": f"observation {number}"}]
        whole = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        expected = whole.rpartition("REPLY")[2]
        assert ids == tokenizer(expected, add_special_tokens=False)["input_ids"]


def test_shared_length_is_0_without_letters_in_the_vocabulary():
    words = {"<unk>": 0, "<e>": 1, "You": 2, "win": 3}
    known = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    known.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=known, unk_token="<unk>", eos_token="<e>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content + ' <e> ' }}{% endfor %}"
    template = ChatTemplate(tokenizer, append_only=False)
    assert template.shared_length("You", template.first_prompt("You", "win")) == 0


def test_prompts_contain_no_probe_text():
    agent = agent_with(SYSTEM_LAST)
    agent.get_system_prompt = lambda: "Be good."
    for observation in ("a", "b", "c"):
        agent.act(observation)
        agent.assign_reward(0.0)
    text = agent.tokenizer.decode(said(agent))
    assert "probe" not in text
    assert text.count("Be good.") == 3


@pytest.mark.parametrize("template", [REMINDS, NUMBERS, LATE, FIFTH])
def test_rejects_a_template_whose_later_prompts_depend_on_earlier_turns(template: str):
    tokenizer = templated(template)
    with pytest.raises(ChatTemplateError, match=r"not append-only.*depends on earlier turns"):
        ChatTemplate(tokenizer)
    # A single turn is rendered as it is.
    ChatTemplate(tokenizer, append_only=False)


@pytest.mark.parametrize("messages", [8, 10, 12, 20, 60, 120])
def test_rejects_a_template_that_changes_after_many_messages(messages: int):
    template = MESSAGES + f"{{% if messages | length > {messages} %}}{{{{ '(long)' }}}}{{% endif %}}"
    with pytest.raises(ChatTemplateError, match=r"depends on earlier turns, such as \d+\."):
        ChatTemplate(templated(template))


@pytest.mark.parametrize(
    ("template", "match"),
    [
        (LENGTH, "depends on that reply"),
        (QUOTES_LETTERS, "depends on that reply"),
        (ECHOES, "repeats earlier replies"),
        (QUOTES, "repeats earlier replies"),
    ],
)
def test_rejects_a_template_whose_later_prompts_depend_on_the_last_reply(template: str, match: str):
    with pytest.raises(ChatTemplateError, match=match):
        ChatTemplate(templated(template))


def test_rejects_a_template_that_drops_messages():
    with pytest.raises(ChatTemplateError, match="drops or changes earlier replies"):
        ChatTemplate(templated(FORGETS))
    with pytest.raises(ChatTemplateError, match="drops the user's message"):
        ChatTemplate(templated("{{ eos_token }}"), append_only=False)


@pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "{{ messages[0].content + 1 }}", "{% if %}"])
def test_an_error_inside_a_template_names_the_template(template: str):
    with pytest.raises(ChatTemplateError, match="cannot render a conversation"):
        ChatTemplate(templated(template))


def without_end(tokenizer, model):
    tokenizer.eos_token = None
    for config in (model.pretrained_model.config, model.pretrained_model.generation_config):
        config.eos_token_id = None


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("context", ["episode", "turn"])
def test_rejects_a_tokenizer_and_model_without_an_end_token(family: str, context: str):
    tokenizer, model = tiny_tokenizer(family), tiny_model(family)
    without_end(tokenizer, model)
    with pytest.raises(ConfigError, match="end token"):
        WordAgent(model, tokenizer, context=context)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ("</s>", r"eos_token_id of GenerationConfig must be .*got '</s>' \(str\)"),
        ([1, 2.5], r"got \[1, 2\.5\] \(list\)"),
    ],
)
def test_rejects_end_tokens_that_are_not_ids(ids, message):
    tokenizer, model = tiny_tokenizer("qwen2"), tiny_model("qwen2")
    model.pretrained_model.generation_config.eos_token_id = ids
    with pytest.raises(ConfigError, match=message):
        WordAgent(model, tokenizer)


def test_rejects_end_tokens_beyond_the_vocabulary():
    tokenizer, model = tiny_tokenizer("qwen2"), tiny_model("qwen2")
    without_end(tokenizer, model)
    model.pretrained_model.generation_config.eos_token_id = 1_000_000
    with pytest.raises(ConfigError, match=r"the ids \[1000000\] are beyond its \d+ tokens"):
        WordAgent(model, tokenizer)


def test_accepts_a_tuple_of_end_tokens_and_ignores_unknown_ids():
    tokenizer, model = tiny_tokenizer("qwen2"), tiny_model("qwen2")
    end = tokenizer.eos_token_id
    model.pretrained_model.generation_config.eos_token_id = (end, 1_000_000)
    assert end_ids(model.pretrained_model, tokenizer) == [end]
    WordAgent(model, tokenizer)


def test_accepts_an_end_token_that_only_the_model_defines():
    tokenizer, model = tiny_tokenizer("qwen2"), tiny_model("qwen2")
    end = tokenizer.eos_token_id
    without_end(tokenizer, model)
    model.pretrained_model.generation_config.eos_token_id = [end]
    agent = WordAgent(model, tokenizer, generate_config_dict={"max_new_tokens": 2})
    assert actor_of(agent).chat_template.closing_id([end]) == end
    agent.act("x")
    # A template that puts no token of its own after a reply leaves the choice to the model.
    tokenizer.chat_template = "{% for m in messages %}{{ m.content + ' ' }}{% endfor %}"
    assert ChatTemplate(tokenizer).closing_id([end]) == end
    assert tiny_base_model("qwen2").generation_config.eos_token_id != [end]
