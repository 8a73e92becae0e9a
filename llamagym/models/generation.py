"""Options of sampling replies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError
from ..options import Options


@dataclass(frozen=True)
class GenerationConfig(Options):
    """Options of sampling replies.

    Attributes:
        max_new_tokens: Maximum length of a free-text reply, in tokens.
        do_sample: False takes the most likely token or choice, which does not explore and is for inference.
        temperature: Divisor of logits (of choices: scores), in sampling and in training.
        top_p: Nucleus sampling in inference; off while learning, since a truncated distribution biases the ratio.
        top_k: Top-k sampling in inference; also off while learning. 0 switches it off.
    """

    max_new_tokens: int = 32
    do_sample: bool = True
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        """Checks types and ranges."""
        super().__post_init__()
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens={self.max_new_tokens} allows no reply. Pass at least 1.")
        if self.temperature <= 0:
            raise ConfigError(
                f"temperature={self.temperature} is not positive. Pass do_sample=False for the most likely reply."
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p} is outside (0, 1]. 1.0 switches it off.")
        if self.top_k < 0:
            raise ConfigError(f"top_k={self.top_k} is negative. 0 switches it off.")

    @classmethod
    def from_dict(cls, options: Mapping[str, Any] | Options) -> GenerationConfig:
        """Reads options, with or without a `generate/` prefix.

        >>> GenerationConfig.from_dict({"generate/max_new_tokens": 8}).max_new_tokens
        8
        """
        if isinstance(options, Mapping):
            options = {str(key).removeprefix("generate/"): value for key, value in options.items()}
        return super().from_dict(options)
