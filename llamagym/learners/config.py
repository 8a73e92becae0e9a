"""Options that all learners share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ..options import Options

_TRACKERS = "Drop it: trackers are passed to train(), see llamagym.training.tracking."
_PASSES = "Drop it: max_tokens_per_pass bounds the tokens of a forward and backward pass."
# Options of earlier versions and of TRL 0.11's PPOConfig without an equivalent, with what to do instead.
_REMOVED = {
    "entropy_decay": "Drop it: the bonus falls to 0 at the end of a run (cooldown). Or pass a smaller entropy_coef.",
    "entropy_floor": "Drop it, or pass a larger entropy_coef.",
    "kl_penalty": 'Drop it: kl_placement="reward" takes k1 off the rewards ("kl" of TRL), "loss" adds k3 to the loss.',
    "early_stopping": "Pass target_kl: a step that leads too far is undone and ends the update.",
    "score_clip": "Clip rewards before assign_reward().",
    "use_score_scaling": "Scale rewards before assign_reward(); advantages are normalized by whiten_advantages.",
    "use_score_norm": "Normalize rewards before assign_reward(); advantages are normalized by whiten_advantages.",
    "whiten_rewards": "Drop it: whiten_advantages normalizes what the policy learns from.",
    "use_target_kl": "Set target_kl: 0.03 by default, None for none.",
    "ratio_threshold": "Pass target_kl: it bounds how far an update may go.",
    "log_with": _TRACKERS,
    "tracker_project_name": _TRACKERS,
    "tracker_kwargs": _TRACKERS,
    "forward_batch_size": _PASSES,
    "backward_batch_size": _PASSES,
    "gradient_accumulation_steps": _PASSES,
    "optimize_cuda_cache": _PASSES,
    "optimize_device_cache": _PASSES,
    "gradient_checkpointing": _PASSES,
    "model_name": "Drop it: the model is the agent's first argument.",
    "steps": "Drop it: train(agent, env, episodes=...) says how long to learn.",
}


@dataclass(frozen=True)
class LearnerConfig(Options):
    """Options of all learners; names follow TRL 0.11.

    Attributes:
        batch_size: Turns per update: it runs once finished episodes hold as many, in `train` together with the turns of
            unfinished ones. None: 768 distinct turns, or 8,192 in all, since equal turns are computed once.
        mini_batch_size: Turns per optimizer step; a smaller batch makes one step. None: a quarter of the batch, at
            least 64.
        learning_rate: Learning rate of the policy's weights (Adam).
        warmup_steps: Optimizer steps over which learning rates rise, since Adam's first steps have full size however
            noisy the gradient is.
        cooldown: Share of a run, at its end, over which learning rates and the entropy bonus fall to 0. Only in
            `train`, which knows the run's progress.
        gamma: Discount per turn.
        cliprange: Epsilon of the clipped surrogate.
        entropy_coef: Weight of the entropy bonus, per nat; at most a tenth of the batch's mean absolute advantage, so
            that the bonus alone never sets the direction of a step.
        init_kl_coef: Initial weight of the KL to the reference, which is the policy at the first update after the
            latest warm start. 0 needs no reference.
        adap_kl_ctrl: Whether the coefficient follows `target` (Ziegler et al. 2019, https://arxiv.org/abs/1909.08593),
            between a thousandth and a thousand times `init_kl_coef`.
        target: Target of the KL to the reference, in nats per turn.
        horizon: Turns over which the coefficient adapts to it.
        target_kl: Target of an update's KL, in nats per decision (`approx_kl`). A step beyond 1.5 times the target is
            undone and ends the update. After an update beyond the target the policy's learning rate falls, after one
            below half of it the rate rises, up to `learning_rate`. None does neither.
        max_grad_norm: Gradient clipping by norm, separately for the policy's weights and a value head's.
        whiten_advantages: Whether advantages are normalized to mean 0 and deviation 1 over a batch.
        max_tokens_per_pass: Tokens of one forward and backward pass; bounds memory and changes nothing else. None:
            1,024 on a CPU, more for small models on an accelerator.
        seed: Seed of the order of turns in minibatches; None takes the agent's seed, or 0.
    """

    advice: ClassVar[Mapping[str, str]] = _REMOVED
    renamed: ClassVar[Mapping[str, str]] = {"microbatch_nodes": "max_tokens_per_pass"}

    batch_size: int | None = None
    mini_batch_size: int | None = None
    learning_rate: float = 1e-3
    warmup_steps: int = 20
    cooldown: float = 0.2
    gamma: float = 0.99
    cliprange: float = 0.2
    entropy_coef: float = 0.02
    init_kl_coef: float = 0.0
    adap_kl_ctrl: bool = False
    target: float = 6.0
    horizon: float = 10_000
    target_kl: float | None = 0.03
    max_grad_norm: float = 1.0
    whiten_advantages: bool = True
    max_tokens_per_pass: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        """Checks types and ranges."""
        super().__post_init__()
        self._require_at_least(1, "batch_size", "mini_batch_size", "warmup_steps", "max_tokens_per_pass")
        self._require_finite("entropy_coef", "init_kl_coef")
        self._require_rate("learning_rate")
        self._require_positive("cliprange", "target", "horizon", "target_kl", "max_grad_norm")
        self._require_fraction("cooldown", "gamma")

    @property
    def kl_in_loss(self) -> bool:
        """Whether the KL to the reference is a term of the loss."""
        return self.init_kl_coef != 0
