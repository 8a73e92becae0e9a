"""The agent: keeps the conversation of each environment, its rewards, and learns when a batch of turns is full."""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import PreTrainedTokenizerBase

from .chat_template import ChatTemplate, Message, end_ids
from .conversation import Context, Conversation, Episode
from .demonstrations import read_demonstrations
from .errors import ActionParseError, ConfigError, EpisodeError, did_you_mean
from .generation import GenerationConfig
from .policy import Policy
from .ppo import PPO, PPOConfig, Stats
from .replay import Replay, ReplayConfig
from .value_head import AutoModelForCausalLMWithValueHead

logger = logging.getLogger(__name__)


class Agent(ABC):
    """A language model that acts in an environment and learns from its rewards.

    Subclass it with `get_system_prompt`, `format_observation` and `extract_action`, then write the usual loop:

        action = agent.act(observation)
        observation, reward, terminated, truncated, info = env.step(action)
        agent.assign_reward(reward)
        ...
        stats = agent.terminate_episode(truncated=truncated, final_observation=observation)

    `act_batch`, `assign_rewards` and `terminate_episodes` do the same for many environments at once, told apart by
    `env_ids`; the single methods are a batch of one whose id is 0.

    Attributes:
        policy: The model as a stochastic policy.
        learner: What turns episodes into updates.
        demonstrations: The file that `sft_warm_start=True` learns from; a subclass sets it.
    """

    demonstrations: ClassVar[str | Path | None] = None

    def __init__(
        self,
        model: AutoModelForCausalLMWithValueHead,
        tokenizer: PreTrainedTokenizerBase,
        device: torch.device | str | None = None,
        generate_config_dict: dict[str, Any] | None = None,
        ppo_config_dict: dict[str, Any] | None = None,
        *,
        context: Context = "episode",
        response_prefix: str = "",
        invalid_action_penalty: float = -1.0,
        calibrate_choices: bool = True,
        aim_lora: bool = True,
        sft_warm_start: bool = False,
        replay_config_dict: dict[str, Any] | None = None,
        seed: int | None = None,
    ) -> None:
        """Prepare to act and to learn.

        Args:
            model: A causal language model with a value head.
            tokenizer: Its tokenizer, with a chat template.
            device: Where to move the model; None leaves it.
            generate_config_dict: Options of `GenerationConfig`, with or without a `generate/` prefix.
            ppo_config_dict: Options of `PPOConfig`.
            context: "episode" shows the model the whole conversation, as far as it holds it (the oldest turns are
                dropped first), "turn" only the current observation.
            response_prefix: Fixed text that every reply begins with.
            invalid_action_penalty: Added to the reward of a turn whose reply names no action; 0 or negative.
            calibrate_choices: Whether choices are measured against their prior likelihood (see `policy`).
            aim_lora: Whether a fresh LoRA adapter is pointed at what differs between observations (see `lora_init`).
            sft_warm_start: Whether to learn from the class's `demonstrations` at once (see `sft_from_jsonl`).
            replay_config_dict: Options of `ReplayConfig`: after each update, go on learning from the best recent
                episodes; None does not.
            seed: Of sampling and of the order of minibatches.

        Raises:
            ConfigError: An option is unknown or out of range, or `demonstrations` cannot be learnt from.
            ChatTemplateError: The tokenizer's template cannot carry the conversation.
        """
        if context not in ("episode", "turn"):
            raise ConfigError(f"context={context!r}. {did_you_mean(context, ['episode', 'turn'])}")
        if invalid_action_penalty > 0:
            raise ConfigError(
                f"invalid_action_penalty={invalid_action_penalty} would reward replies that name no action."
            )
        if not isinstance(model, AutoModelForCausalLMWithValueHead):
            raise ConfigError(
                f"The model is a {type(model).__name__}; PPO needs a value head. Wrap it: "
                "AutoModelForCausalLMWithValueHead.from_pretrained(model)."
            )
        generation = GenerationConfig.from_dict(generate_config_dict or {})
        options = dict(ppo_config_dict or {})
        config = PPOConfig.from_dict(options if seed is None else {"seed": seed, **options})
        self.tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer, append_only=context == "episode")
        if device is not None:
            model.to(device)
        end = end_ids(model.pretrained_model, tokenizer)
        self.policy = Policy(model, end, generation, calibrate_choices, aim_lora, seed)
        self.learner = PPO(self.policy, config)
        replay = None if replay_config_dict is None else ReplayConfig.from_dict(replay_config_dict)
        self._replay = None if replay is None else Replay(self.policy, replay)
        self._context: Context = context
        self._prefix = response_prefix
        self._penalty = invalid_action_penalty
        self._conversations: dict[Hashable, Conversation] = {}
        self._buffer: list[Episode] = []
        self._learning, self._greedy = True, False
        self._acting_s, self._acted_tokens = 0.0, 0
        if sft_warm_start:
            self.sft_from_jsonl()

    @abstractmethod
    def get_system_prompt(self) -> str:
        """What every conversation opens with; empty for no system prompt."""

    @abstractmethod
    def format_observation(self, observation: Any) -> str:
        """An observation in words."""

    @abstractmethod
    def extract_action(self, response: str) -> Any:
        """The action that a reply names.

        Raises:
            ActionParseError: It names none; any ValueError, or returning None, says the same.
        """

    def get_action_choices(self, observation: Any) -> list[str] | None:
        """The replies allowed for this observation, or None for free text."""
        return None

    def fallback_action(self, observation: Any) -> Any:
        """What to do when a reply names no action."""
        raise NotImplementedError

    def sft_from_jsonl(self, path: str | Path | None = None, **options: Any) -> Stats:
        """Learn from demonstrated replies, before learning from rewards; see `demonstrations` and `sft`.

        Args:
            path: A JSONL file of conversations in chat format; None takes the class's `demonstrations`.
            **options: Options of `WarmStartConfig`, such as `epochs` and `learning_rate`.

        Raises:
            ConfigError: An option, the file or a line of it is missing or invalid.
        """
        from .sft import WarmStartConfig, fine_tune  # TRL's trainer takes seconds to import

        config = WarmStartConfig.from_dict(options)
        end = self._template.closing_id(end_ids(self.policy.model.pretrained_model, self.tokenizer))
        episodes = read_demonstrations(path or self.demonstrations, self._new_conversation, self._prefix, end)
        return fine_tune(self.policy, self.tokenizer, episodes, config)

    def train(self) -> None:
        """Sample, record and learn: the mode an agent starts in."""
        self._learning, self._greedy = True, False

    def eval(self, greedy: bool = True) -> None:
        """Only act: nothing is buffered and no weights change.

        Args:
            greedy: Take the most likely choice or token instead of sampling.
        """
        self._learning, self._greedy = False, greedy

    @property
    def learning(self) -> bool:
        """Whether episodes are recorded and learnt from."""
        return self._learning

    @property
    def greedy(self) -> bool:
        """Whether the most likely choice or token is taken."""
        return self._greedy

    @property
    def buffered_turns(self) -> int:
        """Turns of finished episodes that await the next update."""
        return sum(len(episode.turns) for episode in self._buffer)

    def why_no_update(self) -> str:
        """In words, how far the batch is from full."""
        return (
            f"No update yet: finished episodes hold {self.buffered_turns} turns, and a batch needs "
            f"{self.learner.config.batch_size}. Play more episodes or lower batch_size."
        )

    @property
    def current_episode_messages(self) -> list[Message]:
        """The conversation under way in environment 0, as chat messages."""
        return self.conversation(0).messages

    @property
    def current_episode_rewards(self) -> list[float]:
        """The raw rewards so far of environment 0, one per turn."""
        return [turn.reward for turn in self.conversation(0).turns]

    def conversation(self, env_id: Hashable) -> Conversation:
        """The conversation under way in an environment; a new one if none is."""
        if env_id not in self._conversations:
            self._conversations[env_id] = self._new_conversation()
        return self._conversations[env_id]

    def act(self, observation: Any) -> Any:
        """Choose an action for one environment: `act_batch` of one."""
        return self.act_batch([observation], [0])[0]

    def assign_reward(self, reward: float) -> None:
        """Add a reward to the last action of one environment."""
        self.assign_rewards([reward], [0])

    def terminate_episode(self, train: bool = True, truncated: bool = False, final_observation: Any = None) -> Stats:
        """End the episode of one environment; see `terminate_episodes`."""
        return self.terminate_episodes([0], [truncated], [final_observation], train=train)

    def act_batch(self, observations: Sequence[Any], env_ids: Sequence[Hashable] | None = None) -> list[Any]:
        """Choose an action for each of several environments.

        Args:
            observations: One per environment.
            env_ids: Which environments; by default 0, 1, 2, ...

        Returns:
            One action per observation.

        Raises:
            NotImplementedError: A reply named no action and `fallback_action` is not defined.
        """
        ids = _environments(observations, env_ids, "observations")
        started, forwarded = time.perf_counter(), self.policy.tokens_forwarded
        conversations = [self.conversation(env_id) for env_id in ids]
        choices = [self.get_action_choices(observation) for observation in observations]
        contexts = []
        try:
            for conversation, observation, offered in zip(conversations, observations, choices, strict=True):
                contexts.append(conversation.observe(self.format_observation(observation), self._prefix, offered))
            replies = self.policy.sample(contexts, self._learning, self._greedy)
        except BaseException:
            # A caller that mends the cause can act again on the same observations.
            for conversation in conversations[: len(contexts)]:
                conversation.withdraw()
            raise
        actions = []
        for conversation, observation, offered, reply in zip(
            conversations, observations, choices, replies, strict=True
        ):
            if offered is not None and reply.choice_index is not None:
                said = offered[reply.choice_index]
            else:
                said = str(self.tokenizer.decode(list(reply.ids), skip_special_tokens=True))
            text = self._prefix + said
            turn = conversation.answer(reply, text)
            action = self._extract(text)
            if action is None:
                turn.valid, turn.penalty = False, self._penalty
                action = self._fallback(observation, text)
            actions.append(action)
        self._acting_s += time.perf_counter() - started
        self._acted_tokens += self.policy.tokens_forwarded - forwarded
        return actions

    def assign_rewards(self, rewards: Sequence[float], env_ids: Sequence[Hashable] | None = None) -> None:
        """Add each environment's reward to its last action; several rewards for one action add up."""
        ids = _environments(rewards, env_ids, "rewards")
        for reward, env_id in zip(rewards, ids, strict=True):
            if not self.conversation(env_id).turns:
                raise EpisodeError(f"Reward {reward} for environment {env_id!r} follows no action. Call act() first.")
            if not math.isfinite(reward):
                raise EpisodeError(f"Reward {reward} for environment {env_id!r} is not finite. Check the environment.")
        for reward, env_id in zip(rewards, ids, strict=True):
            self.conversation(env_id).turns[-1].reward += float(reward)

    def terminate_episodes(
        self,
        env_ids: Sequence[Hashable],
        truncated: Sequence[bool] | None = None,
        final_observations: Sequence[Any] | None = None,
        train: bool = True,
    ) -> Stats:
        """End episodes, and learn if that fills a batch.

        A batch is the oldest whole episodes that hold `batch_size` turns; episodes beyond it stay for the next.

        Args:
            env_ids: Environments whose episodes ended.
            truncated: Which of them were cut off rather than finished; by default none.
            final_observations: The observation after the last step, needed for those that were cut off.
            train: Whether these episodes are learnt from; if not, they are dropped.

        Returns:
            Statistics of the update, or an empty dictionary if none ran.
        """
        cut = list(truncated) if truncated is not None else [False] * len(env_ids)
        finals = list(final_observations) if final_observations is not None else [None] * len(env_ids)
        for env_id, was_cut, final in zip(env_ids, cut, finals, strict=True):
            if env_id not in self._conversations or not self._conversations[env_id].turns:
                raise EpisodeError(f"Environment {env_id!r} has no episode to end. Call act() at least once first.")
            if was_cut and final is None and self._learning and train:
                raise EpisodeError(
                    f"The episode of environment {env_id!r} was truncated, but its final observation is missing, so "
                    "what would have followed cannot be valued. Pass final_observation=observation, from env.step()."
                )
        if self._learning and train:
            values = self._final_values([i for i, was_cut in enumerate(cut) if was_cut], env_ids, finals)
            for index, (env_id, was_cut) in enumerate(zip(env_ids, cut, strict=True)):
                turns = tuple(self._conversations[env_id].turns)
                self._buffer.append(Episode(turns, not was_cut, bool(was_cut), values.get(index, 0.0)))
        self.discard_episodes(env_ids)
        return self._learn() if self._learning and train else {}

    def discard_episodes(self, env_ids: Sequence[Hashable]) -> None:
        """Forget episodes under way, without learning from them."""
        for env_id in env_ids:
            self._conversations.pop(env_id, None)

    def action_probabilities(self, observations: Sequence[Any]) -> list[dict[str, float]]:
        """Exact probability of each choice at the start of an episode, for observations that offer choices.

        Raises:
            ConfigError: An observation offers no choices.
        """
        contexts = []
        offers: list[list[str]] = []
        for observation in observations:
            offered = self.get_action_choices(observation)
            if offered is None:
                raise ConfigError(
                    f"Observation {observation!r} offers no choices, so its replies cannot be enumerated. Define "
                    "get_action_choices()."
                )
            offers.append(offered)
            conversation = self._new_conversation()
            contexts.append(conversation.observe(self.format_observation(observation), self._prefix, offered))
        logprobs = self.policy.choice_logprobs(contexts)
        return [
            dict(zip(offered, row.exp().tolist(), strict=True)) for offered, row in zip(offers, logprobs, strict=True)
        ]

    def _new_conversation(self) -> Conversation:
        return Conversation(
            self._template,
            self.get_system_prompt(),
            self._context,
            self.policy.max_length,
            self.policy.generation.max_new_tokens,
        )

    def _extract(self, text: str) -> Any:
        try:
            return self.extract_action(text)
        except (ActionParseError, ValueError) as problem:
            logger.debug("invalid reply: %s", problem)
            return None

    def _fallback(self, observation: Any, text: str) -> Any:
        try:
            return self.fallback_action(observation)
        except NotImplementedError:
            raise NotImplementedError(
                f"Reply {text!r} names no action, and {type(self).__name__} does not say what to do then. Define "
                "fallback_action(observation), or restrict replies with get_action_choices(observation)."
            ) from None

    def _final_values(self, cut: list[int], env_ids: Sequence[Hashable], finals: Sequence[Any]) -> dict[int, float]:
        """The critic's estimate of each final observation, by index into `env_ids`."""
        if not cut:
            return {}
        contexts = []
        for index in cut:
            conversation = self._conversations[env_ids[index]]
            contexts.append(conversation.observe(self.format_observation(finals[index]), self._prefix))
        values = self.policy.values(contexts)
        return dict(zip(cut, values, strict=True))

    def _learn(self) -> Stats:
        """Update once if the buffer holds a batch."""
        size, count = 0, 0
        while size < self.learner.config.batch_size and count < len(self._buffer):
            size += len(self._buffer[count].turns)
            count += 1
        if size < self.learner.config.batch_size:
            return {}
        stats = self.learner.update(self._buffer[:count])
        if self._replay is not None:
            stats |= self._replay.update(self._buffer[:count])
        del self._buffer[:count]
        stats |= {"act_s": self._acting_s, "act_tokens": float(self._acted_tokens)}
        self._acting_s, self._acted_tokens = 0.0, 0
        return stats


def _environments(items: Sequence[Any], env_ids: Sequence[Hashable] | None, what: str) -> list[Hashable]:
    ids: list[Hashable] = list(range(len(items))) if env_ids is None else list(env_ids)
    if len(ids) != len(items) or len(set(ids)) != len(ids):
        raise EpisodeError(
            f"{len(items)} {what} came for environments {ids}. Pass one for each of distinct environments."
        )
    return ids
