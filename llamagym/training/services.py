"""Trackers of accelerate, which use their own packages: TensorBoard, Weights & Biases, MLflow, Trackio and more."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..agent.agent import Agent, collector_of
from ..errors import ConfigError, did_you_mean, reason_of
from .report.scores import Score

_COLUMNS = ("update", "episode", "turn", "read", "reply", "probability", "reward", "value", "advantage")


class ServiceTracker:
    """One of accelerate's trackers; logs the agent's transcripts as a table, as text, or as a file, by tracker."""

    def __init__(
        self,
        name: str,
        run_dir: Path,
        config: Mapping[str, Any],
        project: str = "llamagym",
        agent: Agent | None = None,
        **options: Any,
    ) -> None:
        """Starts a tracker.

        Args:
            name: Its name in accelerate.
            run_dir: Folder for its files, if it writes any.
            config: Settings to show; those that are neither numbers nor text are converted to text.
            project: Project or experiment.
            agent: The agent whose transcripts are logged; None logs none.
            **options: Options for starting the tracker, such as those of `wandb.init`.

        Raises:
            ConfigError: The tracker is unknown, its package is missing, or it cannot start.
        """
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        if name not in LOGGER_TYPE_TO_CLASS:
            raise ConfigError(f"track names {name!r}. {did_you_mean(name, [*LOGGER_TYPE_TO_CLASS, 'csv'])}")
        tracker_class = LOGGER_TYPE_TO_CLASS[name]
        if tracker_class.requires_logging_directory:
            options["logging_dir"] = str(run_dir)
        try:
            if name == "mlflow":
                options |= _mlflow_options(run_dir)
            self._make = partial(tracker_class, project, **options)
            self._tracker = self._make()
            self._tracker.start()
            self._tracker.store_init_configuration({str(key): _plain(value) for key, value in config.items()})
        except ImportError as error:
            raise ConfigError(
                f"track={name!r} needs a package that is missing: {error}. Install it (pip install {name}), or drop "
                "the tracker."
            ) from error
        except Exception as error:  # a service may raise anything
            raise ConfigError(
                f"track={name!r} cannot start with the project {project!r}: {reason_of(error)}. Pass another "
                "project (or WANDB_PROJECT), or drop the tracker."
            ) from error
        self._agent = agent
        self._name = name
        self._step = 0

    def log(self, metrics: Mapping[str, float | str], step: int) -> None:
        """Logs metrics, without NaN and infinite ones, and the transcripts of their update."""
        shown = {key: value for key, value in metrics.items() if _can_be_shown(value)}
        if self._name == "mlflow":
            shown = {key: value for key, value in shown.items() if not isinstance(value, str)}
        self._tracker.log(shown, step=step)
        self._step = step
        if self._agent is not None:
            update = int(metrics.get("updates", 0))
            rows = []
            for number, transcript in enumerate(collector_of(self._agent).transcripts, 1):
                rows += [_row(update, number, turn) for turn in transcript["turns"]]
            self._log_transcripts(update, rows, step)

    def log_scores(self, scores: Mapping[str, Score], step: int) -> None:
        """Logs the mean of each policy's evaluation."""
        means = {f"score/{name}": score.mean for name, score in scores.items()}
        self._tracker.log({name: mean for name, mean in means.items() if _can_be_shown(mean)}, step=step)

    def position(self) -> int:
        """Returns the step of the latest metrics."""
        return self._step

    def rewind(self, position: int) -> None:
        """Purges TensorBoard's events after a position; other services start a new run."""
        if self._name == "tensorboard" and isinstance(position, int):
            self._tracker.finish()
            self._tracker = self._make(purge_step=position + 1)
            self._tracker.start()
            self._step = position

    def _log_transcripts(self, update: int, rows: list[list[Any]], step: int) -> None:
        if hasattr(self._tracker, "log_table"):
            self._tracker.log_table("transcripts", list(_COLUMNS), rows, step=step)
        elif self._name == "tensorboard":
            self._tracker.log({"transcripts": _markdown(rows)}, step=step)
        elif self._name == "mlflow":
            import mlflow

            mlflow.log_text(_markdown(rows), f"transcripts/update-{update:06}.md")

    def close(self) -> None:
        """Finishes the tracker's run."""
        self._tracker.finish()


def _mlflow_options(run_dir: Path) -> dict[str, str]:
    """Lets MLflow write into a run's folder, unless its environment variable names a server; returns options for it."""
    import mlflow

    if "MLFLOW_TRACKING_URI" in os.environ:
        return {}
    mlflow.set_tracking_uri(f"sqlite:///{run_dir / 'mlflow.db'}")
    # MLflow sets the variable as well, which the next run would take for the user's.
    os.environ.pop("MLFLOW_TRACKING_URI", None)
    return {"logging_dir": (run_dir / "mlruns").as_uri()}


def _markdown(rows: Sequence[Sequence[Any]]) -> str:
    """Returns rows as a table in Markdown, which TensorBoard renders."""
    lines = [list(_COLUMNS), ["---"] * len(_COLUMNS), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(value: Any) -> str:
    """Returns a value as the text of a table's cell."""
    if isinstance(value, float):
        return f"{value:.3g}"
    return "" if value is None else str(value).replace("|", "\\|").replace("\n", " ")


def _row(update: int, episode: int, turn: Mapping[str, Any]) -> list[Any]:
    """Returns a turn of a transcript as a row of the table."""
    probability = None
    for choice, choice_probability in turn["choices"] or ():
        # A reply may begin with a prefix that is not part of the choice.
        if turn["reply"].endswith(choice):
            probability = choice_probability
            break
    return [
        update,
        episode,
        turn["turn"],
        turn["read"],
        turn["reply"],
        probability,
        turn["reward"],
        turn["value"],
        turn["advantage"],
    ]


def _can_be_shown(value: float | str) -> bool:
    return isinstance(value, str) or math.isfinite(value)


def _plain(value: Any) -> bool | int | float | str:
    is_usual = isinstance(value, bool | float | str) or (isinstance(value, int) and abs(value) < 2**63)
    return value if is_usual else str(value)
