"""Wrong calls and values are rejected at once with a clear LlamaGymError, and nothing changes."""

from __future__ import annotations

import json
import signal
from typing import Any

import numpy as np
import pytest
import torch

from llamagym import (
    AutoModelForCausalLMWithValueHead,
    ConfigError,
    ContextLengthError,
    EpisodeError,
    GRPOConfig,
    LlamaGymError,
    PPOConfig,
    load_model_and_tokenizer,
    train,
)
from llamagym.agent.agent import collector_of
from llamagym.learners.replay import ReplayConfig
from llamagym.learners.sft import WarmStartConfig
from llamagym.models.registry import GenerationConfig, register
from llamagym.text.episode import Episode
from llamagym.training import evaluate
from llamagym.trl_compat.ppo_trainer import PPOTrainer
from tests.helpers.agents import ChoiceAgent, CountdownEnv, WordAgent, actor_of, make_agent
from tests.helpers.faults import FAULTS, FaultyEnv, returns
from tests.helpers.tiny import FAMILIES, tiny_base_model, tiny_model, tiny_tokenizer


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (PPOConfig, {"batch_size": "8"}),
        (PPOConfig, {"batch_size": True}),
        (PPOConfig, {"ppo_epochs": 2.5}),
        (PPOConfig, {"learning_rate": "3e-4"}),
        (PPOConfig, {"learning_rate": float("nan")}),
        (PPOConfig, {"learning_rate": -1e-3}),
        (PPOConfig, {"value_learning_rate": float("inf")}),
        (PPOConfig, {"horizon": 0}),
        (PPOConfig, {"target": 0.0}),
        (PPOConfig, {"target_kl": -0.1}),
        (PPOConfig, {"cliprange": 0}),
        (PPOConfig, {"max_grad_norm": 0.0}),
        (PPOConfig, {"entropy_coef": None}),
        (PPOConfig, {"whiten_advantages": 1}),
        (PPOConfig, {"critic": 3}),
        (PPOConfig, {"gamma": 1.01}),
        (GRPOConfig, {"group_size": 1}),
        (GRPOConfig, {"credit": None}),
        (ReplayConfig, {"steps": "2"}),
        (WarmStartConfig, {"epochs": 1.5}),
        (GenerationConfig, {"temperature": "1"}),
        (GenerationConfig, {"max_new_tokens": 4.0}),
        (GenerationConfig, {"top_p": float("nan")}),
    ],
)
def test_rejects_options_of_wrong_type_or_range(config, options):
    (name,) = options
    with pytest.raises(ConfigError, match=name):
        config.from_dict(options)


def test_accepts_numbers_of_numpy_and_ints_as_floats(tmp_path):
    config = PPOConfig(batch_size=np.int64(8), learning_rate=np.float32(0.1), horizon=5, target_kl=None)
    assert (config.batch_size, config.horizon) == (8, 5)
    two, options = np.int64(2), {"recent_updates": np.int64(2), "steps": np.int64(1)}
    agent = make_agent(ChoiceAgent, seed=two, invalid_action_penalty=np.float32(-1), replay_config_dict=options)
    train(
        agent, CountdownEnv, episodes=two, num_envs=two, seed=two, checkpoint_dir=tmp_path / "run", checkpoint_every=two
    )
    assert agent.policy.num_updates == 1
    assert evaluate(agent, CountdownEnv, episodes=two, seed=two, num_envs=two).returns
    agent.save(tmp_path / "agent")


@pytest.mark.parametrize("config", [PPOConfig, GRPOConfig, ReplayConfig, WarmStartConfig])
def test_rejects_numbers_that_are_too_large(config: Any):
    for options in ({"learning_rate": 3.5e37}, {"max_grad_norm": 1e39}, {"batch_size": 2**63}, {"seed": -1}):
        (name,) = options
        with pytest.raises(ConfigError, match=name):
            config(**options)
    config(learning_rate=3e37)
    with pytest.raises(ConfigError, match="Unknown option 5"):
        config.from_dict({5: 5})


@pytest.mark.parametrize(
    "choices", ["left", ["left", 1], [b"left"], [], ["left", "left"], ["left", ""], {"left": 1}, [["left"]]]
)
def test_rejects_invalid_choices(choices):
    agent = make_agent(ChoiceAgent)
    agent.get_action_choices = lambda observation: choices
    with pytest.raises(ConfigError, match="get_action_choices"):
        agent.act("a")
    assert actor_of(agent).conversations == {}


@pytest.mark.parametrize("encode", [lambda text: text.lower(), lambda text: text.strip("x")], ids=["equal", "empty"])
def test_rejects_choices_with_equal_token_ids(encode):
    """Distinct strings with equal token ids, or without any."""
    agent = make_agent(ChoiceAgent)
    usual = actor_of(agent).chat_template.encode
    actor_of(agent).chat_template.encode = lambda text: usual(encode(text))
    agent.choices = ("Go", "go") if encode("Go") == "go" else ("go", "xx")
    for call in (lambda: agent.act("a"), lambda: agent.action_probabilities(["a"])):
        with pytest.raises(ConfigError, match=r"get_action_choices\(\).*tells apart"):
            call()
    assert actor_of(agent).conversations == {}
    assert agent.policy.calibration.prior == {}


@pytest.mark.parametrize("hook", ["format_observation", "get_system_prompt"])
@pytest.mark.parametrize("returned", [5, None, b"text", ["text"]])
def test_rejects_hooks_that_return_no_text(hook: str, returned: Any):
    agent = make_agent(WordAgent)
    setattr(agent, hook, lambda *_: returned)
    with pytest.raises(ConfigError, match=hook):
        agent.act("a")
    assert actor_of(agent).conversations == {}


@pytest.mark.parametrize(
    "reward",
    [
        *("x", None, float("nan"), float("inf"), -1e300, 1e30, [1.0], 10**400, 1j),
        *(np.array([1, 2]), np.array(["a"]), np.str_("x"), np.str_("1"), torch.tensor([1, 2]), torch.tensor([])),
    ],
    ids=repr,
)
def test_rejects_invalid_rewards(reward: Any):
    agent = make_agent(WordAgent)
    agent.act_batch(["a", "b"])
    with pytest.raises(EpisodeError, match="Reward"):
        agent.assign_rewards([1.0, reward])
    assert agent.current_episode_rewards == [0.0]
    assert actor_of(agent).conversation(0).awaits_reward
    agent.assign_rewards([np.float64(1.0), True])
    agent.assign_rewards(torch.tensor([1.0, 2.0]))
    assert agent.current_episode_rewards == [2.0]


def test_rejects_rewards_whose_sum_is_too_large():
    agent = make_agent(ChoiceAgent, ppo={"batch_size": 2, "mini_batch_size": 2})
    agent.act("a")
    agent.assign_reward(4e11)
    agent.assign_reward(4e11)
    with pytest.raises(EpisodeError, match="sum of its action's"):
        agent.assign_reward(4e11)
    assert agent.current_episode_rewards == [8e11]
    agent.act("b")
    agent.assign_reward(-9e11)
    agent.terminate_episode()
    # A second episode that earns something else, so that there is something to learn.
    for reward in (9e11, -8e11):
        agent.act("a")
        agent.assign_reward(reward)
    stats = agent.terminate_episode()
    assert stats["skipped_steps"] == 0.0
    assert stats["optimizer_steps"] > 0


@pytest.mark.parametrize(
    "call",
    [
        lambda agent: agent.terminate_episodes([0, 1], truncated=True),
        lambda agent: agent.terminate_episodes([0, 1], truncated=["no", False], final_observations=["x", "y"]),
        lambda agent: agent.terminate_episodes([0, 1], [None, False]),
        lambda agent: agent.terminate_episodes([0, 1], train="no"),
        lambda agent: agent.terminate_episodes([0, 1], final_observations=5),
        lambda agent: agent.terminate_episodes([0, 1], groups=5),
        lambda agent: agent.terminate_episodes([0, 1], groups=[[1], [2]]),
        lambda agent: agent.terminate_episodes(0),
        lambda agent: agent.terminate_episodes([[0]]),
        lambda agent: agent.assign_rewards(1.0),
        lambda agent: agent.assign_rewards("12"),
        lambda agent: agent.assign_rewards({0: 1.0, 1: 2.0}),
        lambda agent: agent.assign_rewards(np.array(1.0), [0]),
        lambda agent: agent.assign_rewards([1.0], 0),
        lambda agent: agent.act_batch(5),
        lambda agent: agent.act_batch("cd"),
        lambda agent: agent.act_batch({"c": 0, "d": 1}),
        lambda agent: agent.act_batch(["c"], 2),
        lambda agent: agent.act_batch(["c"], [[2]]),
        lambda agent: agent.action_probabilities(5),
        lambda agent: agent.action_probabilities("ab"),
        lambda agent: actor_of(agent).discard_episodes([[1]]),
        lambda agent: actor_of(agent).discard_episodes(1),
        lambda agent: actor_of(agent).conversation([1]),
        lambda agent: agent.preflight(5),
    ],
)
def test_rejects_invalid_arguments_of_the_loop(call):
    agent = make_agent(ChoiceAgent)
    agent.act_batch(["a", "b"])
    agent.assign_rewards([0.0, 0.0])
    before = str(collector_of(agent).state_dict())
    with pytest.raises(EpisodeError):
        call(agent)
    assert str(collector_of(agent).state_dict()) == before


def test_accepts_arrays_as_arguments_of_the_loop():
    agent = make_agent(ChoiceAgent)
    agent.act_batch(np.array(["a", "b"]), np.array([0, 1]))
    agent.assign_rewards(np.array([0.0, 1.0]), range(2))
    agent.terminate_episodes(np.array([0, 1]), np.array([True, False]), ("x", None))
    assert collector_of(agent).buffered_turns == 2


HALF = "left \ud83d"


def test_rejects_text_with_half_a_surrogate_pair(tmp_path):
    agent = make_agent(ChoiceAgent)
    for observation in (HALF, "a"):
        agent.format_observation = lambda seen: seen
        agent.get_action_choices = lambda seen: ["go", HALF] if seen == "a" else None
        source = "format_observation" if observation == HALF else "get_action_choices"
        with pytest.raises(ConfigError, match=rf"{source}.*surrogate"):
            agent.act(observation)
    agent.get_system_prompt = lambda: HALF
    with pytest.raises(ConfigError, match=r"get_system_prompt.*surrogate"):
        agent.act("a")
    assert actor_of(agent).conversations == {}
    with pytest.raises(ConfigError, match=r"response_prefix.*surrogate"):
        make_agent(WordAgent, response_prefix=HALF)
    path = tmp_path / "demos.jsonl"
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": HALF}]
    path.write_text(json.dumps({"messages": messages}))
    with pytest.raises(ConfigError, match=r"line 1 .*surrogate"):
        make_agent(WordAgent).sft_from_jsonl(path)


@pytest.mark.parametrize(
    "option",
    [
        {"invalid_action_penalty": "x"},
        {"invalid_action_penalty": float("nan")},
        {"invalid_action_penalty": -(10**400)},
        {"seed": "x"},
        {"seed": 1.5},
        {"seed": -1},
        {"seed": 2**63},
        {"calibrate_choices": 3},
        {"aim_lora": "no"},
        {"sft_warm_start": None},
        {"context": ["turn"]},
        {"response_prefix": None},
        {"replay_config_dict": 5},
        {"grpo_config_dict": "x"},
    ],
    ids=repr,
)
def test_rejects_invalid_options_of_an_agent(option: dict[str, Any]):
    (name,) = option
    with pytest.raises(ConfigError, match=name):
        make_agent(ChoiceAgent, **option)


def test_rejects_wrong_constructor_arguments_of_an_agent():
    model = tiny_model("llama")
    for tokenizer in (None, "llama", 5):
        with pytest.raises(ConfigError, match="tokenizer"):
            WordAgent(model, tokenizer)
    for device in (5, "gpu", torch.float32):
        with pytest.raises(ConfigError, match="device"):
            WordAgent(model, tiny_tokenizer("llama"), device)
    for algorithm in (5, [], "dqn"):
        with pytest.raises(ConfigError, match="algorithm"):
            WordAgent(model, tiny_tokenizer("llama"), algorithm=algorithm)
    with pytest.raises(ConfigError, match="ppo_config_dict"):
        WordAgent(model, tiny_tokenizer("llama"), ppo_config_dict=5)


@pytest.mark.parametrize("run", [train, evaluate])
@pytest.mark.parametrize(
    "option",
    [{"seed": "x"}, {"seed": -1}, {"seed": 0.5}, {"env": 5}, {"env": lambda: 5}, {"agent": 5}],
    ids=["seed-x", "seed-minus-1", "seed-half", "env-5", "env-returning-5", "agent-5"],
)
def test_rejects_invalid_arguments_of_a_run(run, option: dict[str, Any]):
    (name,) = option
    with pytest.raises(ConfigError, match=name):
        run(**{"agent": make_agent(ChoiceAgent), "env": CountdownEnv, "episodes": 1, **option})


@pytest.mark.parametrize(
    "option",
    [
        {"group_size": "2"},
        {"group_size": 0},
        {"env_timeout": float("nan")},
        {"env_timeout": float("inf")},
        {"env_timeout": "x"},
        {"env_timeout": -1},
        {"on_update": 5},
        {"tracker": 5},
        {"checkpoint_dir": 5},
        {"resume": "no"},
        {"checkpoint_every": 0.5},
    ],
    ids=repr,
)
def test_rejects_invalid_options_of_train(option: dict[str, Any]):
    (name,) = option
    with pytest.raises(ConfigError, match=name):
        train(make_agent(ChoiceAgent), CountdownEnv, episodes=1, **option)


@pytest.mark.parametrize("run", [train, evaluate])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("CartPole-v99", "`v1`"),
        ("Cartpole-v1", "Did you mean: `CartPole`"),
        ("", "Malformed"),
        ("nowhere:Env-v0", "nowhere"),
        (":CartPole-v1", "Empty module name"),
        (".a:B-v0", "relative import"),
        ("..x:Env-v0", "relative import"),
        ("llamagym/TextWorld-v0", "games"),
    ],
)
def test_rejects_unknown_environments(run, name: str, said: str):
    with pytest.raises(ConfigError, match=rf"env='{name}'.*{said}"):
        run(make_agent(ChoiceAgent), name, episodes=1)


@pytest.mark.parametrize(
    ("method", "fault"), [(method, fault) for method in ("reset", "step") for fault in FAULTS[method][:-2]]
)
def test_rejects_invalid_values_from_an_environment(method: str, fault: Any):
    """`FAULTS` ends with errors."""
    for run in (train, evaluate):
        agent = make_agent(ChoiceAgent)
        with pytest.raises(LlamaGymError):
            run(agent, lambda: FaultyEnv(method, 1, fault), episodes=3, num_envs=2)
        assert actor_of(agent).conversations == {}


@pytest.mark.filterwarnings("ignore::UserWarning")  # Gymnasium logs the errors of its processes.
def test_error_names_the_invalid_value():
    def run(method: str, fault: Any, **options: Any) -> None:
        train(make_agent(ChoiceAgent), lambda: FaultyEnv(method, 1, fault), episodes=2, num_envs=1, **options)

    for options in ({}, {"env_timeout": 60}):
        with pytest.raises(ConfigError, match=r"step\(\) returned None. Return \(observation, reward"):
            run("step", returns(None, None), **options)
        with pytest.raises(ConfigError, match="observations do not fit Discrete"):
            run("step", returns(0, "x"), **options)
    with pytest.raises(ConfigError, match=r"reset\(\) returned .*Return \(observation, info\)"):
        run("reset", returns(1, None))


def test_rejects_actions_outside_of_the_space():
    agent = make_agent(ChoiceAgent)
    agent.extract_action = lambda text: text
    with pytest.raises(ConfigError, match=r"actions \['.*'\] do not fit Discrete"):
        train(agent, CountdownEnv, episodes=1)


@pytest.mark.parametrize("name", ["observation_space", "action_space"])
def test_environments_without_a_space(name: str, monkeypatch):
    monkeypatch.setattr(CountdownEnv, name, None)
    with pytest.raises(ConfigError, match=name):
        train(make_agent(ChoiceAgent), CountdownEnv, episodes=1)


@pytest.mark.long
def test_a_time_limit_leaves_ctrl_c_to_the_caller():
    before = signal.getsignal(signal.SIGINT)
    train(make_agent(ChoiceAgent), CountdownEnv, episodes=1, env_timeout=60)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("run", [train, evaluate])
@pytest.mark.parametrize("counts", [{"episodes": 0}, {"num_envs": 0}, {"num_envs": -1}, {"episodes": 1.5}])
def test_rejects_invalid_counts(run, counts: dict[str, Any]):
    with pytest.raises(ConfigError, match=next(iter(counts))):
        run(make_agent(ChoiceAgent), CountdownEnv, **{"episodes": 1, **counts})


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_an_update_needs_episodes_with_turns(algorithm: Any):
    agent = make_agent(ChoiceAgent, algorithm=algorithm)
    for episodes in ([], [Episode((), True, False, 0.0, None)]):
        with pytest.raises(EpisodeError, match=f"received {len(episodes)} episodes"):
            agent.learner.update(episodes)
    assert agent.policy.num_updates == 0


@pytest.mark.parametrize("dtype", [123, "float7", None])
def test_rejects_invalid_dtypes(dtype: Any):
    with pytest.raises(ConfigError, match="dtype"):
        load_model_and_tokenizer("smollm2-135m", device="cpu", dtype=dtype)


@pytest.mark.parametrize("entry", ["smollm2-135m", None, {}])
def test_rejects_invalid_registry_entries(entry: Any):
    with pytest.raises(ConfigError, match="ModelEntry"):
        register(entry)


@pytest.mark.parametrize(
    "wrong",
    [
        {"scores": [float("nan"), 1.0]},
        {"scores": [torch.tensor(float("inf")), 1.0]},
        {"scores": ["good", 1.0]},
        {"responses": [torch.tensor([10**6]), torch.tensor([1])]},
        {"queries": [torch.tensor([-1]), torch.tensor([1])]},
    ],
)
def test_rejects_invalid_samples_of_a_trainer(wrong: dict[str, Any]):
    trainer = PPOTrainer(PPOConfig(batch_size=2, mini_batch_size=2), tiny_model("llama"))
    before = [weight.clone() for weight in trainer.model.parameters()]
    usual = {"queries": [torch.tensor([1, 2])] * 2, "responses": [torch.tensor([3])] * 2, "scores": [0.0, 1.0]}
    with pytest.raises(LlamaGymError, match=next(iter(wrong))):
        trainer.step(**usual | wrong)
    assert all(torch.equal(now, old) for now, old in zip(trainer.model.parameters(), before, strict=True))


def test_only_line_feeds_end_lines_of_demonstrations(tmp_path):
    path = tmp_path / "demos.jsonl"
    messages = [{"role": "user", "content": "one\u2028two\x85three"}, {"role": "assistant", "content": "yes"}]
    path.write_text(json.dumps({"messages": messages}, ensure_ascii=False) + "\n", encoding="utf-8")
    stats = make_agent(WordAgent).sft_from_jsonl(path, epochs=1)
    assert stats["samples"] == 1


@pytest.mark.parametrize("peft_config", [True, "lora", {"r": 4}])
def test_rejects_invalid_adapters(peft_config: Any):
    with pytest.raises(ConfigError, match="peft_config"):
        load_model_and_tokenizer("smollm2-135m", device="cpu", peft_config=peft_config)


def test_rejects_a_tokenizer_with_more_tokens_than_the_model():
    tokenizer = tiny_tokenizer("llama")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<one>", "<two>"]})
    model = tiny_model("llama")
    with pytest.raises(ConfigError, match="resize_token_embeddings"):
        WordAgent(model, tokenizer)
    model.pretrained_model.resize_token_embeddings(len(tokenizer))
    WordAgent(model, tokenizer, generate_config_dict={"max_new_tokens": 2}).act("a")


@pytest.mark.parametrize(
    ("family", "other"),
    [("llama", "qwen2"), ("gemma", "qwen3"), ("llama", "phi"), ("smollm", "phi"), ("gemma", "phi"), ("phi3", "phi")],
)
def test_rejects_a_smaller_tokenizer_of_another_model(family: str, other: str):
    with pytest.raises(ConfigError, match="another model's"):
        WordAgent(tiny_model(family), tiny_tokenizer(other))


@pytest.mark.parametrize("family", FAMILIES)
def test_accepts_special_tokens_that_were_set_on_purpose(family: str):
    """A model's own tokenizer is accepted whatever its special tokens are."""

    def made(**special: str) -> None:
        model, tokenizer = tiny_model(family), tiny_tokenizer(family)
        if tokenizer.add_special_tokens(special):
            model.pretrained_model.resize_token_embeddings(len(tokenizer))
        WordAgent(model, tokenizer)

    own = tiny_tokenizer(family)
    made()
    made(pad_token=own.eos_token)
    for name in own.all_special_tokens:
        made(eos_token=name)
        made(eos_token=name, pad_token=name)
    made(eos_token="<new>")
    made(eos_token="<new>", pad_token="<new>")
    made(eos_token="<new>", pad_token="<other>")
    made(bos_token="<new>", pad_token="<other>")


def test_ignores_default_ids_of_a_config():
    """Ids beyond the vocabulary, as in configs of small models that were written by hand, do not count."""
    model, tokenizer = tiny_model("llama"), tiny_tokenizer("llama")
    for role in ("eos_token_id", "bos_token_id", "pad_token_id"):
        setattr(model.pretrained_model.config, role, 50256)
        setattr(model.pretrained_model.generation_config, role, None)
    WordAgent(model, tokenizer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rejects_trainable_weights_of_low_precision(dtype: torch.dtype):
    model = AutoModelForCausalLMWithValueHead.from_pretrained(tiny_base_model("llama").to(dtype))
    with pytest.raises(ConfigError, match="dtype='float32'"):
        WordAgent(model, tiny_tokenizer("llama"))


def test_rejects_acting_twice_without_a_reward_in_train_mode():
    agent = make_agent(ChoiceAgent)
    agent.act_batch(["a", "b"])
    agent.assign_rewards([1.0], [0])
    with pytest.raises(EpisodeError, match="Environment 1 acts again"):
        agent.act_batch(["c", "d"])
    assert [len(actor_of(agent).conversation(env_id).turns) for env_id in (0, 1)] == [1, 1]
    agent.assign_rewards([0.0], [1])
    agent.act_batch(["c", "d"])
    agent.eval()
    for _ in range(2):
        agent.act_batch(["e", "f"])


def test_rejects_text_that_exceeds_the_context_length():
    agent, endless = make_agent(ChoiceAgent, ppo={"batch_size": 1}), "x" * 3000
    with pytest.raises(ContextLengthError):
        agent.act(endless)
    with pytest.raises(ContextLengthError):
        agent.action_probabilities([endless])
    agent.act("a")
    agent.assign_reward(1.0)
    with pytest.raises(ContextLengthError):
        agent.terminate_episode(truncated=True, final_observation=endless)
    assert agent.terminate_episode(truncated=True, final_observation="b")["turns"] == 1.0
