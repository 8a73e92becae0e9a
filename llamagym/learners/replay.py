"""Replay of the best recent episodes: supervised learning beside learning from rewards.

An update ends with a few steps that raise the likelihood of the replies in the best recent episodes, as self-imitation
learning does (Oh et al. 2018, https://arxiv.org/abs/1806.05635, without its critic). The likelihood is the policy's
own, so choices are learned as choices. The steps have their own optimizer, so the learner's moments do not change.
Their learning rate sets their strength, since Adam's steps do not depend on the scale of the loss.

With noisy rewards the best episodes are the lucky ones; replay is off by default.
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
from typing import Any, ClassVar

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
    """Options of the replay buffer and of the steps on it.

    Attributes:
        episodes: Number of recent episodes to learn from: those with the highest return, penalties included.
        recent_updates: Number of latest updates whose episodes count as recent.
        steps: Optimizer steps at the end of each update.
        batch_size: Turns per optimizer step, in whole contexts.
        learning_rate: Learning rate of Adam; it falls with the learner's at the end of a run (`cooldown`).
        max_grad_norm: Gradient clipping by norm.
        max_tokens_per_pass: Tokens of one forward and backward pass; bounds memory and changes nothing else.
        seed: Seed of tie-breaking and of the order of turns.
    """

    renamed: ClassVar[Mapping[str, str]] = {"microbatch_nodes": "max_tokens_per_pass"}

    episodes: int = 64
    recent_updates: int = 8
    steps: int = 2
    batch_size: int = 64
    learning_rate: float = 1e-4
    max_grad_norm: float = 1.0
    max_tokens_per_pass: int = 1024
    seed: int = 0

    def __post_init__(self) -> None:
        """Checks types and ranges."""
        super().__post_init__()
        self._require_at_least(1, "episodes", "recent_updates", "steps", "batch_size", "max_tokens_per_pass")
        self._require_positive("learning_rate", "max_grad_norm")
        self._require_rate("learning_rate")


class Replay:
    """Learns from the best recent episodes."""

    def __init__(self, policy: Policy, config: ReplayConfig) -> None:
        """Creates an empty buffer and the optimizer.

        Args:
            policy: The policy whose trainable weights are updated; the value head stays as it is.
            config: The options.
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
        """Restarts the optimizer on the policy's current weights: a warm start replaces them."""
        self.optimizer.restart([self._learning_weights()])

    def _learning_weights(self) -> list[nn.Parameter]:
        return [weight for weight in self.policy.model.pretrained_model.parameters() if weight.requires_grad]

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """While open, an exception restores buffer and optimizer; the learner restores the weights."""
        buffer = attributes_undone_on_error(self, {"_recent": copy, "_lowest": copy, "_rng": deepcopy})
        with self.optimizer.undone_on_error(), buffer:
            yield

    def state_dict(self, table: IdTable) -> dict[str, Any]:
        """The state to save; token ids go to `table`."""
        return {
            "recent": [[episode_record(episode, table) for episode in best] for best in self._recent],
            "lowest": list(self._lowest),
            "learning": state_of(self, ("optimizer", "_rng")),
        }

    def load_state_dict(self, state: Mapping[str, Any], table: IdTable) -> None:
        """Restores what `state_dict` returned, after the policy has its weights."""
        self.reset_optimizer()
        recent = [[episode_from(record, table) for record in best] for best in state["recent"]]
        self._recent = deque(recent, maxlen=self.config.recent_updates)
        self._lowest = deque(state["lowest"], maxlen=self.config.recent_updates)
        restore(self, state["learning"])

    @property
    def episodes(self) -> list[Episode]:
        """The episodes to learn from, best first."""
        return self._best([episode for best in self._recent for episode in best])

    def update(self, episodes: Sequence[Episode], rate_scale: float = 1.0) -> dict[str, float]:
        """Adds the episodes of an update, then learns from the best recent ones.

        Args:
            episodes: The update's batch.
            rate_scale: Factor of the learning rate, which falls with the learner's at the end of a run (`cooldown`).

        Returns:
            Statistics: `replay_loss` (mean negative log-probability of a decision, averaged over the steps),
            `replay_grad_norm`, `replay_skipped_steps` (losses or gradients not finite), `replay_episodes`,
            `replay_return_mean` and `replay_return_min` of the episodes, and `replay_s`. Empty if there is nothing to
            learn: all recent returns are equal, or every turn is invalid or has a single possible reply.
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
        selected = self.episodes
        best = _score(selected[0])
        worst = min(self._lowest)
        # Rewards have the precision of float32.
        if best - worst <= torch.finfo(torch.float32).eps * max(abs(best), abs(worst)):
            return {}
        segments = [segment for segment in segments_of(selected) if any(map(_is_trainable, segment.turns))]
        if not segments:
            return {}
        rate = self.config.learning_rate * rate_scale
        steps: list[tuple[float, float]] = []
        with self.policy.trees.cached():
            for _ in range(self.config.steps):
                loss_and_norm = self._step(self._draw(segments), rate)
                if loss_and_norm is not None:
                    steps.append(loss_and_norm)
        if steps:
            # Without a target KL only output that is not finite is too far.
            is_undone = self.optimizer.record_kl(0.0 if self._is_output_finite(segments) else math.inf)
            self.optimizer.end()
            if is_undone:
                self.optimizer.undo()
                steps.pop()
            self.optimizer.release_weights()
        loss, norm = np.mean(steps, axis=0) if steps else (np.nan, np.nan)
        returns = [episode.total_reward for episode in selected]
        return {
            "replay_loss": float(loss),
            "replay_grad_norm": float(norm),
            "replay_skipped_steps": float(self.config.steps - len(steps)),
            "replay_episodes": float(len(selected)),
            "replay_return_mean": float(np.mean(returns)),
            "replay_return_min": min(returns),
            "replay_s": time.perf_counter() - started,
        }

    def _best(self, episodes: Sequence[Episode]) -> list[Episode]:
        shuffled = [episodes[index] for index in self._rng.permutation(len(episodes))]
        return sorted(shuffled, key=_score, reverse=True)[: self.config.episodes]

    def _draw(self, segments: list[Segment]) -> list[Segment]:
        """Random segments that together hold a batch of turns."""
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
        """One optimizer step; returns the loss before it and the gradient's norm, or None if it was skipped."""
        count = sum(turn.decision_count for segment in segments for turn in segment.turns if turn.valid)
        total = 0.0
        for chunk in self.policy.chunks(own_share(segments), self.config.max_tokens_per_pass):
            current = self.policy.evaluate(chunk)
            valid = torch.tensor([turn.valid for segment in chunk for turn in segment.turns]).to(current.mask.device)
            loss = -current.logprobs[current.mask & valid[:, None]].sum() / count
            self.accelerator.backward(loss)
            total += loss.item()
            # Frees the chunk's graph, which would otherwise live until the next chunk has built its own.
            del current, loss
        self.optimizer.sum_gradients_()
        total = sum(distributed.gather_objects(total))
        if not self.optimizer.accepts({"replay_loss": total}):
            self.optimizer.adam.zero_grad()
            return None
        self.optimizer.keep_weights()
        (norm,) = self.optimizer.step([rate])
        return total, norm


def _is_trainable(turn: Turn) -> bool:
    """Whether the turn's reply named an action and was not the only possible one."""
    return turn.valid and turn.decision_count > 0


def _score(episode: Episode) -> float:
    return sum(turn.reward + turn.penalty for turn in episode.turns)
