"""Refuses what cannot be learned from, or by, before anything is computed."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Hashable, Iterable, Sequence
from numbers import Integral
from typing import Any, SupportsFloat
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn

from ..errors import ConfigError, EpisodeError, excerpt
from ..models.lock import language_model_of
from ..models.value_head import AutoModelForCausalLMWithValueHead
from ..options import as_number
from ..text.episode import Conversation, Episode

logger = logging.getLogger(__name__)

# Of an action: in float32 the squares of the returns of a large batch of long episodes still add up to a finite number.
_LARGEST_REWARD = 1e12
# Agents by the language model that they act with.
_AGENTS: WeakKeyDictionary[nn.Module, WeakSet[Any]] = WeakKeyDictionary()
_WARNED: WeakSet[nn.Module] = WeakSet()


def warn_if_shared(agent: Any, model: AutoModelForCausalLMWithValueHead) -> None:
    """Warn, once for each model, where another agent acts with the same weights."""
    base = language_model_of(model)
    others = _AGENTS.setdefault(base, WeakSet())
    if others and base not in _WARNED:
        # An agent that was deleted may still wait for the garbage collector.
        gc.collect()
        if others:
            _WARNED.add(base)
            logger.warning(
                "This %s has the same model as another %s: both act with the same weights, and what one learns changes "
                "the other. For agents that learn apart, load the model once for each. For self-play with one policy, "
                "take one agent and give each player an environment id of its own (act_batch(..., env_ids=...)).",
                type(agent).__name__,
                type(next(iter(others))).__name__,
            )
    others.add(agent)


def check_episodes(episodes: Sequence[Episode]) -> None:
    """Refuse a batch that has nothing to learn from.

    Raises:
        EpisodeError: There are no episodes, or one has no turns.
    """
    if not episodes or not all(episode.turns for episode in episodes):
        raise EpisodeError(
            f"An update was given {len(episodes)} episodes of {[len(episode.turns) for episode in episodes]} turns. "
            "Pass at least one, and none without turns."
        )


def check_reward(reward: float, place: int, conversation: Conversation, env_id: Hashable) -> None:
    """Rejects a reward for a missing or already trained turn, or one that is not a finite number.

    Args:
        reward: To be added to what the action has earned.
        place: Of the action's turn, from 0, or from the end by negative numbers.
        conversation: Of the environment, with at least one turn.
        env_id: The environment's.

    Raises:
        EpisodeError: It is such a reward.
    """
    count = len(conversation.turns)
    is_whole = isinstance(place, Integral) and not isinstance(place, bool)
    if not is_whole or not -count <= place < count:
        raise EpisodeError(
            f"Reward {excerpt(reward)} is for turn {excerpt(place)} of environment {env_id!r}, whose episode has "
            f"{count} turns. Pass a whole number from {-count} to {count - 1}; rewards of an episode that has ended "
            "cannot be changed."
        )
    if place % count < conversation.learned_turns:
        raise EpisodeError(
            f"Reward {excerpt(reward)} for turn {place} of environment {env_id!r} comes too late: its first "
            f"{conversation.learned_turns} turns have been learned from. Pass a judge to train(), which then "
            "learns from whole episodes."
        )
    number = as_number(reward)
    if not math.isfinite(number):
        raise EpisodeError(
            f"Reward {excerpt(reward)} for environment {env_id!r} is not a finite number. Check the environment."
        )
    total = conversation.turns[int(place)].reward + number
    if not abs(total) < _LARGEST_REWARD:
        raise EpisodeError(
            f"Reward {excerpt(reward)} for environment {env_id!r} brings the sum of its action's rewards to "
            f"{total:.3g}, and float32 cannot learn from {_LARGEST_REWARD:.0e} or more. Scale the rewards."
        )


def check_end(env_id: Hashable, has_turns: bool, lacks_final: bool) -> None:
    """Refuse the end of an episode.

    Args:
        env_id: The environment's.
        has_turns: Whether there is an episode at all.
        lacks_final: Whether it was cut off, and the observation to value the rest by is missing.

    Raises:
        EpisodeError: There is none, or that is so.
    """
    if not has_turns:
        raise EpisodeError(f"Environment {env_id!r} has no episode to end. Call act() at least once first.")
    if lacks_final:
        raise EpisodeError(
            f"The episode of environment {env_id!r} was truncated, but its final observation is missing, so what would "
            "have followed cannot be valued. Pass final_observation=observation, from env.step()."
        )


def check_samples(
    queries: Sequence[Tensor],
    responses: Sequence[Tensor],
    scores: Sequence[Tensor | float],
    batch_size: int,
    vocabulary: int,
) -> None:
    """Check what a step is given.

    Args:
        queries: Token ids of each prompt.
        responses: Token ids of each reply.
        scores: How good each reply is.
        batch_size: How many there must be of each.
        vocabulary: Ids that the model knows.

    Raises:
        ConfigError: There are more or fewer, a sequence is empty or holds other ids, or a score is not one finite
            number.
    """
    given = {"queries": queries, "responses": responses, "scores": scores}
    for name, values in given.items():
        if isinstance(values, str) or not hasattr(values, "__len__"):
            raise ConfigError(f"{name} is {excerpt(values)}, expected a list with one entry a sample.")
    lengths = {name: len(values) for name, values in given.items()}
    if set(lengths.values()) != {batch_size}:
        raise ConfigError(
            f"A step takes batch_size={batch_size} of each, received {lengths}. Pass as many, or build the trainer "
            "with another batch_size."
        )
    for name, sequences in (("queries", queries), ("responses", responses)):
        for index, ids in enumerate(sequences):
            if not isinstance(ids, Tensor) or ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
                received = ids.dtype if isinstance(ids, Tensor) else excerpt(ids)
                raise ConfigError(
                    f"{name}[{index}] is {received}, expected a tensor of token ids, int64 (length,). Pass "
                    "torch.tensor(tokenizer(text).input_ids)."
                )
            if ids.ndim != 1 or not len(ids):
                raise ConfigError(
                    f"{name}[{index}] has shape {tuple(ids.shape)}, expected (length,) with at least one token id. "
                    "Squeeze a batch dimension away; a query needs at least the token that opens the text."
                )
            if not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
                raise ConfigError(
                    f"{name}[{index}] holds ids from {int(ids.min())} to {int(ids.max())}, and the model knows 0 to "
                    f"{vocabulary - 1}. The tokenizer may be another model's."
                )
    for index, score in enumerate(scores):
        if not isinstance(score, SupportsFloat):
            raise ConfigError(f"scores[{index}] is {excerpt(score)}, expected a number.")
        if (shape := tuple(getattr(score, "shape", ()))) and math.prod(shape) != 1:
            raise ConfigError(f"scores[{index}] has shape {shape}, expected one number per response.")
        if not math.isfinite(as_number(score)):
            raise ConfigError(f"scores[{index}] is {excerpt(score)}, expected a finite number. Check the reward.")


def check_trainer(config: object, kind: type, *models: object) -> None:
    """Check what a trainer is made of.

    Args:
        config: Its configuration.
        kind: What that must be.
        models: The model and its reference, which may be None.

    Raises:
        ConfigError: One is something else.
    """
    if not isinstance(config, kind):
        raise ConfigError(
            f"config is {excerpt(config)}, expected a {kind.__name__}. Pass {kind.__name__}(batch_size=...)."
        )
    for model, name in zip(models, ("model", "ref_model"), strict=True):
        if not isinstance(model, AutoModelForCausalLMWithValueHead) and not (model is None and name == "ref_model"):
            raise ConfigError(
                f"{name} is a {type(model).__name__}, expected a model with a value head. Pass "
                "AutoModelForCausalLMWithValueHead.from_pretrained(model)."
            )


def check_trainable(model: AutoModelForCausalLMWithValueHead) -> None:
    """Reject a language model of which no weight learns.

    Raises:
        ConfigError: All are frozen.
    """
    if not any(weight.requires_grad for weight in model.pretrained_model.parameters()):
        what = "its adapter was loaded for inference" if model.is_peft_model else "all its weights are frozen"
        raise ConfigError(
            f"Nothing of {type(model.pretrained_model).__name__} can be trained: {what}. Load an adapter with "
            "PeftModel.from_pretrained(..., is_trainable=True), pass a peft_config, or call "
            "model.pretrained_model.requires_grad_(True) to train all weights."
        )


def check_precision(weights: Iterable[Tensor]) -> None:
    """Refuse to train weights in half precision: rounding them would swallow most steps.

    Raises:
        ConfigError: Some have fewer than 32 bits.
    """
    halves = sorted({str(weight.dtype) for weight in weights if torch.finfo(weight.dtype).bits < 32})
    if halves:
        raise ConfigError(
            f"Some of the weights that learn are {', '.join(halves)}, and a step of the usual size is lost in their "
            "rounding. Load the model with dtype='float32', or train an adapter: PEFT keeps its weights in float32."
        )
