"""Rewards after the fact: of earlier turns, and of a judge once the episode is over."""

from __future__ import annotations

import math

import pytest

from llamagym import ConfigError, EpisodeError, evaluate, train
from llamagym.agent.agent import collector_of
from tests.helpers.agents import ChoiceAgent, CountdownEnv, make_agent


def played(turns: int):
    agent = make_agent(ChoiceAgent, ppo={"batch_size": 100})
    for turn in range(turns):
        agent.act(turn)
        agent.assign_reward(0.0)
    return agent


def test_a_reward_goes_to_the_turn_that_earned_it():
    agent = played(3)
    agent.assign_reward(1.0, turn=0)
    agent.assign_reward(2.0, turn=-2)
    agent.assign_reward(4.0, turn=1)
    agent.assign_rewards([8.0], [0])
    assert agent.current_episode_rewards == [1.0, 6.0, 8.0]
    agent.terminate_episode()
    assert [turn.reward for turn in collector_of(agent).buffer[0].turns] == [1.0, 6.0, 8.0]


def test_a_reward_of_an_earlier_turn_does_not_count_for_the_last():
    agent = played(1)
    agent.act(1)
    agent.assign_reward(1.0, turn=0)
    with pytest.raises(EpisodeError, match="its last action has no reward"):
        agent.act(2)
    agent.assign_reward(1.0, turn=1)
    agent.act(2)


@pytest.mark.parametrize("turn", [3, -4, 1.0, True, None, "last"])
def test_rejects_rewards_for_missing_turns(turn):
    agent = played(3)
    with pytest.raises(EpisodeError, match=r"3 turns so far\. Pass a whole number from -3 to 2"):
        agent.assign_reward(1.0, turn)
    assert agent.current_episode_rewards == [0.0] * 3
    with pytest.raises(EpisodeError, match="not a finite number"):
        agent.assign_reward(math.inf, turn=0)


def test_rejects_rewards_too_large_for_float32():
    agent = played(1)
    agent.assign_reward(6e11)
    with pytest.raises(EpisodeError, match=r"to 1\.2e\+12.*Scale the rewards"):
        agent.assign_reward(6e11)
    assert agent.current_episode_rewards == [6e11]


def test_rewards_of_a_judge_are_added_before_learning():
    seen = []

    def judge(episode):
        seen.append(episode)
        return [10.0 * number for number in range(episode.length)] if len(seen) == 1 else 5

    agent = make_agent(ChoiceAgent, context="turn", ppo={"batch_size": 100})
    result = train(agent, CountdownEnv, episodes=2, num_envs=2, seed=0, judge=judge)
    first, second = collector_of(agent).buffer
    assert [turn.reward for turn in first.turns] == [a + 10.0 * n for n, a in enumerate(seen[0].actions)]
    assert [turn.reward for turn in second.turns] == [*seen[1].actions[:2], seen[1].actions[2] + 5.0]
    assert result.returns == [first.total_reward, second.total_reward]
    # What it sees are the environment's rewards alone.
    assert seen[0].rewards == tuple(map(float, seen[0].actions))
    assert [message["role"] for message in seen[0].messages] == ["system", *["user", "assistant"] * 3]
    assert seen[0].messages[1]["content"] == "Observation 3"
    assert evaluate(lambda observation: 1, CountdownEnv, episodes=2, judge=lambda episode: 0.5).returns == [3.5, 3.5]


@pytest.mark.parametrize("given", [math.nan, [1.0], [1.0, 2.0, math.inf], "good", None, {"a": 1}])
def test_rejects_invalid_judges(given):
    agent = make_agent(ChoiceAgent)
    with pytest.raises(ConfigError, match=r"The judge returned .* for an episode of 3 turns"):
        train(agent, CountdownEnv, episodes=1, num_envs=1, seed=0, judge=lambda episode: given)
    assert collector_of(agent).buffer == []


def test_an_update_that_fails_takes_the_judge_s_rewards_back(tmp_path, monkeypatch):
    """The state that is saved is that of before the step; resumed, the episode is judged once."""

    def make():
        return make_agent(ChoiceAgent, context="turn", ppo={"batch_size": 3})

    where = {"seed": 0, "judge": lambda episode: [1.0] * episode.length}
    expected = train(make(), CountdownEnv, episodes=2, num_envs=1, **where).returns
    agent = make()

    def fails(batch):
        raise ValueError("no update")

    monkeypatch.setattr(agent.learner, "update", fails)
    with pytest.raises(ValueError, match="no update"):
        train(agent, CountdownEnv, episodes=2, num_envs=1, checkpoint_dir=tmp_path / "run", **where)
    again = train(make(), CountdownEnv, episodes=2, num_envs=1, checkpoint_dir=tmp_path / "run", resume=True, **where)
    assert again.returns == expected
