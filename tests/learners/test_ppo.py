"""PPO over turns: targets, minibatches, early stopping, references, and that it learns."""

from __future__ import annotations

import math

import gymnasium as gym
import numpy as np
import pytest
import torch

from llamagym import train
from llamagym.agent.agent import collector_of
from llamagym.learners.batches import minibatches
from llamagym.learners.rollout import collect
from llamagym.learners.schedules import AdaptiveKLController, RateController
from llamagym.text.episode import segments_of
from tests.helpers.agents import ChoiceAgent, WordAgent, actor_of, make_agent


def fill(agent, episodes=4, turns=2, reward=lambda action, episode, turn: episode + turn):
    """Play episodes with known rewards into the buffer, without an update; returns them."""
    for episode in range(episodes):
        for turn in range(turns):
            action = agent.act(f"{episode} {turn}")
            agent.assign_reward(float(reward(action, episode, turn)))
        agent.terminate_episode()
    return collector_of(agent).buffer


def targets_of(agent, episodes):
    learner = agent.learner
    rollout = collect(
        agent.policy, episodes, segments_of(episodes), max_tokens=1000, with_reference=bool(learner.config.init_kl_coef)
    )
    return learner.compute_targets(episodes, rollout)[0], rollout.ref_kl.mean().item()


@pytest.mark.parametrize("context", ["episode", "turn"])
def test_advantages_are_gae_over_turns(context):
    options = {"batch_size": 1000, "gamma": 0.9, "lam": 0.8, "whiten_advantages": False, "critic": "gradient"}
    agent = make_agent(ChoiceAgent, context=context, ppo=options)
    episodes = fill(agent, episodes=3, turns=3)
    targets, _ = targets_of(agent, episodes)
    row = 0
    for episode in episodes:
        values = [turn.reply.value for turn in episode.turns] + [0.0]
        deltas = [turn.reward + 0.9 * values[t + 1] - values[t] for t, turn in enumerate(episode.turns)]
        for t in range(3):
            expected = sum((0.9 * 0.8) ** (k - t) * deltas[k] for k in range(t, 3))
            assert targets.advantages[row].item() == pytest.approx(expected, abs=1e-5)
            assert targets.returns[row].item() == pytest.approx(expected + values[t], abs=1e-5)
            row += 1


def test_the_kl_penalty_is_k1_per_turn_and_leaves_rewards_alone():
    base = {"batch_size": 1000, "whiten_advantages": False, "gamma": 0.0, "lam": 0.0, "critic": "gradient"}
    agent = make_agent(WordAgent, ppo={**base, "init_kl_coef": 0.3})
    episodes = fill(agent, episodes=2, turns=2)
    targets, mean_kl = targets_of(agent, episodes)
    turns = [turn for episode in episodes for turn in episode.turns]
    with torch.no_grad():
        references = [agent.policy.evaluate(segments_of([e]), reference=True).logprobs for e in episodes]
    expected = []
    for turn, reference in zip(turns, [row for r in references for row in r], strict=True):
        expected.append(sum(turn.reply.logprobs) - reference[: len(turn.reply.logprobs)].sum().item())
    assert mean_kl == pytest.approx(np.mean(expected), abs=1e-4)
    # With gamma 0 the advantage is reward less penalty less value.
    for turn, kl, advantage in zip(turns, expected, targets.advantages, strict=True):
        assert advantage.item() == pytest.approx(turn.reward - 0.3 * kl - turn.reply.value, abs=1e-4)


@pytest.mark.parametrize(("size", "sizes"), [(5, [5, 5, 2]), (10, [12])])
def test_minibatches_cover_every_segment_once_and_small_remainders_join(size, sizes):
    agent = make_agent(ChoiceAgent, context="turn", ppo={"batch_size": 1000})
    segments = segments_of(fill(agent, episodes=6, turns=2))
    groups = minibatches(segments, size, np.random.default_rng(0))
    assert sorted(id(s) for group in groups for s in group) == sorted(map(id, segments))
    assert [len(group) for group in groups] == sizes


@pytest.mark.numerical
@pytest.mark.parametrize("kind", [WordAgent, ChoiceAgent])
def test_max_tokens_per_pass_changes_nothing_but_memory(kind):
    weights = []
    for max_tokens in (10_000, 60):
        agent = make_agent(kind, ppo={"batch_size": 8, "mini_batch_size": 8, "max_tokens_per_pass": max_tokens})
        fill(agent, episodes=4, turns=2)
        weights.append(torch.cat([p.detach().flatten() for p in agent.policy.model.parameters() if p.requires_grad]))
    # Adam divides by the gradient's size, so rounding is magnified where a gradient is next to nothing.
    assert torch.quantile((weights[0] - weights[1]).abs(), 0.99) < 1e-5


def test_target_kl_limits_how_far_an_update_moves_the_policy():
    moved = {}
    for target in (None, 0.01):
        ppo = {"batch_size": 16, "mini_batch_size": 4, "ppo_epochs": 30, "learning_rate": 0.0003, "target_kl": target}
        # Without the surrogate's clipping nothing else holds it.
        ppo |= {"cliprange": 100.0, "cliprange_value": 100.0}
        agent = make_agent(ChoiceAgent, context="turn", ppo={**ppo, "entropy_coef": 0.0})
        fill(agent, episodes=7, turns=2)
        for turn in range(2):
            agent.act(f"7 {turn}")
            agent.assign_reward(7.0)
        turns = [t for e in collector_of(agent).buffer for t in e.turns] + list(actor_of(agent).conversation(0).turns)
        before = [logprob for turn in turns for logprob in turn.reply.logprobs]
        episodes = [*collector_of(agent).buffer]
        stats = agent.terminate_episode()
        with torch.no_grad():
            now = torch.cat([agent.policy.evaluate(segments_of([e])).logprobs[:, 0] for e in episodes])
        moved[target] = (0.5 * (now - torch.tensor(before[: len(now)])).square().mean()).item()
        assert stats["stopped_early"] == float(target is not None)
    assert moved[0.01] < 0.5 * moved[None]


def test_undoes_a_step_beyond_the_trust_region():
    """The only step of an update, so that no later minibatch shows it."""
    moved = {}
    for target in (None, 0.01):
        ppo = {"batch_size": 16, "mini_batch_size": 16, "ppo_epochs": 1, "learning_rate": 0.1, "warmup_steps": 1}
        agent = make_agent(ChoiceAgent, context="turn", ppo={**ppo, "target_kl": target})
        before = agent.action_probabilities(["x"])[0]
        for _ in range(2):
            agent.act_batch(["x"] * 16)
            agent.assign_rewards([float(reward) for reward in range(16)])
            stats = agent.terminate_episodes(range(16))
            assert stats["stopped_early"] == float(target is not None)
        after = agent.action_probabilities(["x"])[0]
        moved[target] = max(abs(before[choice] - after[choice]) for choice in before)
    assert moved[None] > 0.1
    assert moved[0.01] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("kind", [ChoiceAgent, WordAgent])
def test_turns_of_older_weights_have_importance_weights(kind):
    one_step = {"ppo_epochs": 1, "mini_batch_size": 1000, "warmup_steps": 1, "learning_rate": 0.01}
    agent = make_agent(kind, ppo={"batch_size": 1000, **one_step})
    finished = list(fill(agent))
    agent.act("under way")
    agent.assign_reward(1.0)
    agent.learner.update(finished)
    agent.act("still under way")
    agent.assign_reward(1.0)
    agent.terminate_episode()
    episodes = collector_of(agent).buffer
    segments = segments_of(episodes)
    turns = [turn for episode in episodes for turn in episode.turns]
    rollout = collect(agent.policy, episodes, segments, max_tokens=1000, with_reference=False)
    with torch.no_grad():
        now = agent.policy.evaluate(segments)
    before = torch.zeros_like(now.logprobs)
    for row, turn in enumerate(turns):
        before[row, : len(turn.reply.logprobs)] = torch.tensor(turn.reply.logprobs)
    expected = (now.logprobs - before).exp().clamp_max(2.0)
    assert (expected[now.mask] - 1.0).abs().max() > 0.01
    torch.testing.assert_close(rollout.importance[now.mask], expected[now.mask])
    torch.testing.assert_close(rollout.old_values, now.values)
    # The last turn is the policy's own: not asked again.
    assert (rollout.importance[-1] == 1.0).all()
    assert rollout.old_values[-1].item() == turns[-1].reply.value
    # The policy has moved since most were sampled; in this update it does not.
    agent.learner.learning_rates[0] = 0.0
    assert agent.learner.update(episodes)["approx_kl"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("kind", [ChoiceAgent, WordAgent])
def test_rounding_before_the_first_step_does_not_end_an_update(kind):
    # Sampled one at a time and learned from together, log-probabilities differ in their last digits.
    agent = make_agent(kind, ppo={"batch_size": 1000, "target_kl": 1e-30})
    stats = agent.learner.update(fill(agent, episodes=8))
    # A step was made; that it led too far was seen after it.
    assert stats["grad_norm"] > 0
    assert (stats["stopped_early"], stats["optimizer_steps"]) == (1.0, 0.0)
    assert stats["entropy"] > 0


def test_the_learning_rate_follows_the_kl_within_bounds():
    controller = RateController(target_kl=0.02)
    for kl, scale in ((0.015, 1.0), (0.021, 1 / 1.5), (0.009, 1.0)):
        controller.update(kl, may_rise=True)
        assert controller.scale == pytest.approx(scale)
    for kl, bound in ((1.0, 0.001), (0.0, 1.0)):
        for _ in range(30):
            controller.update(kl, may_rise=True)
        assert controller.scale == pytest.approx(bound)
    # A small KL says nothing while steps are small.
    controller.update(1.0, may_rise=False)
    controller.update(0.0, may_rise=False)
    assert controller.scale == pytest.approx(1 / 1.5)
    # Everybody moves more than that, so the rate falls, and the optimizer follows.
    agent = make_agent(ChoiceAgent, ppo={"batch_size": 1000, "target_kl": 1e-12, "warmup_steps": 1})
    stats = [agent.learner.update(fill(agent, 3, 2)[-3:]) for _ in range(3)]
    rates = [each["learning_rate"] / math.sqrt(each["step_share"]) for each in stats]
    assert rates == pytest.approx([2e-4, 2e-4 / 1.5, 2e-4 / 2.25])
    last_step = agent.learner.optimizer.param_groups[0]["lr"] / math.sqrt(stats[-1]["step_share"])
    assert last_step == pytest.approx(2e-4 / 1.5)


@pytest.mark.parametrize(("share", "scale"), [(1.0, 0.15), (1e-4, 0.1)])
def test_a_batch_of_small_advantages_does_not_raise_the_learning_rate(share, scale):
    agent = make_agent(ChoiceAgent, ppo={"batch_size": 1000, "target_kl": 100.0, "warmup_steps": 1})
    agent.learner.update(fill(agent, 3, 2)[-3:])
    agent.learner._rate.scale = 0.1
    # Small is measured by the usual deviation, here of many batches like the first one.
    agent.learner._whiten._deviations = 20 * [agent.learner._whiten._deviations[0] / share]
    agent.learner.update(fill(agent, 3, 2)[-3:])
    assert agent.learner._rate.scale == pytest.approx(scale)


def test_learning_rates_rise_over_the_first_steps():
    options = {"batch_size": 1000, "warmup_steps": 4, "learning_rate": 8e-3, "value_learning_rate": 4e-3}
    agent = make_agent(ChoiceAgent, ppo=options)
    rates = []
    for _ in range(3):
        stats = agent.learner.update(fill(agent, 2, 2)[-2:])
        policy, critic = (group["lr"] for group in agent.learner.optimizer.param_groups)
        rates.append([policy / math.sqrt(stats["step_share"]), critic])
    # Two passes over one minibatch: two steps an update.
    assert rates == [pytest.approx([4e-3, 2e-3]), pytest.approx([8e-3, 4e-3]), pytest.approx([8e-3, 4e-3])]


def test_adaptive_kl_controller():
    controller = AdaptiveKLController(init_kl_coef=0.1, target=2.0, horizon=100.0)
    controller.update(kl=10.0, steps=50)
    # The error is clipped at 0.2: 0.1 * (1 + 0.2 * 50 / 100).
    assert controller.value == pytest.approx(0.11)
    controller.update(kl=1.9, steps=100)
    assert controller.value == pytest.approx(0.11 * (1 - 0.05))


@pytest.mark.long
@pytest.mark.parametrize("placement", ["reward", "loss"])
def test_kl_to_the_reference_pulls_back(placement):
    distance = {}
    for coefficient in (0.001, 5.0):
        ppo = {"batch_size": 48, "mini_batch_size": 48, "ppo_epochs": 2, "learning_rate": 0.003, "entropy_coef": 0.0}
        ppo |= {"init_kl_coef": coefficient, "kl_placement": placement}
        agent = make_agent(ChoiceAgent, context="turn", ppo=ppo)
        for _ in range(8):
            fill(agent, episodes=24, turns=2, reward=lambda action, *_: action == 0)
        probe = make_agent(ChoiceAgent, context="turn", ppo={"batch_size": 1000})
        segments = segments_of(fill(probe, 4, 2))
        with torch.no_grad():
            now, ref = (agent.policy.evaluate(segments, reference=r).logprobs for r in (False, True))
        distance[coefficient] = (now - ref).abs().mean().item()
    assert distance[5.0] < distance[0.001] / 2


class Bandit(gym.Env):
    """Shows 0 or 1; the action that equals it earns 1, any other 0. One step an episode."""

    observation_space = gym.spaces.Discrete(2)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.shown = int(self.np_random.integers(2))
        return np.int64(self.shown), {}

    def step(self, action):
        return np.int64(self.shown), float(action == self.shown), True, False, {}


class BanditAgent(ChoiceAgent):
    choices = ("yes", "no")


@pytest.mark.parametrize(
    ("learning_rate", "seed"),
    [(0.01, 0), *(pytest.param(*case, marks=pytest.mark.long) for case in [(0.01, 1), (0.0, 0)])],
)
def test_learns_a_bandit_and_not_at_learning_rate_zero(learning_rate, seed):
    ppo = {"batch_size": 64, "mini_batch_size": 32, "learning_rate": learning_rate, "target_kl": 0.05}
    agent = make_agent(BanditAgent, context="turn", ppo=ppo, seed=seed)
    result = train(agent, Bandit, episodes=2560, num_envs=64, seed=seed)
    last = float(np.mean(result.returns[-256:]))
    assert (last > 0.9) == (learning_rate > 0)
    assert result.updates[-1]["ratio_error"] < 1e-4
    assert not math.isnan(result.updates[0]["ratio_error"])
