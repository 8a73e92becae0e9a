"""What the README promises: its code runs as it stands, its tables are complete and say the truth."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from llamagym import Agent, GenerationConfig, PPOConfig

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.slow
def test_the_loop_runs_as_it_stands():
    namespace: dict[str, object] = {}
    assert len(BLOCKS[0].splitlines()) < 25
    exec(BLOCKS[0], namespace)
    # Eight hands hold at least eight turns, so the last one fills the batch at the latest.
    stats = namespace["train_stats"]
    agent = namespace["agent"]
    assert agent.policy.weights_version >= 1
    assert stats == {} or stats["turns"] >= 8


@pytest.mark.parametrize("config", [PPOConfig, GenerationConfig])
def test_every_option_stands_there_with_its_default(config):
    for field in fields(config):
        assert f"`{field.name}`" in README, f"{config.__name__}.{field.name} is not in the README"
    for names, shown in re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| ([^|]+) \|", README, flags=re.MULTILINE):
        for name, value in zip(re.findall(r"`(\w+)`", names), shown.split(","), strict=False):
            default = {field.name: field.default for field in fields(config)}.get(name)
            if default is not None and config is PPOConfig:
                text = value.strip().strip('`"')
                assert text == str(default) or float(text) == default, f"{name}: README says {text}, code {default}"


def test_every_option_of_the_agent_stands_there():
    for name in inspect.signature(Agent.__init__).parameters:
        if name not in ("self", "model", "tokenizer"):
            assert f"`{name}`" in README


def test_every_flag_of_the_example_stands_there():
    source = (ROOT / "examples" / "blackjack.py").read_text(encoding="utf-8")
    for flag in re.findall(r'add_argument\("(--[\w-]+)"', source):
        assert flag in README


def test_generated_tables_are_up_to_date():
    subprocess.run([sys.executable, str(ROOT / "scripts" / "readme_tables.py"), "--check"], check=True)
