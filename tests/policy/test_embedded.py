"""The invariants once more, on the real model: what random weights may hide."""

from __future__ import annotations

import math
from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
import torch

from llamagym import Agent, AutoModelForCausalLMWithValueHead, load_model_and_tokenizer, parse_choice
from llamagym.agent.agent import collector_of
from llamagym.models.loading import embedded_model_folder
from llamagym.text.episode import Segment
from tests.helpers.agents import ChoiceAgent, WordAgent, actor_of, settled

TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def loaded():
    return load_model_and_tokenizer("smollm2-135m", device="cpu", dtype="float32")


@pytest.mark.long
def test_float16_represents_the_embedded_weights(loaded):
    """Otherwise its packed copies would take twice the memory, without a word."""
    weights = [weight for weight in loaded[0].pretrained_model.parameters() if not weight.requires_grad]
    assert sum(weight.numel() for weight in weights) > 130_000_000
    assert all(torch.equal(weight, weight.half().float()) for weight in weights)


@pytest.mark.long
@pytest.mark.parametrize("context", ["episode", "turn"])
@pytest.mark.parametrize("kind", [ChoiceAgent, WordAgent])
def test_sampled_recorded_and_trained_are_one(loaded, kind, context):
    model, tokenizer, device = loaded
    agent = kind(
        model,
        tokenizer,
        device,
        {"max_new_tokens": 5},
        {"batch_size": 6, "mini_batch_size": 6, "learning_rate": 1e-3, "gamma": 0.5},
        context=context,
        seed=0,
    )
    settled(agent)
    for step in range(2):
        agent.act_batch(["short", "a good deal longer", "the longest of them by far"] if step else ["a", "bb", "ccc"])
        agent.assign_rewards([1.0, -2.0, 0.5])
    episodes = [actor_of(agent).conversation(env) for env in range(3)]
    turns = [turn for conversation in episodes for turn in conversation.turns]
    segments = [conversation.current_segment() for conversation in episodes]
    if context == "turn":
        segments = [Segment((turn,)) for turn in turns]

    together = agent.policy.evaluate(segments)
    recorded = [logprob for turn in turns for logprob in turn.reply.logprobs]
    assert together.logprobs[together.mask].tolist() == pytest.approx(recorded, abs=TOLERANCE)
    alone = [agent.policy.evaluate([segment]) for segment in segments]
    separately = torch.cat([one.logprobs[one.mask] for one in alone])
    assert separately.tolist() == pytest.approx(recorded, abs=TOLERANCE)

    # Sessions, recalled histories and the shared prefix against reading everything again, turn by turn.
    for segment in segments:
        read: list[int] = []
        for turn in segment.turns:
            read += turn.prompt.ids
            whole = replace(turn.prompt, ids=tuple(read), starts_context=True, shared_length=0)
            agent.policy.backbone.prefix_cache.clear()
            again = agent.policy.evaluate([Segment((replace(turn, prompt=whole),))])
            assert again.logprobs[0].tolist() == pytest.approx(list(turn.reply.logprobs), abs=TOLERANCE)
            assert again.values.item() == pytest.approx(turn.reply.value, abs=TOLERANCE)
            read += turn.reply.ids

    if kind is WordAgent:
        for segment in segments:
            ids = []
            for turn in segment.turns:
                ids += turn.prompt.ids
                start = len(ids)
                ids += turn.reply.ids
                opened = [len(turn.reply.ids) + 1]
                with torch.no_grad():
                    output = model.pretrained_model(input_ids=torch.tensor([ids]), alora_offsets=opened)
                plain = output.logits[0].float().log_softmax(-1)
                for offset, (logprob, token) in enumerate(zip(turn.reply.logprobs, turn.reply.ids, strict=True)):
                    assert plain[start - 1 + offset, token].item() == pytest.approx(logprob, abs=TOLERANCE)

    for env in range(2):
        agent.terminate_episodes([env])
    agent.terminate_episodes([2], [True], ["what would have followed"])
    assert [turn.reward for turn in turns] == [1.0, 1.0, -2.0, -2.0, 0.5, 0.5]
    assert agent.policy.num_updates == 1


class BlackjackAgent(Agent):
    """As a user of the first LlamaGym writes it: free text, the whole conversation, defaults throughout."""

    def get_system_prompt(self) -> str:
        return "You are an expert blackjack player. Reply with one word: stick or hit."

    def format_observation(self, observation) -> str:
        return f"You hold {observation[0]}, the dealer shows {observation[1]}."

    def extract_action(self, response: str) -> int:
        return parse_choice(response, {"stick": 0, "hit": 1})

    def fallback_action(self, observation) -> int:
        return 0


@pytest.mark.long
def test_the_snippet_of_llamagym_runs_with_a_local_path(loaded):
    _, tokenizer, device = loaded
    model = AutoModelForCausalLMWithValueHead.from_pretrained(embedded_model_folder()).to(device)
    agent = BlackjackAgent(model, tokenizer, device)
    action = agent.act((14, 10, 0))
    assert action in (0, 1)
    agent.assign_reward(-1.0)
    train_stats = agent.terminate_episode()
    assert train_stats == {}
    assert collector_of(agent).buffered_turns == 1


class ChoosingAgent(BlackjackAgent):
    """Shows the whole conversation, too."""

    def get_action_choices(self, observation) -> list[str]:
        return ["stick", "hit"]


@pytest.mark.long
def test_untrained_agent_is_undecided_at_every_turn_of_a_conversation(loaded):
    """A model that repeats what it has said would hit to the end of a hand, and learn that to hit is bad."""
    _, tokenizer, device = loaded
    model = AutoModelForCausalLMWithValueHead.from_pretrained(embedded_model_folder()).to(device)
    agent = ChoosingAgent(model, tokenizer, device, ppo_config_dict={"batch_size": 10**6}, seed=0)
    env = gym.make("Blackjack-v1")
    hits: dict[int, list[float]] = {1: [], 2: [], 3: []}
    for episode in range(120):
        observation, _ = env.reset(seed=episode)
        done = False
        while not done:
            action = agent.act(observation)
            turns = actor_of(agent).conversation(0).turns
            if episode >= 50 and len(turns) in hits:
                hits[len(turns)].append(math.exp(turns[-1].reply.choice_logprobs[1]))
            observation, reward, terminated, truncated, _ = env.step(action)
            agent.assign_reward(float(reward))
            done = terminated or truncated
        agent.terminate_episode()
    assert [np.mean(hits[turn]) for turn in hits] == pytest.approx([0.5] * 3, abs=0.25)
