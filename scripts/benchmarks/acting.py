"""Claim (a): turns a second while acting, against a plain transformers loop, LlamaGym 0.1.1 and AgileRL 2.58.

python scripts/benchmarks/acting.py [--llamagym-python PATH] [--agilerl-python PATH]

PATH is the interpreter of an environment made as the script in rivals/ says. An update of the weights is feigned
every 512 turns: what depends on them is computed anew. Replies are up to 8 sampled tokens, or one of two choices.
"""

from __future__ import annotations

import torch
from common import add_bare, add_ratios, median_rate, parse_rivals, run_rivals, save
from workload import MAX_NEW_TOKENS, bare_rates, make_agent, plain_model, player, prompts

from llamagym.loading import embedded_model_folder

ENVS, STEPS = 64, 8


def llamagym_turns(free_text: bool) -> tuple[dict, float]:
    """Turns a second of our agent, and the tokens it forwards a turn."""
    agent = make_agent(free_text)
    play = player(agent, ENVS)

    def work() -> None:
        agent.policy.weights_version += 1
        play(STEPS)

    before = agent.policy.tokens_forwarded
    rate = median_rate(ENVS * STEPS, work)
    return rate, (agent.policy.tokens_forwarded - before) / (6 * ENVS * STEPS)


def plain_turns(batch: int) -> dict:
    """Turns a second of `generate` on left-padded batches of rendered prompts."""
    agent = make_agent(free_text=True)
    model, tokenizer = plain_model(agent), agent.tokenizer
    texts = prompts(agent, batch)

    def work() -> None:
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

    return median_rate(batch, work)


def main() -> None:
    """Measure everything in one run."""
    pythons = parse_rivals(__doc__)
    torch.manual_seed(0)
    agent = make_agent(free_text=True)
    length = len(agent.tokenizer(prompts(agent, 1)[0])["input_ids"]) + MAX_NEW_TOKENS
    bare = bare_rates(plain_model(agent), ENVS, length)
    free_text, text_tokens = llamagym_turns(free_text=True)
    choices, choice_tokens = llamagym_turns(free_text=False)
    result = {
        "unit": "turns per second, median of 5",
        "llamagym_free_text": {**free_text, "tokens_per_turn": text_tokens},
        "llamagym_choices": {**choices, "tokens_per_turn": choice_tokens},
        "transformers_batch_1": plain_turns(1),
        "transformers_batch_64": plain_turns(ENVS),
        **run_rivals(pythons, embedded_model_folder(), "act"),
    }
    add_bare(result, bare, text_tokens * free_text["median"])
    add_ratios(result, ("transformers_batch_1", "transformers_batch_64", *pythons))
    save("acting", result)


if __name__ == "__main__":
    main()
