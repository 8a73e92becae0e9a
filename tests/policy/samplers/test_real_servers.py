"""Real servers write what the built-in engine writes; one that is killed is noticed, and used again when restarted."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.request

import numpy as np
import pytest
import torch
from blackjack import BlackjackAgent
from blackjack_exact import STATES

from llamagym import (
    LlamaCppSampler,
    PPOConfig,
    SamplerError,
    VLLMSampler,
    demonstrations_path,
    load_model_and_tokenizer,
)
from scripts import servers

pytestmark = pytest.mark.long
# Enough for a server to load on busy cores.
START_S = 300
SERVERS = {"vllm": servers.vllm_python, "llama.cpp": servers.llama_server}


def agent_on(folder, **options):
    """A trained agent in free text."""
    agent = BlackjackAgent.load(folder, **options)
    agent.free_text = True
    return agent


@pytest.fixture(scope="module", params=["plain", "activated"])
def trained(request, tmp_path_factory):
    """The folder of an agent that has learned from demonstrations which reply is best in each state."""
    folder = tmp_path_factory.mktemp("trained") / request.param
    options = {"peft_config": None} if request.param == "activated" else {"peft_config": _plain_lora()}
    model, tokenizer, device = load_model_and_tokenizer(device="cpu", dtype="float32", **options)
    agent = BlackjackAgent(model, tokenizer, device, {"max_new_tokens": 4}, context="turn", seed=0)
    agent.free_text = True
    agent.sft_from_jsonl(demonstrations_path("demo_blackjack"))
    agent.save(folder)
    return folder


def _plain_lora():
    from peft import LoraConfig

    return LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")


class Server:
    """A server of the embedded model, in a process of its own."""

    def __init__(self, name, folder, agent):
        self.name = name
        self.folder = folder
        self.process = None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        if name == "vllm":
            servers.write_base(folder)
        else:
            agent.save_gguf(folder)
        self.start()

    def start(self):
        if self.name == "vllm":
            command, extra = servers.vllm_command(self.folder, self.port), servers.VLLM_ENVIRONMENT
        else:
            command, extra = servers.llama_cpp_command(self.port, ["--threads", "1"]), {}
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | extra
        with open(self.folder.parent / f"{self.name}.log", "a") as log:
            self.process = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + START_S
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except OSError:
                assert self.process.poll() is None, "the server has ended"
                assert time.monotonic() < deadline, "the server does not start"
                time.sleep(0.5)

    def kill(self):
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def sampler(self):
        if self.name == "vllm":
            return VLLMSampler(self.url)
        return LlamaCppSampler(self.url, self.folder)


@pytest.fixture(params=SERVERS)
def server(request, trained, tmp_path):
    name = request.param
    if not SERVERS[name]().exists():
        pytest.skip(f"no {name}: install it by python scripts/servers.py install {name}")
    if name == "vllm" and trained.name == "activated":
        pytest.skip("vLLM has no activated LoRA")
    started = Server(name, tmp_path / "served", agent_on(trained))
    yield started
    started.kill()


def greedy(agent, states):
    """The most likely action in each state, and the probability of its first token."""
    agent.eval()
    actions = agent.act_batch(states)
    conversations = agent._collector.actor.conversations
    logprobs = [conversations[index].turns[0].reply.logprobs[0] for index in range(len(states))]
    agent.terminate_episodes(range(len(states)), train=False)
    return np.array(actions), np.exp(logprobs)


def test_a_server_writes_what_the_engine_writes(server, trained):
    states = [STATES[index] for index in np.random.default_rng(0).permutation(len(STATES))[:50]]
    expected, probabilities = greedy(agent_on(trained), states)
    assert 0.2 < np.mean(expected) < 0.8
    # llama.cpp multiplies in 8 bits, which decides between words that are about equally likely.
    certain = probabilities > 0.8
    assert certain.sum() >= 40
    learner = PPOConfig(batch_size=50, learning_rate=1e-3, target_kl=None)
    agent = agent_on(trained, sampler=server.sampler(), learner=learner)
    actions, _ = greedy(agent, states)
    assert (actions == expected)[certain].all()

    # Sampled replies have the engine's probabilities, and an update changes those of the server, too.
    agent.train()
    agent.act_batch(states)
    agent.assign_rewards([float(index % 2) for index in range(50)])
    stats = agent.terminate_episodes(range(50), terminated=[True] * 50)
    # The two engines may agree up to rounding.
    assert abs(stats["sampler_kl"]) < 0.05
    assert stats["optimizer_steps"] > 0
    with torch.no_grad():
        # Without the adapter, replies are no longer stick and hit.
        for name, weight in agent.model.named_parameters():
            if "lora_B" in name:
                weight.zero_()
    changed, _ = greedy(agent, states)
    agent.sampler = None
    own, _ = greedy(agent, states)
    assert (changed == own).mean() >= 0.9
    assert (changed != expected).any()


def test_a_killed_server_is_noticed_and_used_again_when_restarted(server, trained):
    agent = agent_on(trained, sampler=server.sampler())
    agent.train()
    states = STATES[:8]
    agent.act_batch(states)
    agent.assign_rewards([0.0] * 8)
    server.kill()
    with pytest.raises(SamplerError, match="cannot be reached"):
        agent.act_batch(states)
    assert all(len(conversation.turns) == 1 for conversation in agent._collector.actor.conversations.values())
    server.start()
    agent.act_batch(states)
    assert all(len(conversation.turns) == 2 for conversation in agent._collector.actor.conversations.values())
