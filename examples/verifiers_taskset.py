"""Train in an environment of verifiers: its harness calls the served agent, and its reward functions reward the turns.

pip install 'llamagym[serve]' verifiers uv
python examples/verifiers_taskset.py

Any other taskset is trained in the same way, by its id. verifiers 0.4 needs Python 3.11.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import re
from collections.abc import Iterator

import httpx
import verifiers.v1 as vf
from verifiers.v1.envs.single_agent import SingleAgentEnvConfig
from verifiers.v1.utils.loaders import load_environment

import llamagym

# verifiers finds a taskset by the name of the module that exports it.
__all__ = ["Sums"]
# Each rollout is a process of its own.
ROLLOUTS_AT_ONCE = 16
# With GRPO, these form a group.
ROLLOUTS_PER_TASK = 4
# An update may take minutes, during which calls wait.
TIMEOUT_S = 3600


class SumData(vf.TaskData):
    """A question and its answer."""

    answer: str


class SumTask(vf.Task[SumData, vf.State, vf.TaskConfig]):
    """One question."""

    @vf.reward
    async def is_right(self, trace: vf.Trace) -> float:
        """1 if the first digit of the reply is the answer."""
        digits = re.findall("[0-9]", trace.last_reply)
        return float(digits[:1] == [self.data.answer])


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    """Sums of two digits from 0 to 3."""

    def load(self) -> Iterator[SumTask]:
        """Yields all sixteen."""
        for first, second in itertools.product(range(4), repeat=2):
            question = f"What is {first} plus {second}?"
            data = SumData(prompt=question, system_prompt="Answer with one digit.", answer=str(first + second))
            yield SumTask(data, self.config.task)


async def play(taskset: str, url: str, episodes: int) -> list[float]:
    """Plays episodes through a served agent and rewards them; returns the rewards."""
    agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
    env = load_environment(SingleAgentEnvConfig(taskset={"id": taskset}, agent=agent))
    # verifiers reads the key from a variable, and a server without a key accepts any.
    os.environ.setdefault("LLAMAGYM_API_KEY", "none")
    model = vf.ModelContext("any", vf.EvalClientConfig(base_url=url, api_key_var="LLAMAGYM_API_KEY"))
    tasks = list(env.taskset)
    at_once = asyncio.Semaphore(ROLLOUTS_AT_ONCE)

    async def play_one(number: int, client: httpx.AsyncClient) -> float:
        async with at_once:
            group = number // ROLLOUTS_PER_TASK
            episode = await env.run_episode(tasks[group % len(tasks)], model)
            reward = 0.0
            for trace in episode.traces:
                # verifiers sends a trace's id with each of its calls, so the server records them under this id.
                body = {"reward": trace.reward, "group": group}
                ended = await client.post(f"{url}/episodes/{trace.id}/end", json=body)
                ended.raise_for_status()
                reward += trace.reward
            return reward

    async with env.serving(), httpx.AsyncClient(timeout=TIMEOUT_S) as client:
        return await asyncio.gather(*(play_one(number, client) for number in range(episodes)))


def main() -> None:
    """Train, and report the share of right answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--taskset", default="verifiers_taskset")
    parser.add_argument("--episodes", type=int, default=2000)
    parser.add_argument("--model", default="smollm2-135m")
    args = parser.parse_args()
    model, tokenizer, device = llamagym.load_model_and_tokenizer(args.model)
    learner = llamagym.PPOConfig(batch_size=128)
    agent = llamagym.ChatAgent(model, tokenizer, device, {"max_new_tokens": 4}, learner=learner, seed=0)
    with llamagym.serve(agent, on_update=lambda stats: print(f"right: {stats['return_mean']:.2f}", flush=True)) as url:
        rewards = asyncio.run(play(args.taskset, url, args.episodes))
    last = rewards[-len(rewards) // 4 :]
    print(f"last quarter: {sum(last) / len(last):.2f}")
    agent.save("verifiers-agent")


if __name__ == "__main__":
    main()
