"""The command `serve`, as a process of its own."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from llamagym.serving import ChatAgent
from tests.helpers.serving import HELLO, openai
from tests.helpers.tiny import tiny_base_model, tiny_tokenizer
from tests.helpers.tools import TOOLS


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tiny_base_model("smollm").save_pretrained(folder)
    tiny_tokenizer("smollm").save_pretrained(folder)
    return str(folder)


@contextmanager
def serving(*words: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Runs the command with a free port; yields the process and the URL."""
    command = [sys.executable, "-m", "llamagym", "serve", "--port", "0", *map(str, words)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if found := re.search(r"http://\S+", line):
                    yield process, found[0]
                    break
        finally:
            process.kill()


def run(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "llamagym", "serve", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_trained_agent_is_saved_and_served_again(model, tmp_path, number):
    out = tmp_path / "agent"
    history = [*HELLO, {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function"}]}]
    history[1]["tool_calls"][0]["function"] = {"name": "find", "arguments": '{"name": "Anna"}'}
    demonstrations = tmp_path / "calls.jsonl"
    demonstrations.write_text(json.dumps({"messages": history, "tools": TOOLS}) + "\n")
    options = ["--model", model, "--max-new-tokens", 4, "--batch-size", 4, "--demonstrations", demonstrations]
    with serving("--train", "--out", out, *options) as (process, url):
        for episode in range(4):
            client = openai.OpenAI(base_url=f"{url}/episodes/{episode}", api_key="none", max_retries=0)
            client.chat.completions.create(model="any", messages=HELLO)
            ended = httpx.post(f"{url}/episodes/{episode}/end", json={"reward": float(episode)}, timeout=60)
        assert ended.json()["update"]["episodes"] == 4
        assert (out / "agent.json").exists()
        process.send_signal(number)
        printed, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        assert "Update 1: 4 episodes, mean return 1.500" in printed
        assert f"Saved in {out}" in printed
    saved = ChatAgent.load(out)
    with serving(out, "--api-key", "secret") as (_, url):
        client = openai.OpenAI(base_url=url, api_key="secret", max_retries=0)
        reply = client.chat.completions.create(model="any", messages=HELLO).choices[0].message.content
        assert reply == saved.act("hello")
        assert httpx.get(f"{url}/models").status_code == 401


def test_wrong_command_lines_are_named(model, tmp_path):
    assert "--train needs --out" in run("--train").stderr
    assert "--batch-size is for a new agent" in run(tmp_path, "--batch-size", 4).stderr
    (tmp_path / "mine.txt").write_text("mine")
    assert "mine" in run("--train", "--out", tmp_path, "--model", model).stderr
    assert (tmp_path / "mine.txt").read_text() == "mine"
