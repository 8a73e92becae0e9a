"""The committed demonstrations are what their script writes, and play mostly well."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_demonstrations_are_the_script_s_and_follow_basic_strategy():
    spec = importlib.util.spec_from_file_location("make_demos", ROOT / "scripts" / "make_demos.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    lines = (ROOT / "sft_data" / "demo_blackjack.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert rows == script.demonstrations()
    right = 0
    for row in rows:
        system, user, assistant = (message["content"] for message in row["messages"])
        assert "stick or hit" in system
        soft, total, card = re.fullmatch(r"(soft )?(\d+) against (\d+|ace)", user).groups()
        state = (int(total), 1 if card == "ace" else int(card), int(soft is not None))
        right += assistant == script.WORDS[script.optimal_policy()[state]]
    # A random reply is right half of the time: 95 % of 500, give or take three standard deviations.
    assert 460 <= right <= 490
