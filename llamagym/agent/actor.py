"""Acting: turns observations into contexts, and replies into actions, in any number of environments.

Learning is added by `agent.Agent`.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, NoReturn

from transformers import PreTrainedTokenizerBase
from typing_extensions import Self

from ..errors import ConfigError, EpisodeError, did_you_mean
from ..models.lock import alone
from ..models.trained_weights import check_fits
from ..options import check_arguments
from ..policy.evaluation import numbered
from ..policy.policy import NOT_PICKLED, Policy
from ..policy.sampling import redrawn_on_error
from ..policy.saved import policy_state, restore_policy
from ..text.arguments import check_text, environment_ids, informed, listed, plain_keys
from ..text.chat_template import ChatTemplate, Message
from ..text.episode import Context, Conversation, Reply
from ..text.records import IdTable, conversation_record, key_from, restore_conversation
from .action_masks import Masking
from .text_interface import TextInterface


class Actor(TextInterface):
    """Acts in many environments at once, with one conversation per environment.

    Attributes:
        policy: The model as a stochastic policy.
        tokenizer: The model's tokenizer.
        chat_template: Renders prompts.
        response_prefix: Fixed text that every reply begins with.
    """

    def __init__(
        self,
        policy: Policy,
        tokenizer: PreTrainedTokenizerBase,
        template: ChatTemplate,
        context: Context,
        response_prefix: str,
        invalid_action_penalty: float,
    ) -> None:
        """Creates an actor without conversations; arguments as for `Agent`."""
        if context not in ("episode", "turn"):
            raise ConfigError(f"context={context!r}. {did_you_mean(str(context), ['episode', 'turn'])}")
        check_text(response_prefix, "response_prefix")
        if not -math.inf < invalid_action_penalty <= 0:
            raise ConfigError(
                f"invalid_action_penalty={invalid_action_penalty} would reward replies that name no action, or is not "
                "finite. Pass 0 or a negative number."
            )
        self.policy = policy
        self.tokenizer = tokenizer
        self.chat_template = template
        self._context: Context = context
        self.response_prefix = response_prefix
        self._penalty = float(invalid_action_penalty)
        self._conversations: dict[Hashable, Conversation] = {}
        self._masking = Masking(self._action_of)
        self._learning, self._greedy = True, False
        self._acting_s, self._acted_tokens = 0.0, 0

    @alone
    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """An agent with its own copy of the model, which acts and learns in the same way."""
        copied = type(self).__new__(type(self))
        # Neither ever changes, and the template's caches belong to its tokenizer.
        memo |= {id(self): copied, id(self.tokenizer): self.tokenizer, id(self.chat_template): self.chat_template}
        for name, value in vars(self).items():
            setattr(copied, name, deepcopy(value, memo))
        return copied

    def __reduce__(self) -> NoReturn:
        """Rejects pickling and shallow copies, which would share or lose the model."""
        raise ConfigError(NOT_PICKLED)

    def train(self) -> None:
        """Switches to sampling, recording and learning, the mode that an agent starts in."""
        self._learning, self._greedy = True, False

    def eval(self, greedy: bool = True) -> None:
        """Switches to acting only: episodes are not recorded, and neither weights nor the run's calibration change.

        Args:
            greedy: Whether to take the most likely choice or token instead of sampling.

        Raises:
            ConfigError: `greedy` is neither True nor False.
        """
        check_arguments(Actor.eval, locals())
        self._learning, self._greedy = False, greedy

    @property
    def learning(self) -> bool:
        """Whether episodes are recorded and learned from."""
        return self._learning

    @property
    def greedy(self) -> bool:
        """Whether the most likely choice or token is taken."""
        return self._greedy

    @property
    def sees_one_turn(self) -> bool:
        """Whether a context holds only the current observation."""
        return self._context == "turn"

    @property
    def current_episode_messages(self) -> list[Message]:
        """Chat messages of environment 0's conversation; before its first action those of a new one."""
        conversation = self._conversations.get(0)
        return (conversation or self.new_conversation()).messages

    @property
    def current_episode_rewards(self) -> list[float]:
        """Raw rewards of environment 0's current episode, one per turn."""
        conversation = self._conversations.get(0)
        return [turn.reward for turn in conversation.turns] if conversation else []

    def conversation(self, env_id: Hashable) -> Conversation:
        """The current conversation of an environment; starts one if needed."""
        (key,) = plain_keys([env_id], "environment id")
        if key not in self._conversations:
            self._conversations[key] = self.new_conversation()
        return self._conversations[key]

    def _has_turns(self, env_id: Hashable) -> bool:
        return env_id in self._conversations and bool(self._conversations[env_id].turns)

    @property
    def lock(self) -> threading.RLock:
        """The lock that a thread holds while it uses the model."""
        return self.policy.lock

    def act(self, observation: Any, info: Mapping[str, Any] | None = None) -> Any:
        """Chooses an action in one environment; `act_batch` for a single observation."""
        return self.act_batch([observation], [0], [info])[0]

    @alone
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
                excludes choices (see `Masking`).

        Returns:
            One action per observation; None where the reply names no action and `fallback_action` is not defined.
        """
        observations = listed(observations, "observations")
        ids = environment_ids(observations, env_ids, "observations")
        infos = informed(infos, ids)
        started = time.perf_counter()
        forwarded = self.policy.tokens_forwarded
        # After an error no turn is taken, so that a caller that fixes the cause can act again.
        with self.undone_on_error(ids):
            conversations = [self.conversation(env_id) for env_id in ids]
            for env_id, conversation in zip(ids, conversations, strict=True):
                if self._learning and conversation.awaits_reward:
                    raise EpisodeError(
                        f"Environment {env_id!r} acts again, but its last action has no reward. Call assign_reward() "
                        "after every step, with 0 if there is none, or act in eval()."
                    )
            actions = self._act(observations, infos, conversations)
        if self._learning:
            self._acting_s += time.perf_counter() - started
            self._acted_tokens += self.policy.tokens_forwarded - forwarded
        return actions

    def _act(
        self,
        observations: Sequence[Any],
        infos: Sequence[Mapping[str, Any] | None],
        conversations: Sequence[Conversation],
    ) -> list[Any]:
        """Takes one turn in each conversation; returns the actions."""
        choices = [self.choices_for(*seen) for seen in zip(observations, infos, strict=True)]
        contexts = [
            conversation.observe(self.text_of(observation, info), self.response_prefix, offered)
            for conversation, observation, info, offered in zip(
                conversations, observations, infos, choices, strict=True
            )
        ]
        contexts = numbered(contexts)
        with self.policy.acting(self._learning), self.policy.trees.cached():
            self.policy.calibrate(contexts)
            replies = self.policy.sample(contexts, self._learning, self._greedy)
        texts = [self._in_words(reply, offered) for reply, offered in zip(replies, choices, strict=True)]
        named = [self._extract(text) for text in texts]
        actions = [
            self._fallback(observation, text, info) if action is None else action
            for observation, text, info, action in zip(observations, texts, infos, named, strict=True)
        ]
        for conversation, reply, text, action in zip(conversations, replies, texts, named, strict=True):
            turn = conversation.answer(reply, text)
            conversation.learns &= self._learning
            conversation.awaits_reward = self._learning
            if action is None:
                turn.valid = False
                turn.penalty = self._penalty
        return actions

    def _action_of(self, choice: str) -> Any:
        """The action that a choice names."""
        return self._extract(self.response_prefix + choice)

    def choices_for(self, observation: Any, info: Mapping[str, Any] | None = None) -> list[str] | None:
        """The allowed replies, without those that `info["action_mask"]` excludes; None for free text."""
        (info,) = informed([info], [0])
        offered = self.get_action_choices(observation, **self._told("get_action_choices", info))
        mask = None if info is None else info.get("action_mask")
        return offered if offered is None or mask is None else self._masking.possible(offered, mask)

    @contextmanager
    def undone_on_error(self, env_ids: Sequence[Hashable]) -> Iterator[None]:
        """While open, an exception undoes the turns of these environments and restores the random numbers."""
        with self._no_new_conversations_on_error(), redrawn_on_error(self.policy.rng):
            roll_backs = [self.conversation(env_id).savepoint() for env_id in env_ids]
            try:
                yield
            except BaseException:
                for roll_back in roll_backs:
                    roll_back()
                raise

    @contextmanager
    def _no_new_conversations_on_error(self) -> Iterator[None]:
        """While open, an exception removes the conversations that were started meanwhile."""
        before = set(self._conversations)
        try:
            yield
        except BaseException:
            self.discard_episodes([env_id for env_id in self._conversations if env_id not in before])
            raise

    def discard_episodes(self, env_ids: Sequence[Hashable]) -> None:
        """Drops unfinished episodes without learning from them."""
        for env_id in plain_keys(listed(env_ids, "env_ids"), "environment id"):
            self._conversations.pop(env_id, None)

    def state_dict(self) -> dict[str, Any]:
        """The state to save: the policy and the current episodes."""
        return {"policy": policy_state(self.policy), **self.own_state_dict()}

    def own_state_dict(self) -> dict[str, Any]:
        """The part of the state that differs between processes: the current episodes."""
        table = IdTable()
        under_way = [
            [env_id, conversation_record(conversation, table)] for env_id, conversation in self._conversations.items()
        ]
        return {
            "under_way": under_way,
            "ids": table.state_dict(),
            "acting_s": self._acting_s,
            "acted_tokens": self._acted_tokens,
        }

    def check_state(self, state: Mapping[str, Any], may_change_model: bool = False) -> None:
        """Rejects the state of another model.

        Args:
            state: A state from `state_dict`.
            may_change_model: Whether the frozen weights may differ, given equal shapes.

        Raises:
            CheckpointError: The state is another model's.
        """
        check_fits(self.policy.model, state["policy"]["model"], may_change_model)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state that `check_state` has accepted, including the current episodes."""
        restore_policy(self.policy, state["policy"])
        self.load_own_state_dict(state)

    def load_own_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state from `own_state_dict`, after the policy has its weights."""
        table = IdTable.from_state(state["ids"])
        self._conversations.clear()
        for env_id, record in state["under_way"]:
            restore_conversation(self.conversation(key_from(env_id)), record, table)
        self._acting_s, self._acted_tokens = state["acting_s"], state["acted_tokens"]

    @alone
    def action_probabilities(
        self, observations: Sequence[Any], infos: Sequence[Mapping[str, Any] | None] | None = None
    ) -> list[dict[str, float]]:
        """Exact probabilities of all choices in the first turn of an episode.

        Nothing changes: choices that are offered for the first time are calibrated for this call only.

        Args:
            observations: Observations that offer choices.
            infos: One info dictionary per observation, as for `act_batch`.

        Raises:
            ConfigError: An observation offers no choices.
        """
        contexts = []
        offers: list[list[str]] = []
        observations = listed(observations, "observations")
        for observation, info in zip(observations, informed(infos, range(len(observations))), strict=True):
            offered = self.choices_for(observation, info)
            if offered is None:
                raise ConfigError(
                    f"Observation {observation!r} offers no choices, so its replies cannot be enumerated. Define "
                    "get_action_choices()."
                )
            offers.append(offered)
            conversation = self.new_conversation()
            contexts.append(conversation.observe(self.text_of(observation, info), self.response_prefix, offered))
        contexts = numbered(contexts)
        with self.policy.measuring(), self.policy.trees.cached():
            self.policy.calibrate(contexts)
            logprobs = self.policy.choice_logprobs(contexts)
        return [
            dict(zip(offered, row.exp().tolist(), strict=True)) for offered, row in zip(offers, logprobs, strict=True)
        ]

    def _in_words(self, reply: Reply, offered: list[str] | None) -> str:
        if offered is not None and reply.choice_index is not None:
            return self.response_prefix + offered[reply.choice_index]
        return self.response_prefix + self._decoded(list(reply.ids))

    def _decoded(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def new_conversation(self) -> Conversation:
        """A new conversation without turns."""
        return Conversation(
            self.chat_template,
            self.get_system_prompt(),
            self._context,
            self.policy.max_length,
            self.policy.generation.max_new_tokens,
        )
