"""How turns are parted into the passes of learning."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llamagym import policy
from llamagym.conversation import Segment
from tests.agents import WordAgent, make_agent


@pytest.mark.parametrize(("padding", "expected"), [(0, [[1, 1], [2, 2], [4], [5]]), (2, [[1, 1, 2, 2], [4, 5]])])
def test_replies_that_would_be_padded_by_more_have_a_pass_of_their_own(padding, expected, monkeypatch):
    monkeypatch.setattr(policy, "_LEARNING_PADDING", padding)
    agent = make_agent(WordAgent)
    agent.act("x")
    turn = agent.conversation(0).turns[-1]

    def said(*ids):
        return Segment((replace(turn, reply=replace(turn.reply, ids=ids, logprobs=(-1.0,) * len(ids))),))

    # Of a reply, all tokens but the last are run.
    segments = [said(*range(first, first + count)) for first, count in enumerate([5, 1, 4, 2, 2], start=20)]
    segments.append(replace(segments[1]))
    parted = [[len(segment.turns[0].reply.ids) for segment in chunk] for chunk in agent.policy.chunks(segments, 10**6)]
    assert parted == expected
