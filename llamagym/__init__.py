"""llamagym: language models that learn by acting."""

import os as _os

# PyTorch reads it at its first allocation: on Linux, memory for large tensors then comes in pages of 2 MB. In pages of
# 4 kB, handing it out takes a tenth of a learning step on a CPU.
_os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

from .agent import Agent
from .errors import (
    ActionParseError,
    ChatTemplateError,
    ConfigError,
    ContextLengthError,
    EpisodeError,
    LlamaGymError,
    ModelLoadError,
)
from .generation import GenerationConfig
from .grpo import GRPO, GRPOConfig, ReinforceConfig
from .loading import load_model_and_tokenizer
from .parsing import find_json, parse_choice
from .ppo import PPO, PPOConfig
from .ppo_trainer import PPOTrainer
from .training import EvaluationResult, TrainingResult, evaluate, train
from .value_head import AutoModelForCausalLMWithValueHead

__all__ = [
    "GRPO",
    "PPO",
    "ActionParseError",
    "Agent",
    "AutoModelForCausalLMWithValueHead",
    "ChatTemplateError",
    "ConfigError",
    "ContextLengthError",
    "EpisodeError",
    "EvaluationResult",
    "GRPOConfig",
    "GenerationConfig",
    "LlamaGymError",
    "ModelLoadError",
    "PPOConfig",
    "PPOTrainer",
    "ReinforceConfig",
    "TrainingResult",
    "evaluate",
    "find_json",
    "load_model_and_tokenizer",
    "parse_choice",
    "train",
]
