"""Replay of the best recent episodes: supervised learning that goes on while rewards are learned from.

An update ends with a few steps that raise the likelihood of the replies that the best recent episodes took, as
self-imitation does (Oh et al. 2018, https://arxiv.org/abs/1806.05635, without its critic). The likelihood is the
policy's own, so choices are learned as choices. The steps have an optimizer of their own: the learner's moments stay
the learner's. Their learning rate sets their strength, since Adam's steps do not depend on the scale of the loss.

Where rewards are a matter of luck, the best episodes are the lucky ones; replay is off by default.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from .. import distributed
from ..options import Options
from ..policy.policy import Policy
from ..text.episode import Episode, Segment, Turn, segments_of
from ..text.records import IdTable, episode_from, episode_record
from .rollout import is_finite, own_share, shortest_opening
from .safe_optimizer import SafeOptimizer
from .state import attributes_undone_on_error, restore, state_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReplayConfig(Options):
    """What the replay buffer keeps, and how it is learned from.

    Attributes:
        episodes: Number of recent episodes to learn from, those with the highest return (with penalties).
        recent_updates: Number of latest updates whose episodes are recent.
        steps: Optimizer steps at the end of each update.
        batch_size: Turns per optimizer step, in whole contexts.
        learning_rate: Of Adam; it falls with the learner's at the end of a run (`cooldown`).
        max_grad_norm: Gradient clipping by norm.
        microbatch_nodes: Tokens in one forward and backward pass; bounds memory, changes nothing else.
        seed: Seed of tie-breaking and of the order of turns.
    """

    episodes: int = 64
    recent_updates: int = 8
    steps: int = 2
    batch_size: int = 64
    learning_rate: float = 1e-4
    max_grad_norm: float = 1.0
    microbatch_nodes: int = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        """Check types and ranges."""
        super().__post_init__()
        self._require_at_least(1, "episodes", "recent_updates", "steps", "batch_size", "microbatch_nodes")
        self._require_positive("learning_rate", "max_grad_norm")
        self._require_rate("learning_rate")


class Replay:
    """Learns from the best recent episodes."""

    def __init__(self, policy: Policy, config: ReplayConfig) -> None:
        """Prepare an empty buffer and the optimizer.

        Args:
            policy: Whose trainable weights are updated; the value head is left alone.
            config: What to keep, and how to learn from it.
        """
        self.policy = policy
        self.config = config
        self.accelerator = distributed.accelerator(policy.device)
        self.optimizer = SafeOptimizer(
            [self._learning_weights()], [config.learning_rate], self.accelerator, config.max_grad_norm
        )
        self._recent: deque[list[Episode]] = deque(maxlen=config.recent_updates)
        # The lowest score in each of these updates.
        self._lowest: deque[float] = deque(maxlen=config.recent_updates)
        self._rng = np.random.default_rng(config.seed)

    def reset_optimizer(self) -> None:
        """Start the optimizer on the policy's weights as they are now: a warm start replaces them."""
        self.optimizer.restart([self._learning_weights()])

    def _learning_weights(self) -> list[nn.Parameter]:
        return [w for w in self.policy.model.pretrained_model.parameters() if w.requires_grad]

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """While open, an exception puts buffer and optimizer back to where they were; weights are the learner's."""
        buffer = attributes_undone_on_error(self, {"_recent": copy, "_lowest": copy, "_rng": deepcopy})
        with self.optimizer.undone_on_error(), buffer:
            yield

    def state_dict(self, table: IdTable) -> dict[str, Any]:
        """What to save; token ids go to `table`."""
        return {
            "recent": [[episode_record(episode, table) for episode in best] for best in self._recent],
            "lowest": list(self._lowest),
            "learning": state_of(self, ("optimizer", "_rng")),
        }

    def load_state_dict(self, state: Mapping[str, Any], table: IdTable) -> None:
        """Take what was saved, once the policy has its weights."""
        self.reset_optimizer()
        recent = [[episode_from(record, table) for record in best] for best in state["recent"]]
        self._recent = deque(recent, maxlen=self.config.recent_updates)
        self._lowest = deque(state["lowest"], maxlen=self.config.recent_updates)
        restore(self, state["learning"])

    @property
    def episodes(self) -> list[Episode]:
        """The episodes that are learned from, best first."""
        return self._best([episode for best in self._recent for episode in best])

    def update(self, episodes: Sequence[Episode], rate_scale: float = 1.0) -> dict[str, float]:
        """Take in the episodes of an update, then learn from the best that are recent.

        Args:
            episodes: The update's batch.
            rate_scale: Factor of the learning rate, as the learner's falls at the end of a run (`cooldown`).

        Returns:
            Statistics: `replay_loss` (mean negative log-probability of a decision, averaged over the steps),
            `replay_grad_norm`, `replay_skipped_steps` (whose losses or gradients were not finite), `replay_episodes`,
            `replay_return_mean` and `replay_return_min` of the episodes learned from, and `replay_s`. Empty if nothing
            was learned: if all recent returns are equal, or no turn is left without invalid replies and turns with a
            single possible reply.
        """
        started = time.perf_counter()
        if not self.optimizer.holds(self._learning_weights()):
            logger.warning("the trainable weights were replaced: replay's optimizer starts again")
            self.reset_optimizer()
        self.optimizer.begin()
        self.policy.model.zero_grad()
        # Only an update's own best episodes can be among the best of several updates.
        self._recent.append(self._best(episodes))
        self._lowest.append(min(map(_score, episodes)))
        kept = self.episodes
        best = _score(kept[0])
        worst = min(self._lowest)
        # Rewards have the precision of float32.
        if best - worst <= torch.finfo(torch.float32).eps * max(abs(best), abs(worst)):
            return {}
        contexts = segments_of(kept)
        segments = [segment for segment in contexts if any(_teaches(turn) for turn in segment.turns)]
        if not segments:
            return {}
        drawn = (self._draw(segments) for _ in range(self.config.steps))
        rate = self.config.learning_rate * rate_scale
        with self.policy.trees.kept():
            made = [step for chosen in drawn if (step := self._step(chosen, rate))]
        if made:
            # Without a target KL only output that is not finite is too far.
            is_undone = self.optimizer.record_kl(0.0 if self._is_output_finite(segments) else math.inf)
            self.optimizer.end()
            if is_undone:
                self.optimizer.undo()
                made.pop()
            self.optimizer.release_weights()
        loss, norm = np.mean(made, axis=0) if made else (np.nan, np.nan)
        returns = [episode.total_reward for episode in kept]
        return {
            "replay_loss": float(loss),
            "replay_grad_norm": float(norm),
            "replay_skipped_steps": float(self.config.steps - len(made)),
            "replay_episodes": float(len(kept)),
            "replay_return_mean": float(np.mean(returns)),
            "replay_return_min": min(returns),
            "replay_s": time.perf_counter() - started,
        }

    def _best(self, episodes: Sequence[Episode]) -> list[Episode]:
        shuffled = [episodes[index] for index in self._rng.permutation(len(episodes))]
        return sorted(shuffled, key=_score, reverse=True)[: self.config.episodes]

    def _draw(self, segments: list[Segment]) -> list[Segment]:
        """Contexts in random order, as many as hold a batch of turns."""
        drawn: list[Segment] = []
        size = 0
        for index in self._rng.permutation(len(segments)):
            if size >= self.config.batch_size:
                break
            drawn.append(segments[index])
            size += len(segments[index].turns)
        return drawn

    @torch.no_grad()
    def _is_output_finite(self, segments: list[Segment]) -> bool:
        """Whether the policy's output after the last step is finite."""
        return all(distributed.gather_objects(is_finite(self.policy.evaluate(shortest_opening(segments)))))

    def _step(self, segments: list[Segment], rate: float) -> tuple[float, float] | None:
        """One optimizer step; returns the loss before it and the gradient's norm, None if it could not be made."""
        count = sum(turn.decision_count for segment in segments for turn in segment.turns if turn.valid)
        total = 0.0
        for chunk in self.policy.chunks(own_share(segments), self.config.microbatch_nodes):
            now = self.policy.evaluate(chunk)
            valid = torch.tensor([turn.valid for segment in chunk for turn in segment.turns], device=now.mask.device)
            loss = -now.logprobs[now.mask & valid[:, None]].sum() / count
            self.accelerator.backward(loss)
            total += loss.item()
        self.optimizer.sum_gradients_()
        total = sum(distributed.gather_objects(total))
        if not self.optimizer.accepts({"replay_loss": total}):
            self.optimizer.adam.zero_grad()
            return None
        self.optimizer.keep_weights()
        (norm,) = self.optimizer.step([rate])
        return total, norm


def _teaches(turn: Turn) -> bool:
    """Whether the turn's reply named an action, and was not the only possible one."""
    return turn.valid and turn.decision_count > 0


def _score(episode: Episode) -> float:
    return sum(turn.reward + turn.penalty for turn in episode.turns)
