"""Names of actions of a space, and parsing of replies for a space."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces

from llamagym import ActionParseError, ConfigError, name_actions, parse_action

ALL = {
    "discrete": (spaces.Discrete(3, start=-1), "1", 1, ["3", "1.0", "true", "one", ""]),
    "multi": (spaces.MultiDiscrete([2, 3]), "[1, 2]", [1, 2], ["[2, 0]", "[1]", "[0.5, 1]", "1", "[true, 1]"]),
    "binary": (spaces.MultiBinary(2), "[0, 1]", [0, 1], ["[0, 2]", "[0]"]),
    "box": (spaces.Box(-1, 1, (2,)), "[0.5, -1]", [0.5, -1], ["[2, 0]", '["a", "b"]', "[[0], [0, 0]]", "[true, 0.5]"]),
    "one number": (spaces.Box(-1, 1, (1,)), "0.25", [0.25], ["2", "x"]),
    "bytes": (spaces.Box(0, 255, (1,), np.uint8), "7", [7], ["-1", "256", "1.5"]),
    "64 bits": (
        spaces.Box(0, 2**64 - 1, (1,), np.uint64),
        "18446744073709551615",
        [2**64 - 1],
        ["18446744073709551616"],
    ),
    "text": (spaces.Text(5), " yes ", "yes", ["much too long"]),
    "dict": (
        spaces.Dict(go=spaces.Discrete(2), say=spaces.Text(5)),
        'So: {"go": 1, "say": "yes"}',
        {"go": 1, "say": "yes"},
        ['{"go": 2, "say": "yes"}', '{"go": 1}', "go", '{"go": 1, "say": 3}'],
    ),
    "tuple": (spaces.Tuple([spaces.Discrete(2), spaces.Text(5)]), '[1, "yes"]', (1, "yes"), ["[1]", "3"]),
    "texts": (
        spaces.Tuple([spaces.Text(5), spaces.Text(5)]),
        '["a", "b"]',
        ("a", "b"),
        ["no", '{"action": {"a": 1, "b": 2}}'],
    ),
}


@pytest.mark.parametrize("name", ALL)
def test_parse_action_returns_an_element_or_raises(name):
    space, reply, expected, others = ALL[name]
    action = parse_action(reply, space)
    assert space.contains(action)
    assert (action.tolist() if isinstance(action, np.ndarray) else action) == expected
    if name not in ("dict", "text"):
        assert str(parse_action(f'I think {{"action": {reply}}}', space)) == str(action)
    for other in others:
        with pytest.raises(ActionParseError, match="names no action of"):
            parse_action(other, space)


def test_names_actions_of_each_space():
    assert name_actions(spaces.Discrete(2, start=5), ["low", "high"]) == {"low": 5, "high": 6}
    named = name_actions(spaces.MultiDiscrete([2, 2], start=[1, 0]))
    assert list(named) == ["1 0", "1 1", "2 0", "2 1"]
    binary = name_actions(spaces.MultiBinary(2))
    for space, of in ((spaces.MultiDiscrete([2, 2], start=[1, 0]), named), (spaces.MultiBinary(2), binary)):
        assert all(space.contains(action) for action in of.values())


@pytest.mark.parametrize(
    ("space", "names", "match"),
    [
        (spaces.Box(0, 1), None, "cannot be listed.*parse_action"),
        (spaces.Dict(), None, "cannot be listed"),
        (spaces.MultiBinary(20), None, "1048576 actions"),
        (spaces.Discrete(3), ["a", "b"], "names 2 actions, but .* has 3"),
        (spaces.Discrete(2), ["a", "a"], "alike"),
        (spaces.Discrete(2), "ab", "Pass a list of strings"),
        (spaces.Discrete(2), [0, 1], "Pass strings"),
        (spaces.MultiDiscrete([2, 2]), ["a", "b"], "Pass a list of strings"),
    ],
)
def test_rejects_names_that_do_not_fit_the_space(space, names, match):
    with pytest.raises(ConfigError, match=match):
        name_actions(space, names)
