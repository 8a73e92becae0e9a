"""An agent beside plain transformers and PEFT, which read one unpadded sequence at a time and cache nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llamagym import Agent
from llamagym.policy.evaluation import Evaluation
from llamagym.text.episode import Segment, Turn, segments_of
from tests.helpers.agents import actor_of

CHOICES = ("go left", "go right", "stay")


@dataclass(frozen=True)
class Difference:
    """How far an agent is from plain transformers; 0 but for rounding.

    Attributes:
        acting: Largest difference of log-probabilities of sampled tokens.
        choosing: Largest difference of log-probabilities at the nodes of a tree of choices.
        learning: Largest difference of log-probabilities as they are trained.
        gradient: Largest difference of the gradient, relative to its norm.
    """

    acting: float
    choosing: float
    learning: float
    gradient: float

    @property
    def largest(self) -> float:
        """The largest of all, NaN if one of them is."""
        return float(torch.tensor([self.acting, self.choosing, self.learning, self.gradient]).max())


def plain_logits(model: Any, ids: Sequence[int], opening: int) -> Tensor:
    """Logits (T, V) of a sequence whose reply opens at a token, from a model's own forward pass."""
    # An activated LoRA is told where the reply begins.
    config = getattr(model, "active_peft_config", None)
    activated = getattr(config, "alora_invocation_tokens", None) is not None
    told = {"alora_offsets": [len(ids) - opening]} if activated else {}
    logits: Tensor = model(input_ids=torch.tensor([list(ids)]), **told).logits[0]
    return logits.float()


def trained_weights(agent: Agent) -> list[Tensor]:
    """All weights of the language model that learn."""
    return [weight for weight in agent.policy.model.pretrained_model.parameters() if weight.requires_grad]


def play(agent: Any, steps: int, envs: int) -> list[Any]:
    """Let every environment take some turns, of observations of different lengths; returns their conversations."""
    for step in range(steps):
        agent.act_batch(["x" * (3 * env + step) for env in range(envs)])
        agent.assign_rewards([0.0] * envs)
    return [actor_of(agent).conversation(env) for env in range(envs)]


def plain_turns(model: Any, segment: Segment) -> list[tuple[Turn, Tensor]]:
    """Each turn with the log-probabilities (L,) of its reply's tokens, from a model's own forward pass."""
    ids: list[int] = []
    found = []
    for turn in segment.turns:
        ids += turn.prompt.ids
        opening, start = len(ids) - turn.prompt.opening_length, len(ids)
        ids += turn.reply.ids
        logprobs = plain_logits(model, ids, opening)[start - 1 : -1].log_softmax(-1)
        found.append((turn, logprobs.gather(1, torch.tensor(turn.reply.ids)[:, None])[:, 0]))
    return found


def compare(agent: Any, steps: int = 3, envs: int = 3) -> Difference:
    """Play with an agent that replies in free text, and compare what it computed with plain transformers.

    Args:
        agent: With a random model, whose replies end late or never.
        steps: Turns of each environment.
        envs: Environments, whose observations have different lengths.
    """
    conversations = play(agent, steps, envs)
    segments = segments_of([talk.finished(False, None) for talk in conversations])
    model = agent.policy.model.pretrained_model
    turns = [turn for segment in segments for turn in plain_turns(model, segment)]
    acting = max(far_apart(torch.tensor(turn.reply.logprobs), expected) for turn, expected in turns)
    # What was kept while acting must not stand in for what is computed.
    agent.policy.backbone.prefix_cache.clear()
    weights = trained_weights(agent)
    received = agent.policy.evaluate(segments)
    learning = largest_error(received, turns)
    own = gradients(received.logprobs.sum(), weights)
    plain = gradients(torch.cat([expected for _, expected in turns]).sum(), weights)
    gradient = float((own - plain).norm() / plain.norm())
    return Difference(acting, choosing_error(agent, conversations), learning, gradient)


def reference_error(agent: Any, base: Any) -> float:
    """Largest difference of log-probabilities of the reference policy, without the adapter, and of the base alone."""
    segments = segments_of([actor_of(agent).conversation(0).finished(False, None)])
    turns = [turn for segment in segments for turn in plain_turns(base, segment)]
    with torch.no_grad():
        return largest_error(agent.policy.evaluate(segments, reference=True), turns)


def largest_error(received: Evaluation, turns: Sequence[tuple[Turn, Tensor]]) -> float:
    """Largest difference of evaluated log-probabilities and those of turns."""
    rows = [row[mask] for row, mask in zip(received.logprobs, received.mask, strict=True)]
    return max(far_apart(row, expected) for row, (_, expected) in zip(rows, turns, strict=True))


def far_apart(received: Tensor, expected: Tensor) -> float:
    """Largest difference of numbers."""
    return float((received - expected).detach().abs().max())


def gradients(value: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Gradients of a number by all weights, as one vector."""
    found = torch.autograd.grad(value, list(weights), allow_unused=True, materialize_grads=True)
    return torch.cat([of_weight.flatten() for of_weight in found])


@torch.no_grad()
def choosing_error(agent: Any, conversations: Sequence[Any]) -> float:
    """Largest difference of log-probabilities at the nodes of trees of choices that follow conversations."""
    contexts = [talk.observe("and now?", "", CHOICES) for talk in conversations]
    errors = []
    trees = agent.policy.trees.of(contexts)
    backbone = agent.policy.backbone
    own = backbone.transformer.logits(backbone.hidden_states(trees)).float().log_softmax(-1)
    model = agent.policy.model.pretrained_model
    first = 0
    for tree in trees:
        before = [*tree.prefix, *tree.history]
        for node, path in enumerate(tree.paths()):
            expected = plain_logits(model, [*before, *path], len(before))[-1].log_softmax(-1)
            errors.append(far_apart(own[first + node], expected))
        first += tree.node_count
    return max(errors)
