"""The visible loop: training, evaluation, and what a run leaves on the disk to go on from."""

from .environments import EnvSource
from .evaluation import EvaluationResult, evaluate
from .loop import TrainingResult, train

__all__ = ["EnvSource", "EvaluationResult", "TrainingResult", "evaluate", "train"]
