"""A LangChain agent plays episodes through a served agent, as the example does."""

from __future__ import annotations

import json

import pytest

from llamagym.agent.agent import collector_of
from llamagym.envs.address_book import AddressBook
from llamagym.policy.sampling import SampledText
from llamagym.serving import ChatAgent
from llamagym.text.chat_history import HistoryTemplate
from tests.helpers.agents import make_agent
from tests.helpers.serving import served

# LangChain is installed for the whole test run only.
pytestmark = pytest.mark.long
example = pytest.importorskip("langchain_agent", reason="LangChain is not installed", exc_type=ImportError)


class Clerk:
    """A sampler that looks up what the question asks for, and answers; its replies have a fixed log-probability."""

    activates_lora = True

    def __init__(self, agent) -> None:
        self._tokenizer = agent.tokenizer
        self._end = agent.tokenizer.eos_token_id

    def set_weights(self, model, weights_id) -> None:
        pass

    def sample(self, prompts, config, eos_ids, rng) -> list[SampledText]:
        return [self._reply(self._tokenizer.decode(list(ids))) for ids in prompts]

    def _reply(self, prompt: str) -> SampledText:
        results = prompt.split("<tool_response>\n")[1:]
        question = prompt.split("where ")[1].split()[0]
        if len(results) < 2:
            name = question if not results else results[0].split("lives in ")[1].split(",")[0]
            call = json.dumps({"name": "find", "arguments": {"name": name}})
            text = f"<tool_call>\n{call}\n</tool_call>"
        else:
            text = results[1].split("are ")[1].split(".")[0]
        ids = (*self._tokenizer(text, add_special_tokens=False)["input_ids"], self._end)
        return SampledText(ids, (-0.1,) * len(ids), "eos")


def test_every_answer_of_an_ideal_clerk_earns_its_reward():
    agent = make_agent(ChatAgent, generate={"max_new_tokens": 100}, ppo={"batch_size": 1000})
    agent.sampler = Clerk(agent)
    with served(agent) as client:
        assert example.mean_reward(example.play_and_reward, client.url, range(6)) == 1.0
        episodes = collector_of(agent).buffer
        assert [len(episode.turns) for episode in episodes] == [3] * 6
        # LangChain's history continues each reply, so an episode is one context.
        assert all(
            [turn.prompt.starts_context for turn in episode.turns] == [True, False, False] for episode in episodes
        )


def test_demonstrations_are_what_langchain_sends(tmp_path):
    """The tokens of a demonstration are those of the prompts that the agent meets."""
    agent = make_agent(ChatAgent, generate={"max_new_tokens": 100}, ppo={"batch_size": 1000})
    agent.sampler = Clerk(agent)
    with served(agent) as client:
        example.mean_reward(example.play_and_reward, client.url, range(1))
        played = collector_of(agent).buffer[0]
    env = AddressBook()
    question, _ = env.reset(seed=0)
    path = tmp_path / "calls.jsonl"
    example.write_random_calls(path, count=1)
    shown = json.loads(path.read_text().splitlines()[0])
    template = HistoryTemplate(collector_of(agent).actor.chat_template)
    prompt = template.prompt(
        [{"role": "system", "content": example.SYSTEM_PROMPT}, {"role": "user", "content": question}], shown["tools"]
    )
    assert prompt == list(played.turns[0].prompt.ids)


def test_agent_that_calls_too_often_earns_nothing():
    agent = make_agent(ChatAgent, generate={"max_new_tokens": 100}, ppo={"batch_size": 1000})

    class Repeating(Clerk):
        def _reply(self, prompt: str) -> SampledText:
            return super()._reply(prompt.split("<tool_response>\n")[0])

    agent.sampler = Repeating(agent)
    with served(agent) as client:
        assert example.mean_reward(example.play_and_reward, client.url, range(2)) == 0.0
        assert [episode.total_reward for episode in collector_of(agent).buffer] == [0.0, 0.0]
        assert [len(episode.turns) for episode in collector_of(agent).buffer] == [5, 5]
