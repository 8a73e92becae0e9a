"""Progress on stderr, and nothing else there: a bar in a terminal, a line per update elsewhere."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

from llamagym.training.tracking import Progress

ROOT = Path(__file__).parent.parent


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(monkeypatch, stream: io.StringIO) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress(4, window=2) as progress:
        progress.advance([1.0], {})
        progress.advance([], {})
        progress.advance([0.0, -1.0], {"entropy": 0.5, "approx_kl": 0.0123})
        progress.note("said so")
        progress.advance([1.0, 1.0], {})
    return stream.getvalue()


def test_where_no_one_watches_an_update_is_a_line(monkeypatch):
    update, note = run(monkeypatch, io.StringIO()).splitlines()
    assert re.fullmatch(
        r"update 1: 3 episodes, mean return of the last 2 -0\.500, entropy 0\.5, approx_kl 0\.0123, \d+ s", update
    )
    assert note == "said so"


def test_in_a_terminal_it_is_a_bar(monkeypatch):
    shown = run(monkeypatch, Terminal())
    assert "4/4" in shown
    assert "said so\n" in shown
    assert "update 1:" not in shown


@pytest.mark.slow
def test_the_readme_s_loop_says_nothing_but_its_own():
    loop = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)[0]
    result = subprocess.run([sys.executable, "-c", loop], capture_output=True, text=True, check=True, cwd=ROOT)
    assert result.stderr == ""
    assert re.search(r"hands, mean return [+-]\d", result.stdout)
