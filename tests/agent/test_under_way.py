"""Batches that use the turns so far of unfinished episodes."""

from __future__ import annotations

from collections import Counter

import pytest

from llamagym import Callback, EpisodeError, train
from llamagym.agent.agent import collector_of
from tests.helpers.agents import ChoiceAgent, CountdownEnv, make_agent


class Uneven(CountdownEnv):
    """Episodes of 1 to 9 turns, by their seed."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.length = self.left = 1 + (seed or 0) % 9
        return self.left, {}


class Ended(Callback):
    """Keeps the episodes that end."""

    def __init__(self):
        self.episodes = []

    def on_episode_end(self, run, episode):
        self.episodes.append(episode)


def learned(monkeypatch, episodes=30, judge=None, **options):
    """An agent trained in four copies; the batches it learned from, the episodes that ended, and the result."""
    agent = make_agent(ChoiceAgent, **{"context": "turn", **(options or {"ppo": {"batch_size": 16}})})
    batches, ended, update = [], Ended(), agent.learner.update
    monkeypatch.setattr(agent.learner, "update", lambda batch: batches.append(list(batch)) or update(batch))
    result = train(agent, Uneven, episodes=episodes, num_envs=4, seed=0, callbacks=ended, judge=judge)
    assert len(batches) > 2
    return agent, batches, ended.episodes, result


def is_over(batch):
    return all(episode.is_over for episode in batch)


@pytest.mark.parametrize("critic", ["gradient", "lstd"])
def test_every_turn_is_learned_from_once(monkeypatch, critic):
    agent, batches, ended, _ = learned(monkeypatch, ppo={"batch_size": 16, "critic": critic})
    times = Counter(id(turn) for batch in batches for episode in batch for turn in episode.turns)
    waiting = {id(turn) for episode in collector_of(agent).buffer for turn in episode.turns}
    assert set(times.values()) == {1}
    assert not waiting & set(times)
    played = {id(turn) for episode in ended for turn in episode.turns}
    assert played <= waiting | set(times)
    assert not all(map(is_over, batches))


def test_remaining_rewards_are_estimated_at_the_last_turn(monkeypatch):
    _, batches, ended, _ = learned(monkeypatch)
    parts = [episode for batch in batches for episode in batch if not episode.is_over]
    whole = {id(turn): episode.turns for episode in ended for turn in episode.turns}
    known = [part for part in parts if id(part.turns[0]) in whole]
    assert known
    for part in known:
        turns = whole[id(part.turns[0])]
        start = next(number for number, turn in enumerate(turns) if turn is part.turns[0])
        stop = start + len(part.turns)
        assert part.turns == turns[start:stop]
        assert part.final_prompt == turns[stop].prompt
    rest = [episode for batch in batches for episode in batch if episode.earlier and episode.is_over]
    assert rest
    assert all(episode.is_over and episode.all_turns == whole[id(episode.turns[0])] for episode in rest)


def test_statistics_count_whole_episodes(monkeypatch):
    _, batches, ended, result = learned(monkeypatch)
    first = 0
    for batch, stats in zip(batches, result.updates, strict=True):
        over = ended[first : first + int(stats["episodes"])]
        first += len(over)
        assert stats["return_mean"] == pytest.approx(sum(episode.total_reward for episode in over) / len(over))
        assert stats["turns_per_episode"] == pytest.approx(sum(episode.length for episode in over) / len(over))
        assert stats["turns"] == sum(len(episode.turns) for episode in batch)


@pytest.mark.parametrize(
    "options",
    [
        {"algorithm": "grpo", "grpo": {"batch_size": 16, "group_size": 4}},
        {"context": "episode"},
        {"judge": lambda episode: 0.0},
        {"replay_config_dict": {"batch_size": 4}},
    ],
    ids=lambda options: next(iter(options)),
)
def test_uses_only_whole_episodes_with_grpo_context_judge_or_replay(monkeypatch, options):
    _, batches, *_ = learned(monkeypatch, **options)
    assert all(map(is_over, batches))


def test_rewards_may_come_late_in_a_users_loop():
    agent = make_agent(ChoiceAgent, context="turn", ppo={"batch_size": 2})
    for env_id in (0, 1):
        for turn in range(3):
            agent.act_batch([turn], [env_id])
            agent.assign_rewards([0.0], [env_id])
    stats = agent.terminate_episodes([0])
    assert stats["turns"] == 3
    agent.assign_rewards([1.0], [1], turns=[0])


def test_rejects_a_reward_for_a_turn_that_was_learned_from():
    agent = make_agent(ChoiceAgent, context="turn", ppo={"batch_size": 2})
    with collector_of(agent).using_unfinished_episodes([0, 1]):
        for env_id in (0, 1):
            for turn in range(3):
                agent.act_batch([turn], [env_id])
                agent.assign_rewards([0.0], [env_id])
        assert agent.terminate_episodes([0])["turns"] == 5
        agent.assign_rewards([1.0], [1], turns=[2])
        for turn in (1, -2):
            with pytest.raises(EpisodeError, match=r"first 2 turns have been learned from\. Pass a judge to train"):
                agent.assign_rewards([1.0], [1], turns=[turn])
        stats = agent.terminate_episodes([1])
    assert stats == {}
    assert collector_of(agent).buffered_turns == 1
    assert (len(collector_of(agent).buffer[0].all_turns), collector_of(agent).buffer[0].total_reward) == (3, 1.0)


def test_failed_update_leaves_unfinished_episodes_to_the_next(monkeypatch):
    agent = make_agent(ChoiceAgent, context="turn", ppo={"batch_size": 2})
    update = agent.learner.update

    def fail(batch):
        raise RuntimeError("no")

    with collector_of(agent).using_unfinished_episodes([0, 1]):
        for env_id in (0, 1):
            for turn in range(3):
                agent.act_batch([turn], [env_id])
                agent.assign_rewards([0.0], [env_id])
        monkeypatch.setattr(agent.learner, "update", fail)
        with pytest.raises(RuntimeError, match="no"):
            agent.terminate_episodes([0])
        monkeypatch.setattr(agent.learner, "update", update)
        assert agent.terminate_episodes([0])["turns"] == 5


def test_transcripts_show_whole_episodes(monkeypatch):
    agent, _, ended, _ = learned(monkeypatch)
    lengths = {(episode.length, episode.total_reward) for episode in ended}
    for transcript in collector_of(agent).transcripts:
        assert len(transcript["turns"]) == transcript["length"]
        assert (transcript["length"], transcript["return"]) in lengths
