"""Train a LangChain agent as it is: its model is a served agent of llamagym, and its answers earn rewards.

pip install 'llamagym[serve,sft]' langchain langchain-openai
python examples/langchain_agent.py
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_openai import ChatOpenAI

import llamagym
from llamagym.envs.address_book import AddressBook, random_call

SYSTEM_PROMPT = "Look up people and cities with the tool. Then answer with one color."
HELD_OUT_SEED = 1_000_000
# Programs that run at the same time; the server answers their calls together.
CLIENTS = 32


def make_tool(look_up: Callable[[str], str]) -> Any:
    """The agent's only tool."""

    @tool
    def find(name: str) -> str:
        """Look up a person or a city."""
        return look_up(name)

    return find


def answer(question: str, look_up: Callable[[str], str], base_url: str) -> str:
    """The LangChain agent: asks its model, calls the tool as often as the model wants, and returns the answer."""
    model = ChatOpenAI(model="any", base_url=base_url, api_key="none", timeout=3600)
    agent = create_agent(model, [make_tool(look_up)], system_prompt=SYSTEM_PROMPT)
    return agent.invoke({"messages": [("user", question)]})["messages"][-1].text


def play(url: str, seed: int, train: bool) -> float:
    """One question; returns the reward."""
    env = AddressBook()
    question, _ = env.reset(seed=seed)
    rewards = [0.0]

    def step(action: str) -> str:
        observation, reward, terminated, _, _ = env.step(action)
        rewards.append(float(reward))
        if terminated:
            raise TimeoutError("too many calls")
        return observation

    # The address names the episode, so the agent need not know of it.
    base_url = f"{url}/episodes/{seed}"
    try:
        step(f"answer {answer(question, lambda name: step(f'find {name}'), base_url).strip()}")
    except TimeoutError:
        pass
    if train:
        httpx.post(f"{url}/episodes/{seed}/end", json={"reward": sum(rewards)}, timeout=3600).raise_for_status()
    return sum(rewards)


def play_all(url: str, seeds: range, train: bool) -> list[float]:
    """All questions, many at a time; returns the rewards."""
    with ThreadPoolExecutor(CLIENTS) as clients:
        return list(clients.map(lambda seed: play(url, seed, train), seeds))


def write_random_calls(path: Path, count: int = 128) -> None:
    """Writes demonstrations of the format of calls and answers, and of nothing else: names and colors are random."""
    rng = random.Random(0)
    tools = [convert_to_openai_tool(make_tool(str))]
    with path.open("w") as file:
        for seed in range(count):
            env = AddressBook()
            said, _ = env.reset(seed=seed)
            messages: list[dict[str, Any]] = [
                {"role": "system", "content": SYSTEM_PROMPT},
                {"role": "user", "content": said},
            ]
            terminated = False
            while not terminated:
                action = random_call(rng, said)
                verb, _, name = action.partition(" ")
                observation, _, terminated, _, _ = env.step(action)
                if verb == "answer":
                    messages.append({"role": "assistant", "content": name})
                elif not terminated:
                    call = {"name": "find", "arguments": json.dumps({"name": name})}
                    messages.append(
                        {
                            "role": "assistant",
                            "content": "",
                            "tool_calls": [{"id": "1", "type": "function", "function": call}],
                        }
                    )
                    messages.append({"role": "tool", "tool_call_id": "1", "content": observation})
                said += observation
            file.write(json.dumps({"messages": messages, "tools": tools}) + "\n")


def main() -> None:
    """Show the format, measure, train, measure again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=4000)
    parser.add_argument("--eval-episodes", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    model, tokenizer, device = llamagym.load_model_and_tokenizer("smollm2-135m")
    agent = llamagym.ChatAgent(model, tokenizer, device, {"max_new_tokens": 32}, seed=arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        write_random_calls(Path(folder) / "calls.jsonl")
        agent.sft_from_jsonl(Path(folder) / "calls.jsonl")
    started = time.monotonic()

    def report(stats: Any) -> None:
        minutes = (time.monotonic() - started) / 60
        print(
            f"{minutes:5.1f} min, {stats['episodes']:.0f} episodes: right {stats['return_mean']:.2f}, entropy {stats['entropy']:.2f}, turns {stats['turns_per_episode']:.1f}, {stats['act_s']:.0f}+{stats['learn_s']:.0f}s",
            flush=True,
        )

    with llamagym.serve(agent, on_update=report) as url:
        for phase in ("before", "training", "after"):
            if phase == "training":
                agent.train()
                first = 10_000 * (1 + arguments.seed)
                play_all(url, range(first, first + arguments.episodes), train=True)
            else:
                agent.eval()
                rewards = play_all(url, range(HELD_OUT_SEED, HELD_OUT_SEED + arguments.eval_episodes), train=False)
                print(f"{phase}: {sum(rewards) / len(rewards):.3f} right (greedy)", flush=True)


if __name__ == "__main__":
    main()
