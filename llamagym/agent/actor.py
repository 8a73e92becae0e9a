"""Acting: turns observations into prompts and replies into actions, in any number of environments."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..errors import ConfigError, EpisodeError, did_you_mean
from ..models.lock import with_model_lock
from ..models.trained_weights import check_fits
from ..policy.evaluation import numbered
from ..policy.policy import Policy
from ..policy.sampling import redrawn_on_error
from ..policy.saved import policy_state, restore_policy
from ..text.arguments import as_infos, as_list, check_text, environment_ids, plain_keys
from ..text.chat_template import ChatTemplate
from ..text.episode import Context, Conversation, Reply
from ..text.records import IdTable, conversation_record, key_from, restore_conversation
from .text_interface import Hooks, TextInterface


class Actor:
    """Acts in many environments at once, with one conversation per environment.

    Attributes:
        hooks: The methods that the user defines.
        policy: The model as a stochastic policy.
        tokenizer: The model's tokenizer.
        chat_template: Renders prompts.
        conversations: The current conversation of each environment that has one.
        context: What prompts show before the current observation: the whole "episode", nothing ("turn"), or this many
            turns.
        is_learning: Whether turns are recorded for learning.
        is_greedy: Whether the most likely choice or token is taken.
        acting_s: Seconds spent acting for learning since the last update.
        acted_tokens: Tokens forwarded in that time.
    """

    def __init__(
        self,
        interface: TextInterface,
        policy: Policy,
        tokenizer: PreTrainedTokenizerBase,
        template: ChatTemplate,
        context: Context,
        response_prefix: str,
        invalid_action_penalty: float,
    ) -> None:
        """Creates an actor without conversations.

        Args:
            interface: The user's methods.
            policy: As in the attributes.
            tokenizer: As in the attributes.
            template: The tokenizer's chat template.
            context: As for `Agent`.
            response_prefix: As for `Agent`.
            invalid_action_penalty: As for `Agent`.

        Raises:
            ConfigError: An option is out of range.
        """
        if isinstance(context, Integral):
            context = int(context)
            if context < 1:
                raise ConfigError(f"context={context}, but the number of earlier turns to show must be at least 1.")
        elif context not in ("episode", "turn"):
            hint = did_you_mean(str(context), ["episode", "turn"])
            raise ConfigError(f"context={context!r}. {hint} A number shows that many earlier turns.")
        check_text(response_prefix, "response_prefix")
        if not -math.inf < invalid_action_penalty <= 0:
            raise ConfigError(
                f"invalid_action_penalty={invalid_action_penalty} would reward replies that name no action, or is not "
                "finite. Pass 0 or a negative number."
            )
        self.hooks = Hooks(interface, response_prefix)
        self.policy = policy
        self.tokenizer = tokenizer
        self.chat_template = template
        self.context: Context = context
        self.is_learning = True
        self.is_greedy = False
        self.acting_s = 0.0
        self.acted_tokens = 0
        self._penalty = float(invalid_action_penalty)
        self.conversations: dict[Hashable, Conversation] = {}

    @property
    def lock(self) -> threading.RLock:
        """The lock that a thread holds while it uses the model."""
        return self.policy.lock

    @property
    def sees_one_turn(self) -> bool:
        """Whether a prompt holds only the current observation."""
        return self.context == "turn"

    def conversation(self, env_id: Hashable) -> Conversation:
        """Returns the current conversation of an environment; starts one if needed."""
        (key,) = plain_keys([env_id], "environment id")
        if key not in self.conversations:
            self.conversations[key] = self.new_conversation()
        return self.conversations[key]

    def new_conversation(self) -> Conversation:
        """Returns a new conversation without turns."""
        return Conversation(
            self.chat_template,
            self.hooks.system_prompt(),
            self.context,
            self.policy.max_length,
            self.policy.generation.max_new_tokens,
        )

    def has_turns(self, env_id: Hashable) -> bool:
        """Whether an environment's current episode has a turn."""
        return env_id in self.conversations and bool(self.conversations[env_id].turns)

    def discard_episodes(self, env_ids: Sequence[Hashable]) -> None:
        """Drops unfinished episodes without learning from them."""
        for env_id in plain_keys(as_list(env_ids, "env_ids"), "environment id"):
            self.conversations.pop(env_id, None)

    @with_model_lock
    def act_batch(
        self,
        observations: Sequence[Any],
        env_ids: Sequence[Hashable] | None = None,
        infos: Sequence[Mapping[str, Any] | None] | None = None,
    ) -> list[Any]:
        """Chooses an action in each of several environments; see `Agent.act_batch`."""
        observations = as_list(observations, "observations")
        ids = environment_ids(observations, env_ids, "observations")
        infos = as_infos(infos, ids)
        started = time.perf_counter()
        forwarded = self.policy.tokens_forwarded
        # After an error no turn is taken, so that a caller that fixes the cause can act again.
        with self.undone_on_error(ids):
            conversations = [self.conversation(env_id) for env_id in ids]
            for env_id, conversation in zip(ids, conversations, strict=True):
                if self.is_learning and conversation.awaits_reward:
                    raise EpisodeError(
                        f"Environment {env_id!r} acts again, but its last action has no reward. Call assign_reward() "
                        "after every step, with 0 for a step without a reward, or act in eval()."
                    )
            actions = self._act(observations, infos, conversations)
        if self.is_learning:
            self.acting_s += time.perf_counter() - started
            self.acted_tokens += self.policy.tokens_forwarded - forwarded
        return actions

    def _act(
        self,
        observations: Sequence[Any],
        infos: Sequence[Mapping[str, Any] | None],
        conversations: Sequence[Conversation],
    ) -> list[Any]:
        """Takes one turn in each conversation; returns the actions."""
        hooks = self.hooks
        choices = [hooks.choices(*pair) for pair in zip(observations, infos, strict=True)]
        contexts = []
        for conversation, observation, info, offered in zip(conversations, observations, infos, choices, strict=True):
            contexts.append(conversation.observe(hooks.text(observation, info), hooks.response_prefix, offered))
        contexts = numbered(contexts)
        with self.policy.acting(self.is_learning), self.policy.trees.cached():
            self.policy.calibrate(contexts)
            replies = self.policy.sample(contexts, self.is_learning, self.is_greedy)
        texts = [self._reply_text(reply, offered) for reply, offered in zip(replies, choices, strict=True)]
        # None where a reply names no action.
        parsed = [hooks.action(text) for text in texts]
        actions = [
            hooks.fallback(observation, text, info) if action is None else action
            for observation, text, info, action in zip(observations, texts, infos, parsed, strict=True)
        ]
        for conversation, reply, text, action in zip(conversations, replies, texts, parsed, strict=True):
            turn = conversation.answer(reply, text)
            conversation.learns &= self.is_learning
            conversation.awaits_reward = self.is_learning
            if action is None:
                turn.valid = False
                turn.penalty = self._penalty
        return actions

    def _reply_text(self, reply: Reply, offered: list[str] | None) -> str:
        if offered is not None and reply.choice_index is not None:
            return self.hooks.response_prefix + offered[reply.choice_index]
        return self.hooks.response_prefix + self.decode(list(reply.ids))

    def decode(self, ids: list[int]) -> str:
        """Returns the text of token ids, without special tokens."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

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
        before = set(self.conversations)
        try:
            yield
        except BaseException:
            self.discard_episodes([env_id for env_id in self.conversations if env_id not in before])
            raise

    @with_model_lock
    def action_probabilities(
        self, observations: Sequence[Any], infos: Sequence[Mapping[str, Any] | None] | None = None
    ) -> list[dict[str, float]]:
        """Returns the exact probabilities of all choices; see `Agent.action_probabilities`."""
        contexts = []
        offers: list[list[str]] = []
        observations = as_list(observations, "observations")
        for observation, info in zip(observations, as_infos(infos, range(len(observations))), strict=True):
            offered = self.hooks.choices(observation, info)
            if offered is None:
                raise ConfigError(
                    f"Observation {observation!r} offers no choices, so its replies cannot be enumerated. Define "
                    "get_action_choices()."
                )
            offers.append(offered)
            text = self.hooks.text(observation, info)
            contexts.append(self.new_conversation().observe(text, self.hooks.response_prefix, offered))
        contexts = numbered(contexts)
        with self.policy.measuring(), self.policy.trees.cached():
            self.policy.calibrate(contexts)
            logprobs = self.policy.choice_logprobs(contexts)
        return [
            dict(zip(offered, row.exp().tolist(), strict=True)) for offered, row in zip(offers, logprobs, strict=True)
        ]

    def state_dict(self) -> dict[str, Any]:
        """Returns the state to save: the policy and the current episodes."""
        return {"policy": policy_state(self.policy), **self.own_state_dict()}

    def own_state_dict(self) -> dict[str, Any]:
        """Returns the part of the state that differs between processes: the current episodes."""
        table = IdTable()
        under_way = [
            [env_id, conversation_record(conversation, table)] for env_id, conversation in self.conversations.items()
        ]
        return {
            "under_way": under_way,
            "ids": table.state_dict(),
            "acting_s": self.acting_s,
            "acted_tokens": self.acted_tokens,
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
        self.conversations.clear()
        for env_id, record in state["under_way"]:
            restore_conversation(self.conversation(key_from(env_id)), record, table)
        self.acting_s = state["acting_s"]
        self.acted_tokens = state["acted_tokens"]
