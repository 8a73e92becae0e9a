"""Interface of an external engine that samples replies in free text.

Choices need no sampler, since the policy computes the probability of every choice itself. The built-in engine does not
implement the interface, since it also needs to know which tokens contexts share, and where an activated LoRA begins to
act; `sampling.write_replies` is its equivalent.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol, runtime_checkable

import torch

from ..errors import ConfigError, SamplerError, excerpt
from ..models.registry import GenerationConfig
from ..models.value_head import AutoModelForCausalLMWithValueHead
from .sampling import SampledText


@runtime_checkable
class Sampler(Protocol):
    """Maps prompts, as token ids, to replies: token ids, their log-probabilities and the reason of the end.

    Attributes:
        activates_lora: Whether it supports an activated LoRA, which leaves the tokens before a reply alone.
    """

    activates_lora: bool

    def set_weights(self, model: AutoModelForCausalLMWithValueHead, weights_id: str) -> None:
        """Updates the weights that `sample` uses.

        Args:
            model: The model that learns.
            weights_id: Identity of its weights, of all models: equal ones are equal weights.
        """

    def sample(
        self,
        prompts: Sequence[tuple[int, ...]],
        config: GenerationConfig,
        eos_ids: AbstractSet[int],
        rng: torch.Generator,
    ) -> list[SampledText]:
        """Writes one reply to each prompt.

        Args:
            prompts: All token ids before each reply; at least one prompt.
            config: Options of sampling. Log-probabilities are under softmax(logits / temperature); with top-p or top-k,
                which are never learned with, they may be of the truncated distribution.
            eos_ids: All ids that end a reply.
            rng: Random numbers, for a sampler that can repeat its replies.
        """


def check_sampler(sampler: object) -> None:
    """Raises a `ConfigError` for what is neither a sampler nor None."""
    if sampler is not None and (isinstance(sampler, type) or not isinstance(sampler, Sampler)):
        raise ConfigError(
            f"sampler={excerpt(sampler)} is not a sampler. Pass a VLLMSampler, a LlamaCppSampler, or an object with "
            "the methods of Sampler."
        )


def sample_checked(
    sampler: Sampler,
    prompts: Sequence[tuple[int, ...]],
    config: GenerationConfig,
    eos_ids: AbstractSet[int],
    rng: torch.Generator,
    vocabulary_size: int,
    learning: bool,
) -> list[SampledText]:
    """Samples replies whose ids the model knows.

    Args:
        sampler: The sampler, which has the policy's weights.
        prompts: As for `Sampler.sample`; so are the next three.
        config: Options of sampling.
        eos_ids: All ids that end a reply.
        rng: Random numbers.
        vocabulary_size: Number of tokens that the model knows.
        learning: Whether replies will be learned from.

    Raises:
        ConfigError: Replies would be learned from and are not sampled.
        SamplerError: A reply has ids that the model does not know.
    """
    if learning and not config.do_sample:
        raise ConfigError(
            "do_sample=False: a server does not report how likely replies are that it does not sample, so they cannot "
            "be learned from. Leave do_sample out, or use the built-in engine."
        )
    texts = sampler.sample(prompts, config, eos_ids, rng)
    for text in texts:
        if not all(0 <= token < vocabulary_size for token in text.ids):
            raise SamplerError(
                f"The sampler wrote the token ids {excerpt(text.ids)}, and the model has {vocabulary_size} tokens. "
                "Serve the base model that the agent trains."
            )
    return texts
