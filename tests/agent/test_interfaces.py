"""The public interface: wrong values are rejected by name, and the same rules hold everywhere."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from dataclasses import fields
from functools import reduce, wraps
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

import pytest
import torch
from gymnasium import spaces

import llamagym
from llamagym import (
    AutoModelForCausalLMWithValueHead,
    ConfigError,
    EvalCallback,
    EvaluationResult,
    GenerationConfig,
    GRPOConfig,
    LlamaCppSampler,
    LlamaGymError,
    PPOConfig,
    PPOTrainer,
    Progress,
    ReinforceConfig,
    Run,
    ScoreCallback,
    StopOnReturn,
    VLLMSampler,
    default_tracker,
    demonstrations_path,
    evaluate,
    find_json,
    load_model_and_tokenizer,
    name_actions,
    parse_action,
    parse_choice,
    serve,
    side_by_side,
    train,
    write_report,
)
from llamagym.agent.agent import collector_of
from llamagym.learners.sft import WarmStartConfig
from tests.helpers.agents import ChoiceAgent, CountdownEnv, actor_of, make_agent
from tests.helpers.tiny import tiny_base_model, tiny_model, tiny_tokenizer

LIMIT = 1500
WRONG: dict[str, Any] = {
    "object": object(),
    "nan": float("nan"),
    "negative": -1,
    "digits": 10**5000,
    "no text": "",
    "no items": [],
    "no entries": {},
    "none": None,
}
WRONG_PATHS: dict[str, Any] = {"bytes": b"x", "nul": "a\0b", "surrogate": "\ud83d"}
# Wrong values of another kind than the argument's, by what else is right.
NUMBER = {"object", "nan", "digits", "no text", "no items", "no entries"}
TEXT = {"object", "nan", "negative", "digits", "no items", "no entries"}
ANY = set(WRONG)


class Call(NamedTuple):
    """A public name, arguments that are right, and what is wrong for each."""

    function: Callable[..., Any]
    right: Callable[[], dict[str, Any]]
    wrong: dict[str, set[str]]


def of_model() -> dict[str, Any]:
    return {"model": tiny_model("llama"), "tokenizer": tiny_tokenizer("llama")}


def of_run() -> dict[str, Any]:
    return {"agent": make_agent(ChoiceAgent), "env": CountdownEnv, "episodes": 1}


@wraps(serve)
def entered(*arguments: Any, **options: Any) -> None:
    """Serves an agent for a moment."""
    with serve(*arguments, **options):
        pass


COUNT = NUMBER | {"negative"}
FLAG = ANY
OPTIONS = ANY - {"no entries", "none"}
FOLDER = TEXT | {"no text"}
RUN = {
    "agent": ANY,
    "env": ANY,
    "num_envs": COUNT,
    "seed": COUNT,
}
SERVER = {
    "url": ANY,
    "timeout_s": COUNT | {"none"},
    "max_requests": COUNT | {"none"},
    "api_key": TEXT | {"no text"},
}
CALLS = {
    "Agent": Call(
        ChoiceAgent,
        of_model,
        {
            "model": ANY,
            "tokenizer": ANY,
            "device": ANY - {"none"},
            "generate_config_dict": OPTIONS,
            "ppo_config_dict": OPTIONS,
            "learner": ANY - {"none"},
            "context": ANY,
            "response_prefix": TEXT | {"none"},
            "invalid_action_penalty": (NUMBER | {"none"}),
            "calibrate_choices": FLAG,
            "aim_lora": FLAG,
            "sft_warm_start": FLAG,
            "replay_config_dict": OPTIONS,
            "seed": COUNT,
            "sampler": ANY - {"none"},
        },
    ),
    "AutoModelForCausalLMWithValueHead": Call(
        AutoModelForCausalLMWithValueHead, lambda: {"pretrained_model": tiny_model("llama")}, {"pretrained_model": ANY}
    ),
    "EvalCallback": Call(
        EvalCallback,
        lambda: {"env": CountdownEnv},
        {
            "env": ANY - {"no text"},
            "episodes": ANY,
            "every": COUNT,
            "every_episodes": COUNT,
            "best_dir": FOLDER,
            "seed": ANY,
            "num_envs": COUNT,
            "greedy": FLAG,
            "on_best": ANY - {"none"},
        },
    ),
    "PPOTrainer": Call(
        PPOTrainer,
        lambda: {"config": PPOConfig(), **of_model()},
        {
            "config": ANY,
            "model": ANY,
            "ref_model": ANY - {"none"},
            "tokenizer": ANY - {"none"},
            "kl_penalty": ANY,
            "ratio_threshold": NUMBER | {"none", "negative"},
            "rng": ANY - {"none"},
        },
    ),
    "Progress": Call(
        Progress,
        dict,
        {"episodes": COUNT, "unit": TEXT | {"none"}, "window": ANY, "share": ANY - {"none"}},
    ),
    "Run": Call(
        Run,
        lambda: {"agent": make_agent(ChoiceAgent), "episodes": 1, "turns": 1, "minutes": 1.0},
        {"agent": ANY, "episodes": COUNT, "turns": COUNT, "minutes": COUNT},
    ),
    "ScoreCallback": Call(
        ScoreCallback,
        lambda: {"score": lambda agent: 0.0},
        {"score": ANY, "every": ANY, "name": TEXT | {"none", "no text"}, "baselines": ANY - {"no entries", "none"}},
    ),
    "StopOnReturn": Call(
        StopOnReturn, lambda: {"mean_return": 1.0}, {"mean_return": NUMBER | {"none"}, "episodes": ANY}
    ),
    "default_tracker": Call(
        default_tracker,
        lambda: {"run_dir": "unused", "config": {}},
        {
            "run_dir": FOLDER | {"none"},
            "config": ANY - {"no entries"},
            "project": TEXT,
            "mode": TEXT,
            "agent": ANY - {"none"},
            "track": ANY - {"no items"},
        },
    ),
    "demonstrations_path": Call(demonstrations_path, dict, {"name": ANY}),
    "evaluate": Call(
        evaluate, of_run, {**RUN, "episodes": ANY, "greedy": FLAG, "judge": ANY - {"none"}, "env_timeout": COUNT}
    ),
    "find_json": Call(find_json, dict, {"reply": ANY - {"no text"}}),
    "load_model_and_tokenizer": Call(
        load_model_and_tokenizer,
        dict,
        {
            "name": ANY,
            "device": ANY,
            "dtype": ANY,
            "load_in_8bit": FLAG,
            "load_in_4bit": FLAG,
            "peft_config": ANY - {"none"},
            "token": TEXT,
            "attn_implementation": ANY - {"none"},
            "lora_layer_fraction": COUNT,
        },
    ),
    "name_actions": Call(name_actions, lambda: {"space": spaces.Discrete(2)}, {"space": ANY, "names": ANY - {"none"}}),
    "parse_action": Call(
        parse_action,
        lambda: {"reply": "1", "space": spaces.Discrete(2)},
        {"reply": ANY, "space": ANY, "key": TEXT | {"none"}},
    ),
    "parse_choice": Call(
        parse_choice,
        lambda: {"reply": "hit", "actions": {"hit": 1}},
        {"reply": ANY, "actions": ANY, "json_key": TEXT | {"none"}},
    ),
    "side_by_side": Call(side_by_side, dict, {"results": ANY}),
    "train": Call(
        train,
        of_run,
        {
            **RUN,
            "episodes": COUNT,
            "on_update": ANY - {"none"},
            "tracker": ANY - {"none"},
            "group_size": COUNT,
            "turns": COUNT,
            "minutes": COUNT,
            "callbacks": ANY - {"none", "no items"},
            "judge": ANY - {"none"},
            "run_dir": FOLDER,
            "eval_episodes": COUNT,
            "config": ANY - {"none", "no entries"},
            "track": ANY - {"no items"},
            "checkpoint_dir": FOLDER,
            "checkpoint_every": ANY,
            "keep_checkpoints": ANY,
            "resume": FLAG,
            "allow_changes": ANY - {"no items"},
            "handle_signals": FLAG,
            "env_timeout": COUNT,
            "overlap": FLAG,
        },
    ),
    "VLLMSampler": Call(VLLMSampler, lambda: {"url": "http://127.0.0.1:1"}, {**SERVER, "folder": FOLDER}),
    "LlamaCppSampler": Call(
        LlamaCppSampler,
        lambda: {"url": "http://127.0.0.1:1", "folder": "nowhere"},
        {**SERVER, "folder": FOLDER | {"none"}},
    ),
    "serve": Call(
        entered,
        lambda: {"agent": make_agent(ChoiceAgent)},
        {
            "agent": ANY,
            "host": TEXT | {"no text", "none"},
            "port": COUNT | {"none"},
            "api_key": TEXT | {"no text"},
            "on_update": ANY - {"none"},
        },
    ),
    "write_report": Call(
        write_report,
        lambda: {"runs": ["nowhere"], "path": "unused"},
        {"runs": ANY, "path": FOLDER | {"none"}, "refreshes": FLAG},
    ),
}
CONFIGURATIONS = {"GRPOConfig", "GenerationConfig", "LearnerConfig", "PPOConfig", "ReinforceConfig", "ReplayConfig"}
# What the library makes for users to read, except for `EvaluationResult`, which tests of its own check; and what takes
# no argument or any.
RECORDS = {
    "Check",
    "EvaluationResult",
    "PlayedEpisode",
    "Prompt",
    "Reply",
    "Report",
    "SampledText",
    "Score",
    "TrainingResult",
    "Turn",
}
WITHOUT_ARGUMENTS = {"Callback", "Sampler", "Tracker", "is_main_process", "main_process_first"}
TAKE_ANYTHING = {"gather_objects"}
# Its arguments are those of `Agent`.
AGENTS = {"ChatAgent"}


def is_error(name: str) -> bool:
    value = getattr(llamagym, name)
    return isinstance(value, type) and issubclass(value, Exception)


def test_the_table_has_every_public_name_and_argument():
    others = CONFIGURATIONS | RECORDS | WITHOUT_ARGUMENTS | TAKE_ANYTHING | AGENTS
    assert set(CALLS) | others | set(filter(is_error, llamagym.__all__)) == set(llamagym.__all__)
    for name, call in CALLS.items():
        assert set(call.wrong) == {parameter.name for parameter in named_parameters(call.function)}, name


@pytest.mark.parametrize(
    ("name", "argument"), [(name, argument) for name, call in CALLS.items() for argument in call.wrong]
)
@pytest.mark.filterwarnings("ignore:.*:UserWarning:gymnasium")
def test_rejects_wrong_values_of_an_argument_by_its_name(name, argument, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call = CALLS[name]
    right = call.right()
    for kind in sorted(call.wrong[argument]):
        with pytest.raises(LlamaGymError) as caught:
            call.function(**{**right, argument: WRONG[kind]})
        assert argument.removesuffix("_config_dict") in str(caught.value), kind
        assert len(str(caught.value)) < LIMIT, kind
    assert list(tmp_path.iterdir()) == []


def named_parameters(function):
    """The parameters of a function, without `**old_options`."""
    return [each for each in inspect.signature(function).parameters.values() if each.kind is not each.VAR_KEYWORD]


def keyword_only(function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]


@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if keyword_only(call.function)])
def test_rejects_arguments_by_position_with_their_keywords(name):
    call = CALLS[name]
    keywords = keyword_only(call.function)
    by_position = [None] * (len(named_parameters(call.function)) - len(keywords))
    with pytest.raises(ConfigError, match=rf"Pass the others by keyword: {keywords[0]}=5, {keywords[1]}='x'\."):
        call.function(*by_position, 5, "x")
    with pytest.raises(ConfigError, match=rf"\(\) has no argument '{keywords[0]}x'\. Did you mean '{keywords[0]}'"):
        call.function(*by_position, **{f"{keywords[0]}x": 1})


@pytest.mark.parametrize(
    ("config", "option"),
    [
        (config, option.name)
        for config in (*(getattr(llamagym, name) for name in sorted(CONFIGURATIONS)), WarmStartConfig)
        for option in fields(config)
    ],
    ids=lambda part: part if isinstance(part, str) else part.__name__,
)
def test_configurations_reject_wrong_values_of_every_option_by_its_name(config, option):
    may_be_none = type(None) in get_args(get_type_hints(config)[option])
    for kind, value in WRONG.items():
        if kind == "none" and may_be_none:
            continue
        with pytest.raises(ConfigError) as caught:
            config(**{option: value})
        assert option in str(caught.value), kind
        assert len(str(caught.value)) < LIMIT, kind


@pytest.mark.parametrize("argument", ["queries", "responses", "scores"])
@pytest.mark.parametrize("is_item", [False, True], ids=["itself", "an item"])
def test_a_trainer_rejects_wrong_samples(argument, is_item):
    right = {"queries": [torch.tensor([1, 2])] * 2, "responses": [torch.tensor([3])] * 2, "scores": [0.0, 1.0]}
    trainer = PPOTrainer(PPOConfig(batch_size=2, mini_batch_size=2), tiny_model("llama"))
    # Any finite number is a score.
    for kind in sorted(ANY - {"negative"}):
        value = [WRONG[kind], right[argument][1]] if is_item else WRONG[kind]
        with pytest.raises(LlamaGymError) as caught:
            trainer.step(**{**right, argument: value})
        assert len(str(caught.value)) < LIMIT, kind


@pytest.mark.parametrize("value", [10**5000, b"x", None, [], 1.5], ids=range(5))
def test_a_model_with_a_value_head_rejects_what_is_not_a_path(value):
    with pytest.raises(LlamaGymError):
        AutoModelForCausalLMWithValueHead.from_pretrained(value)
    with pytest.raises(LlamaGymError):
        tiny_model("llama").save_pretrained(value)


@pytest.mark.parametrize("config", [GRPOConfig, GenerationConfig, PPOConfig, ReinforceConfig])
def test_configurations_reject_unknown_options_with_a_hint(config):
    name = next(iter(inspect.signature(config).parameters))
    with pytest.raises(ConfigError, match=rf"Unknown option '{name}x' of {config.__name__}\. Did you mean '{name}'"):
        config(**{f"{name}x": 1})
    assert copy.deepcopy(pickle.loads(pickle.dumps(config()))) == config()


def test_train_and_evaluate_take_agent_and_environment_by_position():
    for function in (train, evaluate):
        names = list(inspect.signature(function).parameters)
        assert names[:2] == ["agent", "env"]
        assert keyword_only(function) == names[2:]
    assert keyword_only(EvalCallback) == list(inspect.signature(EvalCallback).parameters)[1:]
    with pytest.raises(ConfigError, match=r"train\(\) takes agent and env by position, got 3 more arguments"):
        train("agent", "FrozenLake-v1", 10, 2, 0)


def test_every_error_is_exported():
    values = vars(llamagym.errors).values()
    errors = {value.__name__ for value in values if isinstance(value, type) and issubclass(value, LlamaGymError)}
    assert errors == set(filter(is_error, llamagym.__all__))
    assert [name for name in errors if name not in llamagym.errors.__doc__] == []


INFO = {"object", "nan", "negative", "digits", "no text", "no items"}
LIST = {"object", "nan", "negative", "digits", "no text", "no entries"}
METHODS: dict[str, tuple[dict[str, Any], dict[str, set[str]]]] = {
    "act": ({"observation": "b"}, {"info": INFO}),
    "act_batch": ({"observations": ["b"]}, {"observations": LIST | {"none"}, "env_ids": LIST, "infos": LIST}),
    "assign_reward": ({"reward": 1.0}, {"reward": NUMBER | {"none"}, "turn": NUMBER | {"none"}}),
    "assign_rewards": ({"rewards": [1.0]}, {"rewards": LIST | {"none"}, "env_ids": LIST, "turns": LIST}),
    "terminate_episode": (
        {"final_observation": "b"},
        {
            "train": ANY,
            "truncated": ANY,
            "group": {"object", "nan", "digits", "no items", "no entries"},
            "final_info": INFO,
            "terminated": ANY - {"none"},
        },
    ),
    "terminate_episodes": (
        {"env_ids": [0], "final_observations": ["b"]},
        {
            "env_ids": LIST | {"none"},
            "truncated": LIST | {"no items"},
            "final_observations": LIST | {"no items"},
            "train": ANY,
            "groups": LIST | {"no items"},
            "final_infos": LIST | {"no items"},
            "terminated": LIST | {"no items"},
        },
    ),
    "action_probabilities": ({"observations": ["b"]}, {"observations": LIST | {"none"}, "infos": LIST}),
    "preflight": ({}, {"observations": LIST | {"none"}}),
    "eval": ({}, {"greedy": ANY}),
}


PATH = {"object", "nan", "negative", "digits", "no text", "no items", "no entries", "bytes", "nul", "surrogate"}
# Methods that read or write a folder, which is passed to what makes their right arguments.
FILE_METHODS: dict[str, tuple[Callable[[Path], dict[str, Any]], dict[str, set[str]]]] = {
    "save": (lambda folder: {"folder": folder / "new"}, {"folder": PATH | {"none"}}),
    "save_pretrained": (
        lambda folder: {"folder": folder / "new"},
        {
            "folder": PATH | {"none"},
            "environment": TEXT | {"none", "bytes"},
            "results": ANY - {"none", "no entries"},
            "merged": ANY,
        },
    ),
    "load": (
        lambda folder: {"folder": folder / "agent"},
        {"folder": PATH | {"none"}, "device": ANY, "dtype": ANY, "model": ANY - {"none"}, "options": set()},
    ),
    "save_checkpoint": (
        lambda folder: {"folder": folder / "new"},
        {"folder": PATH | {"none"}, "loop": ANY - {"none", "no entries"}, "facts": ANY - {"none", "no entries"}},
    ),
    "load_checkpoint": (
        lambda folder: {"folder": folder / "checkpoint"},
        {"folder": PATH | {"none"}, "keep_episodes": ANY, "allow_changes": ANY - {"no items"}},
    ),
    "sft_from_jsonl": (lambda folder: {}, {"path": PATH, "options": set()}),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    tiny_base_model("llama").save_pretrained(folder / "base")
    tiny_tokenizer("llama").save_pretrained(folder / "base")
    agent = ChoiceAgent(*load_model_and_tokenizer(str(folder / "base"), "cpu", "float32"))
    agent.save(folder / "agent")
    agent.save_checkpoint(folder / "checkpoint")
    return folder


def test_the_table_has_every_argument_of_methods_that_use_files():
    for name, (_, wrong) in FILE_METHODS.items():
        assert set(wrong) == set(inspect.signature(getattr(ChoiceAgent, name)).parameters) - {"self"}, name


@pytest.mark.parametrize(
    ("method", "argument"), [(method, argument) for method, (_, wrong) in FILE_METHODS.items() for argument in wrong]
)
def test_rejects_wrong_values_of_a_method_and_writes_nothing(method, argument, saved):
    agent = make_agent(ChoiceAgent)
    right, wrong = FILE_METHODS[method]
    before = sorted(saved.rglob("*"))
    for kind in sorted(wrong[argument]):
        with pytest.raises(LlamaGymError) as caught:
            getattr(agent, method)(**{**right(saved), argument: WRONG_PATHS.get(kind, WRONG.get(kind))})
        assert len(str(caught.value)) < LIMIT, kind
    assert sorted(saved.rglob("*")) == before


@pytest.mark.parametrize("value", [object(), float("nan"), -1, [], {}, b"x", "lora"])
def test_rejects_wrong_values_of_an_adapter_by_name(value):
    with pytest.raises(ConfigError, match="peft_config must be"):
        AutoModelForCausalLMWithValueHead.from_pretrained(tiny_base_model("llama"), value)


NESTED: dict[str, Any] = reduce(lambda facts, _: {"in": facts}, range(3000), {})


@pytest.mark.parametrize("facts", [{"a": object()}, {"a": 10**5000}, {"a": b"x"}, {"a": torch.zeros(1)}, NESTED])
def test_rejects_facts_that_no_manifest_holds(facts, tmp_path):
    with pytest.raises(ConfigError, match=r"facts=.*cannot be written as JSON"):
        make_agent(ChoiceAgent).save_checkpoint(tmp_path / "new", facts=facts)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("returns", [[], None, "12", 5])
def test_rejects_a_result_without_returns(returns):
    with pytest.raises(ConfigError, match="returns must be a list of at least one number"):
        EvaluationResult(returns)


@pytest.mark.parametrize(
    ("method", "argument"), [(method, argument) for method, (_, wrong) in METHODS.items() for argument in wrong]
)
def test_rejects_wrong_values_of_a_method_and_changes_nothing(method, argument):
    agent = make_agent(ChoiceAgent)
    agent.act("a")
    if not method.startswith("assign"):
        agent.assign_reward(0.0)
    # The loop calls two of them on the actor.
    owner = agent if hasattr(agent, method) else actor_of(agent)
    right, wrong = METHODS[method]
    before = str(collector_of(agent).state_dict())
    for kind in sorted(wrong[argument]):
        with pytest.raises(LlamaGymError) as caught:
            getattr(owner, method)(**{**right, argument: WRONG[kind]})
        assert len(str(caught.value)) < LIMIT, kind
    assert str(collector_of(agent).state_dict()) == before
    assert actor_of(agent).is_learning
    assert not actor_of(agent).is_greedy
