"""Workloads that benchmarks share: Blackjack's agent, its prompts, and the model without an adapter."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from common import ROOT, Work
from gymnasium.vector import AutoresetMode
from transformers import AutoModelForCausalLM, DynamicCache

from llamagym import Agent, load_model_and_tokenizer
from llamagym.models.loading import embedded_model_folder
from llamagym.models.transformers_internals import cache_argument
from llamagym.text.episode import Context

sys.path.insert(0, str(ROOT / "examples"))
from blackjack import BlackjackAgent

MAX_NEW_TOKENS = 8
# Fraction of the layers that LoRA adapts in all speed benchmarks, including those of whole conversations.
DEPTH = 0.25


def make_agent(
    free_text: bool, context: Context = "turn", dtype: str = "auto", device: str = "cpu", **ppo: Any
) -> BlackjackAgent:
    """The example's agent on a freshly loaded model; `ppo` holds options of `PPOConfig`."""
    model, tokenizer, place = load_model_and_tokenizer("smollm2-135m", device, dtype, lora_layer_fraction=DEPTH)
    # No trust region, which could end an update early.
    settings = {"batch_size": 10**9, "target_kl": None, **ppo}
    agent = BlackjackAgent(
        model, tokenizer, place, {"max_new_tokens": MAX_NEW_TOKENS}, settings, context=context, seed=0
    )
    agent.free_text = free_text
    return agent


def player(agent: BlackjackAgent, num_envs: int) -> Callable[[int], int]:
    """A function that plays a number of steps in all environments and returns the number of turns."""
    envs = gym.make_vec(
        "Blackjack-v1",
        num_envs=num_envs,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP},
        natural=False,
        sab=False,
    )
    observations, _ = envs.reset(seed=0)
    state = {"observations": observations}

    def play(steps: int) -> int:
        for _ in range(steps):
            hands = list(zip(*(part.tolist() for part in state["observations"]), strict=True))
            actions = agent.act_batch(hands)
            state["observations"], rewards, terminated, truncated, _ = envs.step(np.array(actions))
            agent.assign_rewards(rewards.tolist())
            agent.terminate_episodes(np.flatnonzero(terminated | truncated).tolist())
        return steps * num_envs

    return play


@torch.no_grad()
def simulate_update(agent: Agent) -> None:
    """Adds zero to the trained weights, which invalidates caches as an update does."""
    for weight in agent.policy.model.parameters():
        if weight.requires_grad:
            weight.add_(0.0)


def dtype_of(agent: BlackjackAgent) -> str:
    """The dtype of the model's weights."""
    return str(agent.policy.model.pretrained_model.dtype).removeprefix("torch.")


def plain_model(agent: BlackjackAgent) -> Any:
    """The same weights in the same dtype, loaded by transformers, without an adapter."""
    return AutoModelForCausalLM.from_pretrained(embedded_model_folder(), dtype=dtype_of(agent)).eval()


def prompts(agent: BlackjackAgent, count: int) -> list[str]:
    """Rendered prompts of `count` random states."""
    rng = np.random.default_rng(0)
    texts = []
    for _ in range(count):
        state = (int(rng.integers(12, 21)), int(rng.integers(1, 11)), int(rng.integers(2)))
        messages = [
            {"role": "system", "content": agent.get_system_prompt()},
            {"role": "user", "content": agent.format_observation(state)},
        ]
        texts.append(agent.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    return texts


def bare_works(model: Any, batch: int, length: int) -> dict[str, Work]:
    """Works of the bare model on random token ids: bounds of what the hardware can do.

    Args:
        model: The result of `plain_model`.
        batch: Number of rows.
        length: Tokens per row, including the `MAX_NEW_TOKENS` of the reply.

    Returns:
        `body`: a forward pass over whole rows, without logits. `causal_lm`: the same with logits at every token.
        `decode`: decoding of the reply one token at a time, with logits and a KV cache; the bound for free text.
    """
    ids = torch.randint(1000, 40_000, (batch, length), generator=torch.Generator().manual_seed(0))
    prompt_length = length - MAX_NEW_TOKENS
    with torch.no_grad():
        cache = DynamicCache()
        as_cache = {cache_argument(model): cache}
        model(ids[:, :prompt_length], use_cache=True, **as_cache)

    @torch.no_grad()
    def body() -> float:
        model.model(ids, use_cache=False)
        return ids.numel()

    @torch.no_grad()
    def causal_lm() -> float:
        model(ids, use_cache=False)
        return ids.numel()

    @torch.no_grad()
    def decode() -> float:
        for position in range(prompt_length, length):
            model(ids[:, position : position + 1], **as_cache)
        cache.crop(-MAX_NEW_TOKENS)
        return batch * MAX_NEW_TOKENS

    return {"body": body, "causal_lm": causal_lm, "decode": decode}
