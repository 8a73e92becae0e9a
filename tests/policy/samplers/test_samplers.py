"""Replies of an external engine train as the built-in engine's do, and a server's faults are named and undone."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import gymnasium as gym
import pytest
import torch

from llamagym import ConfigError, SamplerError, VLLMSampler, train
from llamagym.agent.alarms import Alarms
from llamagym.engine.backbone import Backbone
from llamagym.engine.token_tree import TokenTree
from llamagym.models.lora import is_activated
from llamagym.policy.drafts import Drafter
from llamagym.policy.samplers.server import as_text
from llamagym.policy.sampling import write_replies
from llamagym.text.episode import Prompt, Segment
from tests.helpers.agents import ChoiceAgent, WordAgent, make_agent
from tests.helpers.tiny import tiny_model, tiny_tokenizer


class OtherEngine:
    """The built-in engine on a copy of the model, without values, as a server would be."""

    activates_lora = True

    def __init__(self, updates: bool = True) -> None:
        self.updates = updates
        self.versions: list[str] = []
        self.engine = None

    def set_weights(self, model, weights_id):
        if weights_id not in self.versions and (self.updates or self.engine is None):
            copied = deepcopy(model)
            self.engine = Backbone(copied), copied.v_head
        self.versions.append(weights_id)

    def sample(self, prompts, config, eos_ids, rng):
        trees = [TokenTree.from_segment(Segment((), Prompt(ids, True))) for ids in prompts]
        texts = write_replies(*self.engine, trees, config, eos_ids, rng, Drafter())
        return [replace(text, value=None) for text in texts]


def learn(agent, updates=3):
    """Statistics of updates on episodes of two turns, in which short replies earn more."""
    stats = []
    count = 0
    while len(stats) < updates:
        count += 1
        rewards = [-len(action) / 10 for action in agent.act_batch([count, "b", "c"])]
        agent.assign_rewards(rewards)
        rewards = [-len(action) / 10 for action in agent.act_batch(["d", count, "f"])]
        agent.assign_rewards(rewards)
        update = agent.terminate_episodes(range(3), terminated=[True] * 3)
        if update:
            stats.append(update)
    return stats


OPTIONS = {"batch_size": 12, "learning_rate": 1e-3}
LEARNERS = {
    "ppo": {"ppo": OPTIONS},
    "reinforce": {"algorithm": "reinforce", "reinforce": OPTIONS},
}


def fresh_agent(**options):
    """An agent whose adapter changes nothing yet."""
    return WordAgent(tiny_model("llama"), tiny_tokenizer("llama"), None, {"max_new_tokens": 6}, seed=0, **options)


@pytest.mark.parametrize("learner", LEARNERS)
def test_another_engine_with_equal_weights_teaches_the_same(learner):
    plain = make_agent(**LEARNERS[learner])
    served = make_agent(**LEARNERS[learner], sampler=OtherEngine())
    expected = learn(plain)
    stats = learn(served)
    assert expected[-1]["optimizer_steps"] > 0
    for before, after in zip(expected, stats, strict=True):
        assert after["sampler_kl"] == pytest.approx(0, abs=1e-6)
        # No turn is on-policy: all were evaluated again.
        assert math.isnan(after["ratio_error"])
        for name in ("return_mean", "approx_kl", "entropy", "grad_norm", "policy_loss"):
            assert after[name] == pytest.approx(before[name], rel=1e-3, abs=1e-6), name
    for one, other in zip(plain.model.parameters(), served.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_an_engine_that_misses_an_update_is_noticed_and_corrected():
    agent = make_agent(ppo={"batch_size": 12, "learning_rate": 0.03})
    agent.sampler = OtherEngine(updates=False)
    first, second, *_ = learn(agent, updates=3)
    assert first["sampler_kl"] == pytest.approx(0, abs=1e-6)
    assert second["sampler_kl"] > 1e-3
    assert Alarms().check({"sampler_kl": 0.5})
    assert not Alarms().check({"sampler_kl": 0.01})


def test_the_sampler_gets_each_version_of_the_weights():
    sampler = OtherEngine()
    agent = make_agent(ppo=OPTIONS, sampler=sampler)
    learn(agent, updates=2)
    agent.act("x")
    assert len(set(sampler.versions)) >= 3
    other = make_agent(ppo=OPTIONS, sampler=sampler)
    other.act("x")
    # Another agent's weights are others, even if as many updates made them.
    assert sampler.versions[-1] not in sampler.versions[:-1]


def test_choices_need_no_sampler():
    agent = make_agent(ChoiceAgent, sampler=OtherEngine())
    assert agent.act("x") in range(3)
    assert agent.policy.sampler.versions == []


def test_episodes_without_values_are_saved(tmp_path):
    agent = make_agent(ppo=OPTIONS, sampler=OtherEngine())
    agent.act("x")
    agent.save_checkpoint(tmp_path / "checkpoint")
    other = make_agent(ppo=OPTIONS, sampler=OtherEngine())
    other.load_checkpoint(tmp_path / "checkpoint", keep_episodes=True)
    other.assign_reward(1.0)
    other.terminate_episode(terminated=True)
    (episode,) = other._collector.buffer
    assert episode.turns[0].reply.value is None


@pytest.mark.parametrize("sampler", ["http://127.0.0.1:8000", VLLMSampler, 5])
def test_rejects_an_invalid_sampler(sampler):
    with pytest.raises(ConfigError, match="sampler"):
        make_agent(sampler=sampler)
    agent = make_agent()
    with pytest.raises(ConfigError, match="sampler"):
        agent.sampler = sampler


def test_a_server_may_end_its_address_with_v1():
    assert VLLMSampler(["http://a:1/v1/", "http://b"]).urls == ["http://a:1", "http://b"]


def test_a_sampler_can_be_replaced():
    agent = make_agent(activated=False)
    sampler = OtherEngine()
    agent.sampler = sampler
    agent.act("x")
    assert sampler.versions
    assert agent.sampler is sampler
    agent.sampler = None
    assert agent.policy.sampler is None


def test_an_agent_that_is_not_made_leaves_the_model_as_it_was():
    model = tiny_model("llama")
    with pytest.raises(ConfigError):
        WordAgent(model, tiny_tokenizer("llama"), context=0, sampler=VLLMSampler("http://127.0.0.1:1"))
    assert is_activated(model.pretrained_model)


def test_preflight_checks_the_built_in_engine():
    agent = make_agent(activated=False, sampler=VLLMSampler("http://127.0.0.1:1"))
    assert agent.preflight().passed
    assert isinstance(agent.sampler, VLLMSampler)


def test_most_likely_replies_of_a_server_are_not_learned_from():
    agent = make_agent(generate={"do_sample": False}, sampler=OtherEngine())
    with pytest.raises(ConfigError, match="do_sample"):
        agent.act("x")
    agent.eval()
    agent.act("x")


def test_a_fresh_activated_lora_becomes_plain_for_vllm(caplog):
    caplog.set_level("INFO")
    expected = fresh_agent()
    agent = fresh_agent(sampler=VLLMSampler("http://127.0.0.1:1"))
    assert is_activated(expected.model.pretrained_model)
    assert not is_activated(agent.model.pretrained_model)
    assert "plain LoRA now" in caplog.text
    agent.sampler = None
    # The first update changes all tokens' activations now; until then nothing has changed.
    assert agent.act("x") == expected.act("x")


def test_a_trained_activated_lora_is_rejected_by_vllm():
    with pytest.raises(ConfigError, match="trained as one"):
        make_agent(sampler=VLLMSampler("http://127.0.0.1:1"))


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:8000",
        "ftp://host",
        "",
        [],
        [8000],
        "http://",
        "http://[",
        "http://a:b",
        "http://u:p@h",
        "http://h?q",
        "http://h\n",
    ],
)
def test_rejects_an_invalid_address(url):
    with pytest.raises(ConfigError, match="url"):
        VLLMSampler(url)


@pytest.mark.parametrize(
    ("ids", "logprobs", "expected"),
    [
        ([5, 6], [-1.0, -2.0], ((5, 6), (-1.0, -2.0), "length")),
        ([5, 2], [-1.0, -2.0], ((5, 2), (-1.0, -2.0), "eos")),
        # llama.cpp knows fewer ends than the tokenizer, and finishes characters.
        ([5, 2, 6], [-1.0, -2.0, -3.0], ((5, 2), (-1.0, -2.0), "eos")),
        ([5, 6, 7, 8], [-1.0] * 4, ((5, 6, 7), (-1.0,) * 3, "length")),
    ],
)
def test_replies_end_where_the_built_in_engine_ends_them(ids, logprobs, expected):
    text = as_text(ids, logprobs, 3, {2})
    assert (text.ids, text.logprobs, text.finish_reason) == expected
    assert text.value is None


@pytest.mark.parametrize(
    ("ids", "logprobs"),
    [
        ([], []),
        ([5], []),
        ([5], [-math.inf]),
        ([5], [math.nan]),
        ([5], [0.5]),
        (["5"], [-1.0]),
        ([5], [None]),
        ([True], [-1.0]),
        ([5], [-9999.0]),
    ],
)
def test_rejects_malformed_replies(ids, logprobs):
    with pytest.raises((ValueError, TypeError)):
        as_text(ids, logprobs, 3, {2})


@contextmanager
def faulty_server(answer):
    """A server whose adapters load and whose completions fail; `answer` writes what it answers."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/v1/completions":
                answer(self)
            else:
                write(self, 200, "Success")

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def write(handler, status, body):
    content = body.encode()
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(content)))
    handler.end_headers()
    handler.wfile.write(content)


def completion(ids, logprobs):
    return json.dumps({"choices": [{"token_ids": ids, "logprobs": {"token_logprobs": logprobs}}]})


FAULTS = {
    "hangs": (lambda handler: time.sleep(2), "did not answer within 0.5 s"),
    "closes the connection": (lambda handler: handler.connection.close(), "cannot be reached"),
    "fails": (lambda handler: write(handler, 500, "out of memory"), "status 500.*out of memory"),
    "has lost the adapter": (lambda handler: write(handler, 404, "no such model"), "no such adapter"),
    "answers with text": (lambda handler: write(handler, 200, "hello"), "without the ids"),
    "answers with broken JSON": (lambda handler: write(handler, 200, "{"), "invalid JSON"),
    "answers without ids": (lambda handler: write(handler, 200, '{"choices": [{"text": "a"}]}'), "without the ids"),
    "answers with too few numbers": (
        lambda handler: write(handler, 200, completion([1, 2], [-1.0])),
        "without the ids",
    ),
    "answers with NaN": (lambda handler: write(handler, 200, completion([1], [math.nan])), "without the ids"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_server_is_named_and_undone(fault):
    answer, message = FAULTS[fault]
    with faulty_server(answer) as url:
        agent = make_agent(activated=False)
        agent.sampler = VLLMSampler(url, timeout_s=0.5)
        with pytest.raises(SamplerError, match=message):
            agent.act_batch(["a", "b"])
        assert not agent._collector.actor.conversations
    with pytest.raises(SamplerError, match="cannot be reached"):
        agent.act("a")
    # The built-in engine goes on from there.
    agent.sampler = None
    assert isinstance(agent.act("a"), str)


def test_after_a_fault_the_adapter_is_sent_again():
    loaded = []

    def answer(handler):
        write(handler, 404, "no such model")

    with faulty_server(answer) as url:
        sampler = VLLMSampler(url)
        agent = make_agent(activated=False)
        agent.sampler = sampler
        for _ in range(2):
            with pytest.raises(SamplerError):
                agent.act("a")
            loaded.append(sampler._adapter)
    assert loaded[0] != loaded[1]


def test_ids_of_another_vocabulary_are_rejected():
    with faulty_server(lambda handler: write(handler, 200, completion([10**6], [-1.0]))) as url:
        agent = make_agent(activated=False, sampler=VLLMSampler(url))
        with pytest.raises(SamplerError, match="base model"):
            agent.act("a")


def test_a_server_that_hangs_does_not_keep_python_from_ending():
    code = """
import sys, threading
sys.path.insert(0, ".")
from tests.policy.samplers.test_samplers import faulty_server, make_agent, VLLMSampler
import time
with faulty_server(lambda handler: (print("asked", flush=True), time.sleep(100))) as url:
    agent = make_agent(activated=False, sampler=VLLMSampler(url, timeout_s=90))
    threading.Thread(target=agent.act, args=("a",), daemon=True).start()
    time.sleep(3)
"""
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=80)
    assert "asked" in done.stdout
    assert time.monotonic() - started < 60


def test_adapters_do_not_pile_up(tmp_path):
    with faulty_server(lambda handler: write(handler, 200, completion([5, 6], [-1.0, -1.0]))) as url:
        agent = make_agent(activated=False, ppo=OPTIONS, sampler=VLLMSampler(url, tmp_path))
        learn(agent, 2)
        agent.act("x")
        assert len(list(tmp_path.iterdir())) == 1
    # One of two servers is down: the new adapter is taken back.
    with faulty_server(lambda handler: write(handler, 200, "Success")) as url:
        agent = make_agent(activated=False, sampler=VLLMSampler([url, "http://127.0.0.1:1"], tmp_path / "other"))
        for _ in range(2):
            with pytest.raises(SamplerError, match="cannot be reached"):
                agent.act("x")
        assert list((tmp_path / "other").iterdir()) == []


def test_several_servers_share_the_requests():
    counts = [0, 0]

    def counting(index):
        def answer(handler):
            counts[index] += 1
            write(handler, 200, completion([5, 6], [-1.0, -1.0]))

        return answer

    with faulty_server(counting(0)) as one, faulty_server(counting(1)) as other:
        agent = make_agent(activated=False)
        agent.sampler = VLLMSampler([one, other])
        agent.act_batch(list("abcdef"))
    assert counts == [3, 3]


def test_log_probabilities_before_the_temperature_are_rejected():
    """As vLLM reports them by default: the same at any temperature."""

    def answer(handler):
        body = {"token_ids": [5], "logprobs": {"token_logprobs": [-1.0], "top_logprobs": [{"a": -1.0, "b": -2.0}]}}
        write(handler, 200, json.dumps({"choices": [body]}))

    with faulty_server(answer) as url:
        agent = make_agent(activated=False, generate={"temperature": 0.7})
        agent.sampler = VLLMSampler(url)
        with pytest.raises(SamplerError, match="processed_logprobs"):
            agent.act("a")


def test_a_model_without_adapter_is_rejected():
    agent = make_agent(activated=False)
    agent.model.pretrained_model = agent.model.pretrained_model.merge_and_unload()
    with pytest.raises(ConfigError, match="LoRA"):
        VLLMSampler("http://127.0.0.1:1").set_weights(agent.model, "0")


class CountWords(gym.Env):
    """Episodes of one turn, for `train`."""

    observation_space = gym.spaces.Discrete(2)
    action_space = gym.spaces.Text(100)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return 0, {}

    def step(self, action):
        return 0, float(len(action)), True, False, {}


def test_a_run_that_lost_its_server_resumes(tmp_path):
    """The same statistics as a run that never lost it, from the checkpoint on."""

    class Failing(OtherEngine):
        calls = 0

        def sample(self, prompts, config, eos_ids, rng):
            type(self).calls += 1
            if type(self).calls == 8:
                raise SamplerError("lost")
            return super().sample(prompts, config, eos_ids, rng)

    def run(sampler, folder, resume=False):
        agent = make_agent(ppo=OPTIONS, sampler=sampler, context="turn")
        options = {"turns": 60, "num_envs": 4, "seed": 0, "checkpoint_dir": folder, "checkpoint_every": 1}
        return train(agent, CountWords, resume=resume, **options)

    with pytest.raises(SamplerError):
        run(Failing(), tmp_path / "lost")
    resumed = run(OtherEngine(), tmp_path / "lost", resume=True)
    whole = run(OtherEngine(), tmp_path / "whole")
    assert resumed.updates[-1]["return_mean"] == whole.updates[-1]["return_mean"]
    assert resumed.updates[-1]["approx_kl"] == pytest.approx(whole.updates[-1]["approx_kl"], rel=1e-4)
