"""The committed demonstrations equal the output of their script; some play mostly well, some only show the format."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections import Counter

import pytest

from llamagym import demonstrations_path
from llamagym.envs.address_book import CITIES, COLOURS, PEOPLE, AddressBook
from llamagym.errors import ConfigError
from llamagym.text.demonstrations import read_demonstrations
from tests.helpers import ROOT
from tests.helpers.agents import actor_of, make_agent

SPEC = importlib.util.spec_from_file_location("make_demos", ROOT / "scripts" / "make_demos.py")
script = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(script)

# Whose worlds are played.
EXTRAS = {
    "format_babyai.jsonl": "minigrid",
    "format_text-world.jsonl": "textworld",
    "format_text-world_commands.jsonl": "textworld",
}


FOLDER = ROOT / "sft_data"


def read(name: str) -> list[dict]:
    return [json.loads(line) for line in (FOLDER / name).read_text(encoding="utf-8").splitlines()]


def state_and_word(row: dict) -> tuple[tuple[int, int, int], str]:
    system, user, assistant = (message["content"] for message in row["messages"])
    assert "stick or hit" in system
    soft, total, card = re.fullmatch(r"(soft )?(\d+) against (\d+|ace)", user).groups()
    return (int(total), 1 if card == "ace" else int(card), int(soft is not None)), assistant


def test_script_writes_every_committed_file():
    assert sorted(script.FILES) == sorted(path.name for path in FOLDER.iterdir())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in EXTRAS else ()) for name in script.FILES]
)
def test_committed_demonstrations_equal_the_output_of_the_script(name):
    if name in EXTRAS:
        pytest.importorskip(EXTRAS[name], reason=f"the extra {EXTRAS[name]} is not installed")
    assert read(name) == script.FILES[name]()


def test_blackjack_demonstrations_follow_basic_strategy():
    best = script.optimal_policy()
    right = sum(word == script.WORDS[best[state]] for state, word in map(state_and_word, read("demo_blackjack.jsonl")))
    # A random reply is right half of the time: 95 % of 500, give or take three standard deviations.
    assert 460 <= right <= 490


def test_format_demonstrations_show_no_strategy():
    rows = [state_and_word(row) for row in read("format_blackjack.jsonl")]
    assert [word for _, word in rows].count("hit") == len(rows) / 2 == 128
    best = script.optimal_policy()
    right = sum(word == script.WORDS[best[state]] for state, word in rows)
    # A coin's: half of 256, give or take three standard deviations.
    assert 104 <= right <= 152
    assert len({state for state, _ in rows}) > 150


# Conversations of several turns have tests of their own.
CONVERSATIONS = ("format_address_book.jsonl", "format_text-world_commands.jsonl")


@pytest.mark.parametrize(
    "name", [name for name in script.FILES if "blackjack" not in name and name not in CONVERSATIONS]
)
def test_format_demonstrations_of_other_examples_name_one_of_their_choices(name):
    rows = [[message["content"] for message in row["messages"]] for row in read(name)]
    assert len(rows) == 128
    replies = Counter(reply for _, _, reply in rows)
    assert len(replies) >= 2
    assert replies.most_common(1)[0][1] < 0.7 * len(rows)
    # Either the task names the possible replies or the observation does.
    assert all(word in system + observation for system, observation, reply in rows for word in reply.split())
    assert len({observation for _, observation, _ in rows}) > 5


def test_random_calls_to_the_address_book_are_rarely_right():
    rows = [[message["content"] for message in row["messages"]] for row in read("format_address_book.jsonl")]
    env, right = AddressBook(), 0.0
    for seed, row in enumerate(rows, script.SEED):
        env.reset(seed=seed)
        right += sum(env.step(reply)[1] for reply in row[2::2])
        for turn in range(2, len(row), 2):
            verb, word = row[turn].split()
            said = re.findall(r"\w+", " ".join(row[1:turn]))
            kinds = {"find": (*PEOPLE, *CITIES), "answer": COLOURS}
            # A word that the conversation holds, unless it holds none of its kind.
            assert word in kinds[verb]
            assert word in said or not set(kinds[verb]) & set(said)
    assert len(rows) == 256
    # An answer in four replies, mostly before the right city has been looked up.
    assert 0 < right < 0.2 * len(rows)


def test_text_adventure_demonstrations_have_all_commands_and_rarely_win():
    rows = [[message["content"] for message in row["messages"]] for row in read("format_text-world_commands.jsonl")]
    commands = Counter(command for row in rows for command in row[2::2])
    assert len(rows) == 64
    ways = {f"go {way}" for way in ("north", "south", "east", "west")}
    assert {"look", "take key", "unlock door with key", "open door", "take coin", *ways} <= set(commands)
    assert commands.most_common(1)[0][1] < 0.5 * commands.total()
    # A game that is won ends before the limit of twelve commands.
    assert 0.1 * len(rows) < sum(len(row) < 1 + 2 * 12 for row in rows) < 0.3 * len(rows)


def test_demonstrations_are_found_by_name():
    assert demonstrations_path("demo_blackjack").read_text(encoding="utf-8").startswith('{"messages"')


def test_expands_tilde_in_the_path_of_demonstrations(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    agent = make_agent()
    with pytest.raises(ConfigError, match=r"cannot read the demonstrations '~/mine\.jsonl'"):
        read_demonstrations("~/mine.jsonl", actor_of(agent).new_conversation, "", 0)
    turn = [{"role": "user", "content": "Which?"}, {"role": "assistant", "content": "one"}]
    (tmp_path / "mine.jsonl").write_text(json.dumps({"messages": turn}))
    assert len(read_demonstrations("~/mine.jsonl", actor_of(agent).new_conversation, "", 0)) == 1


def test_error_names_the_missing_extra(monkeypatch):
    agent = make_agent()
    # As if TRL were not installed, which the module imports.
    monkeypatch.setitem(sys.modules, "llamagym.learners.sft", None)
    with pytest.raises(ConfigError, match=r"A warm start needs .* Run pip install 'llamagym\[sft\]'"):
        agent.sft_from_jsonl(demonstrations_path("demo_blackjack"))
