"""Train an unchanged LangChain agent: its model is served by llamagym, and its answers earn rewards.

pip install 'llamagym[serve,sft]' langchain langchain-openai
python examples/langchain_agent.py
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from langchain.agents import create_agent
from langchain_core.tools import BaseTool, tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_openai import ChatOpenAI

import llamagym
from llamagym.envs.address_book import AddressBook, random_call

SYSTEM_PROMPT = "Look up people and cities with the tool. Then answer with one color."
HELD_OUT_SEED = 1_000_000
# Episodes played at the same time; the server answers their calls together.
CLIENTS = 32
# An update may take minutes, during which calls wait.
TIMEOUT_S = 3600


class TooManyCallsError(Exception):
    """The episode is over before the agent has answered."""


def make_tool(look_up: Callable[[str], str]) -> BaseTool:
    """The agent's only tool."""

    @tool
    def find(name: str) -> str:
        """Look up a person or a city."""
        return look_up(name)

    return find


def answer(question: str, look_up: Callable[[str], str], base_url: str) -> str:
    """The LangChain agent: its model calls the tool as often as it likes, and answers."""
    model = ChatOpenAI(model="any", base_url=base_url, api_key="none", timeout=TIMEOUT_S)
    agent = create_agent(model, [make_tool(look_up)], system_prompt=SYSTEM_PROMPT)
    return agent.invoke({"messages": [("user", question)]})["messages"][-1].text


def play(url: str, seed: int) -> float:
    """Asks the agent one question; returns the reward."""
    env = AddressBook()
    question, _ = env.reset(seed=seed)

    def look_up(name: str) -> str:
        fact, _, terminated, _, _ = env.step(f"find {name}")
        if terminated:
            raise TooManyCallsError
        return fact

    try:
        color = answer(question, look_up, url)
    except TooManyCallsError:
        return 0.0
    return float(env.step(f"answer {color.strip()}")[1])


def play_and_reward(url: str, seed: int) -> float:
    """Asks one question as an episode, which the base URL names, and sends the reward."""
    episode = f"{url}/episodes/{seed}"
    reward = play(episode, seed)
    httpx.post(f"{episode}/end", json={"reward": reward}, timeout=TIMEOUT_S).raise_for_status()
    return reward


def mean_reward(play_one: Callable[[str, int], float], url: str, seeds: range) -> float:
    """Asks many questions at a time; returns the share of right answers."""
    with ThreadPoolExecutor(CLIENTS) as clients:
        rewards = list(clients.map(lambda seed: play_one(url, seed), seeds))
    return sum(rewards) / len(rewards)


def random_conversation(rng: random.Random, seed: int) -> list[dict[str, Any]]:
    """The messages of an episode with random calls, as LangChain sends them."""
    env = AddressBook()
    question, _ = env.reset(seed=seed)
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": question},
    ]
    seen_text = question
    while True:
        action = random_call(rng, seen_text)
        verb, _, name = action.partition(" ")
        observation, _, terminated, _, _ = env.step(action)
        if verb == "answer":
            return [*messages, {"role": "assistant", "content": name}]
        if terminated:
            return messages
        call = {"id": "1", "type": "function", "function": {"name": "find", "arguments": json.dumps({"name": name})}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": "1", "content": observation})
        seen_text += observation


def write_random_calls(path: Path, count: int = 128) -> None:
    """Writes demonstrations of how calls and answers look, and of nothing else."""
    rng = random.Random(0)
    tools = [convert_to_openai_tool(make_tool(str))]
    lines = [json.dumps({"messages": random_conversation(rng, seed), "tools": tools}) for seed in range(count)]
    path.write_text("\n".join(lines))


def make_agent(seed: int, **options: Any) -> llamagym.ChatAgent:
    """An agent that has learned how calls look."""
    model, tokenizer, device = llamagym.load_model_and_tokenizer("smollm2-135m")
    agent = llamagym.ChatAgent(model, tokenizer, device, {"max_new_tokens": 32}, seed=seed, **options)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "calls.jsonl"
        write_random_calls(path)
        agent.sft_from_jsonl(path)
    return agent


def main() -> None:
    """Learn how calls look, then from rewards; measure before and after."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=5000)
    parser.add_argument("--eval-episodes", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="langchain-agent", help="folder to save the agent in")
    args = parser.parse_args()
    held_out = range(HELD_OUT_SEED, HELD_OUT_SEED + args.eval_episodes)
    agent = make_agent(args.seed, learner=llamagym.PPOConfig(batch_size=512))
    agent.eval()
    with llamagym.serve(agent) as url:
        print("right before:", mean_reward(play, url, held_out))
    agent.train()
    with llamagym.serve(agent, on_update=lambda stats: print(f"right: {stats['return_mean']:.2f}")) as url:
        mean_reward(play_and_reward, url, range(args.episodes))
    agent.save(args.out)
    with llamagym.serve(llamagym.ChatAgent.load(args.out)) as url:
        print("right after:", mean_reward(play, url, held_out))


if __name__ == "__main__":
    main()
