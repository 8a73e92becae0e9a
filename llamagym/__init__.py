"""llamagym: language models that learn by acting."""

import os as _os
import warnings as _warnings

# PyTorch reads it at its first allocation: on Linux, memory for large tensors then comes in pages of 2 MB. In pages of
# 4 kB, handing it out takes a tenth of a learning step on a CPU.
_os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

# The only place that names the version; pyproject.toml reads it from here.
__version__ = "0.2.0"

# transformers imports it, and without ipywidgets it warns in every notebook, though nothing here draws a widget.
with _warnings.catch_warnings():
    _warnings.filterwarnings("ignore", "IProgress not found")
    import tqdm.auto as _tqdm_auto  # noqa: F401

from .agent import Agent
from .agent.preflight import Check, Report
from .distributed import gather_objects, is_main_process, main_process_first
from .envs import register as _register
from .errors import (
    ActionParseError,
    ChatTemplateError,
    CheckpointError,
    ConfigError,
    ContextLengthError,
    DivergedError,
    EnvironmentLostError,
    EnvironmentTimeoutError,
    EpisodeError,
    LlamaGymError,
    ModelLoadError,
    RankError,
)
from .learners.config import LearnerConfig
from .learners.grpo import GRPOConfig, ReinforceConfig
from .learners.ppo import PPOConfig
from .learners.replay import ReplayConfig
from .models.loading import load_model_and_tokenizer
from .models.registry import GenerationConfig
from .models.value_head import AutoModelForCausalLMWithValueHead
from .text.demonstrations import demonstrations_path
from .text.episode import Prompt, Reply, Turn
from .text.parsing import find_json, parse_choice
from .text.spaces import name_actions, parse_action
from .training import (
    Callback,
    EvalCallback,
    EvaluationResult,
    PlayedEpisode,
    Progress,
    Run,
    Score,
    ScoreCallback,
    StopOnReturn,
    Tracker,
    TrainingResult,
    default_tracker,
    evaluate,
    side_by_side,
    train,
    write_report,
)
from .trl_compat.ppo_trainer import PPOTrainer

_register()

__all__ = [
    "ActionParseError",
    "Agent",
    "AutoModelForCausalLMWithValueHead",
    "Callback",
    "ChatTemplateError",
    "Check",
    "CheckpointError",
    "ConfigError",
    "ContextLengthError",
    "DivergedError",
    "EnvironmentLostError",
    "EnvironmentTimeoutError",
    "EpisodeError",
    "EvalCallback",
    "EvaluationResult",
    "GRPOConfig",
    "GenerationConfig",
    "LearnerConfig",
    "LlamaGymError",
    "ModelLoadError",
    "PPOConfig",
    "PPOTrainer",
    "PlayedEpisode",
    "Progress",
    "Prompt",
    "RankError",
    "ReinforceConfig",
    "ReplayConfig",
    "Reply",
    "Report",
    "Run",
    "Score",
    "ScoreCallback",
    "StopOnReturn",
    "Tracker",
    "TrainingResult",
    "Turn",
    "default_tracker",
    "demonstrations_path",
    "evaluate",
    "find_json",
    "gather_objects",
    "is_main_process",
    "load_model_and_tokenizer",
    "main_process_first",
    "name_actions",
    "parse_action",
    "parse_choice",
    "side_by_side",
    "train",
    "write_report",
]
