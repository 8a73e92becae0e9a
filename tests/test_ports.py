"""Scripts in the manner of LlamaGym 0.1.1's and ORLLLaM's: other imports, model name and device, else unchanged.

One method is added where `extract_action` may find no action: `fallback_action`.
"""

from __future__ import annotations

import re
from dataclasses import replace

import gymnasium as gym
import pytest
import torch
from gymnasium import spaces
from peft import LoraConfig

from llamagym import (
    Agent,
    AutoModelForCausalLMWithValueHead,
    ConfigError,
    GRPOConfig,
    ModelLoadError,
    PPOConfig,
    load_model_and_tokenizer,
)
from llamagym.models.loading import embedded_model_folder
from tests.agents import ChoiceAgent, WordAgent, make_agent
from tests.tiny import tiny_model, tiny_tokenizer

GENERATION = {
    "generate/max_new_tokens": 6,
    "generate/do_sample": True,
    "generate/top_p": 0.6,
    "generate/top_k": 0,
    "generate/temperature": 0.9,
}


class BlackjackAgent(Agent):
    def get_system_prompt(self) -> str:
        return "You are an expert blackjack player. Reply with Action: 0 to stay or Action: 1 to hit."

    def format_observation(self, observation) -> str:
        return f"You: {observation[0]}. Dealer: {observation[1]}. You have {'an' if observation[2] else 'no'} ace."

    def extract_action(self, response: str):
        match = re.compile(r"Action: (\d)").search(response)
        if match:
            return int(match.group(1))
        if "stay" in response.lower():
            return 0
        if "hit" in response.lower():
            return 1
        raise ValueError(f"no action in {response!r}")

    def fallback_action(self, observation) -> int:
        return 0


class WorldAgent(Agent):
    def get_system_prompt(self) -> str:
        return "You play a text game. Reply with one command after the word Action."

    def format_observation(self, observation) -> str:
        return observation

    def extract_action(self, response: str) -> str:
        return response.split("Action: ")[1].strip() if "Action: " in response else "look"


class PoleAgent(Agent):
    def get_system_prompt(self) -> str:
        return "You balance a pole on a cart."

    def format_observation(self, observation) -> str:
        return f"The pole leans {'right' if observation[2] > 0 else 'left'}. Answer only LEFT or RIGHT"

    def extract_action(self, response: str) -> int:
        return 1 if "RIGHT" in response.upper() else 0


class World(gym.Env):
    """Three rooms in a row, read and answered in words."""

    observation_space = spaces.Text(100)
    action_space = spaces.Text(100)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.moves = 0
        return "A dark room.", {}

    def step(self, action):
        self.moves += 1
        return f"Room {self.moves}. You said {action[:20]!r}.", float("east" in action), self.moves == 3, False, {}


def load(**adapter):
    """As LlamaGym's scripts load a model, with every keyword that they pass."""
    folder = embedded_model_folder()
    lora = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.05, bias="none", task_type="CAUSAL_LM", **adapter)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(
        pretrained_model_name_or_path=folder, peft_config=lora, load_in_8bit=False, token=None
    )
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    model.pretrained_model.resize_token_embeddings(len(tokenizer))
    return model, tokenizer


def play(agent, env, episodes: int) -> list[dict]:
    """LlamaGym's loop."""
    updates = []
    for episode in range(episodes):
        observation, _ = env.reset(seed=episode)
        done = False
        while not done:
            action = agent.act(observation)
            observation, reward, terminated, truncated, _ = env.step(action)
            agent.assign_reward(reward)
            done = terminated or truncated
        if stats := agent.terminate_episode(truncated=truncated, final_observation=observation):
            updates.append(stats)
    return updates


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "env", "episodes"),
    [
        (BlackjackAgent, lambda: gym.make("Blackjack-v1"), 6),
        (WorldAgent, World, 2),
        (PoleAgent, lambda: gym.make("CartPole-v1", max_episode_steps=4), 2),
    ],
    ids=["blackjack", "text-world", "cartpole"],
)
def test_a_ported_script_acts_and_learns(kind, env, episodes):
    model, tokenizer = load(target_modules=["q_proj", "v_proj"])
    trained = [weight for weight in model.pretrained_model.parameters() if weight.requires_grad]
    before = [weight.clone() for weight in trained]
    # The learning rate rises over 20 steps, so that a few of them move little.
    agent = kind(model, tokenizer, "cpu", GENERATION, {"batch_size": 6, "mini_batch_size": 6, "warmup_steps": 1})
    updates = play(agent, env(), episodes)
    assert updates
    assert all(torch.tensor(stats["policy_loss"]).isfinite() for stats in updates)
    assert any(not torch.equal(weight, old) for weight, old in zip(trained, before, strict=True))


@pytest.mark.parametrize("option", ["load_in_8bit", "load_in_4bit"])
def test_quantising_without_a_gpu_is_refused_alike_by_both_ways_to_load(option, monkeypatch):
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

    assert config_of(ppo_config_dict=config, seed=1) is config
    assert config_of(ppo_config_dict={"batch_size": 7}, seed=1) == PPOConfig(batch_size=7, seed=1)
    assert config_of(ppo_config_dict=config, use_target_kl=True) == replace(config, target_kl=0.03)
    with pytest.raises(ConfigError, match="expected PPOConfig or a dictionary of its options, received GRPOConfig"):
        config_of(ppo_config_dict=GRPOConfig())


@pytest.mark.parametrize(
    ("option", "advice"), [("kl_penalty", "kl_placement"), ("log_with", "trackers"), ("score_clip", "assign_reward")]
)
def test_an_option_that_only_trl_has_is_answered_with_what_to_do(option, advice):
    with pytest.raises(ConfigError, match=f"Unknown option '{option}' of PPOConfig.*{advice}"):
        PPOConfig.from_dict({option: "kl"})


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
        conversation = agent.conversation(env_id)
        assert [turn.reward for turn in conversation.turns] == [reward]
        assert conversation.pending is None
        assert [message["role"] for message in conversation.messages][-2:] == ["user", "assistant"]
    agent.act_batch(["ccc", "dddd"])
    assert [len(agent.conversation(env_id).turns) for env_id in (0, 1)] == [2, 2]


def test_an_end_that_a_template_sets_off_by_a_space_comes_once():
    from llamagym.conversation.chat_template import ChatTemplate

    agent = make_agent(WordAgent)
    tokenizer = agent.tokenizer
    end = str(tokenizer.convert_ids_to_tokens(tokenizer.eos_token_id))
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }} " + end + "{% else %}"
        "[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
    )
    template = ChatTemplate(tokenizer)
    assert tokenizer.eos_token_id in template.next_prompt("a", None)
    assert tokenizer.eos_token_id not in template.next_prompt("a", tokenizer.eos_token_id)
