"""Token trees are built once per update, and cached trees are found by the segments' rows."""

from __future__ import annotations

import pytest

from llamagym.agent.agent import collector_of
from llamagym.engine.token_tree import TokenTree
from llamagym.policy.evaluation import TreeCache
from llamagym.text.episode import Segment, segments_of
from tests.helpers.agents import ChoiceAgent, WordAgent, make_agent


@pytest.fixture
def laid_out(monkeypatch):
    """The segments whose trees were built."""
    usual = TokenTree.from_segment
    segments = []

    def counted(segment):
        segments.append(segment)
        return usual(segment)

    monkeypatch.setattr(TokenTree, "from_segment", counted)
    return segments


def played(agent, episodes=6):
    """Episodes of one turn, the first half like the second, that are not learned from."""
    for number in range(episodes):
        agent.act(number % (episodes // 2))
        agent.assign_reward(float(number))
        agent.terminate_episode()
    return collector_of(agent).buffer


@pytest.mark.parametrize("kind", [ChoiceAgent, WordAgent])
def test_an_update_builds_each_tree_once(kind, laid_out):
    agent = make_agent(kind, context="turn", ppo={"batch_size": 1000, "mini_batch_size": 2, "ppo_epochs": 3})
    episodes = played(agent)
    laid_out.clear()
    agent.learner.update(episodes)
    assert len(laid_out) == len(episodes)
    assert len({id(segment) for segment in laid_out}) == len(laid_out)
    agent.policy.evaluate(segments_of(episodes))
    assert len(laid_out) == 2 * len(episodes)


@pytest.mark.parametrize("kind", [ChoiceAgent, WordAgent])
def test_acting_builds_each_tree_once(kind, laid_out):
    make_agent(kind).act_batch(["a", "b", "a"])
    assert len(laid_out) == 3


def test_cached_trees_equal_new_ones():
    agent = make_agent(ChoiceAgent, context="turn", ppo={"batch_size": 1000})
    segments = segments_of(played(agent))
    trees = TreeCache()
    again = [TokenTree.from_segment(segment) for segment in segments]
    with trees.cached():
        kept = trees.of(segments)
        assert kept == again == trees.of(segments)
        assert [tree is again for tree, again in zip(kept, trees.of(segments), strict=True)] == [True] * len(kept)
        # Segments outside of the batch may have the row of one in it.
        for segment in segments * 20:
            assert trees.of([Segment(segment.turns)]) == [TokenTree.from_segment(segment)]
        assert len({id(tree) for tree in trees.of(segments)}) == len(set(again))
    assert trees.of(segments) == again
    assert trees.of(segments)[0] is not kept[0]


def test_different_trees_have_different_hashes():
    trees = [TokenTree((), ids, ()) for ids in ((1, 2), (2, 1), (1, 2, 3))]
    assert len({hash(tree) for tree in trees}) == 3
    assert hash(trees[0]) == hash(TokenTree((), (1, 2), ()))
