"""Training and evaluation loops, callbacks, trackers, and checkpoints of a run."""

from .callbacks import Callback, EvalCallback, ScoreCallback, StopOnReturn
from .environments import EnvSource
from .episodes import PlayedEpisode
from .evaluation import EvaluationResult, evaluate, side_by_side
from .loop import train
from .progress import Progress
from .report import write_report
from .report.scores import Score
from .result import TrainingResult
from .run import Run
from .tracking import Tracker, default_tracker

__all__ = [
    "Callback",
    "EnvSource",
    "EvalCallback",
    "EvaluationResult",
    "PlayedEpisode",
    "Progress",
    "Run",
    "Score",
    "ScoreCallback",
    "StopOnReturn",
    "Tracker",
    "TrainingResult",
    "default_tracker",
    "evaluate",
    "side_by_side",
    "train",
    "write_report",
]
