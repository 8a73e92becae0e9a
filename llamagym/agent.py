"""The agent: keeps the conversation of each environment, its rewards, and learns when a batch of turns is full."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar, SupportsFloat

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from .conversation.chat_template import ChatTemplate, check_vocabulary, end_ids
from .conversation.demonstrations import read_demonstrations
from .conversation.episode import Context, Episode, commonest_reply, environment_ids, one_each
from .errors import ConfigError, EpisodeError
from .learners.alarms import Alarms
from .learners.algorithms import Algorithm, make_learner
from .learners.base import Stats
from .learners.grpo import GRPOConfig, ReinforceConfig
from .learners.ppo import PPOConfig
from .learners.replay import Replay, ReplayConfig
from .models.generation import GenerationConfig
from .models.lock import alone
from .models.lora import redraw_
from .models.value_head import AutoModelForCausalLMWithValueHead
from .policy.actor import Actor
from .policy.choices import ChoiceNormalization, choice_length
from .policy.policy import Policy

logger = logging.getLogger(__name__)

_LARGEST_REWARD = torch.finfo(torch.float32).max ** 0.5


class Agent(Actor):
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
        generate_config_dict: dict[str, Any] | GenerationConfig | None = None,
        ppo_config_dict: dict[str, Any] | PPOConfig | None = None,
        *,
        algorithm: Algorithm = "ppo",
        grpo_config_dict: dict[str, Any] | GRPOConfig | None = None,
        reinforce_config_dict: dict[str, Any] | ReinforceConfig | None = None,
        use_target_kl: bool = False,
        context: Context = "episode",
        response_prefix: str = "",
        invalid_action_penalty: float = -1.0,
        calibrate_choices: bool = True,
        choice_normalization: ChoiceNormalization = "none",
        aim_lora: bool = True,
        sft_warm_start: bool = False,
        replay_config_dict: dict[str, Any] | ReplayConfig | None = None,
        seed: int | None = None,
    ) -> None:
        """Prepare to act and to learn.

        Args:
            model: A causal language model with a value head.
            tokenizer: Its tokenizer, with a chat template.
            device: Where to move the model; None leaves it.
            generate_config_dict: A `GenerationConfig` or its options, with or without a `generate/` prefix.
            ppo_config_dict: A `PPOConfig` or its options.
            algorithm: What turns episodes into updates.
            grpo_config_dict: A `GRPOConfig` or its options, with algorithm="grpo".
            reinforce_config_dict: A `ReinforceConfig` or its options, with algorithm="reinforce".
            use_target_kl: Steer updates to a KL of `target_kl`, or of 0.03 where no such option is given.
            context: "episode" shows the model the whole conversation, as far as it holds it (the oldest turns are
                dropped first), "turn" only the current observation.
            response_prefix: Fixed text that every reply begins with.
            invalid_action_penalty: Added to the reward of a turn whose reply names no action; 0 or negative.
            calibrate_choices: Whether choices are measured against their prior likelihood (see `policy`).
            choice_normalization: Whether a choice's log-likelihood counts whole ("none"), per "token" or per "word",
                so that a long choice is not unlikely for its length alone.
            aim_lora: Whether a fresh LoRA adapter is pointed at what differs between observations (see `adapter`).
            sft_warm_start: Whether to learn from the class's `demonstrations` at once (see `sft_from_jsonl`).
            replay_config_dict: A `ReplayConfig` or its options: after each update, go on learning from the best recent
                episodes; None does not.
            seed: Of sampling, of the order of minibatches, of a fresh LoRA and of the episodes that `train` plays.

        Raises:
            ConfigError: An option is unknown or out of range, or `demonstrations` cannot be learnt from.
            ChatTemplateError: The tokenizer's template cannot carry the conversation.
        """
        if not isinstance(model, AutoModelForCausalLMWithValueHead):
            raise ConfigError(
                f"The model is a {type(model).__name__}; PPO needs a value head. Wrap it: "
                "AutoModelForCausalLMWithValueHead.from_pretrained(model)."
            )
        generation = GenerationConfig.from_dict(generate_config_dict or {})
        check_vocabulary(model.pretrained_model, tokenizer)
        template = ChatTemplate(tokenizer, append_only=context == "episode")
        if device is not None:
            model.to(device)
        end = end_ids(model.pretrained_model, tokenizer)
        length = choice_length(choice_normalization, lambda ids: str(tokenizer.decode(ids)))
        policy = Policy(model, end, generation, calibrate_choices, aim_lora, seed, length)
        if seed is not None and not policy.inputs_are_fit:
            redraw_(model.pretrained_model, seed)
        super().__init__(policy, tokenizer, template, context, response_prefix, invalid_action_penalty)
        self._seeds = np.random.default_rng(seed)
        options = {"ppo": ppo_config_dict, "grpo": grpo_config_dict, "reinforce": reinforce_config_dict}
        self.learner = make_learner(self.policy, algorithm, options, use_target_kl, seed)
        replay = None if replay_config_dict is None else ReplayConfig.from_dict(replay_config_dict)
        self._replay = None if replay is None else Replay(self.policy, replay)
        self._alarms = Alarms(model.pretrained_model.dtype)
        self._buffer: list[Episode] = []
        if sft_warm_start:
            self.sft_from_jsonl()

    @alone
    def sft_from_jsonl(self, path: str | Path | None = None, **options: Any) -> Stats:
        """Learn from demonstrated replies, before learning from rewards; see `demonstrations` and `sft`.

        Args:
            path: A JSONL file of conversations in chat format; None takes the class's `demonstrations`.
            **options: Options of `WarmStartConfig`, such as `epochs` and `learning_rate`.

        Raises:
            ConfigError: An option, the file or a line of it is missing or invalid.
        """
        from .learners.sft import WarmStartConfig, fine_tune  # TRL's trainer takes seconds to import

        config = WarmStartConfig.from_dict(options)
        end = self._template.closing_id(end_ids(self.policy.model.pretrained_model, self.tokenizer))
        episodes = read_demonstrations(path or self.demonstrations, self._new_conversation, self._prefix, end)
        with self.learner.undone_on_error():
            stats = fine_tune(self.policy, self.tokenizer, episodes, config)
        self.learner.watch_weights()
        if self._replay is not None:
            self._replay.watch_weights()
        return stats

    def weights_changed(self) -> None:
        """Say that weights were edited where it cannot be noticed: in place on `weight.data`, or through numpy.

        All other changes are noticed: `load_state_dict`, optimisers, adapters that are loaded, merged or switched off.
        """
        self.policy.weights_changed()

    def draw_seed(self) -> int:
        """A seed for episodes to come, another one each time."""
        return int(self._seeds.integers(2**63))

    @property
    def buffered_turns(self) -> int:
        """Turns of finished episodes that await the next update."""
        return sum(len(episode.turns) for episode in self._buffer)

    def why_no_update(self) -> str:
        """Why no update has run yet."""
        return self.learner.why_no_update(self._buffer)

    def assign_reward(self, reward: float) -> None:
        """Add a reward to the last action of one environment."""
        self.assign_rewards([reward], [0])

    def terminate_episode(
        self,
        train: bool = True,
        truncated: bool = False,
        final_observation: Any = None,
        group: Hashable | None = None,
    ) -> Stats:
        """End the episode of one environment; see `terminate_episodes`."""
        return self.terminate_episodes([0], [truncated], [final_observation], train, [group])

    def assign_rewards(self, rewards: Sequence[float], env_ids: Sequence[Hashable] | None = None) -> None:
        """Add each environment's reward to its last action; several rewards for one action add up."""
        ids = environment_ids(rewards, env_ids, "rewards")
        for reward, env_id in zip(rewards, ids, strict=True):
            if not self._has_turns(env_id):
                raise EpisodeError(f"Reward {reward} for environment {env_id!r} follows no action. Call act() first.")
            if not isinstance(reward, SupportsFloat) or not abs(float(reward)) < _LARGEST_REWARD:
                raise EpisodeError(
                    f"Reward {reward!r} for environment {env_id!r} is no number, not finite or so large that its "
                    "square is not finite in float32. Check the environment, or scale its rewards."
                )
        for reward, env_id in zip(rewards, ids, strict=True):
            self.conversation(env_id).reward(float(reward))

    @alone
    def terminate_episodes(
        self,
        env_ids: Sequence[Hashable],
        truncated: Sequence[bool] | None = None,
        final_observations: Sequence[Any] | None = None,
        train: bool = True,
        groups: Sequence[Hashable | None] | None = None,
    ) -> Stats:
        """End episodes, and learn if that fills a batch.

        A batch is all finished episodes (GRPO: complete groups), once they hold `batch_size` turns.

        Args:
            env_ids: Environments whose episodes ended.
            truncated: Which of them were cut off rather than finished; by default none.
            final_observations: The observation after the last step; a learner with a critic (PPO) needs it of those
                that were cut off.
            train: Whether these episodes are learnt from; if not, they are dropped, as those are of which a turn was
                taken in `eval()`.
            groups: For GRPO, what tells which episodes began alike, such as the seed of their reset; by default all
                did. A start that is played again needs a group of its own.

        Returns:
            Statistics of the update, or an empty dictionary if none ran.
        """
        environment_ids(env_ids, env_ids, "episodes")
        cut = one_each(truncated, False, env_ids, "truncated")
        finals = one_each(final_observations, None, env_ids, "final_observations")
        group_of = one_each(groups, None, env_ids, "groups")
        bootstraps = self._learning and train and self.learner.has_critic
        for env_id, was_cut, final in zip(env_ids, cut, finals, strict=True):
            if not self._has_turns(env_id):
                raise EpisodeError(f"Environment {env_id!r} has no episode to end. Call act() at least once first.")
            if was_cut and final is None and bootstraps:
                raise EpisodeError(
                    f"The episode of environment {env_id!r} was truncated, but its final observation is missing, so "
                    "what would have followed cannot be valued. Pass final_observation=observation, from env.step()."
                )
        before, stats = list(self._buffer), Stats()
        try:
            if self._learning and train:
                self._buffer += self._ended(env_ids, cut, finals, group_of)
                stats = self._learn()
        except BaseException:
            self._buffer[:] = before
            raise
        self.discard_episodes(env_ids)
        return stats

    def _ended(
        self, env_ids: Sequence[Hashable], cut: list[bool], finals: list[Any], groups: list[Hashable | None]
    ) -> list[Episode]:
        """The conversations of environments as episodes, but for those with turns that were not taken to learn from."""
        learnt = [index for index, env_id in enumerate(env_ids) if self._conversations[env_id].learns]
        to_value = [index for index in learnt if cut[index] and self.learner.has_critic]
        values = self._final_values(to_value, env_ids, finals)
        ended = []
        for index in learnt:
            turns, was_cut = tuple(self._conversations[env_ids[index]].turns), bool(cut[index])
            ended.append(Episode(turns, not was_cut, was_cut, values.get(index, 0.0), groups[index]))
        return ended

    def _final_values(self, cut: list[int], env_ids: Sequence[Hashable], finals: Sequence[Any]) -> dict[int, float]:
        """The critic's estimate of each final observation, by index into `env_ids`."""
        contexts = []
        with ExitStack() as undone:
            for index in cut:
                conversation = self._conversations[env_ids[index]]
                undone.enter_context(conversation.undone_on_error())
                contexts.append(conversation.observe(self.format_observation(finals[index]), self._prefix))
            values = self.policy.values(contexts)
        return dict(zip(cut, values, strict=True))

    def _learn(self) -> Stats:
        """Update once if the buffer holds a batch."""
        batch = self.learner.take(self._buffer)
        if not batch:
            return {}
        with ExitStack() as undone:
            if self._replay is not None:
                for part in (self.learner, self._replay):
                    undone.enter_context(part.undone_on_error())
            stats = self.learner.update(batch) | {"commonest_reply": commonest_reply(batch)}
            if self._replay is not None:
                stats |= self._replay.update(batch)
        stats |= {"act_s": self._acting_s, "act_tokens": float(self._acted_tokens)}
        self._acting_s, self._acted_tokens = 0.0, 0
        for alarm in self._alarms.check(stats):
            logger.warning(alarm)
        return stats
