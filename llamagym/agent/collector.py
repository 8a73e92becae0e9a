"""Acting that is learned from: rewards, the ends of episodes, and an update whenever a batch of turns is full."""

from __future__ import annotations

import json
import logging
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from .. import distributed
from ..errors import ConfigError, EpisodeError, excerpt
from ..learners.base import Learner, Stats
from ..learners.checks import check_end, check_reward, warn_if_shared
from ..learners.replay import Replay, ReplayConfig
from ..models.lock import alone
from ..models.lora import extension_undone_on_error
from ..models.quantization import computing_dtype
from ..options import as_json, as_number, check_arguments, user_path
from ..policy.policy import Policy
from ..saving import checkpoints
from ..saving.atomic import written_whole
from ..saving.saveable import saveable_state
from ..saving.state_files import check_alike, named_on_error, read_state, write_state
from ..text.arguments import check_flags, environment_ids, informed, listed, one_each, plain_keys
from ..text.chat_template import ChatTemplate
from ..text.episode import Context, Conversation, Episode, commonest_reply, renumbered
from ..text.records import IdTable, episode_from, episode_record
from .actor import Actor
from .alarms import Alarms, Settings
from .exchange import of_all_ranks
from .transcripts import EpisodeSample, Transcript

logger = logging.getLogger(__name__)

# Name of a checkpoint's files.
_STATE = "state"
# Entries of a checkpoint's manifest that the library writes.
_RESERVED_FACTS = frozenset({"options", "kind", "schema", "llamagym", "files"})
# Options that may differ from the saved ones: the random numbers of a checkpoint go on whatever the seeds say.
_FREE = frozenset({"seed", "max_tokens_per_pass"})
# Options that the saved state depends on: what learns, what is saved of it, and what conversations hold.
_FIXED = frozenset({"algorithm", "critic", "init_kl_coef", "replay_config_dict", "context"})


class LearningActor(Actor):
    """Buffers finished episodes and learns from them.

    Attributes:
        learner: What turns episodes into updates.
        transcripts: A few episodes of the latest update's batch, to be read; see `learners.transcripts`.
    """

    def __init__(
        self,
        policy: Policy,
        tokenizer: PreTrainedTokenizerBase,
        template: ChatTemplate,
        context: Context,
        response_prefix: str,
        invalid_action_penalty: float,
        learner: Learner[Any],
        replay: ReplayConfig | None,
    ) -> None:
        """Prepare to act and to learn; arguments as for `Agent`."""
        super().__init__(policy, tokenizer, template, context, response_prefix, invalid_action_penalty)
        warn_if_shared(self, policy.model)
        distributed.diverge_(policy.rng)
        self.learner = learner
        self._replay = None if replay is None else Replay(policy, replay)
        config = learner.config
        settings = Settings(
            dtype=computing_dtype(policy.model.pretrained_model),
            target_kl=config.target_kl,
            calibrates_choices=policy.calibrates,
            has_prefix=bool(response_prefix),
            has_reference=config.init_kl_coef > 0,
            sets_critic=any(
                getattr(config, name, None) is not None for name in ("value_learning_rate", "cliprange_value")
            ),
            epochs_option=next((name for name in ("ppo_epochs", "epochs") if name in config.given()), ""),
        )
        self._alarms = Alarms(settings)
        self._buffer: list[Episode] = []
        self.transcripts: list[Transcript] = []
        self._sample = EpisodeSample(policy.num_updates)
        # Environments whose episodes are learned from before they end.
        self._cut: Sequence[Hashable] = ()
        # What the constructor was given, as JSON holds it.
        self._options: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """What to save: policy, learner, replay, alarms, and the episodes that await an update."""
        table = IdTable()
        return {
            **super().state_dict(),
            "learner": self.learner.state_dict(),
            "replay": None if self._replay is None else self._replay.state_dict(table),
            "alarms": self._alarms.state_dict(),
            "buffer": [episode_record(episode, table) for episode in self._buffer],
            "buffer_ids": table.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a state that `check_state` has seen."""
        super().load_state_dict(state)
        table = IdTable.from_state(state["buffer_ids"])
        self.learner.load_state_dict(state["learner"])
        if self._replay is not None:
            self._replay.load_state_dict(state["replay"], table)
        self._alarms.load_state_dict(state["alarms"])
        self._buffer[:] = [episode_from(record, table) for record in state["buffer"]]

    @alone
    def save_checkpoint(
        self, folder: str | Path, loop: Mapping[str, Any] | None = None, facts: Mapping[str, Any] | None = None
    ) -> None:
        """Save all that learning goes on from: `load_checkpoint` in another process computes what this agent will.

        The folder appears whole or not at all. All caches are dropped, here as there: what they hold is rounded
        otherwise than what is computed again. Where several processes learn together, each must call this; the first
        writes what all of them go on from.

        Args:
            folder: Folder to write: new, empty, or a checkpoint's. A checkpoint is replaced; other files in its folder
                stay.
            loop: State of the caller's own loop, as JSON holds it, and tensors; `load_checkpoint` returns it.
            facts: Further entries of the manifest, to be read without loading.

        Raises:
            ConfigError: The path is invalid, `loop` would not be read again as it is, or `facts` has a name that the
                library uses itself.
            CheckpointError: The folder holds something else, or cannot be written; it is as it was.
        """
        for name, given in (("loop", loop), ("facts", facts)):
            if not (given is None or isinstance(given, Mapping)):
                raise ConfigError(
                    f"{name} must be a dictionary or None, got {excerpt(given)} ({type(given).__name__})."
                )
        reserved = sorted(_RESERVED_FACTS & set(facts or ()))
        if reserved:
            raise ConfigError(f"facts has {reserved}, which llamagym writes itself. Use other names.")
        try:
            about = {"options": self._identity, **as_json(dict(facts or {}))}
            json.dumps(about)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"facts={excerpt(facts)} cannot be written as JSON: {error}.") from error
        loop_state = saveable_state(dict(loop or {}), "loop")
        self.policy.drop_caches()
        version, rng = self.policy.weights_version, self.policy.rng.get_state()
        own = {"acting": self.own_state_dict(), "version": version, "rng": rng, "loop": loop_state}
        of_others = distributed.gather_objects(own)[1:]
        if distributed.is_main_process():
            with written_whole(folder, checkpoints.KIND, about) as whole:
                write_state(whole, _STATE, {"agent": self.state_dict(), "loop": own["loop"], "others": of_others})
        distributed.gather_objects(None)

    def load_checkpoint(
        self, folder: str | Path, *, keep_episodes: bool = False, allow_changes: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Go on learning where `save_checkpoint` was called; build the agent as the saved one was built.

        Seeds, `max_tokens_per_pass` and the number of processes are yours to change. With another number of these,
        episodes under way are dropped, and so are those whose group can no longer be completed.

        Args:
            folder: What it wrote, or a folder of checkpoints, of which the newest whole one is taken.
            keep_episodes: Whether episodes that were under way go on: their environments stand where they stood.
                Otherwise they are dropped, and environments are to be reset.
            allow_changes: What may differ from the checkpoint, by the names that the error lists, such as
                "ppo_config_dict.learning_rate"; "model" allows other frozen weights of the same shapes.

        Returns:
            The `loop` that was saved.

        Raises:
            CheckpointError: It is damaged, of a later version, another model's, or an agent's of another class or with
                other options; nothing has changed.
        """
        with self.loading_checkpoint(folder, keep_episodes=keep_episodes, allow_changes=allow_changes) as loop:
            return loop

    @contextmanager
    def loading_checkpoint(
        self, folder: str | Path, *, keep_episodes: bool = False, allow_changes: Sequence[str] = ()
    ) -> Iterator[dict[str, Any]]:
        """While open, the agent has the state of a checkpoint; an exception brings its own state back.

        For callers whose loop may reject the rest of the checkpoint. What learns is held twice while it is open.

        Args:
            folder: As for `load_checkpoint`.
            keep_episodes: As for `load_checkpoint`.
            allow_changes: As for `load_checkpoint`.

        Yields:
            The `loop` that was saved.

        Raises:
            CheckpointError: As for `load_checkpoint`.
        """
        folder = user_path(folder, "folder")
        given = {"keep_episodes": keep_episodes, "allow_changes": allow_changes}
        check_arguments(LearningActor.load_checkpoint, given)
        with named_on_error(folder):
            folder = checkpoints.find(folder)
        checkpoints.check_options(folder, "options", self._identity, _FREE, _FIXED, allow_changes)
        state = read_state(folder, _STATE)
        with self._unchanged_on_error():
            with named_on_error(folder, f"{_STATE}.json"), self.lock:
                check_alike(state["agent"], self.state_dict())
                self.check_state(state["agent"], "model" in allow_changes)
                self.load_state_dict(state["agent"])
                loop = self._take_own_share(state)
                is_same = distributed.count() == 1 + len(state.get("others", []))
                if not (keep_episodes and is_same):
                    self.discard_episodes(list(self._conversations))
                if not is_same:
                    self._buffer[:] = self.learner.complete(self._buffer)
            yield loop

    def _take_own_share(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Take what a checkpoint holds for this process alone; returns its loop's state."""
        others = state.get("others", [])
        loop: dict[str, Any] = dict(state["loop"])
        if 0 < distributed.rank() <= len(others):
            own = others[distributed.rank() - 1]
            self.load_own_state_dict(own["acting"])
            for conversation in self._conversations.values():
                conversation.turns = renumbered(conversation.turns, {own["version"]: self.policy.weights_version})
            self.policy.rng.set_state(own["rng"])
            loop = dict(own["loop"])
        elif distributed.rank():
            distributed.diverge_(self.policy.rng)
        return loop

    @contextmanager
    def _unchanged_on_error(self) -> Iterator[None]:
        """While open, an exception leaves the agent as it was; what learns is held twice meanwhile."""
        with self.lock:
            before = deepcopy(self.state_dict())
        try:
            with extension_undone_on_error(self.policy.model.pretrained_model):
                yield
        except BaseException:
            with self.lock:
                self.load_state_dict(before)
            raise

    @property
    def _identity(self) -> dict[str, Any]:
        """What a checkpoint must be loaded with: the agent's class and its options."""
        return {"class": type(self).__name__, **self._options}

    @property
    def buffered_turns(self) -> int:
        """Turns of finished episodes that await the next update."""
        return sum(len(episode.turns) for episode in self._buffer)

    def why_no_update(self) -> str:
        """Why no update has run yet."""
        return self.learner.why_no_update(self._buffer)

    def assign_reward(self, reward: float, turn: int = -1) -> None:
        """Add a reward to an action of one environment, by default the last; see `assign_rewards`."""
        self.assign_rewards([reward], [0], [turn])

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
        """End the episode of one environment; see `terminate_episodes`.

        agent.terminate_episode(terminated=terminated, truncated=truncated, final_observation=observation)
        """
        reached_final_state = None if terminated is None else [terminated]
        return self.terminate_episodes(
            [0], [truncated], [final_observation], train, [group], [final_info], terminated=reached_final_state
        )

    def assign_rewards(
        self,
        rewards: Sequence[float],
        env_ids: Sequence[Hashable] | None = None,
        turns: Sequence[int] | None = None,
    ) -> None:
        """Add each environment's reward to one of its actions; several rewards for one action add up.

        Args:
            rewards: One per environment.
            env_ids: Which environments; by default 0, 1, 2, ...
            turns: Which turn of its episode under way each is for, counted from 0, or from the end by negative
                numbers; by default the last. Rewards that come late, such as a judge's, go to the turns that earned
                them so.

        Raises:
            EpisodeError: A turn is missing, or a reward is not a finite number; none is assigned.
        """
        given = listed(rewards, "rewards")
        ids = environment_ids(given, env_ids, "rewards")
        places = one_each(turns, -1, ids, "turns")
        for reward, env_id, place in zip(given, ids, places, strict=True):
            if not self._has_turns(env_id):
                raise EpisodeError(
                    f"Reward {excerpt(reward)} for environment {env_id!r} follows no action. Call act() first."
                )
            check_reward(reward, place, self._conversations[env_id], env_id)
        for reward, env_id, place in zip(given, ids, places, strict=True):
            self.conversation(env_id).reward(as_number(reward), int(place))

    @alone
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
        """End episodes, and learn if that fills a batch.

        A batch is all finished episodes (GRPO: complete groups), once they hold `batch_size` turns.

        Where several processes learn together, a batch is what all of them have finished. All must call this equally
        often, such as after every step, with no `env_ids` if no episode ended: here they hear of each other.

        Args:
            env_ids: Environments whose episodes ended.
            truncated: Which of them were cut off rather than finished; by default none. Without effect where
                `terminated` is passed.
            final_observations: The observation after the last step; a learner with a critic (PPO) needs it of those
                that were cut off.
            train: Whether these episodes are learned from; if not, they are dropped, as those are of which a turn was
                taken in `eval()`.
            groups: For GRPO, what tells which episodes began alike, such as the seed of their reset; by default all
                did. A start that is played again needs a group of its own.
            final_infos: The info after the last step, for a `format_observation` that takes it.
            terminated: Which of them reached a final state, after which nothing is earned. Takes precedence: an episode
                that was terminated and truncated at once is terminated; one that is neither was cut off by the loop.
                None: those that were not truncated. An episode that was both then counts as cut off, since
                `truncated` alone does not say it: loops of earlier versions should pass this, too.

        Returns:
            Statistics of the update, or an empty dictionary if none ran.
        """
        ids = listed(env_ids, "env_ids")
        ids = environment_ids(ids, ids, "episodes")
        flagged = one_each(truncated, False, ids, "truncated")
        finals = one_each(final_observations, None, ids, "final_observations")
        group_of = plain_keys(one_each(groups, None, ids, "groups"), "group")
        last_infos = informed(final_infos, ids)
        ends = one_each(terminated, False, ids, "terminated")
        check_flags([*flagged, *ends, train], "truncated, terminated or train")
        cut = [bool(flag) for flag in flagged] if terminated is None else [not end for end in ends]
        bootstraps = self._learning and train and self.learner.has_critic
        for env_id, was_cut, final in zip(ids, cut, finals, strict=True):
            check_end(env_id, self._has_turns(env_id), bootstraps and was_cut and final is None)
        before, sample, stats = list(self._buffer), self._sample.copy(), Stats()
        try:
            if self._learning and train:
                with self.undone_on_error(ids):
                    conversations, own = self._ended(ids, cut, finals, last_infos, group_of)
                    finished = of_all_ranks(self.policy, own)
                    self._buffer += finished
                    # With several processes, what is learned from are copies of `own`.
                    mine = [episode for episode in finished if episode.rank == distributed.rank()]
                    for conversation, episode in zip(conversations, mine, strict=True):
                        self._sample.add(episode, conversation.messages)
                    stats = self._learn(set(ids))
        except BaseException:
            self._buffer[:], self._sample = before, sample
            raise
        self.discard_episodes(ids)
        return stats

    def _ended(
        self,
        env_ids: Sequence[Hashable],
        cut: list[bool],
        finals: list[Any],
        infos: list[Any],
        groups: list[Hashable | None],
    ) -> tuple[list[Conversation], list[Episode]]:
        """The conversations of environments, without those that were not recorded for learning, and their episodes."""
        recorded = [index for index, env_id in enumerate(env_ids) if self._conversations[env_id].learns]
        conversations = [self._conversations[env_ids[index]] for index in recorded]
        episodes = []
        for index, conversation in zip(recorded, conversations, strict=True):
            if cut[index] and self.learner.has_critic:
                conversation.observe(self.text_of(finals[index], infos[index]), self.response_prefix)
            episodes.append(conversation.finished(cut[index], groups[index]))
        return conversations, episodes

    @contextmanager
    def cutting_episodes(self, env_ids: Sequence[Hashable]) -> Iterator[None]:
        """While open, a batch also takes what these environments' episodes under way have come to.

        Their last turns wait for the next one: the critic's estimate there stands for what is still to come. So an
        update needs one episode to end, not all. Rewards must not come late. Without a critic, where contexts hold more
        than a turn, and where replay learns from whole episodes, nothing is cut.
        """
        if self.learner.has_critic and self.sees_one_turn and self._replay is None:
            self._cut = env_ids
        try:
            yield
        finally:
            self._cut = ()

    def _under_way(self, ended: set[Hashable]) -> list[tuple[Conversation, Episode]]:
        """The conversations that a batch may take turns of, and these turns."""
        going_on = [each for each in self._cut if each not in ended and self._has_turns(each)]
        so_far = ((talk, talk.under_way()) for talk in map(self._conversations.__getitem__, going_on) if talk.learns)
        return [(conversation, episode) for conversation, episode in so_far if episode.turns]

    def _learn(self, ended: set[Hashable]) -> Stats:
        """Update once if there is a batch; episodes that have just `ended` are in the buffer."""
        under_way = self._under_way(ended)
        so_far = of_all_ranks(self.policy, [episode for _, episode in under_way]) if self._cut else []
        batch = self.learner.take(self._buffer, so_far)
        if not batch:
            return {}
        with ExitStack() as undone:
            if self._replay is not None:
                for part in (self.learner, self._replay):
                    undone.enter_context(part.undone_on_error())
            stats = self.learner.update(batch) | {"commonest_reply": commonest_reply(batch)}
            if self._replay is not None:
                stats |= self._replay.update(batch, self.learner.cooldown.scale)
        for conversation, episode in under_way:
            conversation.learned_turns += len(episode.turns)
        self.transcripts = self._sample.transcripts(batch, self.learner.advantages, self._decoded)
        self._sample = EpisodeSample(self.policy.num_updates)
        seconds, tokens = zip(*distributed.gather_objects((self._acting_s, self._acted_tokens)), strict=True)
        stats |= {"act_s": max(seconds), "act_tokens": float(sum(tokens))}
        self._acting_s, self._acted_tokens = 0.0, 0
        offers_choices = any(turn.prompt.choices is not None for episode in batch for turn in episode.turns)
        for alarm in self._alarms.check(stats, offers_choices):
            if distributed.is_main_process():
                logger.warning(alarm)
        return stats
