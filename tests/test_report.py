"""The report of runs: one page, which a browser shows without a network and without an error."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from llamagym import ConfigError, train
from llamagym.training.report import write_report
from llamagym.training.tracking import default_tracker
from tests.agents import ChoiceAgent, CountdownEnv, make_agent

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOSTILE = 'says </script><script>alert("x")</script> <!-- & </p>'


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two real runs, one of which reads what would break a page that does not take care."""

    class Hostile(ChoiceAgent):
        def format_observation(self, observation):
            return f"{HOSTILE} {observation}"

    folders = []
    for name, kind in (("first", Hostile), ("second", ChoiceAgent)):
        folders.append(tmp_path_factory.mktemp("runs") / name)
        agent = make_agent(kind, context="turn", ppo={"batch_size": 24})
        tracker = default_tracker(folders[-1], {"seed": 0}, agent=agent)
        train(agent, CountdownEnv, episodes=24, num_envs=4, seed=0, tracker=tracker)
        # An alarm's statistics, so that there is one to show.
        tracker.log({"approx_kl": 0.3, "updates": 99}, 25)
        tracker.close()
    return folders


def dom(page: Path, *options: str, width: int = 390) -> tuple[str, str]:
    """What a browser makes of a page, and what it has to say about it."""
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += ["--enable-logging=stderr", f"--window-size={width},900", "--dump-dom", *options, page.as_uri()]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return result.stdout, result.stderr


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_a_browser_shows_curves_alarms_and_episodes_without_an_error(runs, tmp_path):
    shown, said = dom(write_report(runs, tmp_path / "report.html"))
    assert "CONSOLE" not in said
    assert shown.count("<figure") == 6
    assert shown.count('class="curve') == 2 * 7
    assert shown.count('class="card alarm"') == 2
    assert "approx_kl jumped to 0.300" in shown
    told = [json.loads(line) for run in runs for line in (run / "transcripts.jsonl").read_text().splitlines()]
    assert f"{len(told)} of {len(told)} episodes" in shown
    # The first episode is open, and shows what was read as text.
    assert shown.count('class="turn"') == 3
    assert "says &lt;/script&gt;&lt;script&gt;alert" in shown
    assert shown.count('class="bar') == 9
    assert shown.count("<script") == 2


def test_the_page_names_no_other_address(runs, tmp_path):
    page = write_report(runs[:1], tmp_path / "report.html").read_text()
    assert set(re.findall(r"https?://[^\s\"']+", page)) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in page


def test_what_cannot_be_reported_is_said(tmp_path):
    with pytest.raises(ConfigError, match="holds no metrics"):
        write_report([tmp_path], tmp_path / "report.html")
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("")
    with pytest.raises(ConfigError, match="no update has run yet"):
        write_report([tmp_path], tmp_path / "report.html")
    metrics.write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(ConfigError, match=r"Line 2 of .* is not valid JSON"):
        write_report([tmp_path], tmp_path / "report.html")
    # A run that was killed while it wrote its last line.
    metrics.write_text('{"step": 1, "entropy": 1.0}\n{"step": 2, "ent')
    assert write_report([tmp_path], tmp_path / "report.html").exists()


def test_the_command_writes_the_page_and_says_what_is_wrong(runs, tmp_path):
    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "llamagym", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    result = call("report", str(runs[0]))
    assert (result.returncode, result.stdout.strip()) == (0, str(runs[0] / "report.html"))
    assert (runs[0] / "report.html").exists()
    result = call("report", str(tmp_path))
    assert result.returncode == 1
    assert len(result.stderr.splitlines()) == 1
    assert call("reprot").returncode == 2
    assert "smollm2-135m" in call("models").stdout
