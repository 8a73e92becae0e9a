"""Parsing of actions from replies: which actions a reply names, and that no reply causes another error or long runs."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llamagym import ActionParseError, ConfigError, find_json, name_actions, parse_action, parse_choice
from llamagym.text import parsing
from tests.helpers.agents import WordAgent, make_agent

LIMIT = 1000
WALK = {name: name for name in ("north", "east", "southeast", "go north", "heat", "eat")}
SPACES = {
    "discrete": spaces.Discrete(3),
    "multi": spaces.MultiDiscrete([2, 3]),
    "binary": spaces.MultiBinary(2),
    "box": spaces.Box(-1, 1, (2,)),
    "unbounded": spaces.Box(-np.inf, np.inf, (1,)),
    "integers": spaces.Box(0, 255, (1,), np.uint8),
    "text": spaces.Text(5),
    "dict": spaces.Dict(go=spaces.Discrete(2), how=spaces.Tuple([spaces.Box(-1, 1, (1,)), spaces.Text(3)])),
    "tuple": spaces.Tuple([spaces.Discrete(2), spaces.Text(5)]),
}


class Unequal:
    """Cannot be compared."""

    def __eq__(self, other):  # noqa: D105
        raise RuntimeError("no")

    __hash__ = None


MANY_DIGITS = "9" * 5000
DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        ("Go north.", "go north"),
        ("north", "north"),
        ("southeast!", "southeast"),
        ("NORTH, north", "north"),
        ('{"reason": "east is dark"} {"action": "north"}', "north"),
        ('{"reason": "x"} and then {"action": "heat"}', "heat"),
        ('{"action": "eat"}, so {"action": "EAT"}', "eat"),
        ('{"action": "eat"} or heat?', "eat"),
        ('{"action": ["eat"]}', "eat"),
        ('{"action": "eat", "why": "I am hun', "eat"),
        ('{"plan": {"action": "eat"}, "why": "I am hun', "eat"),
    ],
)
def test_a_reply_names_one_action(reply, action):
    assert parse_choice(reply, WALK) == action


@pytest.mark.parametrize(
    ("reply", "named"),
    [
        ("I could go east or southeast", "'east', 'southeast'"),
        ("eat or heat?", "'eat', 'heat'"),
        ("go north, or north", "'go north', 'north'"),
        ('{"action": "eat"} or {"action": "heat"}', "'eat', 'heat'"),
        ('{"action": "eat or heat"}', "'eat', 'heat'"),
    ],
)
def test_rejects_reply_that_names_several_actions(reply, named):
    with pytest.raises(ActionParseError, match=rf"names several actions \(\[{named}\]\)"):
        parse_choice(reply, WALK)


def test_rejects_names_that_overlap_without_one_inside_the_other():
    with pytest.raises(ActionParseError, match="names several actions"):
        parse_choice("go north east", {"go north": 0, "north east": 1})


@pytest.mark.parametrize("reply", ["", "heater", "{", "{}", '{"action": null}', '{"action": {"action": 1}}', "weast"])
def test_rejects_reply_that_names_no_action(reply):
    with pytest.raises(ActionParseError, match="names no action"):
        parse_choice(reply, WALK)


@pytest.mark.parametrize("reply", ['{"action": null}', '{"action": [null]}', '{"action": {"move": null}}'])
def test_null_is_not_the_word_none(reply):
    with pytest.raises(ActionParseError, match="names no action"):
        parse_choice(reply, {"none": 0, "hit": 1})


def test_json_values_are_written_as_json():
    assert parse_choice('{"action": null}', {"null": 0, "hit": 1}) == 0
    assert parse_choice('{"action": true}', {"true": 0, "false": 1}) == 0
    assert parse_choice('{"action": ["caf\u00e9"]}', {"caf\u00e9": 0, "hit": 1}) == 0


@pytest.mark.parametrize(
    ("reply", "action"),
    [("2.", 2), ("(1)", 1), ("option 1: yes", 1), ("I take...2", 2), ("1 or 1", 1), ('{"action": 2}', 2)],
)
def test_numbers_may_be_names(reply, action):
    assert parse_choice(reply, {"1": 1, "2": 2}) == action


NUMBERS = [
    *["-1", "1.5", "12", "2,5", "x1", ".5", "-.5", "5e-1", "1e-2", "2E+1", "5e\u22121"],
    *["1'000", "1\u2019000", "1 000", "1\u202f000", "1,000"],
]


@pytest.mark.parametrize("reply", NUMBERS)
def test_number_inside_another_number_is_not_named(reply):
    with pytest.raises(ActionParseError, match="names no action"):
        parse_choice(reply, {"1": 1, "2": 2, "5": 5, "000": 0})


def test_a_range_names_both_of_its_ends():
    with pytest.raises(ActionParseError, match="several"):
        parse_choice("1-2", {"1": 1, "2": 2})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (100_000.0, 100_000.9),
        (torch.tensor([1, 2]), torch.tensor([1, 3])),
        (torch.zeros(2), torch.zeros(3)),
        (np.array(["left"]), np.array(["right"])),
        (np.zeros(2, dtype=np.int8), np.zeros(2, dtype=np.int16)),
        ({"at": np.array([1000000])}, {"at": np.array([1000005])}),
        ([1, (2,)], [1, (3,)]),
        (Unequal(), Unequal()),
    ],
)
def test_different_actions_are_ambiguous(one, other):
    with pytest.raises(ActionParseError, match="several"):
        parse_choice("a or b", {"a": one, "b": other})
    assert parse_choice("a", {"a": one, "b": other}) is one


@pytest.mark.parametrize("action", [torch.tensor([1, 2]), np.array(["left"]), {"at": np.ones(2)}, [1, (2.5,)], "x"])
def test_equal_actions_are_not_ambiguous(action):
    assert parse_choice("a or b", {"a": action, "b": copy.deepcopy(action)}) is action


def test_compiles_patterns_once_for_any_number_of_choices(monkeypatch):
    actions = {f"move {number}": number for number in range(1024)}
    parse_choice("move 7", actions)
    monkeypatch.setattr(re, "compile", lambda *args, **kwargs: pytest.fail("compiled again"))
    assert parse_choice("move 8", actions) == 8


def test_several_names_of_one_action_are_not_ambiguous():
    large = np.arange(2000)
    assert parse_choice("stick or stay", {"stick": 0, "stay": 0, "hit": 1}) == 0
    assert parse_choice("a or b", {"a": large, "b": large.copy()}) is large
    # Their representations, which NumPy shortens, are equal.
    other = large.copy()
    other[1000] = 0
    with pytest.raises(ActionParseError, match="several"):
        parse_choice("a or b", {"a": large, "b": other})


@pytest.mark.parametrize(
    ("reply", "space", "action"),
    [
        ('{"reason": "x"} and then {"action": 2}', spaces.Discrete(3), 2),
        ('{"action": 7}, no: {"action": 2}', spaces.Discrete(3), 2),
        ('{"action": 2} means {"action": 2}', spaces.Discrete(3), 2),
        ('{"x": 1} {"to": 1}', spaces.Dict(to=spaces.Discrete(2)), {"to": 1}),
    ],
)
def test_parses_every_json_object_of_a_reply(reply, space, action):
    assert parse_action(reply, space) == action


@pytest.mark.parametrize(
    ("reply", "space"),
    [
        ('{"action": 1} or {"action": 2}', spaces.Discrete(3)),
        ('{"action": [0, 1]} or {"action": [1, 1]}', spaces.MultiDiscrete([2, 3])),
        ('{"to": 0} {"to": 1}', spaces.Dict(to=spaces.Discrete(2))),
        ('{"action": [1000000]} no, {"action": [1000005]}', spaces.MultiDiscrete([2_000_000])),
        ('{"action": 100000.0} or {"action": 100000.9}', spaces.Box(-1e6, 1e6, (1,), np.float64)),
    ],
)
def test_rejects_reply_that_names_several_actions_of_a_space(reply, space):
    with pytest.raises(ActionParseError, match="names several actions"):
        parse_action(reply, space)


@pytest.mark.parametrize(
    ("reply", "space"),
    [
        (MANY_DIGITS, spaces.Discrete(3)),
        (f'{{"action": {MANY_DIGITS}}}', spaces.Discrete(3)),
        ("9" * 400, spaces.Discrete(3)),
        ("9" * 400, spaces.MultiDiscrete([2, 2])),
        (DEEP, spaces.MultiDiscrete([2, 2])),
        ('{"action": ' * 10_000, spaces.Discrete(3)),
        ('{"action": ' + "[" * 500 + "]" * 500 + "}", spaces.Discrete(3)),
        ("1e999", spaces.Box(-np.inf, np.inf, (1,))),
        ("[Infinity, 0]", spaces.Box(-np.inf, np.inf, (2,))),
        ("1e39", spaces.Box(-np.inf, np.inf, (1,))),
        ("NaN", spaces.Box(-np.inf, np.inf, (1,))),
        ("x" * 100_000, spaces.Discrete(3)),
        ("\ud83d", spaces.Discrete(3)),
    ],
    ids=range(13),
)
def test_rejects_huge_replies_with_a_short_message(reply, space):
    for parse in (lambda: parse_action(reply, space), lambda: parse_choice(reply, {"1": 1, "hit": 2})):
        with pytest.raises(ActionParseError) as caught:
            parse()
        assert len(str(caught.value)) < LIMIT
    assert find_json(reply) is None or "action" in find_json(reply)


def test_message_is_short_with_many_choices():
    names = {f"choice {number} {'x' * 100}": number for number in range(1000)}
    for reply in ("none", " ".join(names)):
        with pytest.raises(ActionParseError) as caught:
            parse_choice(reply, names)
        assert len(str(caught.value)) < LIMIT


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["go", "hit", "x"]),
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(st.sampled_from(["action", "go", "how"]), parts),
    max_leaves=6,
)
# Text as models write it: values as JSON has them, cut, repeated, and between other text.
PIECES = (
    st.text(max_size=8)
    | JSON.map(json.dumps)
    | JSON.map(json.dumps).map(lambda text: text[: len(text) // 2])
    | st.sampled_from(["{", "}", '{"', "[", '{"action": ', MANY_DIGITS, "\ud83d", "1e999", "-", "hit", "stick", "\\"])
)
REPLIES = st.lists(PIECES, max_size=5).map("".join)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(reply=REPLIES)
@example(reply=MANY_DIGITS)
@example(reply=f'{{"action": {MANY_DIGITS}}}')
@example(reply='{"action":' * 2000)
def test_parsing_raises_only_action_parse_errors(reply: str):
    calls = [lambda: parse_choice(reply, {"stick": 0, "hit": 1, "1": 2})]
    calls += [lambda space=space: parse_action(reply, space) for space in SPACES.values()]
    for call in calls:
        message = ""
        try:
            call()
        except ActionParseError as error:
            message = str(error)
        assert len(message) < LIMIT
    found = find_json(reply)
    assert found is None or isinstance(found, dict)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(before=st.text("ab 1.,", max_size=9), value=JSON, after=st.text(max_size=9))
def test_an_object_is_found_in_any_text(before: str, value: Any, after: str):
    found = find_json(f"{before}{json.dumps({'key': value})}{after}")
    assert json.dumps(found) == json.dumps({"key": value})


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data(), name=st.sampled_from(sorted(SPACES)))
def test_action_written_as_json_is_parsed_back(data: st.DataObject, name: str):
    space = SPACES[name]
    space.seed(data.draw(st.integers(0, 2**31 - 1)))
    action = space.sample()
    written = json.dumps(space.to_jsonable([action])[0] if name not in ("dict", "tuple") else as_lists(action))
    reply = written if name == "dict" else f'I do {{"action": {written}}}.'
    if name == "text" and not action.strip():
        return
    read = parse_action(reply, space)
    assert space.contains(read)
    assert as_lists(read) == as_lists(action)


def as_lists(action: Any) -> Any:
    """An action without arrays."""
    if isinstance(action, dict):
        return {name: as_lists(part) for name, part in action.items()}
    if isinstance(action, tuple):
        return [as_lists(part) for part in action]
    return action.tolist() if isinstance(action, (np.ndarray, np.generic)) else action


HOSTILE = {
    "braces": "{",
    "open keys": '{"',
    "open objects": '{"a":',
    "open lists": '{"a":[',
    "objects with open lists": '{"a": [1, ',
    "open strings": '{"a": "{"b": "',
    "escaped quotes": '{"\\"',
    "complete objects": '{"a": 1} ',
    "names": "hit stick ",
    "numbers": "1,1.1-1",
    "digits": "1",
    "spaces": "{ ",
}


@pytest.mark.parametrize("piece", HOSTILE.values(), ids=HOSTILE)
def test_parsing_time_is_linear_in_the_length_of_the_reply(piece, monkeypatch):
    """Work is counted in the characters that the JSON parser receives."""
    counted = []
    usual = json.JSONDecoder.raw_decode
    monkeypatch.setattr(
        json.JSONDecoder,
        "raw_decode",
        lambda decoder, text, *where: counted.append(len(text)) or usual(decoder, text, *where),
    )
    most = parsing.WINDOW + 2 * (parsing.MAX_WASTED_READS + 2)
    for length in (1_000, 10_000, 100_000):
        reply = (piece * length)[:length]
        counted.clear()
        list(parsing.json_objects(reply))
        assert sum(counted) <= most * length


@pytest.mark.parametrize(
    "call",
    [
        lambda: find_json(5),
        lambda: find_json(None),
        lambda: parse_choice(b"hit", WALK),
        lambda: parse_choice("hit", ["hit"]),
        lambda: parse_choice("hit", {}),
        lambda: parse_choice("hit", {"": 1}),
        lambda: parse_choice("hit", {1: 1}),
        lambda: parse_choice("hit", WALK, json_key=None),
        lambda: parse_action(None, spaces.Discrete(2)),
        lambda: parse_action("1", 2),
        lambda: parse_action("1", spaces.Discrete),
        lambda: parse_action("1", spaces.Discrete(2), key=["action"]),
        lambda: parse_action("[1]", spaces.Sequence(spaces.Discrete(2))),
        lambda: parse_action("{}", spaces.Dict(a=spaces.Graph(spaces.Discrete(2), None))),
        lambda: name_actions(5),
        lambda: name_actions(spaces.MultiBinary(20_000)),
        lambda: name_actions(spaces.MultiDiscrete([2, 2]), 5),
        lambda: name_actions(spaces.Discrete(2), ["a", ""]),
        lambda: name_actions(spaces.Discrete(2), ["a", "\ud83d"]),
        lambda: name_actions(spaces.Discrete(2), ["a", None]),
    ],
    ids=range(20),
)
def test_rejects_arguments_of_other_types(call):
    with pytest.raises(ConfigError) as caught:
        call()
    assert len(str(caught.value)) < LIMIT


def test_wrong_arguments_do_not_count_as_invalid_replies():
    class Mistaken(WordAgent):
        def extract_action(self, response):
            return parse_action(response, spaces.Sequence(spaces.Discrete(2)))

    with pytest.raises(ConfigError, match="space must be one of"):
        make_agent(Mistaken).act("a")
