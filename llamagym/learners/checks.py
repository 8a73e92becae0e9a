"""Checks of rewards, episodes, samples and models before anything is computed."""

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
from ..text.episode import Episode, Turn

logger = logging.getLogger(__name__)

# Largest reward of an action: in float32 the squared returns of a large batch of long episodes have a finite sum.
_MAX_REWARD = 1e12
# Agents by the language model that they act with.
_AGENTS: WeakKeyDictionary[nn.Module, WeakSet[Any]] = WeakKeyDictionary()
_WARNED: WeakSet[nn.Module] = WeakSet()


def warn_if_shared(agent: Any, model: AutoModelForCausalLMWithValueHead) -> None:
    """Warns, once per model, if another agent acts with the same weights."""
    base = language_model_of(model)
    others = _AGENTS.setdefault(base, WeakSet())
    if others and base not in _WARNED:
        # An agent that was deleted may still wait for the garbage collector.
        gc.collect()
        if others:
            _WARNED.add(base)
            logger.warning(
                "This %s has the same model as another %s: both act with the same weights, and what one learns changes "
                "the other. For agents that learn separately, load the model once for each. For self-play with one "
                "policy, use one agent and an environment id per player (act_batch(..., env_ids=...)).",
                type(agent).__name__,
                type(next(iter(others))).__name__,
            )
    others.add(agent)


def check_episodes(episodes: Sequence[Episode]) -> None:
    """Rejects a batch without episodes, or with an episode without turns.

    Raises:
        EpisodeError: The batch is invalid.
    """
    if not episodes or not all(episode.turns for episode in episodes):
        raise EpisodeError(
            f"An update received {len(episodes)} episodes of {[len(episode.turns) for episode in episodes]} turns. "
            "Pass at least one episode, each with at least one turn."
        )


def check_reward(reward: float, turn: int, turns: Sequence[Turn], learned_turns: int, owner: str) -> None:
    """Rejects a reward for a missing or already trained turn, or one that is not a finite number.

    Args:
        reward: The reward to add to the action's.
        turn: Index of the action's turn; negative numbers count from the end.
        turns: The turns of the episode so far, at least one.
        learned_turns: Number of leading turns that updates have learned from.
        owner: Environment or episode that the reward is for, in words.

    Raises:
        EpisodeError: The turn or the reward is invalid.
    """
    count = len(turns)
    is_integer = isinstance(turn, Integral) and not isinstance(turn, bool)
    if not is_integer or not -count <= turn < count:
        raise EpisodeError(
            f"Reward {excerpt(reward)} is for turn {excerpt(turn)} of {owner}, which has {count} turns so far. Pass a "
            f"whole number from {-count} to {count - 1}; rewards of an episode that has ended cannot be changed."
        )
    if turn % count < learned_turns:
        raise EpisodeError(
            f"Reward {excerpt(reward)} for turn {turn} of {owner} comes too late: its first "
            f"{learned_turns} turns have been learned from. Pass a judge to train(), which then "
            "learns from whole episodes."
        )
    number = as_number(reward)
    if not math.isfinite(number):
        raise EpisodeError(f"Reward {excerpt(reward)} for {owner} is not a finite number. Check where it comes from.")
    total = turns[int(turn)].reward + number
    if not abs(total) < _MAX_REWARD:
        raise EpisodeError(
            f"Reward {excerpt(reward)} for {owner} brings the sum of its action's rewards to "
            f"{total:.3g}, and float32 cannot learn from {_MAX_REWARD:.0e} or more. Scale the rewards."
        )


def check_end(env_id: Hashable, has_turns: bool, lacks_final: bool) -> None:
    """Rejects the end of an episode that is not running, or that was truncated without its final observation.

    Args:
        env_id: Id of the environment.
        has_turns: Whether an episode is running.
        lacks_final: Whether the episode was truncated and lacks its final observation.

    Raises:
        EpisodeError: No episode is running, or a truncated episode lacks its final observation.
    """
    if not has_turns:
        raise EpisodeError(f"Environment {env_id!r} has no episode to end. Call act() at least once first.")
    if lacks_final:
        raise EpisodeError(
            f"The episode of environment {env_id!r} was truncated, but its final observation is missing, from which "
            "the critic bootstraps. Pass final_observation=observation, from env.step()."
        )


def check_samples(
    queries: Sequence[Tensor],
    responses: Sequence[Tensor],
    scores: Sequence[Tensor | float],
    batch_size: int,
    vocabulary: int,
) -> None:
    """Checks the samples of a `PPOTrainer` step.

    Args:
        queries: Token ids of each prompt.
        responses: Token ids of each reply.
        scores: Score of each reply.
        batch_size: Expected length of each list.
        vocabulary: Number of token ids of the model.

    Raises:
        ConfigError: A list has another length, a sequence is empty or holds invalid ids, or a score is not one finite
            number.
    """
    samples = {"queries": queries, "responses": responses, "scores": scores}
    for name, values in samples.items():
        if isinstance(values, str) or not hasattr(values, "__len__"):
            raise ConfigError(f"{name} is {excerpt(values)}, expected a list with one entry per sample.")
    lengths = {name: len(values) for name, values in samples.items()}
    if set(lengths.values()) != {batch_size}:
        raise ConfigError(
            f"A step takes batch_size={batch_size} of each, received {lengths}. Pass as many, or create the trainer "
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
                    "Remove a batch dimension with squeeze(); a query needs at least the token that opens the text."
                )
            if not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
                raise ConfigError(
                    f"{name}[{index}] holds ids from {int(ids.min())} to {int(ids.max())}, but the model's are 0 to "
                    f"{vocabulary - 1}. The tokenizer may be another model's."
                )
    for index, score in enumerate(scores):
        if not isinstance(score, SupportsFloat):
            raise ConfigError(f"scores[{index}] is {excerpt(score)}, expected a number.")
        shape = tuple(getattr(score, "shape", ()))
        if shape and math.prod(shape) != 1:
            raise ConfigError(f"scores[{index}] has shape {shape}, expected one number per response.")
        if not math.isfinite(as_number(score)):
            raise ConfigError(f"scores[{index}] is {excerpt(score)}, expected a finite number. Check the reward.")


def check_trainer(config: object, config_class: type, model: object, ref_model: object) -> None:
    """Checks the types of a trainer's arguments.

    Args:
        config: The configuration.
        config_class: Its expected class.
        model: The model.
        ref_model: The reference model, or None.

    Raises:
        ConfigError: An argument has another type.
    """
    if not isinstance(config, config_class):
        expected = config_class.__name__
        raise ConfigError(f"config is {excerpt(config)}, expected a {expected}. Pass {expected}(batch_size=...).")
    models = {"model": model} if ref_model is None else {"model": model, "ref_model": ref_model}
    for name, model in models.items():
        if not isinstance(model, AutoModelForCausalLMWithValueHead):
            raise ConfigError(
                f"{name} is a {type(model).__name__}, expected a model with a value head. Pass "
                "AutoModelForCausalLMWithValueHead.from_pretrained(model)."
            )


def check_trainable(model: AutoModelForCausalLMWithValueHead) -> None:
    """Rejects a language model without trainable weights.

    Raises:
        ConfigError: All weights are frozen.
    """
    if not any(weight.requires_grad for weight in model.pretrained_model.parameters()):
        reason = "its adapter was loaded for inference" if model.is_peft_model else "all its weights are frozen"
        raise ConfigError(
            f"Nothing of {type(model.pretrained_model).__name__} can be trained: {reason}. Load an adapter with "
            "PeftModel.from_pretrained(..., is_trainable=True), pass a peft_config, or call "
            "model.pretrained_model.requires_grad_(True) to train all weights."
        )


def check_precision(weights: Iterable[Tensor]) -> None:
    """Rejects trainable weights in half precision, whose rounding would lose most steps.

    Raises:
        ConfigError: Some weights have fewer than 32 bits.
    """
    halves = sorted({str(weight.dtype) for weight in weights if torch.finfo(weight.dtype).bits < 32})
    if halves:
        raise ConfigError(
            f"Some trainable weights are {', '.join(halves)}, and steps of the usual size are lost in their rounding. "
            "Load the model with dtype='float32', or train an adapter: PEFT keeps its weights in float32."
        )
