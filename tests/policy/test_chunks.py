"""How turns are parted into the passes of learning, and run in them without padding."""

from __future__ import annotations

from dataclasses import replace

from llamagym.engine.token_tree import TokenTree
from llamagym.text.episode import Segment
from tests.helpers.agents import WordAgent, actor_of, make_agent


def turns_saying(agent, counts):
    """One turn each, whose reply has so many tokens."""
    agent.act("x")
    turn = actor_of(agent).conversation(0).turns[-1]

    def said(*ids):
        return Segment((replace(turn, reply=replace(turn.reply, ids=ids, logprobs=(-1.0,) * len(ids))),))

    return [said(*range(first, first + count)) for first, count in enumerate(counts, start=20)]


def test_chunks_are_sorted_by_length_and_count_equal_rows_once():
    agent = make_agent(WordAgent)
    segments = turns_saying(agent, [5, 1, 4, 2, 2])
    segments.append(replace(segments[1]))
    size = agent.policy.backbone.cost(TokenTree.from_segment(segments[3]))

    def parted(nodes):
        return [
            [len(segment.turns[0].reply.ids) for segment in chunk] for chunk in agent.policy.chunks(segments, nodes)
        ]

    assert parted(3 * size) == [[1, 1, 2, 2], [4, 5]]
    assert parted(3 * size - 1) == [[1, 1, 2], [2, 4], [5]]
