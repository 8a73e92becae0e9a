"""The agent's contract: order of calls, batches, modes, invalid replies, what is kept raw."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from llamagym import (
    ActionParseError,
    Agent,
    AutoModelForCausalLMWithValueHead,
    ConfigError,
    ContextLengthError,
    EpisodeError,
    GenerationConfig,
    GRPOConfig,
    PPOConfig,
    ReinforceConfig,
    train,
)
from llamagym.agent import collector
from llamagym.agent.agent import collector_of
from llamagym.learners.algorithms import make_learner
from tests.helpers.agents import PLAIN, ChoiceAgent, WordAgent, actor_of, experienced, make_agent
from tests.helpers.tiny import FAMILIES, tiny_base_model, tiny_tokenizer


def play_episode(agent, turns, reward=1.0):
    for turn in range(turns):
        agent.act(f"step {turn}")
        agent.assign_reward(reward)
    return agent.terminate_episode()


@pytest.mark.equivalence
@pytest.mark.pairwise(kind=[WordAgent, ChoiceAgent], family=FAMILIES)
def test_act_and_update_run_for_every_family(family, kind):
    agent = experienced(make_agent(kind, family, ppo={"batch_size": 3}))
    weights = {name: w.detach().clone() for name, w in agent.policy.model.named_parameters()}
    stats = play_episode(agent, 3)
    assert stats["ratio_error"] < 1e-3
    assert stats["return_mean"] == 3.0
    assert stats["turns"] == 3.0
    assert stats["learn_tokens"] > 0
    assert stats["act_s"] > 0
    assert stats["learn_s"] > 0
    changed = {n for n, w in agent.policy.model.named_parameters() if not torch.equal(w, weights[n])}
    assert changed == {n for n, w in agent.policy.model.named_parameters() if w.requires_grad}


def test_updates_only_when_a_batch_is_full():
    agent = make_agent(ppo={"batch_size": 4})
    assert play_episode(agent, 3) == {}
    assert collector_of(agent).buffered_turns == 3
    assert "3 turns, and a batch needs 4" in collector_of(agent).why_no_update()
    agent.act_batch(["a", "b", "c"])
    agent.assign_rewards([1.0, 2.0, 3.0])
    stats = agent.terminate_episodes([0, 1, 2])
    assert stats["episodes"] == 4.0
    assert stats["turns"] == 6.0
    assert collector_of(agent).buffered_turns == 0


def test_current_episode_messages_and_rewards():
    agent = make_agent(ChoiceAgent)
    action = agent.act("one")
    agent.assign_reward(0.5)
    agent.assign_reward(0.25)
    assert agent.current_episode_rewards == [0.75]
    assert agent.current_episode_messages == [
        {"role": "system", "content": "Say something."},
        {"role": "user", "content": "Observation one"},
        {"role": "assistant", "content": ChoiceAgent.choices[action]},
    ]
    agent.terminate_episode()
    assert agent.current_episode_rewards == []


def test_turn_context_shows_only_the_current_observation():
    agent = make_agent(context="turn")
    for text in ("first", "second"):
        agent.act(text)
        agent.assign_reward(0.0)
    seen = agent.tokenizer.decode(actor_of(agent).conversation(0).current_segment().prompts[-1].ids)
    assert "second" in seen
    assert "Say something." in seen
    assert "first" not in seen


def test_single_calls_are_a_batch_of_one():
    single, batch = make_agent(), make_agent()
    for text in ("a", "b"):
        assert single.act(text) == batch.act_batch([text], [0])[0]
        single.assign_reward(1.0)
        batch.assign_rewards([1.0], [0])
    assert actor_of(single).conversation(0).turns == actor_of(batch).conversation(0).turns


@pytest.mark.equivalence
def test_same_seed_same_actions():
    actions = [make_agent(seed=seed).act_batch(["a", "b", "c"]) for seed in (1, 1, 2)]
    assert actions[0] == actions[1] != actions[2]


class Picky(WordAgent):
    """Accepts nothing; knows a fallback."""

    def extract_action(self, response):
        raise ValueError("no")

    def fallback_action(self, observation):
        return f"fallback for {observation}"


def test_invalid_reply_has_a_penalty_beside_the_raw_reward():
    agent = make_agent(Picky, invalid_action_penalty=-0.5, ppo={"batch_size": 1})
    assert agent.act("x") == "fallback for x"
    agent.assign_reward(2.0)
    turn = actor_of(agent).conversation(0).turns[0]
    stats = agent.terminate_episode()
    assert stats["invalid_rate"] == 1.0
    assert stats["return_mean"] == 2.0
    assert (turn.reward, turn.penalty, turn.valid) == (2.0, -0.5, False)


def test_invalid_reply_without_fallback_warns_with_advice(caplog):
    class Strict(WordAgent):
        def extract_action(self, response):
            return None

    agent = make_agent(Strict)
    assert agent.act_batch(["x", "y"]) == [None, None]
    agent.assign_rewards([0.0, 0.0])
    assert [actor_of(agent).conversation(env).turns[0].valid for env in (0, 1)] == [False, False]
    assert caplog.text.count("Strict has no fallback: define fallback_action") == 1
    with pytest.raises(ActionParseError, match="define fallback_action"):
        train(make_agent(Strict), "Blackjack-v1", episodes=1)


def test_rewards_stay_raw_through_an_update():
    agent = make_agent(ppo={"batch_size": 4, "init_kl_coef": 0.5, "gamma": 0.5, "learning_rate": 1e-2})
    for _ in range(2):
        episodes = {}
        for rewards in ((1.5, 0.0), (0.5, -3.0)):
            for observation, reward in zip("ab", rewards, strict=True):
                agent.act(observation)
                agent.assign_reward(reward)
            episodes[rewards] = list(actor_of(agent).conversation(0).turns)
            stats = agent.terminate_episode()
        for rewards, turns in episodes.items():
            assert tuple(turn.reward for turn in turns) == rewards
    # The first update has left the reference: the second one's penalties are not zero.
    assert abs(stats["ref_kl"]) > 1e-3


def test_value_is_bootstrapped_after_truncation_and_never_after_termination():
    agent = make_agent(ppo={"batch_size": 100})
    for truncated in (True, False):
        agent.act("a")
        agent.assign_reward(1.0)
        agent.terminate_episode(truncated=truncated, final_observation="the end")
    cut, ended = collector_of(agent).buffer
    assert (cut.truncated, cut.terminated) == (True, False)
    assert (ended.truncated, ended.terminated) == (False, True)
    assert ended.final_prompt is None
    # Independently: the final observation's context, through the model's own forward pass and value head.
    ids = [*cut.turns[0].prompt.ids, *cut.turns[0].reply.ids]
    end = cut.turns[0].reply.ids[-1] if cut.turns[0].reply.finish_reason == "eos" else None
    ids += actor_of(agent).chat_template.next_prompt("Say something.", "Observation the end", end)
    with torch.no_grad():
        values = agent.policy.model(torch.tensor([ids]))[2]
    value = agent.policy.read_critic([cut.final_segment()]).values.item()
    assert value == pytest.approx(values[0, -1].item(), abs=1e-4)
    assert value != 0.0


def test_rejects_truncation_without_final_observation_and_keeps_the_episode():
    agent = make_agent()
    agent.act("a")
    with pytest.raises(EpisodeError, match="Pass final_observation"):
        agent.terminate_episode(truncated=True)
    assert len(actor_of(agent).conversation(0).turns) == 1


def test_eval_neither_buffers_nor_learns():
    agent = make_agent(ppo={"batch_size": 1})
    agent.eval()
    weights = [w.detach().clone() for w in agent.policy.model.parameters()]
    replies = {
        agent.act("same") for _ in range(3) if agent.terminate_episode is not None and not actor_of(agent).is_learning
    }
    assert agent.terminate_episode() == {}
    assert collector_of(agent).buffered_turns == 0
    assert all(torch.equal(a, b) for a, b in zip(weights, agent.policy.model.parameters(), strict=True))
    assert len(replies) >= 1


@pytest.mark.equivalence
def test_greedy_takes_the_most_likely_choice():
    agent = make_agent(ChoiceAgent, context="turn")
    agent.eval(greedy=True)
    probabilities = agent.action_probabilities(["x"])[0]
    assert sum(probabilities.values()) == pytest.approx(1.0)
    best = max(probabilities, key=probabilities.get)
    assert {agent.act("x") for _ in range(5)} == {ChoiceAgent.choices.index(best)}


@pytest.mark.equivalence
def test_sampled_choices_follow_their_probabilities():
    agent = make_agent(ChoiceAgent, context="turn")
    probabilities = agent.action_probabilities(["x"])[0]
    n = 2000
    actions = agent.act_batch(["x"] * n)
    for index, choice in enumerate(ChoiceAgent.choices):
        p = probabilities[choice]
        assert actions.count(index) / n == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / n))


def test_calibration_subtracts_the_first_measured_prior():
    measured = make_agent(ChoiceAgent, context="turn")
    measured.act_batch(["x", "yy", "zzz"])
    prior = dict(measured.policy.calibration.prior)
    left, right, stay = (tuple(measured.tokenizer(choice)["input_ids"]) for choice in ChoiceAgent.choices)
    part = next(at for at, (a, b) in enumerate(zip(left, right, strict=False), start=1) if a != b)
    assert set(prior) == {left[:1], stay[:1], left[:part], right[:part]}
    measured.act_batch(["something else"], [9])
    assert measured.policy.calibration.prior == prior
    # One branch that has two choices, "go left" and "go right", against "stay".
    plain = make_agent(ChoiceAgent, context="turn", calibrate_choices=False)
    raw = torch.tensor(list(plain.action_probabilities(["x"])[0].values()))
    first = torch.stack([raw[:2].sum().log() - prior[left[:1]] + math.log(2), raw[2].log() - prior[stay[:1]]])
    second = raw[:2].log() - torch.tensor([prior[left[:part]], prior[right[:part]]])
    (go, staying), directions = first.softmax(0), second.softmax(0)
    wanted = [*(go * directions).tolist(), staying.item()]
    assert list(measured.action_probabilities(["x"])[0].values()) == pytest.approx(wanted, abs=1e-3)


def test_reply_begins_with_response_prefix():
    agent = make_agent(response_prefix="Action:")
    assert agent.act("x").startswith("Action:")
    prompt = actor_of(agent).conversation(0).turns[0].prompt
    assert agent.tokenizer.decode(prompt.ids).endswith("Action:")


def test_rejects_calls_out_of_order():
    agent = make_agent()
    with pytest.raises(EpisodeError, match=r"follows no action\. Call act\(\) first"):
        agent.assign_reward(1.0)
    with pytest.raises(EpisodeError, match="no episode to end"):
        agent.terminate_episode()
    agent.act("x")
    with pytest.raises(EpisodeError, match="not a finite number"):
        agent.assign_reward(float("nan"))
    with pytest.raises(EpisodeError, match="distinct environments"):
        agent.act_batch(["a", "b"], [1, 1])


def test_observation_that_failed_can_be_passed_again():
    class Fragile(WordAgent):
        def format_observation(self, observation):
            return f"value {observation['x']}"

    agent = make_agent(Fragile)
    with pytest.raises(KeyError):
        agent.act_batch([{"x": 1}, {}])
    agent.act_batch([{"x": 1}, {"x": 2}])
    assert len(actor_of(agent).conversation(0).turns) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"generate": {"max_new_token": 3}}, "Did you mean 'max_new_tokens'"),
        ({"generate": {"generate/temprature": 1.0}}, "Did you mean 'temperature'"),
        ({"ppo": {"learning_rat": 1.0}}, "Did you mean 'learning_rate'"),
        ({"generate": {"temperature": 0.0}}, "do_sample=False"),
        ({"ppo": {"gamma": 1.5}}, r"gamma=1.5 is outside \[0, 1\]"),
        ({"context": "episodes"}, "Did you mean 'episode'"),
        ({"invalid_action_penalty": 1.0}, "would reward replies"),
    ],
)
def test_rejects_invalid_options(options, message):
    with pytest.raises(ConfigError, match=message):
        make_agent(**options)


def test_rejects_options_of_another_algorithm():
    assert make_agent(algorithm="grpo", grpo={"gamma": 0.9}).learner.config == GRPOConfig(
        **{**PLAIN, "batch_size": 4, "mini_batch_size": 4, "epochs": 2, "gamma": 0.9, "seed": 0}
    )
    assert make_agent(algorithm="reinforce", seed=3).learner.config == ReinforceConfig(**PLAIN, batch_size=4, seed=3)
    with pytest.raises(ConfigError, match=r"Did you mean 'grpo'"):
        WordAgent(make_agent().policy.model, tiny_tokenizer("llama"), algorithm="grop")
    with pytest.raises(ConfigError, match=r"ppo_config_dict=.* has no effect on algorithm='grpo'. Pass learner=PPOC"):
        WordAgent(make_agent().policy.model, tiny_tokenizer("llama"), None, None, {"gamma": 0.5}, algorithm="grpo")


def test_accepts_arguments_of_earlier_versions_with_a_message(caplog):
    model = make_agent().policy.model
    tokenizer = tiny_tokenizer("llama")
    agent = WordAgent(model, tokenizer, algorithm="grpo", grpo_config_dict={"group_size": 4}, seed=3)
    assert agent.learner.config == GRPOConfig(group_size=4, seed=3)
    assert "algorithm, grpo_config_dict. Pass learner=GRPOConfig(...) instead" in caplog.text
    assert WordAgent(model, tokenizer, use_target_kl=True).learner.config == PPOConfig()
    assert "use_target_kl. Pass learner=PPOConfig(...) instead" in caplog.text
    assert WordAgent(model, tokenizer, use_target_kl=False).learner.config == PPOConfig(target_kl=None)
    with pytest.raises(ConfigError, match="use_target_kl=True contradicts target_kl=None"):
        WordAgent(model, tokenizer, None, None, {"target_kl": None}, use_target_kl=True)
    with pytest.raises(ConfigError, match="use_target_kl must be True or False, got None"):
        WordAgent(model, tokenizer, use_target_kl=None)


def test_learner_selects_the_algorithm():
    model = make_agent().policy.model
    tokenizer = tiny_tokenizer("llama")
    for config in (PPOConfig(ppo_epochs=2), GRPOConfig(group_size=4), ReinforceConfig(gamma=0.5)):
        learner = WordAgent(model, tokenizer, learner=config, seed=3).learner
        assert learner.config == replace(config, seed=3)
        assert learner.has_critic == isinstance(config, PPOConfig)
    assert WordAgent(model, tokenizer, learner=PPOConfig(seed=5), seed=3).learner.config.seed == 5
    with pytest.raises(ConfigError, match=r"learner=.* and algorithm and ppo_config_dict are both set"):
        WordAgent(model, tokenizer, None, None, {"gamma": 1.0}, learner=PPOConfig(), algorithm="ppo")
    with pytest.raises(ConfigError, match=r"learner must be a configuration, got Generation.* Pass PPOConfig"):
        WordAgent(model, tokenizer, learner=GenerationConfig())
    with pytest.raises(ConfigError, match="learner must be a configuration, got 'grpo'"):
        WordAgent(model, tokenizer, learner="grpo")


def test_model_tokenizer_and_device_are_attributes():
    agent = make_agent(response_prefix="I")
    assert agent.model is agent.policy.model
    assert isinstance(agent.tokenizer, PreTrainedTokenizerBase)
    assert (agent.device, agent.response_prefix) == (torch.device("cpu"), "I")
    agent.device = "my own"
    agent.model = agent.policy.model
    for name in ("model", "tokenizer", "policy", "response_prefix"):
        with pytest.raises(ConfigError, match=rf"agent\.{name} cannot be replaced"):
            setattr(agent, name, None)


def test_a_replaced_learner_updates():
    agent = make_agent(ChoiceAgent)
    agent.learner = make_learner(agent.policy, GRPOConfig(batch_size=2, group_size=2))
    agent.act_batch(["a", "b"])
    agent.assign_rewards([0.0, 1.0])
    assert "value_loss" not in agent.terminate_episodes([0, 1])
    assert agent.policy.num_updates == 1


def test_load_overrides_the_saved_learner_by_either_name(tmp_path):
    model = make_agent().policy.model
    saved = WordAgent(model, tiny_tokenizer("llama"), learner=GRPOConfig(learning_rate=7e-4, group_size=4))
    saved.save(tmp_path)

    def loaded(**options):
        return WordAgent.load(tmp_path, "cpu", model=model, **options).learner.config

    assert (loaded().learning_rate, loaded().group_size) == (7e-4, 4)
    assert loaded(algorithm="grpo").learning_rate == 7e-4
    assert loaded(ppo_config_dict=None).learning_rate == 7e-4
    assert loaded(grpo_config_dict={"group_size": 2}).group_size == 2
    assert (loaded(use_target_kl=False).target_kl, loaded(use_target_kl=False).learning_rate) == (None, 7e-4)
    assert isinstance(loaded(learner=PPOConfig()), PPOConfig)
    with pytest.raises(ConfigError, match=r"ppo_config_dict=.* has no effect on algorithm='grpo'"):
        loaded(ppo_config_dict={"gamma": 0.5})


def test_a_derived_configuration_is_accepted():
    class MyConfig(PPOConfig):
        pass

    assert isinstance(make_agent(WordAgent).learner.config, PPOConfig)
    agent = WordAgent(make_agent().policy.model, tiny_tokenizer("llama"), learner=MyConfig(gamma=0.5))
    assert agent.learner.config.gamma == 0.5


def test_transcripts_have_advantages_where_episodes_are_copied_between_processes(monkeypatch):
    monkeypatch.setattr(collector, "episodes_of_all_ranks", lambda policy, own: pickle.loads(pickle.dumps(own)))
    agent = make_agent(ChoiceAgent, ppo={"batch_size": 2})
    for observation in ("a", "b"):
        agent.act(observation)
        agent.assign_reward(1.0)
        agent.terminate_episode()
    advantages = [turn["advantage"] for transcript in collector_of(agent).transcripts for turn in transcript["turns"]]
    assert len(advantages) == 2
    assert None not in advantages


def test_episode_that_is_terminated_and_truncated_at_once_is_terminated():
    agent = make_agent(ChoiceAgent, ppo={"batch_size": 1000})

    def end(**flags: Any) -> tuple[bool, bool, bool]:
        agent.act("a")
        agent.assign_reward(1.0)
        agent.terminate_episode(final_observation="b", **flags)
        episode = collector_of(agent).buffer[-1]
        return episode.terminated, episode.truncated, episode.final_prompt is not None

    for true in (True, np.True_, torch.tensor(True)):
        assert end(terminated=true, truncated=true) == end(terminated=true) == (True, False, False)
    assert end(truncated=True) == end(terminated=False, truncated=True) == (False, True, True)
    # The loop itself ended the episode.
    assert end(terminated=False, truncated=False) == end(terminated=np.False_) == (False, True, True)
    assert end() == (True, False, False)


def test_termination_takes_precedence_in_a_batch():
    agent = make_agent(ChoiceAgent, ppo={"batch_size": 1000})
    agent.act_batch(["a", "b", "c"])
    agent.assign_rewards([1.0, 1.0, 1.0])
    ends = np.array([True, False, True])
    agent.terminate_episodes([0, 1, 2], [True, True, False], ["x", "y", "z"], terminated=ends)
    assert [episode.truncated for episode in collector_of(agent).buffer] == [False, True, False]
    assert [episode.final_prompt is not None for episode in collector_of(agent).buffer] == [False, True, False]


@pytest.mark.parametrize("flags", [{"terminated": "no"}, {"terminated": [True]}, {"terminated": 2}])
def test_rejects_terminated_that_is_neither_true_nor_false(flags):
    agent = make_agent(ChoiceAgent)
    agent.act("a")
    agent.assign_reward(1.0)
    with pytest.raises(EpisodeError, match="terminated"):
        agent.terminate_episode(**flags)


def test_rejects_end_without_termination_that_lacks_its_final_observation():
    agent = make_agent(ChoiceAgent)
    agent.act("a")
    agent.assign_reward(1.0)
    with pytest.raises(EpisodeError, match="final observation"):
        agent.terminate_episode(terminated=False)
    agent.terminate_episode(terminated=True, truncated=True)


def test_rejects_a_model_without_value_head():
    model = tiny_base_model("llama")
    with pytest.raises(ConfigError, match=r"AutoModelForCausalLMWithValueHead\.from_pretrained"):
        WordAgent(model, tiny_tokenizer("llama"))
    agent = WordAgent(AutoModelForCausalLMWithValueHead.from_pretrained(model), tiny_tokenizer("llama"))
    assert isinstance(agent, Agent)


def test_accepts_llamagyms_option_names():
    generate = {"generate/max_new_tokens": 3, "generate/do_sample": True, "generate/top_p": 0.6, "generate/top_k": 0}
    ppo = {"batch_size": 2, "mini_batch_size": 1, "cliprange": 0.1, "vf_coef": 0.2, "init_kl_coef": 0.1, "lam": 0.9}
    agent = make_agent(generate={**generate, "max_new_tokens": 3}, ppo=ppo)
    assert play_episode(agent, 2)["turns"] == 2.0


def test_rejects_a_context_that_is_too_long():
    with pytest.raises(ContextLengthError, match="context='turn'"):
        make_agent().act("x" * 3000)


def test_rejects_choices_that_are_not_distinct_strings():
    agent = make_agent(ChoiceAgent)
    agent.choices = ("a", "a")
    with pytest.raises(ConfigError, match="distinct, non-empty"):
        agent.act("x")


def test_statistics_can_be_logged_as_json():
    agent = make_agent(ppo={"batch_size": 1})
    assert json.loads(json.dumps(play_episode(agent, 1)))["turns"] == 1.0


@pytest.mark.parametrize(("context", "turns"), [("turn", 8192), ("episode", 1024)])
def test_default_batch_size_depends_on_distinct_turns(context: str, turns: int):
    agent = make_agent(ChoiceAgent, context=context, ppo={"batch_size": None, "mini_batch_size": None, "ppo_epochs": 1})
    played, stats = 0, {}
    while not stats:
        for _ in range(2):
            agent.act_batch(["x"] * 256, range(256))
            agent.assign_rewards([float(env_id % 2) for env_id in range(256)], range(256))
            played += 256
        stats = agent.terminate_episodes(range(256))
    # Three choices of one text are three turns; of a conversation only the first turn is one of three.
    assert turns <= played <= turns + 512
    assert stats["optimizer_steps"] == 4


def test_reading_messages_starts_no_conversation():
    agent = make_agent(ChoiceAgent)
    assert [message["role"] for message in agent.current_episode_messages] == ["system"]
    assert agent.current_episode_rewards == []
    assert (
        collector_of(agent).state_dict()["under_way"] == collector_of(make_agent(ChoiceAgent)).state_dict()["under_way"]
    )


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("learn", r"Train with llamagym\.train\(agent, env, minutes=10\)"),
        ("predict", r"Act with agent\.act\(observation\)"),
        ("set_env", "The environment is an argument"),
    ],
)
def test_methods_of_other_libraries_are_named_with_what_replaces_them(name, advice):
    agent = make_agent()
    with pytest.raises(AttributeError, match=rf"'WordAgent' object has no attribute '{name}'\. {advice}"):
        getattr(agent, name)
    assert not hasattr(agent, name)
    with pytest.raises(AttributeError, match=r"'WordAgent' object has no attribute 'leaern'$"):
        _ = agent.leaern


def test_training_mode_has_one_clear_name():
    agent = make_agent()
    actor = actor_of(agent)
    modes = []
    for switch in (
        lambda: agent.set_training_mode(False),
        lambda: agent.set_training_mode(False, greedy=False),
        lambda: agent.set_training_mode(True),
        lambda: agent.eval(),
        lambda: agent.eval(greedy=False),
        lambda: agent.train(),
    ):
        switch()
        modes.append((actor.is_learning, actor.is_greedy))
    assert modes == [(False, True), (False, False), (True, False)] * 2
    with pytest.raises(ConfigError, match="mode must be True or False"):
        agent.set_training_mode("yes")


def test_a_property_keeps_its_own_error():
    class Mine(WordAgent):
        @property
        def table(self) -> Any:
            return self.missing_part

    with pytest.raises(AttributeError, match="has no attribute 'missing_part'"):
        _ = make_agent(Mine).table
