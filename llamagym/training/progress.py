"""Shows how far a run has come: a bar in a terminal or a notebook, plain lines on stderr elsewhere."""

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
from ..models.quiet import is_terminal
from ..options import check_arguments, require_positive

# A line is printed after this many seconds without one: an update of a large model may take a minute.
_LONGEST_SILENCE_S = 10.0
# A bar's clock moves on its own, so that nobody takes a long update for a hang.
_BAR_REFRESH_S = 1.0
_NOTEBOOK_COLUMNS = 100
_BAR_FORMAT = "{percentage:3.0f}%|{bar:20}| {elapsed}<{remaining}{postfix}"
# Statistics in an update's line; the second group is shown only if it is not zero.
_SHOWN_STATS = ("expected_return", "eval_return", "entropy", "approx_kl")
_SHOWN_COUNTS = ("skipped_steps", "replay_skipped_steps")


class Progress:
    """Shows how far a run has come; `train` uses it, and so can a loop of your own.

    In a terminal and in a notebook's cell it is one bar. Elsewhere (a file, a pipe, CI) it is one line per update, and
    one whenever ten seconds have passed without a line. Of several processes only the main one shows anything.

        with Progress(episodes=1000) as progress:
            while ...:
                progress.advance(returns_of_episodes_that_ended, agent.terminate_episodes(...))
    """

    def __init__(
        self,
        episodes: int | None = None,
        unit: str = "episode",
        window: int = 100,
        share: Callable[[], float] | None = None,
    ) -> None:
        """Begin at zero.

        Args:
            episodes: Total number of episodes; None if unknown.
            unit: Name of an episode in the output, such as "hand".
            window: Number of latest episodes in the mean return.
            share: Returns the share of the run's budget that is used up, 0 to 1; None is the share of `episodes`.

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
        self._updates = 0
        self._started = time.perf_counter()
        self._last_line = self._started
        self._is_shown = distributed.is_main_process()
        self._bar = _make_bar() if self._is_shown else tqdm(disable=True)
        self._has_bar = not self._bar.disable
        # The clock's thread and the run both write.
        self._lock = threading.RLock()
        self._is_closed = threading.Event()
        self._clock = threading.Thread(target=self._run_clock, name="llamagym-progress", daemon=True)

    def __enter__(self) -> Progress:
        """Start the clock that breaks long silences."""
        if self._is_shown:
            self._clock.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the clock and leave the bar as it stands."""
        self._is_closed.set()
        if self._clock.is_alive():
            self._clock.join()
        if self._has_bar:
            self._draw_bar()
        self._bar.close()

    def resume(self, returns: Sequence[float], updates: int) -> None:
        """Count the episodes and updates that a resumed run had done before."""
        self._updates = updates
        self.advance(returns, {})

    def advance(self, returns: Sequence[float], stats: Mapping[str, float]) -> None:
        """Count finished episodes, and an update if there are statistics of one.

        Args:
            returns: Return of each episode that ended since the last call.
            stats: Statistics of an update; empty without one.
        """
        with self._lock:
            self._done += len(returns)
            self._recent.extend(returns)
            self._updates += bool(stats)
            if self._has_bar and stats:
                self._draw_bar()
            elif stats:
                self.note(f"update {self._updates}: {self._summary()}{_named(stats)}, {self._seconds()} s")

    def note(self, line: str) -> None:
        """Print a line, above the bar if there is one."""
        if not self._is_shown:
            return
        with self._lock:
            self._last_line = time.perf_counter()
            if self._has_bar:
                self._bar.write(line, file=sys.stderr)
                return
            # A run does not end because nobody reads it any more: a closed pipe, or no stderr at all.
            with suppress(OSError, ValueError, AttributeError):
                sys.stderr.write(line + "\n")
                sys.stderr.flush()

    def _summary(self) -> str:
        """Share of the budget, number of episodes and mean return, as far as they are known."""
        parts = []
        share = self._share()
        if share is not None and not self._has_bar:
            parts.append(f"{share:.0%}")
        parts.append(f"{self._done:,} {self._unit}s")
        if self._has_bar:
            parts.append(f"{self._updates} updates")
        if self._recent:
            parts.append(f"mean return of the last {len(self._recent)} {np.mean(self._recent):+.3f}")
        return ", ".join(parts)

    def _share(self) -> float | None:
        """Share of the budget that is used up; None if there is no budget."""
        if self._share_of_budget is not None:
            return self._share_of_budget()
        return min(1.0, self._done / self._total) if self._total else None

    def _draw_bar(self) -> None:
        share = self._share()
        self._bar.n = 0 if share is None else round(100 * share, 1)
        self._bar.set_postfix_str(self._summary())

    def _seconds(self) -> str:
        return f"{time.perf_counter() - self._started:.0f}"

    def _run_clock(self) -> None:
        """Refresh the bar, or print a line where none was printed for long, until the run is over."""
        pause = _BAR_REFRESH_S if self._has_bar else _LONGEST_SILENCE_S
        while not self._is_closed.wait(pause):
            with self._lock:
                silence = time.perf_counter() - self._last_line
                if self._has_bar:
                    self._draw_bar()
                elif silence >= _LONGEST_SILENCE_S:
                    self.note(f"{self._summary()}, {self._seconds()} s")
                    silence = 0.0
            if not self._has_bar:
                pause = max(0.1, _LONGEST_SILENCE_S - silence)


def _named(stats: Mapping[str, float]) -> str:
    """The statistics that a line shows, each after a comma."""
    shown = [f", {name} {stats[name]:.3g}" for name in _SHOWN_STATS if name in stats]
    shown += [f", {name} {stats[name]:.0f}" for name in _SHOWN_COUNTS if stats.get(name)]
    return "".join(shown)


def _make_bar() -> Any:
    """A bar of percents in a notebook or a terminal; elsewhere a disabled one."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    # IPython in a terminal has no kernel.
    if hasattr(shell, "kernel"):
        from IPython.display import display

        return tqdm(total=100, bar_format=_BAR_FORMAT, file=_CellOutput(display), ncols=_NOTEBOOK_COLUMNS)
    return tqdm(total=100, bar_format=_BAR_FORMAT, disable=not is_terminal(sys.stderr))


class _CellOutput:
    """A file that shows the last line written to it in one output of a notebook's cell, which is updated in place.

    A stream would show a bar again after everything that is printed in between, and a widget needs ipywidgets.
    """

    def __init__(self, display: Any) -> None:
        """Open an output by IPython's `display`."""
        self._output = display({"text/plain": ""}, raw=True, display_id=True)

    def write(self, text: str) -> None:
        """Show a line, unless it is empty."""
        if line := text.strip():
            self._output.update({"text/plain": line}, raw=True)

    def flush(self) -> None:
        """Nothing is pending."""
