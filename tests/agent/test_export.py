"""Saved agents: the same policy after loading, here and in plain transformers and PEFT."""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM

from llamagym import CheckpointError, ConfigError, evaluate, load_model_and_tokenizer, train
from llamagym.agent.agent import collector_of
from llamagym.agent.export import KIND, Card
from llamagym.models.loading import embedded_model_folder
from llamagym.models.registry import GenerationConfig
from llamagym.models.value_head import AutoModelForCausalLMWithValueHead
from llamagym.saving.atomic import verify
from llamagym.saving.manifest import MANIFEST
from llamagym.text.chat_template import end_ids
from tests.helpers.agents import ChoiceAgent, WordAgent, actor_of, make_agent
from tests.helpers.killed import killed_at
from tests.helpers.resumed_run import SIZES, DiceEnv, Talker
from tests.helpers.tiny import tiny_base_model, tiny_tokenizer
from tests.models.test_loading import hub  # noqa: F401 - a fixture

EMBEDDED_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.fixture
def base(tmp_path) -> Path:
    """A tiny model in a folder."""
    folder = tmp_path / "base"
    tiny_base_model("llama").save_pretrained(folder)
    tiny_tokenizer("llama").save_pretrained(folder)
    return folder


def trained(kind: Any, base: Path, peft_config: Any = None, **options: Any) -> Any:
    """An agent that has learned something."""
    model, tokenizer, device = load_model_and_tokenizer(base, "cpu", "float32", peft_config=peft_config)
    settings = {"max_new_tokens": 5, "temperature": 0.7}
    agent = kind(model, tokenizer, device, settings, SIZES, context="turn", seed=1, **options)
    train(agent, DiceEnv, episodes=10, num_envs=2, seed=0)
    return agent


@pytest.mark.pairwise(kind=[ChoiceAgent, Talker], peft_config=[None, False])
def test_loaded_agent_equals_the_saved_one(base, tmp_path, kind, peft_config):
    agent = trained(kind, base, peft_config)
    agent.save(tmp_path / "agent")
    again = kind.load(tmp_path / "agent", "cpu", "float32")
    assert collector_of(again).options == json.loads(json.dumps(collector_of(agent).options))
    assert again.policy.calibration.prior == agent.policy.calibration.prior
    for greedy in (True, False):
        results = [evaluate(each, DiceEnv, episodes=12, seed=3, num_envs=4, greedy=greedy) for each in (agent, again)]
        assert results[0] == results[1]
    # Options passed at loading take precedence over saved ones.
    changed = kind.load(tmp_path / "agent", response_prefix="So:")
    assert actor_of(changed).hooks.response_prefix == "So:"


def test_loads_with_a_model_that_has_no_name(tmp_path):
    model = AutoModelForCausalLMWithValueHead.from_pretrained(tiny_base_model("llama"))
    agent = WordAgent(model, tiny_tokenizer("llama"), seed=0)
    agent.save(tmp_path / "agent")
    again = WordAgent.load(tmp_path / "agent", model=model)
    agent.eval()
    assert again.act("x") == WordAgent.load(tmp_path / "agent").act("x") == agent.act("x")


def test_a_loaded_agent_only_acts_until_it_is_told_to_learn(base, tmp_path, caplog):
    trained(ChoiceAgent, base).save(tmp_path / "agent")
    agent = ChoiceAgent.load(tmp_path / "agent", "cpu", "float32")

    def play() -> Any:
        agent.act_batch([1, 2])
        agent.assign_rewards([0.0, 1.0])
        return agent.terminate_episodes([0, 1])

    before = agent.policy.num_updates
    greedy = agent.act(3)
    assert {agent.act_batch([3], [env])[0] for env in range(1, 20)} == {greedy}
    evaluate(agent, DiceEnv, episodes=2, num_envs=1)
    hint = "A loaded agent is in evaluation mode, so it does not learn from this episode. Call agent.train()"
    agent.terminate_episodes(range(20), train=False)
    assert hint not in caplog.text
    for _ in range(4):
        play()
    assert caplog.text.count(hint) == 1
    assert agent.policy.num_updates == before
    agent.train()
    while agent.policy.num_updates == before:
        play()
    agent.eval()
    play()
    assert caplog.text.count(hint) == 1


def test_loads_in_the_saved_dtype(base, tmp_path):
    for dtype in ("float32", "bfloat16"):
        model, tokenizer, device = load_model_and_tokenizer(base, "cpu", dtype)
        ChoiceAgent(model, tokenizer, device).save(tmp_path / dtype)
        again = ChoiceAgent.load(tmp_path / dtype, "cpu").policy.model.pretrained_model
        assert str(again.dtype) == f"torch.{dtype}"
        assert f'dtype="{dtype}"' in lines_of(tmp_path / dtype)[0]


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_save_killed_at_any_point_leaves_the_old_or_the_new_agent(tmp_path):
    """The short version of scripts/reliability/kill_during_save.py."""
    agent, folder = make_agent(ChoiceAgent), tmp_path / "agent"
    agent.act(1)

    def kept() -> str:
        """Tells the old one from the new one, once all that it holds is found whole."""
        return str(verify(folder, KIND)["files"]["agent.safetensors"][1])

    agent.save(folder)
    found, point = [kept()], 0
    agent.policy.rng.manual_seed(1)
    # By the kernel, in the next write of PEFT, safetensors, tokenizers or whoever writes next.
    for most in (0, 500):
        for early in range(0, 45, 9):
            assert not killed_at(early, lambda: agent.save(folder), most)
            assert kept() == found[0]
    while not killed_at(point, lambda: agent.save(folder)):
        found.append(kept())
        point += 3
    assert point > 40
    assert len(set(found)) == 2
    assert sorted(found, key=found.index) == found
    again = ChoiceAgent.load(folder, model=agent.policy.model)
    assert again.policy.calibration.prior == agent.policy.calibration.prior


class Announcing(ChoiceAgent):
    """Its replies begin with a prefix."""

    def extract_action(self, response: str) -> int:
        return super().extract_action(response.removeprefix("I will "))


def lines_of(folder: Path) -> tuple[str, str]:
    """The lines for plain transformers in a card: those that load the model, and those that take one reply."""
    code = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)[1]
    loads, start, replies = code.partition("messages = ")
    return loads, start + replies


def replies_by_card(folder: Path, observations: Sequence[Any], **changed: str) -> Iterator[dict[str, Any]]:
    """The names that the card's own lines define for each observation; `changed` are values in them."""
    loads, replies = lines_of(folder)
    if EMBEDDED_ID in loads:
        # What the hub has by this name, the package has too.
        loads = loads.replace(EMBEDDED_ID, str(embedded_model_folder()))
    for name, value in changed.items():
        assert f"{name}=" in replies
        replies = re.sub(rf"{name}=\w+", f"{name}={value}", replies)
    space: dict[str, Any] = {"folder": str(folder)}
    exec(loads, space)
    for observation in observations:
        space["observation"] = f"Observation {observation}"
        with torch.no_grad():
            exec(replies, space)
        yield space


class Wordy(Announcing):
    """Some of its choices begin alike, and one is the beginning of another."""

    choices = ("go", "go left", "go left now", "stay")


def test_card_code_gives_the_agents_choice_probabilities(base, tmp_path):
    agent = trained(Wordy, base, response_prefix="I will ")
    agent.save_pretrained(tmp_path / "agent", environment="Dice", results={"mean return": 1.5})
    card = (tmp_path / "agent" / "README.md").read_text()
    assert "acting in Dice" in card
    assert "| mean return | 1.5 |" in card
    expected = agent.action_probabilities(range(50))
    for space, probabilities in zip(replies_by_card(tmp_path / "agent", range(50)), expected, strict=True):
        names = [choice for choice, _ in space["choices"]]
        assert dict(zip(names, space["probabilities"].tolist(), strict=True)) == pytest.approx(probabilities, abs=1e-5)


def test_card_without_calibration_shows_choices_without_prior(base, tmp_path):
    agent = trained(ChoiceAgent, base, calibrate_choices=False)
    agent.save_pretrained(tmp_path / "agent")
    (space,) = replies_by_card(tmp_path / "agent", [7])
    assert [choice for choice, _ in space["choices"]] == list(agent.choices)
    assert "prior" not in space
    expected = list(agent.action_probabilities([7])[0].values())
    assert space["probabilities"].tolist() == pytest.approx(expected, abs=1e-5)
    # Loaded to be calibrated, or no longer, it starts from no prior of the other kind.
    other = ChoiceAgent.load(tmp_path / "agent", "cpu", "float32", calibrate_choices=True)
    other.act(7)
    assert all(other.policy.calibration.prior.values())
    other.save(tmp_path / "other")
    again = ChoiceAgent.load(tmp_path / "other", "cpu", "float32", calibrate_choices=False)
    assert list(again.action_probabilities([7])[0].values()) == pytest.approx(expected, abs=1e-5)


def test_loaded_agent_equals_the_saved_one_after_a_warm_start(base, tmp_path):
    model, tokenizer, device = load_model_and_tokenizer(base, "cpu", "float32")
    agent = Wordy(model, tokenizer, device, context="turn")
    said = [{"role": "user", "content": "Observation 7"}, {"role": "assistant", "content": "go left now"}]
    (tmp_path / "demo.jsonl").write_text(json.dumps({"messages": said}))
    agent.sft_from_jsonl(tmp_path / "demo.jsonl", epochs=20, learning_rate=1e-2)
    expected = agent.action_probabilities([7])[0]
    assert max(expected, key=expected.__getitem__) == "go left now"
    # What is only looked at has not been offered.
    agent.act(7)
    agent.save(tmp_path / "agent")
    loaded = Wordy.load(tmp_path / "agent", "cpu", "float32")
    assert loaded.action_probabilities([7])[0] == pytest.approx(expected, abs=1e-5)
    (space,) = replies_by_card(tmp_path / "agent", [7])
    assert space["probabilities"].tolist() == pytest.approx(list(expected.values()), abs=1e-5)


def test_card_notes_that_no_choice_was_offered_yet(base, tmp_path):
    model, tokenizer, device = load_model_and_tokenizer(base, "cpu", "float32")
    said = "Its class can offer choices, but had offered none when it was saved"
    for kind, says_so in ((ChoiceAgent, True), (WordAgent, False)):
        agent = kind(model, tokenizer, device)
        agent.save(tmp_path / "agent")
        assert (said in (tmp_path / "agent" / "README.md").read_text()) == says_so
        agent.act(1)
        agent.save(tmp_path / "agent")
        assert said not in (tmp_path / "agent" / "README.md").read_text()


def test_choices_that_decode_alike_keep_their_own_priors(base, tmp_path):
    agent = trained(ChoiceAgent, base)
    # Single bytes of longer characters: both decode to the replacement character.
    agent.policy.offered, agent.policy.calibration.prior = dict.fromkeys([(150,), (151,)]), {(150,): -1.0, (151,): -2.0}
    assert agent.tokenizer.decode([150]) == agent.tokenizer.decode([151])
    agent.save_pretrained(tmp_path / "agent")
    (space,) = replies_by_card(tmp_path / "agent", [0])
    assert [ids for _, ids in space["choices"]] == [[150], [151]]
    assert space["prior"] == agent.policy.calibration.prior
    assert space["probabilities"].shape == (2,)


@pytest.mark.long
def test_card_code_writes_the_agents_greedy_replies(base, tmp_path):
    # As Qwen2's: what the base would add to its replies is no part of the agent's policy.
    defaults = json.loads((base / "generation_config.json").read_text())
    (base / "generation_config.json").write_text(json.dumps({**defaults, "repetition_penalty": 5.0, "top_k": 1}))
    agent = trained(Talker, base)
    agent.save_pretrained(tmp_path / "agent")
    agent.eval()
    for space in replies_by_card(tmp_path / "agent", range(50), do_sample="False"):
        reply = reply_of(agent, space["observation"].removeprefix("Observation "))
        assert tuple(space["ids"][0, space["prompt"].shape[1] :].tolist()) == reply.ids


@pytest.mark.long
def test_card_code_has_the_agents_sampling_distribution(base, tmp_path):
    agent = trained(Talker, base)
    agent.save_pretrained(tmp_path / "agent")
    agent.eval(greedy=False)
    compared = 0
    for space in replies_by_card(tmp_path / "agent", range(50)):
        reply = reply_of(agent, space["observation"].removeprefix("Observation "))
        # Given a whole text at once, PEFT lets the adapter act from the last tokens that look like a reply's opening.
        if set(space["model"].peft_config["default"].alora_invocation_tokens) & set(reply.ids):
            continue
        compared += 1
        ids = torch.tensor([reply.ids])
        with torch.no_grad():
            logits = space["model"](input_ids=torch.cat([space["prompt"], ids], 1)).logits[0, -len(reply.ids) - 1 : -1]
        logprobs = (logits / space["how"]["temperature"]).log_softmax(-1).gather(1, ids.T)[:, 0]
        assert logprobs.tolist() == pytest.approx(reply.logprobs, abs=1e-4)
    assert compared > 25


@pytest.mark.long
# Logits from 16 to 32 lie 0.125 apart in bfloat16: its rounding may decide between the two most likely tokens.
@pytest.mark.parametrize(("dtype", "most", "other_texts"), [("float32", 1e-4, 0), ("bfloat16", 0.15, 2)])
def test_embedded_model_is_the_same_policy_in_transformers_and_peft(tmp_path, dtype, most, other_texts):
    model, tokenizer, device = load_model_and_tokenizer("smollm2-135m", "cpu", dtype)
    options = {"generate_config_dict": {"max_new_tokens": 3}, "context": "turn", "seed": 0}
    # A batch of few turns takes a share of the rate.
    learning = {**SIZES, "learning_rate": 1e-2, "target_kl": None, "ppo_epochs": 2, "entropy_coef": 0.01, "gamma": 1.0}
    chooser = ChoiceAgent(model, tokenizer, device, ppo_config_dict=learning, **options)
    untrained = chooser.action_probabilities([0])[0]
    train(chooser, DiceEnv, episodes=24, num_envs=4, seed=0)
    # Without its adapter, the saved agent would be further off than is allowed below.
    assert chooser.action_probabilities([0])[0] != pytest.approx(untrained, abs=most)
    chooser.save_pretrained(tmp_path / "choices")
    observations = range(0, 100, 20)
    expected = torch.tensor([list(row.values()) for row in chooser.action_probabilities(observations)])
    found = torch.stack([space["probabilities"] for space in replies_by_card(tmp_path / "choices", observations)])
    assert (found - expected).abs().max() < most
    assert (found - expected).abs().mean() < most / 5
    talker = Talker(model, tokenizer, device, **options)
    talker.save_pretrained(tmp_path / "text")
    talker.eval()
    others = 0
    for space in replies_by_card(tmp_path / "text", range(0, 50, 10), do_sample="False"):
        ids = reply_of(talker, space["observation"].removeprefix("Observation ")).ids
        others += ids != tuple(space["ids"][0, space["prompt"].shape[1] :].tolist())
    assert others <= other_texts


def test_card_code_samples_with_the_agents_options(base, tmp_path):
    model, tokenizer, device = load_model_and_tokenizer(base, "cpu", "float32")
    settings = {"max_new_tokens": 3, "temperature": 0.5, "top_k": 7, "top_p": 0.9}
    agent = Talker(model, tokenizer, device, settings, seed=0)
    agent.save_pretrained(tmp_path / "agent")
    (space,) = replies_by_card(tmp_path / "agent", [0])
    ends = end_ids(model.pretrained_model, tokenizer)
    assert len(ends) > 1
    always = {"do_sample": True, "repetition_penalty": 1.0, "eos_token_id": ends}
    assert space["how"] == {**settings, **always}


def reply_of(agent: Any, observation: str) -> Any:
    """The agent's reply to an observation at the start of an episode."""
    actor_of(agent).discard_episodes([0])
    agent.act(observation)
    return actor_of(agent).conversation(0).turns[-1].reply


def test_push_to_hub_uploads_all_files(hub, base):  # noqa: F811 - the fixture
    agent = trained(ChoiceAgent, base)
    address = agent.push_to_hub("me/agent", environment="Dice")
    assert address.startswith(f"{hub.url}/me/agent/commit/")
    files = hub.files["me/agent"]
    expected = {"README.md", "adapter_config.json", "adapter_model.safetensors", "value_head.safetensors", MANIFEST}
    assert expected <= set(files)
    assert b"acting in Dice" in files["README.md"]
    # A folder of this machine is no base that the hub could show.
    assert f"base_model: {json.dumps(str(base))}" not in files["README.md"].decode()


@pytest.mark.long
def test_merges_a_plain_adapter_and_rejects_an_activated_one(base, tmp_path):
    from llamagym.models.registry import lookup_by_architecture, lora_config

    entry = tiny_base_model("llama")
    plain = lora_config(lookup_by_architecture(entry.config), entry.config, None)
    agent = trained(ChoiceAgent, base, plain)
    agent.save_pretrained(tmp_path / "merged", merged=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    agent.save_pretrained(tmp_path / "adapter")
    adapted = PeftModel.from_pretrained(tiny_base_model("llama"), tmp_path / "adapter")
    ids = torch.arange(40)[None]
    assert torch.allclose(merged(ids).logits, adapted(ids).logits, atol=1e-4)
    assert not torch.allclose(merged(ids).logits, tiny_base_model("llama")(ids).logits, atol=1e-4)
    again = ChoiceAgent.load(tmp_path / "merged", "cpu", "float32", model=None)
    assert again.action_probabilities([1])[0] == pytest.approx(agent.action_probabilities([1])[0], abs=1e-4)
    with pytest.raises(ConfigError, match="activated LoRA"):
        trained(ChoiceAgent, base).save_pretrained(tmp_path / "activated", merged=True)
    with pytest.raises(ConfigError, match="no adapter to merge"):
        trained(ChoiceAgent, base, False).save_pretrained(tmp_path / "activated", merged=True)
    assert not (tmp_path / "activated").exists()


def test_rejects_a_folder_that_is_not_an_agent(base, tmp_path):
    agent = trained(ChoiceAgent, base)
    agent.save_checkpoint(tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match="holds: checkpoint; expected: agent"):
        ChoiceAgent.load(tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match="holds no agent of llamagym"):
        ChoiceAgent.load(base)


HOSTILE_NAMES = [
    "a\n---\nlicense: mit\n---\n# Owned",
    "x | y |\n|---|---|\n| owned | 1",
    "<script>alert(1)</script><img src=x onerror=alert(1)>",
    "[click](https://example.org) ![i](x) https://example.org www.example.org `code` **bold** ~~gone~~ @you",
    "```\n# Owned\n```python",
    "lone \ud800 surrogate \u202e \x1b[31m \u2028 # Owned",
    '": {x: y}, "\\',
    "x" * 100_000,
]


@pytest.mark.parametrize("name", HOSTILE_NAMES, ids=range(len(HOSTILE_NAMES)))
def test_names_in_a_card_are_only_text(name):
    card = Card(
        agent=name,
        base=name[:200],
        dtype="float32",
        system_prompt=name,
        prefix=name,
        generation=GenerationConfig(),
        end_ids=[1],
        closing_id=1,
        choices=[(name, (1, 2))],
        prior={},
        deviation=1.0,
        offers_choices=True,
        environment=name,
        settings={name: name, "nested": {name: [name]}},
        results={name: float("nan")},
    )
    text = card.text()
    # A strict encoder takes it.
    (_, head, body) = text.encode("utf-8").decode().split("---\n", 2)
    assert set(yaml.safe_load(head)) == {"library_name", "pipeline_tag", "base_model", "tags"}
    assert (
        yaml.safe_load(head)["base_model"] == name[:200].encode("utf-8", "surrogatepass").decode("utf-8", "replace")
        or "\ud800" in name
    )
    fences = re.findall(r"^```.*$", body, re.MULTILINE)
    assert fences == ["```python", "```"] * 2
    prose = re.sub(r"^```python\n.*?^```$", "", body, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#.*$", prose, re.MULTILINE)
    assert [heading.split()[0] for heading in headings] == ["#", "##", "##", "##"]
    rows = re.findall(r"^\|.*$", prose, re.MULTILINE)
    assert len(rows) == 2 + 1 + 2 + 2
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 3 for row in rows)
    assert not re.search(r"(?<!\\)[<>\[`*~@]|(?<!\\):/|www\.", prose)
    assert len(prose) < 6000
    # The code is Python and holds the texts as they were.
    for code in re.findall(r"^```python\n(.*?)^```$", body, flags=re.MULTILINE | re.DOTALL):
        tree = ast.parse(code)
        texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert name in texts
