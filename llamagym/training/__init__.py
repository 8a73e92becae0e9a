"""The visible loop: training, evaluation, callbacks, and checkpoints to resume a run from."""

from .callbacks import Callback, StopOnReturn
from .environments import EnvSource
from .eval_callback import EvalCallback
from .evaluation import EvaluationResult, evaluate, side_by_side
from .loop import TrainingResult, train
from .played import PlayedEpisode
from .run import Run

__all__ = [
    "Callback",
    "EnvSource",
    "EvalCallback",
    "EvaluationResult",
    "PlayedEpisode",
    "Run",
    "StopOnReturn",
    "TrainingResult",
    "evaluate",
    "side_by_side",
    "train",
]
