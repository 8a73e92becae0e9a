"""Learning throughput, compared with a plain PPO step, LlamaGym 0.1.1 and AgileRL 2.58.

python scripts/benchmarks/learning.py [--dtype float32] [--llamagym-python PATH] [--agilerl-python PATH]

A turn counts once per epoch. Every update has a new batch, since a repeated one would reuse what was prepared or
compiled for its sizes. The plain step implements PPO directly: prompt and reply of every turn in one padded batch of
16, logits of every token over the whole vocabulary, LoRA on q_proj and v_proj of all layers. PATH is the interpreter of
a virtual environment; the script in rivals/ lists its packages. All are measured in alternation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from common import ROUNDS, Work, add_bare, add_ratios, add_tokens, measure, named, parse_args, save
from workload import MAX_NEW_TOKENS, BlackjackAgent, bare_works, dtype_of, make_agent, plain_model, player, prompts

from llamagym.agent.agent import collector_of
from llamagym.models.loading import embedded_model_folder
from llamagym.text.episode import Episode

TABLES, TURNS, BATCH = 16, 256, 16


def llamagym_work(free_text: bool, dtype: str, per_turn: list[float]) -> Work:
    """Our update with one epoch over a new batch; appends the tokens forwarded per turn to `per_turn`."""
    agent = make_agent(free_text, dtype=dtype, ppo_epochs=1, mini_batch_size=2 * TURNS, learning_rate=1e-5)
    play = player(agent, TABLES)
    batches = [take_batch(agent, play) for _ in range(ROUNDS)]

    def work() -> float:
        episodes = batches.pop()
        turns = sum(len(episode.turns) for episode in episodes)
        # Mark the turns as sampled with the current weights; turns of older weights would be evaluated first.
        for turn in (turn for episode in episodes for turn in episode.turns):
            turn.reply = replace(turn.reply, weights_version=agent.policy.weights_version)
        per_turn.append(agent.learner.update(episodes)["learn_tokens"] / turns)
        return turns

    return work


def take_batch(agent: BlackjackAgent, play: Callable[[int], int]) -> list[Episode]:
    """Plays whole episodes with at least `TURNS` turns in total."""
    while collector_of(agent).buffered_turns < TURNS:
        play(1)
    episodes = list(collector_of(agent).buffer)
    collector_of(agent).buffer.clear()
    return episodes


def plain_work(agent: BlackjackAgent) -> Work:
    """A direct implementation of a PPO step."""
    # Imported after llamagym, which configures how memory is allocated.
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(plain_model(agent), config)
    optimizer = torch.optim.Adam([w for w in model.parameters() if w.requires_grad], lr=1e-5)
    inputs = agent.tokenizer(prompts(agent, BATCH), padding=True, add_special_tokens=False, return_tensors="pt")
    replies = torch.randint(1000, 40_000, (BATCH, MAX_NEW_TOKENS), generator=torch.Generator().manual_seed(0))
    ids = torch.cat([inputs["input_ids"], replies], dim=1)
    mask = torch.cat([inputs["attention_mask"], torch.ones_like(replies)], dim=1)

    def work() -> float:
        logprobs = model(input_ids=ids, attention_mask=mask).logits[:, :-1].log_softmax(-1)
        taken = logprobs.gather(2, ids[:, 1:, None])[:, -MAX_NEW_TOKENS:, 0]
        ratio = (taken - taken.detach()).exp()
        ratio.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return BATCH

    return work


def main() -> None:
    """Measure everything in one run."""
    dtype_option, pythons = parse_args(__doc__, ("llamagym_0.1.1", "agilerl_2.58"))
    torch.manual_seed(0)
    agent = make_agent(free_text=True, dtype=dtype_option)
    dtype = dtype_of(agent)
    length = len(agent.tokenizer(prompts(agent, 1)[0])["input_ids"]) + MAX_NEW_TOKENS
    per_turn: dict[str, list[float]] = {"llamagym_free_text": [], "llamagym_choices": []}
    works = {name: llamagym_work(name == "llamagym_free_text", dtype, tokens) for name, tokens in per_turn.items()}
    works["plain_step"] = plain_work(agent)
    bare = bare_works(plain_model(agent), BATCH, length)
    rates = measure(works | bare, pythons, embedded_model_folder(), "learn")
    add_tokens(rates, per_turn)
    unit = "turns per second, median of 5"
    result = {"unit": unit, "dtype": dtype, **{name: rates[name] for name in (*works, *pythons)}}
    add_bare(result, {name: rates[name] for name in bare}, rates["llamagym_free_text"]["tokens_per_second"])
    add_ratios(result, ("plain_step", *pythons))
    save(named("learning", dtype), result)


if __name__ == "__main__":
    main()
