"""The visible loop: training, evaluation, and checkpoints to resume a run from."""

from .environments import EnvSource
from .evaluation import EvaluationResult, evaluate
from .loop import TrainingResult, train

__all__ = ["EnvSource", "EvaluationResult", "TrainingResult", "evaluate", "train"]
