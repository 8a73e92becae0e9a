"""The agent: keeps the conversation of each environment, its rewards, and learns when a batch of turns is full."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase
from typing_extensions import Self

from .. import distributed
from ..errors import ConfigError, needs
from ..learners import Algorithm, make_learner
from ..learners.base import Stats
from ..learners.grpo import GRPOConfig, ReinforceConfig
from ..learners.ppo import PPOConfig
from ..learners.replay import ReplayConfig
from ..models.generation import GenerationConfig
from ..models.hub import upload
from ..models.loading import MissingBaseError, move_, resolve_device
from ..models.lock import alone
from ..models.lora import redraw_, settle_depth_
from ..models.value_head import AutoModelForCausalLMWithValueHead
from ..options import as_json, as_seed, check_arguments, explains_wrong_calls, user_path
from ..policy.policy import Policy
from ..policy.saved import restore_choices
from ..saving.atomic import written_whole
from ..saving.state_files import named_on_error
from ..text.arguments import listed
from ..text.chat_template import ChatTemplate, check_vocabulary, end_ids
from ..text.demonstrations import read_demonstrations
from ..text.episode import Context
from .collector import LearningActor
from .export import KIND, read_export, write_export
from .preflight import Report, preflight

# Arguments of earlier versions, and what to pass instead.
_REMOVED = {
    "use_target_kl": "Set target_kl in ppo_config_dict (or that of the algorithm): 0.03 by default, None for none."
}


class Agent(LearningActor):
    """A language model that acts in an environment and learns from its rewards.

    Subclass it with `get_system_prompt`, `format_observation` and `extract_action`, then write the usual loop:

        action = agent.act(observation)
        observation, reward, terminated, truncated, info = env.step(action)
        agent.assign_reward(reward)
        ...
        stats = agent.terminate_episode(
            terminated=terminated, truncated=truncated, final_observation=observation
        )

    `act_batch`, `assign_rewards` and `terminate_episodes` do the same for many environments at once, told apart by
    `env_ids`; the single methods are a batch of one whose id is 0.

    Attributes:
        policy: The model as a stochastic policy.
        learner: What turns episodes into updates.
        demonstrations: The file that `sft_warm_start=True` learns from; a subclass sets it.
    """

    demonstrations: ClassVar[str | Path | None] = None

    @explains_wrong_calls(positional=6, removed=_REMOVED)
    def __init__(
        self,
        model: AutoModelForCausalLMWithValueHead,
        tokenizer: PreTrainedTokenizerBase,
        device: torch.device | str | None = None,
        generate_config_dict: Mapping[str, Any] | GenerationConfig | None = None,
        ppo_config_dict: Mapping[str, Any] | PPOConfig | None = None,
        *,
        algorithm: Algorithm = "ppo",
        grpo_config_dict: Mapping[str, Any] | GRPOConfig | None = None,
        reinforce_config_dict: Mapping[str, Any] | ReinforceConfig | None = None,
        context: Context = "episode",
        response_prefix: str = "",
        invalid_action_penalty: float = -1.0,
        calibrate_choices: bool = True,
        aim_lora: bool = True,
        sft_warm_start: bool = False,
        replay_config_dict: Mapping[str, Any] | ReplayConfig | None = None,
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
            context: "episode" shows the model the whole conversation, as far as it holds it (the oldest turns are
                dropped first), "turn" only the current observation.
            response_prefix: Fixed text that every reply begins with.
            invalid_action_penalty: Added to the reward of a turn whose reply names no action; 0 or negative.
            calibrate_choices: Whether choices are measured against what is usual for the model (see `policy`).
            aim_lora: Whether a fresh LoRA adapter is pointed at what differs between observations (see `lora`).
            sft_warm_start: Whether to learn from the class's `demonstrations` at once (see `sft_from_jsonl`).
            replay_config_dict: A `ReplayConfig` or its options: at the end of each update, go on learning from the best
                recent episodes; None does not.
            seed: Of sampling, of the order of minibatches, of a fresh LoRA and of the episodes that `train` plays.

        Raises:
            ConfigError: An option is unknown or out of range, or `demonstrations` cannot be learned from.
            ChatTemplateError: The tokenizer's template cannot carry the conversation.
        """
        if not isinstance(model, AutoModelForCausalLMWithValueHead):
            raise ConfigError(
                f"The model is a {type(model).__name__}; PPO needs a value head. Wrap it: "
                "AutoModelForCausalLMWithValueHead.from_pretrained(model)."
            )
        check_arguments(Agent.__init__, locals())
        seed = as_seed(seed)
        generation = GenerationConfig.from_dict(generate_config_dict or {})
        check_vocabulary(model.pretrained_model, tokenizer)
        end = end_ids(model.pretrained_model, tokenizer)
        template = ChatTemplate(tokenizer, append_only=context == "episode")
        if device is not None:
            move_(model, resolve_device(device))
        settle_depth_(model, sees_one_turn=context == "turn")
        policy = Policy(model, end, template.closing_id(end), generation, calibrate_choices, aim_lora, seed)
        if seed is not None and not policy.is_initialized_from_data:
            redraw_(model.pretrained_model, seed)
        options = {"ppo": ppo_config_dict, "grpo": grpo_config_dict, "reinforce": reinforce_config_dict}
        learner = make_learner(policy, algorithm, options, seed)
        replay = None if replay_config_dict is None else ReplayConfig.from_dict(replay_config_dict)
        super().__init__(policy, tokenizer, template, context, response_prefix, invalid_action_penalty, learner, replay)
        self._seeds = distributed.gather_objects(np.random.default_rng(seed))[0]
        given = {
            "generate_config_dict": generation.given(),
            "algorithm": algorithm,
            f"{algorithm}_config_dict": learner.config.given(),
            "context": context,
            "response_prefix": response_prefix,
            "invalid_action_penalty": float(invalid_action_penalty),
            "calibrate_choices": calibrate_choices,
            "aim_lora": aim_lora,
            "replay_config_dict": None if replay is None else replay.given(),
            "seed": seed,
        }
        self._options = as_json(given)
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
        with needs("sft", "A warm start"):
            from ..learners.sft import WarmStartConfig, fine_tune  # TRL's trainer takes seconds to import

        config = WarmStartConfig.from_dict(options)
        path = self.demonstrations if path is None else user_path(path)
        end = self.chat_template.closing_id(end_ids(self.policy.model.pretrained_model, self.tokenizer))
        episodes = read_demonstrations(path, self.new_conversation, self.response_prefix, end)
        with self.learner.undone_on_error():
            stats = fine_tune(self.policy, self.tokenizer, episodes, config)
        self.learner.reset_optimizer()
        if self._replay is not None:
            self._replay.reset_optimizer()
        return stats

    def weights_changed(self) -> None:
        """Say that weights were edited where it cannot be noticed: in place on `weight.data`, or through numpy.

        All other changes are noticed: `load_state_dict`, optimizers, adapters that are loaded, merged or switched off.
        """
        self.policy.weights_changed()

    def preflight(self, observations: Sequence[Any] = ()) -> Report:
        """Look over tokenizer, template, caches, ratios, memory and speed; see `learners.preflight`.

        Args:
            observations: Some of the environment's, up to four, so that your own methods are looked at too.

        Returns:
            The checks; print it, or ask whether all have `passed`.
        """
        return preflight(self, listed(observations, "observations"))

    def draw_seed(self) -> int:
        """A seed for episodes to come, another one each time."""
        return int(self._seeds.integers(2**63))

    def save(self, folder: str | Path) -> None:
        """Save the agent for use; see `save_pretrained`, and `save_checkpoint` to go on learning."""
        self.save_pretrained(folder)

    @alone
    def save_pretrained(
        self,
        folder: str | Path,
        *,
        environment: str = "",
        results: Mapping[str, Any] | None = None,
        merged: bool = False,
    ) -> None:
        """Save the agent as a folder that `load`, and plain transformers and PEFT, read; of several processes, once.

        It holds the adapter (without one: all weights), the value head, the tokenizer, the options that the agent was
        made with, the priors of its choices, and a model card that shows how to use it.

        Args:
            folder: Folder to write, whole or not at all: new, empty, or an agent's. An agent is replaced; other files
                in its folder stay.
            environment: What the agent acts in, for the card.
            results: Measurements by name, for the card.
            merged: Whether to add a plain LoRA to the weights and write these whole.

        Raises:
            ConfigError: `merged` is asked for where there is nothing that can be merged, or the path is invalid.
            CheckpointError: The folder holds something else, or cannot be written; it is as it was.
        """
        check_arguments(Agent.save_pretrained, {"environment": environment, "results": results, "merged": merged})
        if not distributed.is_main_process():
            return
        with written_whole(folder, KIND) as whole:
            write_export(self, whole, self._options, environment, results, merged)

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
        """Load what `save` wrote, as an agent of this class.

        Args:
            folder: What it wrote.
            device: As for `load_model_and_tokenizer`.
            dtype: As for `load_model_and_tokenizer`, but "auto" is what it was saved in, on a device of the same kind.
            model: The model, where it cannot be loaded by its base's name; it must have the saved weights.
            **options: Options of the constructor that differ from those the agent was made with.

        Raises:
            CheckpointError: The folder is damaged, something else, or of a later version.
            ModelLoadError: The adapter's base is missing, or the device is.
        """
        folder = user_path(folder, "folder")
        check_arguments(Agent.load, {"device": device, "dtype": dtype, "model": model})
        device = resolve_device(device)
        # What the caller passes may be invalid, too.
        passes = (MissingBaseError, *((ConfigError,) if options or dtype != "auto" else ()))
        with named_on_error(folder, passes=passes):
            model, tokenizer, state = read_export(folder, device, dtype, model)
            agent = cls(model, tokenizer, **{**state["options"], **options})
            restore_choices(agent.policy, state, agent.policy.calibrates == state["options"]["calibrate_choices"])
            agent.policy.rng.set_state(state["rng"])
        distributed.diverge_(agent.policy.rng)
        return agent

    def push_to_hub(self, repo_id: str, *, private: bool | None = None, token: str | None = None, **saved: Any) -> str:
        """Upload what `save_pretrained` writes to the model hub; returns the commit's address.

        Args:
            repo_id: The repository, "user/name"; made if need be.
            private: Whether a new repository is private; None leaves it to the account's default.
            token: Access token; None takes `HF_TOKEN` or that of the last login.
            **saved: Options of `save_pretrained`.
        """
        with TemporaryDirectory() as scratch:
            folder = Path(scratch) / "agent"
            self.save_pretrained(folder, **saved)
            return upload(folder, repo_id, "Upload agent", private, token)

    def state_dict(self) -> dict[str, Any]:
        """What to save: all that acting and learning depend on, but for what the constructor was given."""
        return {**super().state_dict(), "seeds": self._seeds.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a state that `check_state` has seen."""
        super().load_state_dict(state)
        self._seeds.bit_generator.state = state["seeds"]
