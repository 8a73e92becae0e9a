"""The interface of a sampler: what writes the policy's replies in free text if the built-in engine does not.

Choices need no sampler, since the policy computes the probability of every choice itself. The built-in engine is no
implementation of it, since it also needs to know which tokens contexts share, and where an activated LoRA begins to
act; `sampling.write_replies` is its equivalent.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol, runtime_checkable

import torch

from ..models.registry import GenerationConfig
from ..models.value_head import AutoModelForCausalLMWithValueHead
from .sampling import SampledText


@runtime_checkable
class Sampler(Protocol):
    """Writes replies: token ids in; token ids, their log-probabilities and the reason of the end out.

    Attributes:
        activates_lora: Whether it can apply an activated LoRA, which leaves the tokens before a reply alone.
    """

    activates_lora: bool

    def set_weights(self, model: AutoModelForCausalLMWithValueHead, version: int) -> None:
        """Makes the weights of the model those that `sample` uses.

        Args:
            model: The model that learns.
            version: Number of its weights' state. The same number means the same weights.
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
            prompts: All token ids before each reply.
            config: Options of sampling. Log-probabilities are under softmax(logits / temperature).
            eos_ids: All ids that end a reply.
            rng: Random numbers, for a sampler that can repeat its replies.
        """
