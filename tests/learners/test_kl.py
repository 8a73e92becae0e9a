"""How far an update moves the policy: exact where choices are offered, after the last step, of real decisions only."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

from llamagym.agent.agent import collector_of
from llamagym.learners import base
from llamagym.learners.losses import categorical_kl
from llamagym.learners.replay import Replay, ReplayConfig
from llamagym.learners.rollout import collect
from llamagym.learners.schedules import AdaptiveKLController
from llamagym.text.episode import Segment, segments_of
from tests.helpers.agents import ChoiceAgent, WordAgent, actor_of, make_agent

# A single character each, so that all of them part at one place.
SINGLE = tuple(map(chr, range(48, 112)))
# Three characters each, so that they part at three places.
CODES = tuple(a + b + c for a in "abcd" for b in "abcd" for c in "abcd")
EPOCHS = {"ppo": {"ppo_epochs": 2}, "grpo": {"epochs": 2}, "reinforce": {}}


class Offering(ChoiceAgent):
    """Offers what the test says; where an observation is "forced", a single choice."""

    def get_action_choices(self, observation: Any) -> list[str]:
        return ["wait"] if observation == "forced" else list(self.choices)

    def extract_action(self, response: str) -> int:
        return -1 if response == "wait" else self.choices.index(response)


def offering(choices: tuple[str, ...] = SINGLE, algorithm: str = "ppo", **options: Any) -> Any:
    """An agent whose batch is 16 turns in a single minibatch."""
    sizes = {"batch_size": 16, "learning_rate": 3e-3, "warmup_steps": 1, **EPOCHS[algorithm]}
    sizes |= {} if algorithm == "reinforce" else {"mini_batch_size": 16}
    agent = make_agent(Offering, context="turn", algorithm=algorithm, **{algorithm: {**sizes, **options}})
    agent.choices = choices
    return agent


def update(agent: Any, observations: list[str]) -> dict[str, float]:
    """One batch of a turn each; the reward grows with the number of the turn."""
    agent.act_batch(observations)
    agent.assign_rewards([float(number) for number in range(len(observations))])
    return agent.terminate_episodes(range(len(observations)))


def exact_kl(before: dict[str, float], after: dict[str, float]) -> float:
    return sum(p * math.log(p / after[choice]) for choice, p in before.items())


# The statistic


@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "reinforce"])
@pytest.mark.parametrize("choices", [("left", "right"), SINGLE], ids=["2 choices", "64 choices"])
def test_approx_kl_is_the_exact_kl_of_the_whole_update(algorithm: str, choices: tuple[str, ...]):
    agent = offering(choices, algorithm)
    before = agent.action_probabilities(["x"])[0]
    stats = update(agent, ["x"] * 16)
    moved = exact_kl(before, agent.action_probabilities(["x"])[0])
    assert moved > 1e-4
    assert stats["approx_kl"] == pytest.approx(moved, rel=1e-3)


def test_approx_kl_of_free_text_includes_the_last_step():
    agent = make_agent(WordAgent, ppo={"ppo_epochs": 1, "warmup_steps": 1, "learning_rate": 3e-3})
    assert update(agent, list("abcd"))["approx_kl"] > 1e-6


def test_kl_summed_over_branch_points_is_unbiased():
    """With several places where choices part, each choice shows those on the way to it."""
    agent = offering(CODES, batch_size=1000)
    agent.act("x")
    turn = actor_of(agent).conversation(0).turns[0]
    old = torch.tensor(turn.reply.choice_logprobs)
    actor_of(agent).discard_episodes([0])
    turns = []
    for index, choice in enumerate(turn.prompt.choices):
        reply = type(turn.reply)(
            choice,
            (old[index].item(),),
            0.0,
            "choice",
            index,
            agent.policy.weights_version,
            turn.reply.choice_logprobs,
        )
        turns.append(type(turn)(turn.prompt, reply))
    before = agent.action_probabilities(["x"])[0]
    episode = actor_of(agent).new_conversation()
    episodes = []
    for one in turns:
        episode.turns[:] = [one]
        episodes.append(episode.finished(False, None))
    rollout = collect(agent.policy, episodes, segments_of(episodes), max_tokens=10_000, with_reference=False)
    with torch.no_grad():
        for name, weight in agent.policy.model.named_parameters():
            if "lora_B" in name:
                weight.mul_(2.0)
        now = agent.policy.evaluate([Segment((one,)) for one in turns])
    of_turns = categorical_kl(rollout.branches, now.branches).sum(1)
    moved = exact_kl(before, agent.action_probabilities(["x"])[0])
    assert moved > 1e-3
    assert (old.exp() * of_turns).sum().item() == pytest.approx(moved, rel=1e-3)


def test_the_kl_of_turns_of_older_weights_starts_at_the_policy_before_the_update():
    """A turn that an earlier policy sampled: the distance from that one is not this update's doing."""
    agent = offering(SINGLE)
    agent.act_batch(["x"] * 16)
    agent.assign_rewards([float(number) for number in range(16)])
    with torch.no_grad():
        for name, weight in agent.policy.model.named_parameters():
            if "lora_B" in name:
                weight.mul_(2.0)
    before = agent.action_probabilities(["x"])[0]
    stats = agent.terminate_episodes(range(16))
    moved = exact_kl(before, agent.action_probabilities(["x"])[0])
    assert stats["approx_kl"] == pytest.approx(moved, rel=1e-2, abs=1e-6)


def test_target_kl_bounds_the_exact_kl_for_any_number_of_choices():
    agent = offering(SINGLE, target_kl=0.02, learning_rate=0.05)
    for _ in range(4):
        before = agent.action_probabilities(["x"])[0]
        stats = update(agent, ["x"] * 16)
        moved = exact_kl(before, agent.action_probabilities(["x"])[0])
        assert moved <= 1.5 * 0.02 + 1e-6
        assert stats["approx_kl"] == pytest.approx(moved, rel=1e-3, abs=1e-6)


def test_a_step_that_is_undone_is_not_counted():
    agent = offering(SINGLE, target_kl=1e-12)
    stats = update(agent, ["x"] * 16)
    assert (stats["stopped_early"], stats["optimizer_steps"], stats["approx_kl"]) == (1.0, 0.0, 0.0)


# Turns that leave nothing to decide


@pytest.mark.parametrize("algorithm", ["grpo", "reinforce"])
def test_turns_with_a_single_choice_have_no_weight(algorithm: str):
    """The same batch with and without them: the same statistics, and the same weights afterwards."""
    plain = {"whiten_advantages": False, "batch_size": 8}
    plain |= {"baseline": "none", "mini_batch_size": 1000, "cliprange": 1e-6} if algorithm == "grpo" else {}
    learned = []
    for forced in (0, 8):
        agent = offering(("left", "right", "stay"), algorithm, **plain | {"batch_size": 8 + forced})
        agent.act_batch(["a", "b"] * 4)
        agent.assign_rewards([1.0, -1.0, 2.0, 0.5, 0.0, -0.5, 1.0, 1.5])
        if forced:
            agent.act_batch(["forced"] * forced, range(8, 8 + forced))
            agent.assign_rewards([3.0] * forced, range(8, 8 + forced))
        stats = agent.terminate_episodes(range(8 + forced))
        assert stats["deciding_turns"] == 8.0
        weights = [w.detach().flatten() for w in agent.policy.model.parameters() if w.requires_grad]
        learned.append((stats, torch.cat(weights)))
    (alone, weights), (diluted, others) = learned
    for name in ("entropy", "approx_kl", "clip_fraction", "policy_loss", "grad_norm", "commonest_reply"):
        assert diluted[name] == pytest.approx(alone[name], rel=1e-3, abs=1e-6), name
    assert alone["entropy"] > 0
    assert alone["approx_kl"] > 0
    assert (weights - others).abs().max() < 1e-4


@pytest.mark.parametrize("critic", ["lstd", "gradient"])
def test_minibatches_without_decisions_do_not_enter_averages(critic: str, monkeypatch):
    agent = offering(("left", "right"), mini_batch_size=8, ppo_epochs=1, learning_rate=1e-9, critic=critic)
    entropy = -sum(p * math.log(p) for p in agent.action_probabilities(["x"])[0].values())
    monkeypatch.setattr(base, "minibatches", lambda segments, *_: [list(segments[:8]), list(segments[8:])])
    stats = update(agent, ["x"] * 8 + ["forced"] * 8)
    assert stats["entropy"] == pytest.approx(entropy, rel=1e-3)


def test_critic_learns_from_a_batch_without_decisions():
    agent = offering(("left", "right"))
    stats = update(agent, ["forced"] * 16)
    assert stats["deciding_turns"] == 0.0
    assert stats["approx_kl"] == 0.0
    assert stats.get("entropy", 0.0) == 0.0
    assert math.isnan(stats["commonest_reply"])


def test_a_batch_without_decisions_keeps_the_policy():
    """The optimizer's momentum of earlier batches must not move it either."""
    agent = offering(("left", "right"))
    update(agent, ["x"] * 16)
    before = [weight.detach().clone() for weight in agent.policy.model.pretrained_model.parameters()]
    update(agent, ["forced"] * 16)
    now = agent.policy.model.pretrained_model.parameters()
    assert all(torch.equal(weight, old) for weight, old in zip(now, before, strict=True))


def test_whitening_uses_decisions_only():
    """Large returns after turns that decide nothing must not shrink the advantages of those that do."""
    agent = offering(("left", "right"), "reinforce", batch_size=1000)
    agent.act_batch(["x"] * 4)
    agent.assign_rewards([1.0, -1.0, 1.0, -1.0])
    agent.act_batch(["forced"] * 4, range(4, 8))
    agent.assign_rewards([100.0, -100.0, 100.0, -100.0], range(4, 8))
    agent.terminate_episodes(range(8))
    episodes = list(collector_of(agent).buffer)
    rollout = collect(agent.policy, episodes, segments_of(episodes), max_tokens=1000, with_reference=False)
    targets, _ = agent.learner.compute_targets(episodes, rollout)
    assert targets.advantages[:4].abs().tolist() == pytest.approx([0.75**0.5] * 4, rel=1e-3)


def away_from_its_reference(**options: Any) -> Any:
    """An agent whose policy has moved since its reference was fixed."""
    agent = offering(("left", "right"), init_kl_coef=0.1, **options)
    agent.policy.fix_reference()
    with torch.no_grad():
        for name, weight in agent.policy.model.named_parameters():
            if "lora_B" in name:
                weight.mul_(2.0)
    return agent


def test_the_kl_to_the_reference_is_a_mean_over_decisions():
    both = update(away_from_its_reference(), ["x"] * 8 + ["forced"] * 8)["ref_kl"]
    assert both == pytest.approx(update(away_from_its_reference(batch_size=8), ["x"] * 8)["ref_kl"], rel=1e-4)
    assert abs(both) > 1e-4


def test_replay_loss_is_a_mean_over_decisions():
    losses = []
    for forced in (0, 4):
        agent = offering(("left", "right"), batch_size=1000)
        observations = ["x"] * 4 + ["forced"] * forced
        agent.act_batch(observations)
        # While all have earned the same, none is better than another.
        agent.assign_rewards([1.0, *[0.0] * (len(observations) - 1)])
        agent.terminate_episodes(range(len(observations)))
        losses.append(Replay(agent.policy, ReplayConfig(steps=1)).update(collector_of(agent).buffer)["replay_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize("critic", ["lstd", "gradient"])
def test_minibatches_without_decisions_do_not_hide_a_step_beyond_the_trust_region(critic):
    for seed in range(4):
        agent = offering(
            ("left", "right", "stay"),
            mini_batch_size=4,
            ppo_epochs=1,
            learning_rate=0.03,
            target_kl=0.03,
            critic=critic,
            seed=seed,
        )
        before = agent.action_probabilities(["x"])[0]
        stats = update(agent, ["x"] * 3 + ["forced"] * 13)
        moved = exact_kl(before, agent.action_probabilities(["x"])[0])
        # The region ends at 1.5 times the target.
        assert moved <= 1.5 * 0.03 * stats["step_share"] + 1e-6
        assert stats["approx_kl"] == pytest.approx(moved, rel=0.05, abs=1e-6)


# What follows from it


def test_skipped_steps_do_not_raise_the_learning_rate(monkeypatch):
    """Nothing was measured, so the KL is unknown and not 0."""
    agent = offering(target_kl=0.02)
    # After the warm-up, when a small KL would mean too small a rate.
    agent.learner.optimizer.total_steps = 100
    agent.learner._rate.scale = 0.1
    backward = agent.learner.accelerator.backward
    monkeypatch.setattr(agent.learner.accelerator, "backward", lambda loss: backward(loss * math.nan))
    stats = update(agent, ["x"] * 16)
    assert (stats["skipped_steps"], stats["optimizer_steps"]) == (2.0, 0.0)
    assert agent.learner._rate.scale == 0.1


def test_an_alarm_fires_when_every_update_is_undone(caplog):
    agent = offering(SINGLE, target_kl=1e-12, learning_rate=0.1)
    stats = [update(agent, ["x"] * 16) for _ in range(20)][-1]
    assert stats["learning_rate"] == pytest.approx(0.1 / 1000 * math.sqrt(stats["step_share"]))
    # Whether the first update is undone as well depends on rounding.
    assert re.search(r"in 19 of the last (19|20) updates with information a step led beyond target_kl", caplog.text)


def test_the_adaptive_kl_coefficient_stays_within_bounds():
    controller = AdaptiveKLController(init_kl_coef=0.2, target=6.0, horizon=1.0)
    for kl, bound in ((0.0, 0.0002), (1e9, 200.0), (-5.0, 0.0002)):
        for _ in range(1000):
            controller.update(kl, steps=1)
        assert controller.value == pytest.approx(bound)
    # From a bound it comes back at the usual speed.
    controller.update(1e9, steps=1)
    assert controller.value == pytest.approx(0.00024)


def test_a_checkpoint_keeps_the_distribution_of_recorded_choices(tmp_path):
    """Without it a resumed run would measure another KL than one that was never stopped."""
    agent = offering(SINGLE, batch_size=1000)
    agent.act_batch(["x", "y"])
    agent.assign_rewards([1.0, 0.0])
    agent.terminate_episodes(range(2))
    agent.save_checkpoint(tmp_path / "now")
    resumed = offering(SINGLE, batch_size=1000)
    resumed.load_checkpoint(tmp_path / "now")
    for one, other in zip(collector_of(agent).buffer, collector_of(resumed).buffer, strict=True):
        assert one.turns[0].reply.choice_logprobs == other.turns[0].reply.choice_logprobs
        assert len(other.turns[0].reply.choice_logprobs) == 64
