"""The options that every learner has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ..options import Options

_OWN_TRACKER = "Drop it: trackers are passed to train(), see llamagym.training.tracking."
_OWN_BATCHES = "Drop it: microbatch_nodes bounds the tokens of a forward and backward pass."
# Options of earlier versions, and of TRL 0.11's PPOConfig, that have no equal here.
_REMOVED = {
    "entropy_floor": "Drop it, or pass a larger entropy_coef.",
    "kl_penalty": 'Drop it: kl_placement="reward" takes k1 off the rewards ("kl" of TRL), "loss" adds k3 to the loss.',
    "early_stopping": "Pass target_kl: a step that leads too far is undone and ends the update.",
    "score_clip": "Clip rewards before assign_reward().",
    "use_score_scaling": "Scale rewards before assign_reward(); advantages are normalized by whiten_advantages.",
    "use_score_norm": "Normalize rewards before assign_reward(); advantages are normalized by whiten_advantages.",
    "whiten_rewards": "Drop it: whiten_advantages normalizes what the policy learns from.",
    "use_target_kl": "Set target_kl: 0.03 by default, None for none.",
    "ratio_threshold": "Pass target_kl: it bounds how far an update may go.",
    "log_with": _OWN_TRACKER,
    "tracker_project_name": _OWN_TRACKER,
    "tracker_kwargs": _OWN_TRACKER,
    "forward_batch_size": _OWN_BATCHES,
    "backward_batch_size": _OWN_BATCHES,
    "gradient_accumulation_steps": _OWN_BATCHES,
    "optimize_cuda_cache": _OWN_BATCHES,
    "optimize_device_cache": _OWN_BATCHES,
    "gradient_checkpointing": _OWN_BATCHES,
    "model_name": "Drop it: the model is the agent's first argument.",
    "steps": "Drop it: train(agent, env, episodes=...) says how long to learn.",
}


@dataclass(frozen=True)
class LearnerConfig(Options):
    """Options of every learner; names follow TRL 0.11.

    Attributes:
        batch_size: An update runs when finished episodes, and in `train` what is learned from of those under way, hold
            at least this many turns. None: 768 turns that differ, or 8,192 in all, since equal turns are computed once
            and more of them cost next to nothing.
        mini_batch_size: Turns per optimizer step; a smaller batch makes one step. None: a quarter of the batch, at
            least 64.
        learning_rate: Of the policy's weights (Adam).
        warmup_steps: Optimizer steps over which learning rates rise: Adam's first steps are full ones, however unsure
            the gradient.
        cooldown: Share of a run, at its end, over which learning rates and the entropy bonus fall to 0. `train` knows
            how far a run has come; nothing falls in a loop of your own.
        gamma: Discount per turn.
        cliprange: Epsilon of the clipped surrogate.
        entropy_coef: Weight of the entropy bonus, per nat; at most a tenth of the batch's mean absolute advantage, so
            that the bonus alone never sets the direction of a step.
        entropy_decay: Factor of that weight after each update: much exploration first, little in the end.
        init_kl_coef: Weight of the KL to the reference, to begin with: to the policy as it is at the first update after
            the latest warm start. 0 needs no reference.
        adap_kl_ctrl: Whether the coefficient follows `target` (Ziegler et al. 2019, https://arxiv.org/abs/1909.08593),
            between a thousandth and a thousand times `init_kl_coef`.
        target: KL to the reference, in nats per turn, that the coefficient steers to.
        horizon: Turns over which it does.
        target_kl: KL by which an update may move the policy, in nats per decision (`approx_kl`). A step that leads
            beyond 1.5 times that is undone and ends the update; after an update that went beyond the target the
            policy's learning rate falls, after one that stayed below half of it it rises again, up to `learning_rate`.
            None does neither.
        max_grad_norm: Gradient clipping by norm, of the policy's weights and of a value head's apart.
        whiten_advantages: Normalize advantages to mean 0 and deviation 1 over a batch.
        microbatch_nodes: Tokens in one forward and backward pass; bounds memory, changes nothing else. None: 1,024 on
            a processor, more of a small model on an accelerator.
        seed: Seed of the order of turns in minibatches; None takes the agent's seed, or 0.
    """

    advice: ClassVar[Mapping[str, str]] = _REMOVED

    batch_size: int | None = None
    mini_batch_size: int | None = None
    learning_rate: float = 1e-3
    warmup_steps: int = 20
    cooldown: float = 0.2
    gamma: float = 0.99
    cliprange: float = 0.2
    entropy_coef: float = 0.02
    entropy_decay: float = 1.0
    init_kl_coef: float = 0.0
    adap_kl_ctrl: bool = False
    target: float = 6.0
    horizon: float = 10_000
    target_kl: float | None = 0.03
    max_grad_norm: float = 1.0
    whiten_advantages: bool = True
    microbatch_nodes: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        """Check types and ranges."""
        super().__post_init__()
        self._require_at_least(1, "batch_size", "mini_batch_size", "warmup_steps", "microbatch_nodes")
        self._require_finite("entropy_coef", "init_kl_coef")
        self._require_rate("learning_rate")
        self._require_positive("cliprange", "target", "horizon", "target_kl", "max_grad_norm")
        self._require_fraction("cooldown", "gamma", "entropy_decay")

    @property
    def kl_in_loss(self) -> bool:
        """Whether the KL to the reference is a term of the loss."""
        return self.init_kl_coef != 0
