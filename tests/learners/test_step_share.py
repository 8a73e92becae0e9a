"""How far an update may go follows the information in its batch."""

from __future__ import annotations

import math

import pytest
import torch

from llamagym.learners.advantages import FULL_BATCH, step_share
from llamagym.text.episode import Prompt, Reply, Segment, Turn
from tests.helpers.agents import ChoiceAgent, make_agent

# A turn between two equally likely replies, in nats.
ONE_BIT = math.log(2.0)


def segments(contexts: list[int]) -> list[Segment]:
    """Segments of one turn, each with the same reply to one of some contexts."""
    reply = Reply((8,), (-ONE_BIT,), 0.0, "stop", None, 0)
    return [Segment((Turn(Prompt((5, context), starts_context=True), reply, 0.0, 0.0, True),)) for context in contexts]


def test_steps_are_in_proportion_to_the_turns_of_a_batch():
    for count in (1, 32, 128, FULL_BATCH, 4 * FULL_BATCH):
        share = step_share(torch.randn(count), segments(list(range(count))), ONE_BIT)
        assert share == pytest.approx(min(1.0, count / FULL_BATCH))


def test_few_turns_without_noise_make_full_steps():
    contexts = [index % 2 for index in range(64)]
    certain = torch.tensor([1.0 if context else -1.0 for context in contexts])
    assert step_share(certain, segments(contexts), ONE_BIT) == 1.0
    noise = torch.randn(64, generator=torch.Generator().manual_seed(0))
    assert step_share(noise, segments(contexts), ONE_BIT) == pytest.approx(64 / FULL_BATCH, rel=0.05)


def test_turns_of_a_nearly_certain_policy_count_in_proportion_to_their_entropy():
    advantages = torch.randn(128)
    whole = step_share(advantages, segments(list(range(128))), ONE_BIT)
    assert step_share(advantages, segments(list(range(128))), 5.0) == whole
    assert step_share(advantages, segments(list(range(128))), ONE_BIT / 8) == pytest.approx(whole / 8)
    # A policy that is certain of the wrong reply can still move.
    assert step_share(advantages, segments(list(range(128))), 0.0) == pytest.approx(whole / 100)


def test_a_batch_without_decisions_has_full_share():
    assert step_share(torch.zeros(0), [], 0.0) == 1.0


def test_a_nearly_certain_policy_takes_smaller_steps():
    def share(scale: float) -> float:
        agent = make_agent(
            ChoiceAgent, context="turn", calibrate_choices=False, ppo={"batch_size": 16, "critic": "gradient"}
        )
        with torch.no_grad():
            agent.policy.model.pretrained_model.get_output_embeddings().weight.mul_(scale)
        agent.act_batch([f"{index}" for index in range(16)])
        generator = torch.Generator().manual_seed(0)
        agent.assign_rewards(torch.randn(16, generator=generator).tolist())
        return float(agent.terminate_episodes(range(16))["step_share"])

    assert share(0.0) == pytest.approx(16 / FULL_BATCH)
    assert share(200.0) < 0.5 * share(0.0)
