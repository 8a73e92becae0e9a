"""The agent: acts in environments through a conversation, and learns when a batch of turns is full."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, NoReturn

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase
from typing_extensions import Self

from .. import distributed
from ..errors import ConfigError, needs
from ..learners.algorithms import OLD_ARGUMENTS, config_from, config_record, learner_config, make_learner, old_arguments
from ..learners.base import Learner, Stats
from ..learners.checks import warn_if_shared
from ..learners.config import LearnerConfig
from ..learners.ppo import PPOConfig
from ..learners.replay import ReplayConfig
from ..models.hub import upload
from ..models.loading import MissingBaseError, move_, resolve_device
from ..models.lora import seed_lora_, set_lora_depth_
from ..models.registry import GenerationConfig
from ..models.value_head import AutoModelForCausalLMWithValueHead
from ..options import as_json, as_seed, check_arguments, explains_wrong_calls, user_path
from ..policy.policy import NOT_PICKLED, Policy
from ..policy.sampler import Sampler
from ..policy.saved import restore_choices
from ..saving.atomic import atomic_folder
from ..saving.state_files import as_checkpoint_error
from ..text.arguments import as_list
from ..text.chat_template import ChatTemplate, Message, check_vocabulary, end_ids
from ..text.demonstrations import read_demonstrations
from ..text.episode import Context
from .actor import Actor
from .checkpoint import loading_checkpoint, write_checkpoint
from .collector import Collector
from .export import GGUF_KIND, KIND, read_export, write_export, write_gguf
from .preflight import Report, preflight
from .text_interface import EQUIVALENTS, TextInterface

# Attributes of an agent that its other parts refer to.
_FIXED_PARTS = frozenset({"model", "tokenizer", "policy", "response_prefix"})


class Agent(TextInterface):
    """A language model that acts in an environment and learns from its rewards.

    Subclass it with `get_system_prompt`, `format_observation` and `extract_action`, then write the usual loop:

        action = agent.act(observation)
        observation, reward, terminated, truncated, info = env.step(action)
        agent.assign_reward(reward)
        ...
        stats = agent.terminate_episode(
            terminated=terminated, truncated=truncated, final_observation=observation
        )

    `act_batch`, `assign_rewards` and `terminate_episodes` do the same for many environments at once, which `env_ids`
    tell apart; the methods for one environment are a batch of one whose id is 0.

    Attributes:
        model: The causal language model with a value head.
        tokenizer: Its tokenizer.
        device: The model's device when the agent was made.
        response_prefix: Fixed text that every reply begins with.
        policy: The model as a stochastic policy.
        learner: The learner, which turns batches of episodes into updates.
        demonstrations: The file that `sft_warm_start=True` learns from; a subclass may set it.
    """

    demonstrations: ClassVar[str | Path | None] = None

    @explains_wrong_calls(positional=6, old_names=OLD_ARGUMENTS)
    def __init__(
        self,
        model: AutoModelForCausalLMWithValueHead,
        tokenizer: PreTrainedTokenizerBase,
        device: torch.device | str | None = None,
        generate_config_dict: Mapping[str, Any] | GenerationConfig | None = None,
        ppo_config_dict: Mapping[str, Any] | PPOConfig | None = None,
        *,
        learner: LearnerConfig | None = None,
        context: Context = "episode",
        response_prefix: str = "",
        invalid_action_penalty: float = -1.0,
        calibrate_choices: bool = True,
        aim_lora: bool = True,
        sft_warm_start: bool = False,
        replay_config_dict: Mapping[str, Any] | ReplayConfig | None = None,
        seed: int | None = None,
        sampler: Sampler | None = None,
        **old_options: Any,
    ) -> None:
        """Creates an agent from a model.

        Args:
            model: A causal language model with a value head.
            tokenizer: Its tokenizer, with a chat template.
            device: Device to move the model to; None leaves it.
            generate_config_dict: A `GenerationConfig` or its options, with or without a `generate/` prefix.
            ppo_config_dict: A `PPOConfig` or its options; the same as `learner=PPOConfig(...)`.
            learner: The learning algorithm and its options: a `PPOConfig`, `GRPOConfig` or `ReinforceConfig`. None is
                PPO.
            context: "episode" shows the model the whole conversation, as far as it fits (the oldest turns are dropped
                first); "turn" only the current observation; a number that many earlier turns as well.
            response_prefix: Fixed text that every reply begins with.
            invalid_action_penalty: Added to the reward of a turn whose reply names no action; 0 or negative.
            calibrate_choices: Whether choices are scored relative to the model's prior for them (see `policy`).
            aim_lora: Whether a fresh LoRA adapter starts from differences between observations (see `lora`).
            sft_warm_start: Whether to learn from the class's `demonstrations` first (see `sft_from_jsonl`).
            replay_config_dict: A `ReplayConfig` or its options: after each update, learn from the best recent episodes
                as well. None: no replay.
            seed: Seed of sampling, of the order of minibatches, of a fresh LoRA and of the episodes that `train` plays.
            sampler: A `VLLMSampler` or `LlamaCppSampler`, which writes free text; None for the built-in engine.
            **old_options: Arguments of earlier versions, each accepted with a logged message: `algorithm`,
                `grpo_config_dict` and `reinforce_config_dict` (now `learner`), `use_target_kl` (now its `target_kl`).

        Raises:
            ConfigError: An option is unknown or out of range, or `demonstrations` cannot be learned from.
            ChatTemplateError: The tokenizer's template cannot carry the conversation.
        """
        config = learner_config(learner, ppo_config_dict, old_options)
        if not isinstance(model, AutoModelForCausalLMWithValueHead):
            raise ConfigError(
                f"The model is a {type(model).__name__}; PPO needs a value head. Wrap it: "
                "AutoModelForCausalLMWithValueHead.from_pretrained(model)."
            )
        check_arguments(Agent.__init__, locals())
        seed = as_seed(seed)
        generation = GenerationConfig.from_dict(generate_config_dict or {})
        if config.seed is None and seed is not None:
            config = replace(config, seed=seed)
        replay = None if replay_config_dict is None else ReplayConfig.from_dict(replay_config_dict)
        check_vocabulary(model.pretrained_model, tokenizer)
        end = end_ids(model.pretrained_model, tokenizer)
        template = ChatTemplate(tokenizer, append_only=context != "turn")
        if device is not None:
            move_(model, resolve_device(device))
        set_lora_depth_(model, sees_one_turn=context == "turn")
        policy = Policy(model, end, template.closing_id(end), generation, calibrate_choices, aim_lora, seed)
        if seed is not None and not policy.is_initialized_from_data:
            seed_lora_(model.pretrained_model, seed)
        actor = Actor(self, policy, tokenizer, template, context, response_prefix, invalid_action_penalty)
        policy.sampler = sampler
        warn_if_shared(self, model)
        seeds = distributed.gather_objects(np.random.default_rng(seed))[0]
        self.model = model
        self.tokenizer = tokenizer
        self.device = policy.device
        self.response_prefix = response_prefix
        self.policy = policy
        self.learner: Learner[Any] = make_learner(policy, config)
        options = {
            "generate_config_dict": generation.to_dict(),
            "learner": config_record(config),
            "context": context,
            "response_prefix": response_prefix,
            "invalid_action_penalty": float(invalid_action_penalty),
            "calibrate_choices": calibrate_choices,
            "aim_lora": aim_lora,
            "replay_config_dict": None if replay is None else replay.to_dict(),
            "seed": seed,
        }
        self._collector = Collector(actor, self.learner, replay, seeds, type(self).__name__, as_json(options))
        if sft_warm_start:
            self.sft_from_jsonl()

    def __getattr__(self, name: str) -> Any:
        """Raises an AttributeError that names this library's equivalent of a method of other libraries."""
        if name in EQUIVALENTS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}. {EQUIVALENTS[name]}")
        # A property that raised an AttributeError raises it again.
        return object.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute; a new learner takes effect, and other parts of the agent cannot be replaced.

        Raises:
            ConfigError: The attribute is a part that belongs to others, such as the policy.
        """
        collector = vars(self).get("_collector")
        if collector is not None:
            if name in _FIXED_PARTS and value is not getattr(self, name):
                raise ConfigError(f"agent.{name} cannot be replaced, since caches depend on it. Make another agent.")
            if name == "learner":
                collector.learner = value
        super().__setattr__(name, value)

    @property
    def sampler(self) -> Sampler | None:
        """Server that writes replies in free text; None for the built-in engine. May be replaced between episodes."""
        return self.policy.sampler

    @sampler.setter
    def sampler(self, sampler: Sampler | None) -> None:
        self.policy.sampler = sampler

    @property
    def current_episode_messages(self) -> list[Message]:
        """Chat messages of environment 0's conversation; before its first action those of a new one."""
        actor = self._collector.actor
        return (actor.conversations.get(0) or actor.new_conversation()).messages

    @property
    def current_episode_rewards(self) -> list[float]:
        """Raw rewards of environment 0's current episode, one per turn."""
        actor = self._collector.actor
        return [turn.reward for turn in actor.conversation(0).turns] if actor.has_turns(0) else []

    def set_training_mode(self, mode: bool, greedy: bool = True) -> None:
        """Switches between learning and acting only.

        A new agent is in training mode: it samples, records episodes and learns from them. A loaded one is in
        evaluation mode: it acts, and neither weights nor the run's calibration change. `llamagym.train` and
        `llamagym.evaluate` switch by themselves.

        Args:
            mode: True for training mode, False for evaluation mode.
            greedy: Whether to take the most likely choice or token in evaluation mode, instead of sampling.

        Raises:
            ConfigError: An argument is neither True nor False.
        """
        check_arguments(Agent.set_training_mode, locals())
        self._collector.is_as_loaded = False
        actor = self._collector.actor
        actor.is_learning = mode
        actor.is_greedy = greedy and not mode

    def train(self) -> None:
        """Switches to training mode, as `set_training_mode(True)`; it is `llamagym.train` that trains."""
        self.set_training_mode(True)

    def eval(self, greedy: bool = True) -> None:
        """Switches to evaluation mode, as `set_training_mode(False, greedy)`."""
        check_arguments(Agent.eval, locals())
        self.set_training_mode(False, greedy)

    def act(self, observation: Any, info: Mapping[str, Any] | None = None) -> Any:
        """Chooses an action in one environment; `act_batch` for a single observation."""
        return self.act_batch([observation], [0], [info])[0]

    def act_batch(
        self,
        observations: Sequence[Any],
        env_ids: Sequence[Hashable] | None = None,
        infos: Sequence[Mapping[str, Any] | None] | None = None,
    ) -> list[Any]:
        """Chooses an action in each of several environments.

        Args:
            observations: One observation per environment.
            env_ids: Ids of the environments; by default 0, 1, 2, ...
            infos: Info dictionaries of the environments, for methods with a parameter `info`. The entry "action_mask"
                excludes choices (see `ActionMasks`).

        Returns:
            One action per observation; None where the reply names no action and `fallback_action` is not defined.

        Raises:
            EpisodeError: Observations, ids and infos do not match, or an environment's last action has no reward yet.
        """
        return self._collector.actor.act_batch(observations, env_ids, infos)

    def action_probabilities(
        self, observations: Sequence[Any], infos: Sequence[Mapping[str, Any] | None] | None = None
    ) -> list[dict[str, float]]:
        """Returns the exact probabilities of all choices in the first turn of an episode.

        Nothing changes: choices that are offered for the first time are calibrated for this call only.

        Args:
            observations: Observations that offer choices.
            infos: One info dictionary per observation, as for `act_batch`.

        Raises:
            ConfigError: An observation offers no choices.
        """
        return self._collector.actor.action_probabilities(observations, infos)

    def assign_reward(self, reward: float, turn: int = -1) -> None:
        """Adds a reward to an action of one environment, by default the last; see `assign_rewards`."""
        self.assign_rewards([reward], [0], [turn])

    def assign_rewards(
        self,
        rewards: Sequence[float],
        env_ids: Sequence[Hashable] | None = None,
        turns: Sequence[int] | None = None,
    ) -> None:
        """Adds each environment's reward to one of its actions; several rewards for one action add up.

        Args:
            rewards: One per environment.
            env_ids: Ids of the environments; by default 0, 1, 2, ...
            turns: Turn of its current episode that each reward is for, counted from 0, or from the end by negative
                numbers; by default the last. Late rewards, such as a judge's, reach the turns that earned them this
                way.

        Raises:
            EpisodeError: A turn is missing, or a reward is not a finite number; none is assigned.
        """
        self._collector.assign_rewards(rewards, env_ids, turns)

    def terminate_episode(
        self,
        train: bool = True,
        truncated: bool = False,
        final_observation: Any = None,
        group: Hashable | None = None,
        final_info: Mapping[str, Any] | None = None,
        *,
        terminated: bool | None = None,
    ) -> Stats:
        """Ends the episode of one environment; see `terminate_episodes`.

        agent.terminate_episode(terminated=terminated, truncated=truncated, final_observation=observation)
        """
        reached_final_state = None if terminated is None else [terminated]
        return self.terminate_episodes(
            [0], [truncated], [final_observation], train, [group], [final_info], terminated=reached_final_state
        )

    def terminate_episodes(
        self,
        env_ids: Sequence[Hashable],
        truncated: Sequence[bool] | None = None,
        final_observations: Sequence[Any] | None = None,
        train: bool = True,
        groups: Sequence[Hashable | None] | None = None,
        final_infos: Sequence[Mapping[str, Any] | None] | None = None,
        *,
        terminated: Sequence[bool] | None = None,
    ) -> Stats:
        """Ends episodes, and learns if that fills a batch.

        A batch is all finished episodes (GRPO: complete groups), once they hold `batch_size` turns. If several
        processes learn together, a batch is the finished episodes of all of them. Then all must call this equally
        often, such as after every step, with no `env_ids` if no episode ended, because they exchange episodes here.

        Args:
            env_ids: Environments whose episodes ended.
            truncated: Whether each was cut off rather than finished; by default none. Without effect if `terminated` is
                passed.
            final_observations: The observation after the last step. A learner with a critic (PPO) needs it for episodes
                that were cut off.
            train: Whether to learn from these episodes. If not, they are dropped. Episodes with a turn taken in
                `eval()` are always dropped.
            groups: For GRPO, equal for episodes that began alike, such as the seed of their reset; by default all are
                one group. A start that is played again needs a new group.
            final_infos: The info after the last step, for a `format_observation` that takes it.
            terminated: Whether each reached a final state, after which no reward follows. Takes precedence over
                `truncated`: an episode with both is terminated; one with neither was cut off by the loop. None: derived
                from `truncated`.

        Returns:
            Statistics of the update, or an empty dictionary if none ran.

        Raises:
            EpisodeError: An environment has no episode, or a truncated one lacks its final observation.
        """
        return self._collector.terminate_episodes(
            env_ids, truncated, final_observations, train, groups, final_infos, terminated=terminated
        )

    def sft_from_jsonl(self, path: str | Path | None = None, **options: Any) -> Stats:
        """Learns from demonstrated replies, before learning from rewards; see `demonstrations` and `sft`.

        Args:
            path: A JSONL file of conversations in chat format; None takes the class's `demonstrations`.
            **options: Options of `WarmStartConfig`, such as `epochs` and `learning_rate`.

        Returns:
            Statistics of the training.

        Raises:
            ConfigError: An option, the file or a line of it is missing or invalid.
        """
        with needs("sft", "A warm start"):
            from ..learners.sft import WarmStartConfig, fine_tune  # TRL's trainer takes seconds to import

        config = WarmStartConfig.from_dict(options)
        path = self.demonstrations if path is None else user_path(path)
        actor = self._collector.actor
        with self.policy.lock:
            end = actor.chat_template.closing_id(end_ids(self.model.pretrained_model, self.tokenizer))
            episodes = read_demonstrations(path, actor.new_conversation, actor.hooks.response_prefix, end)
            with self.learner.undone_on_error():
                stats = fine_tune(self.policy, self.tokenizer, episodes, config)
            self.learner.reset_optimizer()
            if self._collector.replay is not None:
                self._collector.replay.reset_optimizer()
        return stats

    def preflight(self, observations: Sequence[Any] = ()) -> Report:
        """Checks tokenizer, template, caches, ratios, memory and speed; see `preflight`.

        Args:
            observations: Up to four observations of the environment, so that your own methods are checked too.

        Returns:
            The checks; print it, or look at `passed`.
        """
        return preflight(self._collector.actor, self.learner, as_list(observations, "observations"))

    def save(self, folder: str | Path) -> None:
        """Saves the agent for use; see `save_pretrained`, and `save_checkpoint` to continue learning."""
        self.save_pretrained(folder)

    def save_pretrained(
        self,
        folder: str | Path,
        *,
        environment: str = "",
        results: Mapping[str, Any] | None = None,
        merged: bool = False,
    ) -> None:
        """Saves the agent as a folder that `load`, and plain transformers and PEFT, read.

        It holds the adapter (without one: all weights), the value head, the tokenizer, the constructor's options, the
        calibration of choices, and a model card with an example. Of several processes, the first writes.

        Args:
            folder: Folder to write, whole or not at all: new, empty, or an agent's. An agent is replaced; other files
                in its folder stay.
            environment: Name of the environment, for the card.
            results: Measurements by name, for the card.
            merged: Whether to merge a plain LoRA into the weights and write these.

        Raises:
            ConfigError: `merged` is True and there is no adapter that can be merged, or the path is invalid.
            CheckpointError: The folder holds something else, or cannot be written; it is as it was.
        """
        check_arguments(Agent.save_pretrained, {"environment": environment, "results": results, "merged": merged})
        if not distributed.is_main_process():
            return
        with self.policy.lock, atomic_folder(folder, KIND) as whole:
            write_export(self, self._collector.actor, whole, self._collector.options, environment, results, merged)

    def save_gguf(self, folder: str | Path) -> None:
        """Saves the adapter for llama.cpp, whose `llama-server` then answers as this agent.

        The folder holds `adapter.gguf`, `base.gguf` if the base is the embedded model, `server.ini` for a
        `LlamaCppSampler`, and a README with the command. An activated LoRA is written as one. Of several processes, the
        first writes.

        Args:
            folder: Folder to write, whole or not at all: new, empty, or one that this method wrote.

        Raises:
            ConfigError: There is no adapter, or one that GGUF cannot hold; an activated LoRA's invocation tokens occur
                in `response_prefix`; or the path is invalid.
            CheckpointError: The folder holds something else, or cannot be written; it is as it was.
        """
        if not distributed.is_main_process():
            return
        with self.policy.lock, atomic_folder(folder, GGUF_KIND) as whole:
            write_gguf(self, self._collector.actor, whole)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        *,
        model: AutoModelForCausalLMWithValueHead | None = None,
        **options: Any,
    ) -> Self:
        """Loads what `save` wrote, as an agent of this class in evaluation mode.

        To go on learning in a loop of your own, call `agent.train()` first.

        Args:
            folder: The saved folder.
            device: As for `load_model_and_tokenizer`.
            dtype: As for `load_model_and_tokenizer`, but "auto" is the saved dtype, on a device of the same type.
            model: The model, if it cannot be loaded by its base's name; it must have the saved weights.
            **options: Constructor options that replace the saved ones, each as a whole.

        Raises:
            CheckpointError: The folder is damaged, something else, or of a later version.
            ModelLoadError: The adapter's base is missing, or the device is.
        """
        folder = user_path(folder, "folder")
        check_arguments(Agent.load, {"device": device, "dtype": dtype, "model": model})
        device = resolve_device(device)
        passes: tuple[type[Exception], ...] = (MissingBaseError,)
        if options or dtype != "auto":
            # The caller's arguments may be invalid, rather than the folder.
            passes += (ConfigError,)
        with as_checkpoint_error(folder, unchanged=passes):
            model, tokenizer, state = read_export(folder, device, dtype, model)
            saved = dict(state["options"])
            saved_learner = config_from(saved.pop("learner"))
            if options.keys() & {"ppo_config_dict", *OLD_ARGUMENTS}:
                saved |= old_arguments(saved_learner)
            else:
                saved["learner"] = saved_learner
            agent = cls(model, tokenizer, **{**saved, **options})
            restore_choices(agent.policy, state, agent.policy.calibrates == saved["calibrate_choices"])
            agent.policy.rng.set_state(state["rng"])
        distributed.reseed_by_rank_(agent.policy.rng)
        agent.set_training_mode(False)
        agent._collector.is_as_loaded = True
        return agent

    def push_to_hub(self, repo_id: str, *, private: bool | None = None, token: str | None = None, **saved: Any) -> str:
        """Uploads what `save_pretrained` writes to the model hub; returns the commit's address.

        Args:
            repo_id: The repository, "user/name"; created if it does not exist.
            private: Whether a new repository is private; None is the account's default.
            token: Access token; None takes `HF_TOKEN` or that of the last login.
            **saved: Options of `save_pretrained`.
        """
        with TemporaryDirectory() as scratch:
            folder = Path(scratch) / "agent"
            self.save_pretrained(folder, **saved)
            return upload(folder, repo_id, "Upload agent", private, token)

    def save_checkpoint(
        self, folder: str | Path, loop: Mapping[str, Any] | None = None, facts: Mapping[str, Any] | None = None
    ) -> None:
        """Saves everything that learning continues from: after `load_checkpoint`, the next update is the same.

        The folder appears whole or not at all. All caches are dropped, in this process too, because cached numbers
        are rounded differently from recomputed ones. If several processes learn together, each must call this; the
        first writes the states of all.

        Args:
            folder: Folder to write: new, empty, or a checkpoint's. A checkpoint is replaced; other files in its folder
                stay.
            loop: State of the caller's own loop, JSON values and tensors; `load_checkpoint` returns it.
            facts: Further entries of the manifest, which can be read without loading.

        Raises:
            ConfigError: The path is invalid, `loop` would not be read again as it is, or `facts` has a name that the
                library uses itself.
            CheckpointError: The folder holds something else, or cannot be written; it is as it was.
        """
        with self.policy.lock:
            write_checkpoint(self._collector, folder, loop, facts)

    def load_checkpoint(
        self, folder: str | Path, *, keep_episodes: bool = False, allow_changes: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Restores what `save_checkpoint` saved; construct the agent as the saved one was constructed.

        Seeds, `max_tokens_per_pass` and the number of processes may differ. With another number of processes,
        unfinished episodes are dropped, and so are those whose group can no longer be completed.

        Args:
            folder: The saved folder, or a folder of checkpoints, whose newest intact one is taken.
            keep_episodes: Whether unfinished episodes continue, because their environments are where they were.
                Otherwise they are dropped, and environments must be reset.
            allow_changes: Options that may differ from the checkpoint, by the names that the error lists, such as
                "learner.learning_rate"; "model" allows other frozen weights of the same shapes.

        Returns:
            The `loop` that was saved.

        Raises:
            CheckpointError: The checkpoint is damaged, of a later version, another model's, or an agent's of another
                class or with other options; nothing has changed.
        """
        options = {"keep_episodes": keep_episodes, "allow_changes": allow_changes}
        check_arguments(Agent.load_checkpoint, options)
        with loading_checkpoint(self._collector, folder, keep_episodes, allow_changes) as loop:
            if self._collector.is_as_loaded:
                # A checkpoint is loaded to go on learning.
                self.set_training_mode(True)
            return loop

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Returns an agent with its own copy of the model, which acts and learns in the same way."""
        copied = type(self).__new__(type(self))
        # The tokenizer and the template never change, and the template's caches belong to its tokenizer.
        template = self._collector.actor.chat_template
        memo |= {id(self): copied, id(self.tokenizer): self.tokenizer, id(template): template}
        with self.policy.lock:
            for name, value in vars(self).items():
                setattr(copied, name, deepcopy(value, memo))
        return copied

    def __reduce__(self) -> NoReturn:
        """Rejects pickling and shallow copies, which would share or lose the model."""
        raise ConfigError(NOT_PICKLED)


def collector_of(agent: Agent) -> Collector:
    """Returns an agent's internals, for the library's other packages."""
    return agent._collector
