"""Replay: what is kept, that it becomes likelier, and that nothing happens unless it is asked for."""

from __future__ import annotations

import pytest
import torch

from llamagym import ConfigError
from llamagym.errors import DivergedError
from llamagym.learners.replay import Replay, ReplayConfig
from llamagym.text.episode import Episode, Prompt, Reply, Turn, segments_of
from tests.helpers.agents import ChoiceAgent, WordAgent, actor_of, make_agent


def episode(total: float, valid: bool = True, penalty: float = 0.0) -> Episode:
    prompt = Prompt((5, 6, 7), starts_context=True)
    reply = Reply((8, 9), (-1.0, -1.0), 0.0, "length", None, 0)
    return Episode((Turn(prompt, reply, total, penalty, valid),), terminated=True, truncated=False)


def returns(replay: Replay) -> list[float]:
    return [kept.total_reward for kept in replay.episodes]


def test_the_best_of_the_last_updates_are_kept():
    replay = Replay(make_agent().policy, ReplayConfig(episodes=3, recent_updates=2, steps=1))
    replay.update([episode(value) for value in (1.0, 9.0, 5.0, 2.0)])
    assert returns(replay) == [9.0, 5.0, 2.0]
    replay.update([episode(value) for value in (4.0, 6.0)])
    assert returns(replay) == [9.0, 6.0, 5.0]
    stats = replay.update([episode(value) for value in (0.0, 1.0)])
    assert returns(replay) == [6.0, 4.0, 1.0]
    assert (stats["replay_episodes"], stats["replay_return_min"]) == (3.0, 1.0)
    assert stats["replay_return_mean"] == pytest.approx(11 / 3)


def test_replay_breaks_ties_at_random():
    replay = Replay(make_agent().policy, ReplayConfig(episodes=1, recent_updates=1, steps=1))
    equals = [episode(1.0) for _ in range(4)]
    kept = set()
    for _ in range(20):
        replay.update([*equals, episode(0.0)])
        kept.add(next(index for index, one in enumerate(equals) if one is replay.episodes[0]))
    assert len(kept) > 1


def test_replay_scores_penalties_and_skips_invalid_replies():
    agent = make_agent()
    before = [weight.clone() for weight in agent.policy.model.parameters()]
    replay = Replay(agent.policy, ReplayConfig(episodes=1))
    assert replay.update([episode(2.0, valid=False, penalty=-3.0), episode(0.0, valid=False)]) == {}
    assert returns(replay) == [0.0]
    assert all(torch.equal(weight, old) for weight, old in zip(agent.policy.model.parameters(), before, strict=True))


def test_replay_learns_from_valid_replies_only():
    agent = make_agent()
    for step in range(3):
        agent.act(step)
        agent.assign_reward(1.0)
    turns = actor_of(agent).conversation(0).turns
    turns[1].valid = False
    recorded = [logprob for turn in (turns[0], turns[2]) for logprob in turn.reply.logprobs]
    replay = Replay(agent.policy, ReplayConfig(episodes=1, steps=1))
    stats = replay.update([Episode(tuple(turns), terminated=True, truncated=False), episode(0.0)])
    assert stats["replay_loss"] == pytest.approx(-sum(recorded) / len(recorded), abs=1e-4)


@pytest.mark.parametrize("kind", [WordAgent, ChoiceAgent])
@pytest.mark.parametrize("activated", [True, False])
def test_replies_of_the_best_episodes_become_likelier(kind, activated):
    agent = make_agent(kind, activated=activated)
    replay = Replay(agent.policy, ReplayConfig(episodes=2, steps=20, batch_size=4, learning_rate=3e-3))
    head = [weight.clone() for weight in agent.policy.model.v_head.parameters()]
    episodes = []
    for env in range(4):
        for _ in range(2):
            agent.act_batch([env], [env])
            agent.assign_rewards([0.0], [env])
        episodes.append(Episode(tuple(actor_of(agent).conversation(env).turns), terminated=True, truncated=False))
        episodes[-1].turns[-1].reward = float(env)
    best = segments_of(episodes[2:])

    def logprob() -> float:
        with torch.no_grad():
            now = agent.policy.evaluate(best)
        return now.logprobs[now.mask].mean().item()

    before = logprob()
    assert 0 < replay.update(episodes)["replay_loss"] < -before
    assert logprob() > before + 0.1
    assert all(torch.equal(w, old) for w, old in zip(agent.policy.model.v_head.parameters(), head, strict=True))
    assert all(weight.grad is None for weight in agent.policy.model.parameters())


def weights_after_an_update(**options) -> tuple[dict[str, float], list[torch.Tensor]]:
    agent = make_agent(ChoiceAgent, context="turn", ppo={"batch_size": 4}, **options)
    for step in range(4):
        agent.act(step)
        agent.assign_reward(float(step))
        stats = agent.terminate_episode()
    return stats, [weight.detach().clone() for weight in agent.policy.model.parameters()]


def test_replay_follows_the_update_and_is_off_by_default():
    stats, weights = weights_after_an_update()
    assert not [name for name in stats if name.startswith("replay_")]
    off, same = weights_after_an_update(replay_config_dict=None)
    assert all(torch.equal(one, other) for one, other in zip(weights, same, strict=True))
    on, moved = weights_after_an_update(replay_config_dict={"episodes": 2, "learning_rate": 1e-2})
    assert on["replay_return_mean"] == 2.5
    assert on["policy_loss"] == off["policy_loss"]
    assert not all(torch.equal(one, other) for one, other in zip(weights, moved, strict=True))


def test_replay_follows_an_adapter_that_takes_the_place_of_another(caplog):
    """Else it would move the old one, and leave its gradients for the learner's next step on the new one."""
    config = {"batch_size": 2, "mini_batch_size": 2, "learning_rate": 0.0}
    agent = make_agent(ChoiceAgent, ppo=config, replay_config_dict={"steps": 1, "learning_rate": 1e-2})
    pretrained = agent.policy.model.pretrained_model
    pretrained.add_adapter("other", pretrained.peft_config["default"])
    pretrained.set_adapter("other")
    before = {name: weight.clone() for name, weight in pretrained.named_parameters()}
    for reward in (0.0, 1.0):
        agent.act("a")
        agent.assign_reward(reward)
        stats = agent.terminate_episode()
    moved = {name for name, weight in pretrained.named_parameters() if not torch.equal(weight, before[name])}
    assert stats["replay_grad_norm"] > 0
    assert moved
    assert all(".other." in name for name in moved)
    assert all(weight.grad is None for weight in agent.policy.model.parameters())
    assert "replay's optimizer starts again" in caplog.text


def test_replay_undoes_a_last_step_to_output_that_is_not_finite(caplog):
    agent = make_agent(ChoiceAgent, replay_config_dict={"steps": 1, "learning_rate": 1e36}, ppo={"learning_rate": 0.0})
    before = [weight.clone() for weight in agent.policy.model.pretrained_model.parameters()]
    for _ in range(2):
        agent.act_batch(["a", "b", "c", "d"])
        agent.assign_rewards([1.0, 0.0, 1.0, 0.0])
        assert agent.terminate_episodes(range(4))["replay_skipped_steps"] == 1.0
    assert "skipped" in caplog.text
    now = agent.policy.model.pretrained_model.parameters()
    assert all(torch.equal(weight, old) for weight, old in zip(now, before, strict=True))
    agent.act_batch(["a", "b", "c", "d"])
    agent.assign_rewards([1.0, 0.0, 1.0, 0.0])
    with pytest.raises(DivergedError, match="After each of 3 updates"):
        agent.terminate_episodes(range(4))


def test_bad_options_are_refused():
    with pytest.raises(ConfigError, match="Did you mean 'episodes'"):
        make_agent(replay_config_dict={"episode": 3})
    with pytest.raises(ConfigError, match="steps=0 is too small"):
        make_agent(replay_config_dict={"steps": 0})
    with pytest.raises(ConfigError, match=r"learning_rate=0\.0 is not positive"):
        make_agent(replay_config_dict={"learning_rate": 0.0})


def test_replay_learns_nothing_from_equal_returns():
    agent = make_agent(ChoiceAgent)
    replay = Replay(agent.policy, ReplayConfig(learning_rate=1e-2))

    def played(reward: float) -> Episode:
        agent.act("x")
        agent.assign_reward(reward)
        turns = tuple(actor_of(agent).conversation(0).turns)
        actor_of(agent).discard_episodes([0])
        return Episode(turns, terminated=True, truncated=False)

    before = [weight.clone() for weight in agent.policy.model.parameters()]
    assert [replay.update([played(1.0), played(1.0)]) for _ in range(2)] == [{}, {}]
    assert all(map(torch.equal, agent.policy.model.parameters(), before))
    assert replay.update([played(1.0), played(0.0)])["replay_episodes"] == 6
    assert not all(map(torch.equal, agent.policy.model.parameters(), before))


def test_replay_ignores_differences_of_rounding():
    replay = Replay(make_agent().policy, ReplayConfig(episodes=3, recent_updates=2, steps=1))
    assert replay.update([episode(0.1 + 0.2), episode(0.3)]) == {}
    assert replay.update([episode(0.3), episode(0.3 + 1e-5)])["replay_episodes"] == 3.0
