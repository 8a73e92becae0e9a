"""Learning without a critic: advantages by hand, groups in the buffer, and that it learns."""

from __future__ import annotations

import math
from itertools import chain

import numpy as np
import pytest
import torch

from llamagym import ConfigError, EpisodeError, GRPOConfig, ReinforceConfig
from llamagym.agent.agent import collector_of
from llamagym.learners.losses import discounted_returns, group_advantages
from llamagym.learners.rollout import collect
from llamagym.text.episode import segments_of
from tests.helpers.agents import ChoiceAgent, WordAgent, make_agent, settled

BIG = {"batch_size": 1000, "group_size": 2}


def play(agent, rewards, group=None, **end):
    """One episode with these rewards, observations told apart by the group; returns what its end gives."""
    for turn, reward in enumerate(rewards):
        agent.act(f"{group} {turn}")
        agent.assign_reward(reward)
    return agent.terminate_episode(group=group, **end)


def advantages_of(agent):
    """The advantages of the buffer's episodes, as lists."""
    episodes = list(collector_of(agent).buffer)
    targets, _ = agent.learner.compute_targets(
        episodes, collect(agent.policy, episodes, segments_of(episodes), max_tokens=1000, with_reference=False)
    )
    flat = iter(targets.advantages.tolist())
    return [[next(flat) for _ in episode.turns] for episode in episodes]


def slow_advantages(episodes, gamma, credit, baseline):
    """Advantages by loops over (group, rewards) pairs, from the definitions."""

    def earned(rewards, turn):
        first = 0 if credit == "episode" else turn
        return sum(gamma ** (k - first) * rewards[k] for k in range(first, len(rewards)))

    longest = max(len(rewards) for _, rewards in episodes)
    result = []
    for index, (group, rewards) in enumerate(episodes):
        members = [other for other, (name, _) in enumerate(episodes) if name == group]
        others = [episodes[other][1] for other in members if other != index]
        everyone = [episodes[other][1] for other in members]
        row = []
        for turn in range(len(rewards)):
            own = earned(rewards, turn)
            if not others:
                row.append(0.0)
            elif baseline == "leave_one_out":
                row.append(own - float(np.mean([earned(other, turn) for other in others])))
            else:
                spread = max(np.std([earned(one, t) for one in everyone], ddof=1) for t in range(longest))
                row.append((own - float(np.mean([earned(other, turn) for other in others]))) / (float(spread) + 1e-4))
        result.append(row)
    return result


def test_group_advantages_by_hand():
    returns = torch.tensor([[3.0, 2.0], [1.0, 0.0]])
    assert group_advantages(returns, "leave_one_out").tolist() == [[2.0, 2.0], [-2.0, -2.0]]
    # The deviation of both steps is sqrt(2), their distance from the other 2.
    assert group_advantages(returns, "std").flatten().tolist() == pytest.approx([2**0.5] * 2 + [-(2**0.5)] * 2, 1e-3)
    assert discounted_returns(returns, 0.5).tolist() == [[4.0, 2.0], [1.0, 0.0]]


@pytest.mark.pairwise(baseline=["leave_one_out", "std"])
def test_groups_of_one_or_of_equal_returns_have_zero_advantages(baseline):
    assert group_advantages(torch.tensor([[5.0, 1.0]]), baseline).tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize(("members", "value"), [(2, 3e6), (7, 0.1), (8, -200.7), (12, 1234.567)])
@pytest.mark.parametrize("baseline", ["leave_one_out", "std"])
def test_equal_returns_have_advantages_of_exactly_zero(baseline, members, value):
    returns = torch.full((members, 1), value)
    assert not group_advantages(returns, baseline).any()
    # One that is better is still seen.
    returns[0] += abs(value) / 1000
    assert (group_advantages(returns, baseline)[0] > 0).all()


@pytest.mark.pairwise(baseline=["leave_one_out", "std"], scale=[1.0, 1000.0])
def test_equal_sums_of_different_rewards_are_equal_returns(baseline, scale):
    options = {**BIG, "gamma": 1.0, "credit": "episode", "baseline": baseline}
    agent = make_agent(ChoiceAgent, context="turn", algorithm="grpo", grpo=options)
    for rewards in ([0.1] * 6, [0.3, 0.3], [0.2, 0.2, 0.2], [0.6]):
        play(agent, [scale * reward for reward in rewards])
    assert {advantage for row in advantages_of(agent) for advantage in row} == {0.0}


@pytest.mark.parametrize("reward", [1234.567, -200.7, 3e6])
def test_reinforce_learns_nothing_from_equal_returns(reward):
    agent = make_agent(ChoiceAgent, context="turn", algorithm="reinforce", reinforce={"batch_size": 1000})
    for _ in range(12):
        play(agent, [reward])
    assert advantages_of(agent) == [[0.0]] * 12


@pytest.mark.parametrize("members", [2, 4, 16])
def test_baseline_excludes_the_own_return(members):
    """It would make the gradient of a group of G smaller by (G - 1) / G."""
    returns = torch.arange(float(members))[:, None]
    in_deviations = group_advantages(returns, "std") * (returns.std() + 1e-4)
    torch.testing.assert_close(in_deviations, group_advantages(returns, "leave_one_out"))


@pytest.mark.pairwise(
    baseline=["leave_one_out", "std"], credit=["return_to_go", "episode"], context=["episode", "turn"]
)
def test_advantages_equal_those_of_a_slow_loop(context, credit, baseline):
    options = {**BIG, "gamma": 0.9, "credit": credit, "baseline": baseline}
    agent = make_agent(ChoiceAgent, context=context, algorithm="grpo", grpo=options)
    # Groups of 3, 2 and 1, interleaved, of different lengths.
    episodes = [("a", [1.0, 0.5]), ("b", [2.0]), ("a", [0.0, 0.0, 3.0]), ("c", [4.0, 1.0]), ("a", [-1.0])]
    episodes.append(("b", [0.5, -2.0, 0.25, 1.0]))
    for group, rewards in episodes:
        play(agent, rewards, group)
    for row, expected in zip(advantages_of(agent), slow_advantages(episodes, 0.9, credit, baseline), strict=True):
        assert row == pytest.approx(expected, abs=1e-5)


def test_episodes_without_a_group_form_one():
    agent = make_agent(ChoiceAgent, algorithm="grpo", grpo={**BIG, "baseline": "leave_one_out"})
    for reward in (1.0, 2.0, 6.0):
        play(agent, [reward])
    assert advantages_of(agent) == [[-3.0], [-1.5], [4.5]]


def test_rejects_a_batch_without_two_episodes_of_a_group():
    agent = make_agent(ChoiceAgent, algorithm="grpo", grpo=BIG)
    for group in range(3):
        play(agent, [1.0], group)
    with pytest.raises(EpisodeError, match="None of 3 episodes shares its group"):
        agent.learner.update(list(collector_of(agent).buffer))


def test_a_truncated_episode_needs_no_final_observation_and_is_not_valued():
    agent = make_agent(ChoiceAgent, algorithm="grpo", grpo=BIG)
    play(agent, [1.0], truncated=True)
    assert (collector_of(agent).buffer[0].truncated, collector_of(agent).buffer[0].final_prompt) == (True, None)


def test_batches_hold_complete_groups_only():
    agent = make_agent(ChoiceAgent, algorithm="grpo", grpo={"batch_size": 4, "group_size": 2})
    assert play(agent, [1.0, 0.0, 1.0], "slow") == {}
    assert play(agent, [1.0], "a") == {}
    assert play(agent, [1.0], "b") == {}
    assert play(agent, [0.0], "a") == {}
    message = collector_of(agent).why_no_update()
    assert "2 turns, and a batch needs 4" in message
    assert "2 more wait until their group has 2" in message
    stats = play(agent, [1.0], "b")
    assert (stats["episodes"], stats["turns"], stats["groups"]) == (4.0, 4.0, 2.0)
    # Both of b earned 1: nothing to learn there.
    assert stats["flat_groups"] == 0.5
    assert [episode.group for episode in collector_of(agent).buffer] == ["slow"]
    assert play(agent, [0.0], "slow")["episodes"] == 2.0


def begun(agent, group, members):
    """Episodes of one start under way, each with a turn that earned nothing yet."""
    ids = [f"{group}{member}" for member in range(members)]
    agent.act_batch([f"{group} 0"] * members, ids)
    agent.assign_rewards([0.0] * members, ids)
    return ids


def end(agent, ids, rewards, group):
    agent.assign_rewards(rewards, ids)
    return agent.terminate_episodes(ids, groups=[group] * len(ids))


@pytest.mark.parametrize("baseline", ["leave_one_out", "std"])
@pytest.mark.parametrize("credit", ["return_to_go", "episode"])
def test_late_members_are_compared_with_their_group(baseline, credit, tmp_path):
    """Of six episodes of a start four fill the group; the two that last longer must not be lost."""
    options = {"batch_size": 4, "group_size": 4, "baseline": baseline, "credit": credit, "gamma": 1.0}
    agent = make_agent(ChoiceAgent, context="turn", algorithm="grpo", grpo=options)
    ids = begun(agent, "a", 6)
    assert end(agent, ids[:4], [1.0, 2.0, 3.0, 6.0], "a")["episodes"] == 4.0
    # As late members in a run that goes on, and in one that was resumed.
    agent.save_checkpoint(tmp_path / "now")
    resumed = make_agent(ChoiceAgent, context="turn", algorithm="grpo", grpo=options)
    resumed.load_checkpoint(tmp_path / "now", keep_episodes=True)
    for each in (agent, resumed):
        each.act_batch(["later"] * 2, ids[4:])
        stats = end(each, ids[4:], [5.0, 3.0], "a")
        assert (stats["episodes"], stats["groups"]) == (2.0, 0.0)
        # The others earned 3 on average, at the first turn; with credit for whole episodes at each.
        later = [1.0, 2.0, 3.0, 6.0] if credit == "episode" else [0.0] * 4
        expected = []
        for earned in (5.0, 3.0):
            spread = 1.0
            if baseline == "std":
                # Where the five differ most.
                spread = max(np.std([1.0, 2.0, 3.0, 6.0, earned], ddof=1), np.std([*later, earned], ddof=1)) + 1e-4
            expected += [(earned - 3.0) / spread, (earned - np.mean(later)) / spread]
        assert list(chain(*each.learner.advantages)) == pytest.approx(expected, rel=1e-4, abs=1e-6)
        assert collector_of(each).buffer == []


def test_a_reused_group_key_starts_a_new_group():
    agent = make_agent(ChoiceAgent, context="turn", algorithm="grpo", grpo={"batch_size": 2, "group_size": 2})
    end(agent, begun(agent, "a", 2), [0.0, 1.0], "a")
    later = begun(agent, "a", 2)
    assert end(agent, later[:1], [0.0], "a") == {}
    assert end(agent, later[1:], [1.0], "a")["groups"] == 1.0


@pytest.mark.equivalence
@pytest.mark.pairwise(kind=[ChoiceAgent, WordAgent])
def test_grpo_keeps_the_value_head_and_initializes_the_adapter_once(kind, monkeypatch):
    agent = make_agent(kind, algorithm="grpo", grpo={"batch_size": 4, "group_size": 2})
    head = agent.policy.model.v_head
    with torch.no_grad():
        head.summary.weight.zero_()
        head.summary.bias.zero_()
    fits = []
    fit = agent.policy.initialize_from_data
    monkeypatch.setattr(
        agent.policy, "initialize_from_data", lambda segments: (fits.append(len(segments)), fit(segments))
    )
    before = {name: weight.detach().clone() for name, weight in agent.policy.model.named_parameters()}
    for _ in range(2):
        play(agent, [1.0, 1.0], "a")
        stats = play(agent, [0.0, 1.0], "a")
    assert fits == [2]
    assert stats["ratio_error"] < 1e-3
    changed = {n for n, w in agent.policy.model.named_parameters() if not torch.equal(w, before[n])}
    assert changed == {n for n, w in agent.policy.model.named_parameters() if w.requires_grad and "v_head" not in n}


def test_learns_from_a_batch_of_one_observation():
    agent = make_agent(ChoiceAgent, context="turn", algorithm="grpo", grpo={"batch_size": 2, "group_size": 2})
    torch.nn.init.zeros_(agent.policy.model.v_head.summary.weight)
    play(agent, [1.0])
    assert play(agent, [0.0])["turns"] == 2.0
    assert not agent.policy.is_initialized_from_data


@pytest.mark.equivalence
@pytest.mark.pairwise(kind=[ChoiceAgent, WordAgent])
def test_reinforce_is_the_gradient_of_logprob_times_normalized_return(kind):
    options = {"batch_size": 1000, "gamma": 0.5, "entropy_coef": 0.0, "max_grad_norm": math.inf}
    agent = settled(make_agent(kind, context="turn", algorithm="reinforce", reinforce=options))
    for rewards in ([1.0, 0.0], [2.0], [0.0, -4.0, 1.0]):
        play(agent, rewards)
    episodes, learner = list(collector_of(agent).buffer), agent.learner
    weights = [weight for weight in agent.policy.model.pretrained_model.parameters() if weight.requires_grad]
    gradients = []
    learner.optimizer.adam.step = lambda: gradients.extend(weight.grad.clone() for weight in weights)
    stats = learner.update(episodes)
    assert (stats["optimizer_steps"], stats["clip_fraction"]) == (1.0, 0.0)
    # By hand: returns to go with gamma 0.5, normalized, times the log-probability of all of a turn's decisions.
    returns = np.array([1.0, 0.0, 2.0, -1.75, -3.5, 1.0])
    normalized = (returns - returns.mean()) / returns.std(ddof=1)
    turns = [turn for episode in episodes for turn in episode.turns]
    segments = segments_of(episodes)
    logprobs = agent.policy.evaluate(segments)
    per_turn = logprobs.logprobs.masked_fill(~logprobs.mask, 0.0).sum(1)
    loss = -(torch.tensor(normalized, dtype=torch.float) * per_turn).sum() / sum(len(t.reply.logprobs) for t in turns)
    expected = torch.autograd.grad(loss, weights)
    assert max(gradient.abs().max() for gradient in expected) > 1e-3
    for gradient, by_hand in zip(gradients, expected, strict=True):
        assert torch.allclose(gradient, by_hand, atol=1e-5, rtol=1e-3)


def test_one_pass_of_grpo_over_returns_is_reinforce():
    weights = []
    free = {"epochs": 1, "baseline": "none", "whiten_advantages": True, "mini_batch_size": 100, "cliprange": 100.0}
    for algorithm, options in (("reinforce", {}), ("grpo", free)):
        agent = make_agent(ChoiceAgent, algorithm=algorithm, **{algorithm: {"batch_size": 4, **options}})
        for rewards in ([1.0, 0.0], [2.0], [3.0]):
            stats = play(agent, rewards)
        assert stats["turns"] == 4.0
        weights.append(torch.cat([w.detach().flatten() for w in agent.policy.model.parameters()]))
    assert torch.equal(*weights)


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (GRPOConfig, {"group_sise": 4}, "Did you mean 'group_size'"),
        (GRPOConfig, {"group_size": 1}, "group_size=1 is too small. Pass at least 2"),
        (GRPOConfig, {"baseline": "leave_one"}, "Did you mean 'leave_one_out'"),
        (GRPOConfig, {"credit": "episodes"}, "Did you mean 'episode'"),
        (GRPOConfig, {"epochs": 0}, "epochs=0 is too small"),
        (ReinforceConfig, {"epochs": 2}, "Unknown option 'epochs' of ReinforceConfig"),
    ],
)
def test_bad_options_are_refused(config, options, message):
    with pytest.raises(ConfigError, match=message):
        config.from_dict(options)


def test_a_late_member_of_a_group_without_differences_does_not_outweigh_everything_else():
    agent = make_agent(ChoiceAgent, context="turn", algorithm="grpo", grpo={"batch_size": 4, "group_size": 4})
    ids = begun(agent, "a", 5)
    assert end(agent, ids[:4], [0.0] * 4, "a")["flat_batch"]
    agent.act_batch(["later"], ids[4:])
    others = begun(agent, "b", 4)
    end(agent, ids[4:], [1.0], "a")
    end(agent, others, [0.0, 1.0, 0.0, 1.0], "b")
    late = agent.learner.advantages[0]
    # The deviation of five members of which one earned 1 is sqrt(1 / 5).
    assert late[0] == pytest.approx(5**0.5, rel=1e-3)


@pytest.mark.parametrize(("earned", "flat"), [(5.0, 0.0), (3.0, 1.0)])
def test_late_members_with_equal_returns_are_compared_with_their_group(earned, flat):
    options = {"batch_size": 2, "group_size": 4, "credit": "episode", "gamma": 1.0}
    agent = make_agent(ChoiceAgent, context="turn", algorithm="grpo", grpo=options)
    ids = begun(agent, "a", 6)
    end(agent, ids[:4], [1.0, 2.0, 3.0, 6.0], "a")
    agent.act_batch(["later"] * 2, ids[4:])
    assert end(agent, ids[4:], [earned] * 2, "a")["flat_batch"] == flat


def test_deviation_excludes_turns_with_a_single_choice():
    returns = torch.tensor([[1.0, -100.0], [0.0, 100.0]])
    decides = torch.tensor([[True, False], [True, False]])
    alone = group_advantages(returns[:, :1], "std")
    assert torch.equal(group_advantages(returns, "std", decides)[:, :1], alone)
