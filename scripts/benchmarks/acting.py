"""Acting throughput, compared with a plain transformers loop, LlamaGym 0.1.1 and AgileRL 2.58.

python scripts/benchmarks/acting.py [--dtype float32] [--llamagym-python PATH] [--agilerl-python PATH]

PATH is the interpreter of a virtual environment; the script in rivals/ lists its packages. All are measured in
alternation. Every 512 turns an update is simulated, which invalidates all caches that depend on the weights. Replies
are up to 8 sampled tokens, or one of two choices.
"""

from __future__ import annotations

from typing import Any

import torch
from common import Work, add_bare, add_ratios, add_tokens, measure, named, parse_args, save
from workload import (
    MAX_NEW_TOKENS,
    BlackjackAgent,
    bare_works,
    dtype_of,
    make_agent,
    plain_model,
    player,
    prompts,
    simulate_update,
)

from llamagym.models.loading import embedded_model_folder

ENVS, STEPS = 64, 8


def llamagym_work(agent: BlackjackAgent, per_turn: list[float]) -> Work:
    """Plays at all tables after a simulated update; appends the tokens forwarded per turn to `per_turn`."""
    play = player(agent, ENVS)

    def work() -> float:
        simulate_update(agent)
        before = agent.policy.tokens_forwarded
        turns = play(STEPS)
        per_turn.append((agent.policy.tokens_forwarded - before) / turns)
        return turns

    return work


def plain_work(agent: BlackjackAgent, model: Any, batch: int) -> Work:
    """Calls `generate` on a left-padded batch of rendered prompts."""
    tokenizer, texts = agent.tokenizer, prompts(agent, batch)

    def work() -> float:
        inputs = tokenizer(texts, padding=True, padding_side="left", add_special_tokens=False, return_tensors="pt")
        output = model.generate(
            **inputs,
            do_sample=True,
            top_k=0,
            top_p=1.0,
            max_new_tokens=MAX_NEW_TOKENS,
            pad_token_id=tokenizer.pad_token_id,
        )
        tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return batch

    return work


def main() -> None:
    """Measure everything in one run."""
    dtype_option, pythons = parse_args(__doc__, ("llamagym_0.1.1", "agilerl_2.58"))
    torch.manual_seed(0)
    agents = {
        f"llamagym_{kind}": make_agent(kind == "free_text", dtype=dtype_option) for kind in ("free_text", "choices")
    }
    agent = agents["llamagym_free_text"]
    dtype = dtype_of(agent)
    model = plain_model(agent)
    length = len(agent.tokenizer(prompts(agent, 1)[0])["input_ids"]) + MAX_NEW_TOKENS
    per_turn: dict[str, list[float]] = {name: [] for name in agents}
    works = {name: llamagym_work(of_kind, per_turn[name]) for name, of_kind in agents.items()}
    works |= {f"transformers_batch_{batch}": plain_work(agent, model, batch) for batch in (1, ENVS)}
    bare = bare_works(model, ENVS, length)
    rates = measure(works | bare, pythons, embedded_model_folder(), "act")
    add_tokens(rates, per_turn)
    unit = "turns per second, median of 5"
    result = {"unit": unit, "dtype": dtype, **{name: rates[name] for name in (*works, *pythons)}}
    tokens_per_second = rates["llamagym_free_text"]["tokens_per_second"]
    add_bare(result, {name: rates[name] for name in bare}, tokens_per_second)
    add_ratios(result, ("transformers_batch_1", "transformers_batch_64", *pythons))
    save(named("acting", dtype), result)


if __name__ == "__main__":
    main()
