"""A copy of an agent acts and learns as the agent would, or copying is rejected."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import sys
import threading
import time
from typing import Any

import pytest
import torch

from llamagym import ConfigError
from llamagym.models.lora import freeze_and_extend_
from tests.helpers.agents import ChoiceAgent, actor_of, make_agent
from tests.helpers.tiny import FAMILIES

TEXTS = ["a", "bb", "c"]


def learn(agent: Any, turns: int = 8) -> None:
    """Play and learn from rewards that tell observations apart."""
    for index in range(turns):
        observation = TEXTS[index % 3]
        action = agent.act(observation)
        agent.assign_reward(float(action == index % 3))
        agent.terminate_episode()


def probabilities(agent: Any) -> torch.Tensor:
    return torch.tensor([list(offer.values()) for offer in agent.action_probabilities(TEXTS)])


def weights(agent: Any) -> list[torch.Tensor]:
    return [weight.detach().clone() for weight in agent.policy.model.parameters()]


OPTIONS = [
    {},
    {"activated": False},
    {"context": "turn"},
    {"algorithm": "grpo"},
    {"ppo": {"init_kl_coef": 0.1}},
    {"replay_config_dict": {}},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_deep_copy_acts_and_learns_as_the_agent_would(options: dict[str, Any]):
    agent = make_agent(ChoiceAgent, **options)
    learn(agent)
    duplicate = copy.deepcopy(agent)
    assert torch.allclose(probabilities(duplicate), probabilities(agent), atol=1e-5)
    before = weights(agent)
    learn(duplicate)
    # The agent has its own weights.
    assert all(torch.equal(one, other) for one, other in zip(before, weights(agent), strict=True))
    learn(agent)
    for one, other in zip(weights(agent), weights(duplicate), strict=True):
        assert torch.allclose(one, other, atol=1e-4)
    assert any(not torch.equal(one, other) for one, other in zip(before, weights(agent), strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_deep_copy_in_the_middle_of_an_episode_goes_on_with_it(family: str):
    agent = make_agent(ChoiceAgent, family)
    learn(agent)
    agent.act("a")
    agent.assign_reward(1.0)
    duplicate = copy.deepcopy(agent)
    for one in (agent, duplicate):
        one.act("bb")
        one.assign_reward(0.0)
    assert duplicate.current_episode_messages == agent.current_episode_messages
    assert actor_of(duplicate).conversation(0) is not actor_of(agent).conversation(0)


def test_weights_edited_before_a_deep_copy_are_noticed_in_it():
    agent = make_agent(ChoiceAgent)
    probabilities(agent)
    with torch.no_grad():
        for name, weight in agent.policy.model.named_parameters():
            if "lora_B" in name:
                weight.mul_(-3.0)
    duplicate = copy.deepcopy(agent)
    assert torch.allclose(probabilities(duplicate), probabilities(agent), atol=1e-5)


def test_a_deep_copy_keeps_what_demonstrations_taught():
    agent = make_agent(ChoiceAgent, ppo={"learning_rate": 0.01, "warmup_steps": 1})
    freeze_and_extend_(agent.policy.model.pretrained_model)
    agent.learner.reset_optimizer()
    duplicate = copy.deepcopy(agent)
    before = {n: w.detach().clone() for n, w in duplicate.policy.model.named_parameters() if ".lora_A." in n}
    learn(duplicate)
    after = dict(duplicate.policy.model.named_parameters())
    for name, weight in before.items():
        half = len(weight) // 2
        assert torch.equal(after[name][:half], weight[:half])


def test_a_deep_copy_asks_its_own_methods_for_masks():
    agent = make_agent(ChoiceAgent)
    agent.offset = 0
    agent.extract_action = None
    del agent.extract_action

    class Shifted(ChoiceAgent):
        offset = 0

        def extract_action(self, response: str) -> int:
            return (self.choices.index(response) + self.offset) % 3

    agent.__class__ = Shifted
    duplicate = copy.deepcopy(agent)
    duplicate.offset = 1
    info = {"action_mask": [1, 0, 0]}
    assert actor_of(agent).hooks.choices("a", info) == ["go left"]
    assert actor_of(duplicate).hooks.choices("a", info) == ["stay"]


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy])
@pytest.mark.parametrize("part", [lambda agent: agent, lambda agent: agent.policy], ids=["agent", "policy"])
def test_rejects_pickling_and_shallow_copies(copied: Any, part: Any):
    agent = make_agent(ChoiceAgent)
    with pytest.raises(ConfigError, match="deepcopy"):
        copied(part(agent))
    agent.act("a")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_while_another_thread_uses_the_model_can_use_it_too():
    agent = make_agent(ChoiceAgent)
    expected = probabilities(agent)
    inside, goes_on = threading.Event(), threading.Event()

    def use() -> None:
        with agent.policy.lock:
            inside.set()
            goes_on.wait(10)

    thread = threading.Thread(target=use)
    thread.start()
    inside.wait(10)
    # The fork waits for the thread, which goes on a little later.
    threading.Timer(0.2, goes_on.set).start()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            # The threads of PyTorch's pool are not forked, and waiting for them would take forever.
            torch.set_num_threads(1)
            agent.policy.weights_changed()
            status = 0 if torch.allclose(probabilities(agent), expected, atol=1e-5) else 2
        finally:
            sys.stdout.flush()
            os._exit(status)
    deadline = time.monotonic() + 60
    pid, status = 0, 0
    while not pid and time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.01)
    if not pid:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    thread.join(10)
    assert (pid, status) == (child, 0)
    # Nothing is held in this process.
    assert torch.allclose(probabilities(agent), expected, atol=1e-5)
