"""Scripts for LlamaGym 0.1.1, as `docs/from-llamagym.md` shows them: they run, and changes are reported."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llamagym import (
    AutoModelForCausalLMWithValueHead,
    ConfigError,
    GRPOConfig,
    ModelLoadError,
    PPOConfig,
    ReinforceConfig,
    load_model_and_tokenizer,
)
from llamagym.learners.replay import ReplayConfig
from llamagym.models.loading import embedded_model_folder
from llamagym.text.chat_template import ChatTemplate
from tests.helpers import ROOT
from tests.helpers.agents import ChoiceAgent, WordAgent, actor_of, make_agent
from tests.helpers.rounding import LOGPROB_TOLERANCE
from tests.helpers.tiny import tiny_base_model, tiny_model, tiny_tokenizer

PAGE = (ROOT / "docs" / "from-llamagym.md").read_text(encoding="utf-8")
# The page's blocks, in this order: what is loaded otherwise (before, after), then whole scripts as they run here.
BEFORE, AFTER, BLACKJACK, TEXT_WORLD, CARTPOLE = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model as a folder; what a port names as its model."""
    where = tmp_path_factory.mktemp("model")
    tiny_base_model("llama").save_pretrained(where)
    tiny_tokenizer("llama").save_pretrained(where)
    return where


class Rooms:
    """Three rooms in a row, played by text commands; has the methods of TextWorld's older Gym interface."""

    def __init__(self) -> None:
        self.commands: list[Any] = []

    def reset(self):
        self.room, self.steps = 0, 0
        return "A header $$$$$$$ \n\nYou are in room 0.", {}

    def step(self, command):
        self.commands.append(command)
        self.steps += 1
        self.room += command is not None and command.strip() == "go east"
        won = self.room == 2
        return f"You are in room {self.room}.", float(won), won or self.steps == 4, {}

    def render(self):
        pass

    def close(self):
        pass


@pytest.fixture
def logged(monkeypatch):
    """A stand-in for W&B; what was logged to it."""
    rows: list[dict[str, Any]] = []
    fake = SimpleNamespace(init=lambda **options: None, log=rows.append)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return rows


def port(script: str, model: Path | str, logged: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """Run a script of the page; W&B's stand-in is in place. Returns its variables."""
    small = re.sub(r'("episodes": )\d+', r"\g<1>3", script)
    small = re.sub(r'("batch_size": )\d+', r"\g<1>2", small)
    small = re.sub(r'("generate/max_new_tokens": )\d+', r"\g<1>6", small)
    # Its fallback keeps the pole up for some forty steps; a plain LoRA reads the conversation again in each of them.
    small = small.replace('"CartPole-v1"', '"CartPole-v1", max_episode_steps=10')
    namespace: dict[str, Any] = {"model_name": str(model), **more}
    exec(compile(small, "<docs/from-llamagym.md>", "exec"), namespace)
    return namespace


def check(variables: dict[str, Any], logged: list[dict[str, Any]]) -> None:
    """It has learned, and the statistics have reached the log."""
    agent = variables["agent"]
    assert agent.policy.num_updates >= 1
    assert len([row for row in logged if "total_return" in row]) == 3
    assert any("ratio_error" in row for row in logged)
    assert max(row.get("ratio_error", 0.0) for row in logged) < 1e-3
    # The script added a token for padding and made room for it.
    assert agent.tokenizer.pad_token == "<pad>"
    embeddings = agent.policy.model.pretrained_model.get_input_embeddings()
    assert embeddings.weight.shape[0] == len(agent.tokenizer)


def test_blackjack_of_llamagym_runs(folder, logged):
    variables = port(BLACKJACK, folder, logged)
    check(variables, logged)
    assert {row["action"] for row in logged if "action" in row} <= {0, 1}
    generation = variables["agent"].policy.generation
    assert (generation.top_p, generation.temperature, generation.max_new_tokens) == (0.8, 0.7, 6)


def test_text_world_of_llamagym_runs_though_replies_name_no_command(folder, logged):
    env = Rooms()
    variables = port(TEXT_WORLD, folder, logged, env=env)
    check(variables, logged)
    # A tiny random model never says "command: ", so every action is None, as it was in LlamaGym.
    assert set(env.commands) == {None}
    rates = [row["invalid_rate"] for row in logged if "invalid_rate" in row]
    assert rates
    assert set(rates) == {1.0}


def test_trained_weights_of_a_port_are_loaded(folder, logged, tmp_path):
    agent = port(BLACKJACK, folder, logged)["agent"]
    with torch.no_grad():
        # Two hands that end in a draw teach the critic a value of 0, which an untrained head has as well.
        agent.policy.model.v_head.summary.bias += 1
    agent.policy.model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)
    ids, known = torch.tensor([[1, 2, 3]]), len(tiny_tokenizer("llama"))
    with torch.no_grad():
        here, there = agent.policy.model(ids), loaded(ids)
    assert torch.allclose(here[0][..., :known], there[0][..., :known], atol=LOGPROB_TOLERANCE)
    assert torch.allclose(here[2], there[2], atol=LOGPROB_TOLERANCE)
    assert there[2].abs().max() > 0


def test_text_world_s_commands_reach_the_environment(folder, logged):
    env = Rooms()
    variables = port(TEXT_WORLD, folder, logged, env=env)
    agent = variables["agent"]
    assert agent.extract_action("First I look. command: go east") == "go east"
    actor_of(agent).hooks.response_prefix = "command: go east "
    assert agent.act("You are in room 0.").startswith("go east")


@pytest.mark.long
def test_cartpole_in_free_text_runs_and_learns_from_what_it_said(folder):
    variables = port(CARTPOLE, folder, [])
    agent = variables["agent"]
    assert agent.policy.num_updates >= 1
    assert variables["returns"]
    assert min(variables["returns"]) >= 8
    assert agent.extract_action("I push LEFT") == 0
    assert agent.extract_action("right.") == 1
    with pytest.raises(ValueError, match="names no action"):
        agent.extract_action("up")


@pytest.mark.long
def test_blackjack_of_llamagym_runs_with_the_embedded_model(logged):
    # The page's first lines name the model.
    named: dict[str, Any] = {}
    exec(AFTER, named)
    assert named["model_name"] == str(embedded_model_folder())
    check(port(BLACKJACK, named["model_name"], logged), logged)


def test_before_and_after_differ_in_imports_model_and_device_only():
    def kept(block: str) -> list[str]:
        moved = ("import", "model_name", "device =", 'load_in_8bit":', "load_in_8bit = ")
        return [line for line in block.splitlines() if line and not any(word in line for word in moved)]

    assert kept(BEFORE) == kept(AFTER)
    assert BEFORE != AFTER


@pytest.mark.parametrize("option", ["load_in_8bit", "load_in_4bit"])
def test_both_loaders_reject_quantization_without_a_gpu(option, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for load_model in (AutoModelForCausalLMWithValueHead.from_pretrained, load_model_and_tokenizer):
        with pytest.raises(ModelLoadError, match=f"{option} needs a CUDA device"):
            load_model("somewhere", **{option: True})


@pytest.mark.parametrize("name", ["llm", "train_batch", "format_episode_for_ppo"])
def test_a_method_that_only_llamagym_called_is_refused_when_the_class_is_made(name):
    with pytest.raises(ConfigError, match=rf"Ported defines {name}\(\), which LlamaGym called"):
        type("Ported", (WordAgent,), {name: lambda self: None})


def test_a_configuration_is_taken_where_its_options_are():
    config = PPOConfig(batch_size=7, seed=3)

    def config_of(**options):
        return WordAgent(tiny_model("llama"), tiny_tokenizer("llama"), **options).learner.config

    assert config_of(ppo_config_dict=config, seed=1) == config
    assert config_of(ppo_config_dict={"batch_size": 7}, seed=1) == PPOConfig(batch_size=7, seed=1)
    with pytest.raises(ConfigError, match="expected PPOConfig or a dictionary of its options, received GRPOConfig"):
        config_of(ppo_config_dict=GRPOConfig())


@pytest.mark.parametrize(
    ("option", "advice"), [("kl_penalty", "kl_placement"), ("log_with", "trackers"), ("score_clip", "assign_reward")]
)
def test_an_option_that_only_trl_has_is_answered_with_what_to_do(option, advice):
    with pytest.raises(ConfigError, match=f"Unknown option '{option}' of PPOConfig.*{advice}"):
        PPOConfig.from_dict({option: "kl"})


@pytest.mark.parametrize("config", [PPOConfig, GRPOConfig, ReinforceConfig, ReplayConfig])
def test_accepts_old_names_of_options_with_a_hint(config, caplog):
    for create in (lambda **options: config(**options), lambda **options: config.from_dict(options)):
        caplog.clear()
        assert create(microbatch_nodes=64) == config(max_tokens_per_pass=64)
        assert f"{config.__name__}: the option microbatch_nodes is now called max_tokens_per_pass" in caplog.text
        assert len(caplog.records) == 1
        with pytest.raises(ConfigError, match="also microbatch_nodes, its old name"):
            create(microbatch_nodes=64, max_tokens_per_pass=64)
        with pytest.raises(ConfigError, match="max_tokens_per_pass=0 is too small"):
            create(microbatch_nodes=0)
    assert "microbatch_nodes" not in config().to_dict()


@pytest.mark.parametrize("kind", [WordAgent, ChoiceAgent])
@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt, NotImplementedError])
def test_an_error_in_one_reply_leaves_all_environments_as_they_were(kind, error, monkeypatch):
    agent = make_agent(kind)
    agent.act_batch(["a", "bb"])
    agent.assign_rewards([1.0, 2.0])
    calls = []

    def extract(reply):
        calls.append(reply)
        if len(calls) == 2:
            raise error("no such word")
        return 0

    with monkeypatch.context() as patched:
        patched.setattr(agent, "extract_action", extract)
        with pytest.raises(error):
            agent.act_batch(["ccc", "dddd"])
    for env_id, reward in ((0, 1.0), (1, 2.0)):
        conversation = actor_of(agent).conversation(env_id)
        assert [turn.reward for turn in conversation.turns] == [reward]
        assert conversation.pending is None
        assert [message["role"] for message in conversation.messages][-2:] == ["user", "assistant"]
    agent.act_batch(["ccc", "dddd"])
    assert [len(actor_of(agent).conversation(env_id).turns) for env_id in (0, 1)] == [2, 2]


# As Llama-2's: the system prompt inside the first user message, spaces around a reply, its end token behind a space.
LLAMA_2 = (
    "{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% for m in messages if m.role != 'system' %}{% if m.role == 'user' %}"
    "{{ bos_token + '[INST] ' }}"
    "{% if loop.first and system %}{{ '<<SYS>>\n' + system + '\n<</SYS>>\n\n' }}{% endif %}"
    "{{ m.content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)


def llama_2():
    tokenizer = tiny_tokenizer("llama")
    tokenizer.chat_template = LLAMA_2
    return tokenizer


@pytest.mark.parametrize("ended", [True, False])
def test_llama_2_s_end_token_comes_once_between_turns(ended):
    tokenizer = llama_2()
    end = tokenizer.eos_token_id
    template = ChatTemplate(tokenizer)
    reply = [*template.encode("hit"), *([end] if ended else [])]
    ids = [*template.first_prompt("Play.", "You hold 12."), *reply]
    for _ in range(2):
        ids += [*template.next_prompt("Play.", "You hold 15.", end if ended else None), *reply]
    begin, stop = tokenizer.bos_token, tokenizer.eos_token
    gap = stop if ended else f" {stop}"
    assert tokenizer.decode(ids) == (
        f"{begin}[INST] <<SYS>>\nPlay.\n<</SYS>>\n\nYou hold 12. [/INST]hit{gap}"
        f"{begin}[INST] You hold 15. [/INST]hit{gap}{begin}[INST] You hold 15. [/INST]hit{stop if ended else ''}"
    )


def test_a_demonstrated_reply_closes_as_llama_2_s_template_does():
    tokenizer = llama_2()
    end = tokenizer.eos_token_id
    assert ChatTemplate(tokenizer).closing_id([end, end + 1]) == end
    # The control: a template that closes with another of the end tokens.
    tokenizer.chat_template = LLAMA_2.replace("eos_token", "pad_token")
    assert ChatTemplate(tokenizer).closing_id([end, tokenizer.pad_token_id]) == tokenizer.pad_token_id
