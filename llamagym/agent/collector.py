"""Collects finished episodes, and updates the policy whenever they fill a batch."""

from __future__ import annotations

import logging
import threading
from collections.abc import Hashable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from .. import distributed
from ..errors import EpisodeError, excerpt
from ..learners.base import Learner, Stats, UpdateStats
from ..learners.checks import check_end, check_reward
from ..learners.replay import Replay, ReplayConfig
from ..models.hardware import computing_dtype
from ..models.lock import with_model_lock
from ..options import as_number
from ..policy.policy import Policy
from ..text.arguments import as_infos, as_list, check_flags, environment_ids, per_env, plain_keys
from ..text.chat_template import Message
from ..text.episode import Conversation, Episode, commonest_reply, from_process
from ..text.records import IdTable, episode_from, episode_record
from .actor import Actor
from .alarms import Alarms, Settings
from .transcripts import EpisodeSample, Transcript

logger = logging.getLogger(__name__)


class Collector:
    """Turns the steps of an actor into batches of episodes and these into updates.

    Attributes:
        actor: The actor, which holds the conversations under way.
        learner: The learner, which updates the policy from a batch.
        buffer: Finished episodes that await an update.
        alarms: Watches the statistics of updates.
        transcripts: A few episodes of the latest update's batch as text (see `transcripts`).
        seeds: Random numbers for the base seeds of runs.
        options: The agent's constructor options as JSON holds them.
        replay: The replay learner; None for no replay.
    """

    def __init__(
        self,
        actor: Actor,
        learner: Learner[Any],
        replay: ReplayConfig | None,
        seeds: np.random.Generator,
        class_name: str,
        options: dict[str, Any],
    ) -> None:
        """Creates a collector without episodes.

        Args:
            actor: As in the attributes.
            learner: As in the attributes.
            replay: Settings of the replay learner; None for no replay.
            seeds: As in the attributes.
            class_name: Name of the agent's class.
            options: As in the attributes.
        """
        distributed.reseed_by_rank_(actor.policy.rng)
        self.actor = actor
        self.learner = learner
        self.seeds = seeds
        self.options = options
        self._class_name = class_name
        self.transcripts: list[Transcript] = []
        self.replay = None if replay is None else Replay(actor.policy, replay)
        self.alarms = Alarms(_alarm_settings(actor, learner))
        self.buffer: list[Episode] = []
        # True from `load` until a mode is chosen.
        self.is_as_loaded = False
        self._sample = EpisodeSample(actor.policy.num_updates)
        # Environments whose unfinished episodes may enter a batch.
        self._usable_unfinished: Sequence[Hashable] = ()

    @property
    def identity(self) -> dict[str, Any]:
        """The agent's class and options, which must match those of a checkpoint."""
        return {"class": self._class_name, **self.options}

    @property
    def lock(self) -> threading.RLock:
        """The lock that a thread holds while it uses the model."""
        return self.actor.lock

    @property
    def buffered_turns(self) -> int:
        """Number of turns of finished episodes that await the next update."""
        return sum(len(episode.turns) for episode in self.buffer)

    def why_no_update(self) -> str:
        """Returns why no update has run yet."""
        return self.learner.why_no_update(self.buffer)

    def draw_seed(self) -> int:
        """Returns a new base seed for a run."""
        return int(self.seeds.integers(2**63))

    def assign_rewards(
        self,
        rewards: Sequence[float],
        env_ids: Sequence[Hashable] | None = None,
        turns: Sequence[int] | None = None,
    ) -> None:
        """Adds each environment's reward to one of its turns; see `Agent.assign_rewards`."""
        actor = self.actor
        as_given = as_list(rewards, "rewards")
        ids = environment_ids(as_given, env_ids, "rewards")
        turn_of = per_env(turns, -1, ids, "turns")
        for reward, env_id, turn in zip(as_given, ids, turn_of, strict=True):
            if not actor.has_turns(env_id):
                raise EpisodeError(
                    f"Reward {excerpt(reward)} for environment {env_id!r} follows no action. Call act() first."
                )
            conversation = actor.conversation(env_id)
            check_reward(reward, turn, conversation.turns, conversation.learned_turns, f"environment {env_id!r}")
        for reward, env_id, turn in zip(as_given, ids, turn_of, strict=True):
            actor.conversation(env_id).reward(as_number(reward), int(turn))

    @with_model_lock
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
        """Ends episodes, and updates if that fills a batch; see `Agent.terminate_episodes`."""
        actor = self.actor
        ids = as_list(env_ids, "env_ids")
        ids = environment_ids(ids, ids, "episodes")
        truncated_flags = per_env(truncated, False, ids, "truncated")
        finals = per_env(final_observations, None, ids, "final_observations")
        group_of = plain_keys(per_env(groups, None, ids, "groups"), "group")
        last_infos = as_infos(final_infos, ids)
        terminated_flags = per_env(terminated, False, ids, "terminated")
        check_flags([*truncated_flags, *terminated_flags, train], "truncated, terminated or train")
        if terminated is None:
            was_truncated = [bool(flag) for flag in truncated_flags]
        else:
            was_truncated = [not flag for flag in terminated_flags]
        is_recorded = actor.is_learning and train
        needs_final = is_recorded and self.learner.has_critic
        for env_id, is_truncated, final in zip(ids, was_truncated, finals, strict=True):
            check_end(env_id, actor.has_turns(env_id), needs_final and is_truncated and final is None)
        stats: Stats = UpdateStats()
        if train and self.is_as_loaded and not actor.is_learning:
            self.is_as_loaded = False
            logger.warning(
                "A loaded agent is in evaluation mode, so it does not learn from this episode. Call agent.train() to "
                "go on learning, or agent.eval() to silence this warning."
            )
        if is_recorded:
            with actor.undone_on_error(ids):
                conversations, episodes = self._ended(ids, was_truncated, finals, last_infos, group_of)
                messages = [conversation.messages for conversation in conversations]
                stats = self.learn_from(episodes, messages, set(ids))
        actor.discard_episodes(ids)
        return stats

    def learn_from(
        self,
        episodes: Sequence[Episode],
        messages: Sequence[Sequence[Message]],
        env_ids: AbstractSet[Hashable] = frozenset(),
    ) -> Stats:
        """Adds this process's finished episodes to the buffer, and updates if that fills a batch.

        Args:
            episodes: The episodes.
            messages: The chat messages of each: the system's, then one of the user and one of the assistant per turn.
            env_ids: The environments that they ended in.

        Returns:
            Statistics of the update; empty if none ran. After an error the buffer is as it was.
        """
        with self._buffer_restored_on_error():
            finished = episodes_of_all_ranks(self.actor.policy, list(episodes))
            self.buffer += finished
            # With several processes, `finished` holds copies of this one's.
            own = [episode for episode in finished if episode.rank == distributed.rank()]
            for episode, own_messages in zip(own, messages, strict=True):
                self._sample.add(episode, own_messages)
            return self._update_if_full(env_ids)

    @contextmanager
    def _buffer_restored_on_error(self) -> Iterator[None]:
        buffer = list(self.buffer)
        sample = self._sample.copy()
        try:
            yield
        except BaseException:
            self.buffer[:] = buffer
            self._sample = sample
            raise

    def _ended(
        self,
        env_ids: Sequence[Hashable],
        was_truncated: list[bool],
        finals: list[Any],
        infos: list[Any],
        groups: list[Hashable | None],
    ) -> tuple[list[Conversation], list[Episode]]:
        """Returns the conversations that were recorded for learning, and their episodes.

        Args:
            env_ids: The environments whose episodes end.
            was_truncated: Whether each episode ended without reaching a final state.
            finals: Each environment's final observation.
            infos: Each environment's final info.
            groups: Each episode's group, for learners that compare episodes with one start.
        """
        conversations = []
        episodes = []
        for env_id, is_truncated, final, info, group in zip(env_ids, was_truncated, finals, infos, groups, strict=True):
            conversation = self.actor.conversation(env_id)
            if not conversation.learns:
                continue
            if is_truncated and self.learner.has_critic:
                hooks = self.actor.hooks
                conversation.observe(hooks.text(final, info), hooks.response_prefix)
            conversations.append(conversation)
            episodes.append(conversation.finished(is_truncated, group))
        return conversations, episodes

    @contextmanager
    def using_unfinished_episodes(self, env_ids: Sequence[Hashable]) -> Iterator[None]:
        """While open, a batch may include unfinished episodes of these environments.

        The last turn of each waits for the next batch: the critic's estimate there replaces the rewards to come. So an
        update needs one finished episode, not all of them. Rewards must not come late. Episodes stay whole without a
        critic, if prompts hold more than one turn, or if replay needs whole episodes.
        """
        if self.learner.has_critic and self.actor.sees_one_turn and self.replay is None:
            self._usable_unfinished = env_ids
        try:
            yield
        finally:
            self._usable_unfinished = ()

    def _unfinished(self, ended: AbstractSet[Hashable]) -> list[tuple[Conversation, Episode]]:
        """Returns the conversations under way that a batch may use, each with its turns so far as an episode."""
        pairs = []
        for env_id in self._usable_unfinished:
            if env_id in ended or not self.actor.has_turns(env_id):
                continue
            conversation = self.actor.conversation(env_id)
            if not conversation.learns:
                continue
            episode = conversation.under_way()
            if episode.turns:
                pairs.append((conversation, episode))
        return pairs

    def _update_if_full(self, ended: AbstractSet[Hashable]) -> Stats:
        """Runs one update if the buffer fills a batch.

        Args:
            ended: The environments whose episodes have just ended; these are in the buffer.

        Returns:
            Statistics of the update; empty if none ran.
        """
        policy = self.actor.policy
        unfinished = self._unfinished(ended)
        unfinished_of_all: list[Episode] = []
        if self._usable_unfinished:
            unfinished_of_all = episodes_of_all_ranks(policy, [episode for _, episode in unfinished])
        batch = self.learner.take(self.buffer, unfinished_of_all)
        if not batch:
            return UpdateStats()
        with ExitStack() as undone:
            if self.replay is not None:
                # If replay fails, the learner's update is taken back as well.
                undone.enter_context(self.learner.undone_on_error())
                undone.enter_context(self.replay.undone_on_error())
            stats = self.learner.update(batch) | {"commonest_reply": commonest_reply(batch)}
            if self.replay is not None:
                stats |= self.replay.update(batch, self.learner.cooldown.scale)
        for conversation, episode in unfinished:
            conversation.learned_turns += len(episode.turns)
        self.transcripts = self._sample.transcripts(batch, self.learner.advantages, self.actor.decode)
        self._sample = EpisodeSample(policy.num_updates)
        stats |= self._acting_stats()
        offers_choices = any(turn.prompt.choices is not None for episode in batch for turn in episode.turns)
        for alarm in self.alarms.check(stats, offers_choices):
            if distributed.is_main_process():
                logger.warning(alarm)
        return UpdateStats(stats)

    def _acting_stats(self) -> Stats:
        """Returns the cost of acting since the last update, over all processes, and resets it."""
        costs = distributed.gather_objects((self.actor.acting_s, self.actor.acted_tokens))
        self.actor.acting_s = 0.0
        self.actor.acted_tokens = 0
        return {"act_s": max(seconds for seconds, _ in costs), "act_tokens": float(sum(tokens for _, tokens in costs))}

    def keep_complete_groups(self) -> None:
        """Drops buffered episodes whose group can no longer be completed."""
        self.buffer[:] = self.learner.complete(self.buffer)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state to save: policy, learner, replay, alarms, seeds, and the episodes that await an update."""
        table = IdTable()
        return {
            **self.actor.state_dict(),
            "learner": self.learner.state_dict(),
            "replay": None if self.replay is None else self.replay.state_dict(table),
            "alarms": self.alarms.state_dict(),
            "buffer": [episode_record(episode, table) for episode in self.buffer],
            "buffer_ids": table.state_dict(),
            "seeds": self.seeds.bit_generator.state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state that `Actor.check_state` has accepted."""
        self.actor.load_state_dict(state)
        table = IdTable.from_state(state["buffer_ids"])
        self.learner.load_state_dict(state["learner"])
        if self.replay is not None:
            self.replay.load_state_dict(state["replay"], table)
        self.alarms.load_state_dict(state["alarms"])
        self.buffer[:] = [episode_from(record, table) for record in state["buffer"]]
        self.seeds.bit_generator.state = state["seeds"]


def _alarm_settings(actor: Actor, learner: Learner[Any]) -> Settings:
    config = learner.config
    critic_options = ("value_learning_rate", "cliprange_value")
    epochs_options = [name for name in ("ppo_epochs", "epochs") if name in config.to_dict()]
    return Settings(
        dtype=computing_dtype(actor.policy.model.pretrained_model),
        target_kl=config.target_kl,
        calibrates_choices=actor.policy.calibrates,
        has_prefix=bool(actor.hooks.response_prefix),
        has_reference=config.init_kl_coef > 0,
        sets_critic=any(getattr(config, name, None) is not None for name in critic_options),
        epochs_option=epochs_options[0] if epochs_options else "",
    )


def episodes_of_all_ranks(policy: Policy, own: list[Episode]) -> list[Episode]:
    """Returns the episodes of all processes that learn together, after their calibrations have been made equal.

    Args:
        policy: This process's policy.
        own: This process's episodes.
    """
    if distributed.world_size() == 1:
        return own
    calibration = policy.calibration
    own_measurements = calibration.measured if calibration else {}
    gathered = distributed.gather_objects((policy.weights_version, own_measurements, own))
    has_changed = False
    if calibration is not None:
        measurements = [measured for _, measured, _ in gathered]
        has_changed = calibration.agree(measurements, learns=policy.num_updates > 0)
    if has_changed:
        policy.calibration_changed()
    # Every process numbers the states of its weights by itself.
    version_here = policy.weights_version
    episodes = []
    for rank, (version, _, rank_episodes) in enumerate(gathered):
        versions = {} if has_changed else {version: version_here}
        episodes += [from_process(rank, episode, versions) for episode in rank_episodes]
    return episodes
