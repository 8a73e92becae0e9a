"""Shows the progress of a run: a bar in a terminal or a notebook, plain lines on stderr elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

import numpy as np
from tqdm import tqdm

from .. import distributed
from ..learners.base import UpdateStats
from ..models.quiet import is_terminal
from ..options import check_arguments, require_positive

# A line is printed after this many seconds without one, since an update of a large model may take a minute.
MAX_SILENCE_S = 10.0
# The bar is redrawn this often, so that nobody takes a long update for a hang.
_BAR_REFRESH_S = 1.0
_NOTEBOOK_COLUMNS = 100
_BAR_FORMAT = "{percentage:3.0f}%|{bar:20}| {elapsed}<{remaining}{postfix}"
# In a terminal, updates that follow faster than this share a line.
_LINE_INTERVAL_S = 2.0


class Progress:
    """Shows the progress of a run, in `train` or in a loop of your own.

    In a terminal it is a bar with the share of the budget, the time left, the speed and the mean return, below a line
    for each update (every two seconds at most). In a notebook's cell it is the bar alone. Elsewhere (a file, a pipe,
    CI) it is one line per update, and one whenever ten seconds have passed without a line. Of several processes only
    the main one shows anything.

        with Progress(episodes=1000) as progress:
            while ...:
                progress.advance(returns_of_episodes_that_ended, agent.terminate_episodes(...), turns=1)
    """

    def __init__(
        self,
        episodes: int | None = None,
        unit: str = "episode",
        window: int = 100,
        share: Callable[[], float] | None = None,
    ) -> None:
        """Starts at zero.

        Args:
            episodes: Total number of episodes; None if unknown.
            unit: Name of an episode in the output, such as "hand".
            window: Number of latest episodes in the mean return.
            share: Function that returns the used share of the run's budget, 0 to 1; None counts `episodes`.

        Raises:
            ConfigError: An argument has the wrong type, or a number is below 1.
        """
        check_arguments(Progress.__init__, locals())
        require_positive(episodes=episodes, window=window)
        self._total = episodes
        self._share_of_budget = share
        self._unit = unit
        self._recent: deque[float] = deque(maxlen=window)
        self._done = 0
        self._turns = 0
        self._updates = 0
        self._started = time.perf_counter()
        self._acting_since: float | None = None
        self._last_line = self._started
        self._is_shown = distributed.is_main_process()
        self._bar = _make_bar() if self._is_shown else tqdm(disable=True)
        self._has_bar = not self._bar.disable
        self._prints_updates = not _is_notebook()
        # The thread and the run both write.
        self._lock = threading.RLock()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._refresh, name="llamagym-progress", daemon=True)

    def __enter__(self) -> Progress:
        """Starts the thread that redraws the bar, or prints a line after a long silence."""
        if self._is_shown:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stops the thread; the bar stays as it is."""
        self._is_closed.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._has_bar:
            self._draw_bar()
        self._bar.close()

    def resume(self, returns: Sequence[float], updates: int) -> None:
        """Counts the episodes and updates of a resumed run before its checkpoint."""
        self._updates = updates
        self.advance(returns, {})

    def advance(self, returns: Sequence[float], stats: Mapping[str, float], turns: int = 0) -> None:
        """Counts finished episodes, and an update if there are statistics of one.

        Args:
            returns: Return of each episode that ended since the last call.
            stats: Statistics of an update; empty without one.
            turns: Number of turns since the last call.
        """
        with self._lock:
            if self._acting_since is None:
                self._acting_since = time.perf_counter()
            self._done += len(returns)
            self._turns += turns
            self._recent.extend(returns)
            if not stats:
                return
            self._updates += 1
            silence = time.perf_counter() - self._last_line
            if self._prints_updates and (not self._has_bar or self._updates == 1 or silence >= _LINE_INTERVAL_S):
                parts = [*self._summary(), *_shown(stats), f"{self._seconds()} s"]
                self.note(f"update {self._updates}: {', '.join(parts)}")
            if self._has_bar:
                self._draw_bar()

    def note(self, line: str) -> None:
        """Prints a line, above the bar if there is one."""
        if not self._is_shown:
            return
        line = str(line)
        with self._lock:
            self._last_line = time.perf_counter()
            if self._has_bar:
                self._bar.write(line, file=sys.stderr)
                return
            # A closed pipe or a missing stderr must not end the run.
            with suppress(OSError, ValueError, AttributeError):
                sys.stderr.write(line + "\n")
                sys.stderr.flush()

    def _summary(self) -> list[str]:
        """Returns the share of the budget, the number of episodes and the mean return, as far as they are known."""
        parts = []
        share = self._share()
        if share is not None:
            parts.append(f"{share:.0%}")
        parts.append(f"{self._done:,} {self._unit}s")
        if self._recent:
            parts.append(f"mean return of the last {len(self._recent)} {np.mean(self._recent):+.3f}")
        return parts

    def _share(self) -> float | None:
        """Returns the used share of the budget; None if there is no budget."""
        if self._share_of_budget is not None:
            return self._share_of_budget()
        return min(1.0, self._done / self._total) if self._total else None

    def _draw_bar(self) -> None:
        share = self._share()
        self._bar.n = 0 if share is None else round(100 * share, 1)
        parts = [f"{self._done:,} {self._unit}s", f"{self._updates} updates"]
        if self._turns and self._acting_since is not None:
            seconds = max(time.perf_counter() - self._acting_since, 1e-3)
            parts.append(f"{self._turns / seconds:,.0f} turns/s")
        if self._recent:
            parts.append(f"mean return {np.mean(self._recent):+.3f}")
        self._bar.set_postfix_str(", ".join(parts))

    def _seconds(self) -> str:
        return f"{time.perf_counter() - self._started:.0f}"

    def _refresh(self) -> None:
        """Redraws the bar, or prints a line after a long silence, until the run is over."""
        pause = _BAR_REFRESH_S if self._has_bar else MAX_SILENCE_S
        while not self._is_closed.wait(pause):
            with self._lock:
                silence = time.perf_counter() - self._last_line
                if self._has_bar:
                    self._draw_bar()
                elif silence >= MAX_SILENCE_S:
                    self.note(", ".join([*self._summary(), f"{self._seconds()} s"]))
                    silence = 0.0
            if not self._has_bar:
                pause = max(0.1, MAX_SILENCE_S - silence)


def _shown(stats: Mapping[str, float]) -> list[str]:
    """Returns the statistics for a line; the mean return is in it already."""
    return UpdateStats({name: value for name, value in stats.items() if name != "return_mean"}).shown()


def _is_notebook() -> bool:
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    # IPython in a terminal has no kernel.
    return hasattr(shell, "kernel")


def _make_bar() -> Any:
    """Returns a bar in percent for a notebook or a terminal; elsewhere a disabled one."""
    if _is_notebook():
        from IPython.display import display

        return tqdm(total=100, bar_format=_BAR_FORMAT, file=_CellOutput(display), ncols=_NOTEBOOK_COLUMNS)
    return tqdm(total=100, bar_format=_BAR_FORMAT, disable=not is_terminal(sys.stderr))


class _CellOutput:
    """A file whose last line is the only output in a notebook's cell, updated in place.

    With a stream the bar would appear again after each line that is printed in between; a widget needs ipywidgets.
    """

    def __init__(self, display: Any) -> None:
        """Opens an output with IPython's `display`."""
        self._output = display({"text/plain": ""}, raw=True, display_id=True)

    def write(self, text: str) -> None:
        """Shows a line, unless it is empty."""
        line = text.strip()
        if line:
            self._output.update({"text/plain": line}, raw=True)

    def flush(self) -> None:
        """Does nothing, since nothing is buffered."""
