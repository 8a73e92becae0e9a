"""The visible loop: training, evaluation, callbacks, and checkpoints to resume a run from."""

from .callbacks import Callback, StopOnReturn
from .environments import EnvSource
from .evaluation import EvaluationResult, evaluate
from .loop import TrainingResult, train
from .played import PlayedEpisode
from .run import Run

__all__ = [
    "Callback",
    "EnvSource",
    "EvaluationResult",
    "PlayedEpisode",
    "Run",
    "StopOnReturn",
    "TrainingResult",
    "evaluate",
    "train",
]
