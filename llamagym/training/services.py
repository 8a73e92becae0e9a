"""The trackers that accelerate knows: TensorBoard, Weights & Biases, Trackio, MLflow, Comet and more."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..agent.agent import Agent, collector_of
from ..errors import ConfigError, did_you_mean, reason_of

_COLUMNS = ("update", "episode", "turn", "read", "reply", "probability", "reward", "value", "advantage")


class ServiceTracker:
    """One of accelerate's trackers; where it has tables, with the agent's transcripts as one."""

    def __init__(
        self,
        name: str,
        run_dir: Path,
        config: Mapping[str, Any],
        project: str = "llamagym",
        agent: Agent | None = None,
        **options: Any,
    ) -> None:
        """Start a run.

        Args:
            name: As accelerate calls the tracker.
            run_dir: Where it writes, if it writes files.
            config: Settings to show beside it; what is neither number nor text is shown as text.
            project: Project or experiment.
            agent: Whose transcripts are shown.
            **options: Of the tracker's own start (`wandb.init` and the like).

        Raises:
            ConfigError: There is no such tracker, its package is missing, or it cannot start.
        """
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        if name not in LOGGER_TYPE_TO_CLASS:
            raise ConfigError(f"log_with names {name!r}. {did_you_mean(name, [*LOGGER_TYPE_TO_CLASS, 'csv'])}")
        kind = LOGGER_TYPE_TO_CLASS[name]
        places = {"logging_dir": str(run_dir)} if kind.requires_logging_directory else {}
        try:
            self._tracker = kind(project, **places, **options)
            self._tracker.start()
        except ImportError as error:
            raise ConfigError(
                f"log_with={name!r} needs a package that is missing: {error}. Install it (pip install {name}), or drop "
                "the tracker."
            ) from error
        except Exception as error:  # whatever a service raises
            raise ConfigError(
                f"log_with={name!r} cannot start with the project {project!r}: {reason_of(error)}. Pass another "
                "project (or WANDB_PROJECT), or drop the tracker."
            ) from error
        self._tracker.store_init_configuration({key: _plain(value) for key, value in config.items()})
        self._agent = agent

    def log(self, metrics: Mapping[str, float | str], step: int) -> None:
        """Send metrics, and the transcripts of the update that they belong to."""
        self._tracker.log({key: value for key, value in metrics.items() if _is_shown(value)}, step=step)
        if self._agent is not None and hasattr(self._tracker, "log_table"):
            update = int(metrics.get("updates", 0))
            rows = []
            for number, transcript in enumerate(collector_of(self._agent).transcripts, 1):
                rows += _rows(update, number, transcript)
            self._tracker.log_table("transcripts", list(_COLUMNS), rows, step=step)

    def close(self) -> None:
        """Finish the run."""
        self._tracker.finish()


def _rows(update: int, number: int, transcript: Mapping[str, Any]) -> list[list[Any]]:
    """A transcript's turns as rows of a table."""
    return [
        [
            update,
            number,
            turn["turn"],
            turn["read"],
            turn["reply"],
            # A reply may open with a prefix that choices do not have.
            next((chance for text, chance in turn["choices"] or () if turn["reply"].endswith(text)), None),
            turn["reward"],
            turn["value"],
            turn["advantage"],
        ]
        for turn in transcript["turns"]
    ]


def _is_shown(value: float | str) -> bool:
    return isinstance(value, str) or math.isfinite(value)


def _plain(value: Any) -> bool | int | float | str:
    return value if isinstance(value, bool | int | float | str) else str(value)
