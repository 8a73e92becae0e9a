"""The public names of the library, which `llamagym` loads when one of them is used first."""

import warnings as _warnings

# transformers imports it, and without ipywidgets it warns in every notebook, though nothing here draws a widget.
with _warnings.catch_warnings():
    _warnings.filterwarnings("ignore", "IProgress not found")
    import tqdm.auto as _tqdm_auto  # noqa: F401

from .agent import Agent
from .agent.preflight import Check, Report
from .distributed import gather_objects, is_main_process, main_process_first
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
    SamplerError,
)
from .learners.config import LearnerConfig
from .learners.grpo import GRPOConfig, ReinforceConfig
from .learners.ppo import PPOConfig
from .learners.replay import ReplayConfig
from .models.loading import load_model_and_tokenizer
from .models.registry import GenerationConfig
from .models.value_head import AutoModelForCausalLMWithValueHead
from .policy.sampler import Sampler
from .policy.samplers import LlamaCppSampler, VLLMSampler
from .policy.sampling import SampledText
from .serving import ChatAgent, serve
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

__all__ = [
    "ActionParseError",
    "Agent",
    "AutoModelForCausalLMWithValueHead",
    "Callback",
    "ChatAgent",
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
    "LlamaCppSampler",
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
    "SampledText",
    "Sampler",
    "SamplerError",
    "Score",
    "ScoreCallback",
    "StopOnReturn",
    "Tracker",
    "TrainingResult",
    "Turn",
    "VLLMSampler",
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
    "serve",
    "side_by_side",
    "train",
    "write_report",
]
