"""Alarms: warnings about learning that goes wrong, each with what to try next.

A rule reads the statistics of the latest updates and returns a warning, or None. Rules skip statistics that an
algorithm does not have.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..learners.advantages import FULL_BATCH

Stats = Mapping[str, float]
History = Sequence[Stats]

# Updates in the history: enough for the latest 20 with information if every second one is a flat batch.
_HISTORY_LENGTH = 40
_INFORMATIVE_UPDATES = 20
# Updates per mean when the latest are compared with those before; means of five are steady enough to show a trend.
_WINDOW = 5
# Fewer turns may have one and the same reply by chance, and fewer episodes one return.
_MIN_TURNS = 32
_MIN_EPISODES = 8
# Beyond this share of one reply, a batch of some hundred turns has hardly any other reply to learn from.
_SAME_REPLY = 0.99
# Nats. The less likely of two choices is then taken 3 times in 1000: a reply that is not tried is not learned.
_CERTAIN = 0.02
# Returns with a smaller deviation are equal up to rounding.
_EQUAL = 1e-8
# From one reply in ten on, much of the gradient is about the format instead of the game.
_INVALID_HIGH = 0.1
# A rise of the invalid rate that stays below this is not reported.
_INVALID_NOTICED = 0.02
# Nats per decision. approx_kl is 0.02 where the log-ratios of two even choices have the size of the usual clipping
# range, 0.2. Within the default target_kl it stays below 0.045.
_KL_JUMP = 0.05
# Undone updates in the history. Each lowers the learning rate by a third, so after this many it is at its minimum, a
# thousandth.
_UNDONE = 19
# The critic starts at 0 and learns within a few updates if there is anything to learn.
_CRITIC_UPDATES = 10
_EXPLAINS_NOTHING = 0.01
# Rounding stays below this; a wrong mask, position or temperature does not. In half precision, sampling and learning
# round differently from the first attention on, which adds up to 0.3 over thirty layers and whole conversations.
_RATIO_ERROR = 1e-3
_RATIO_ERROR_HALF = 0.5
# Nats per token. Servers of the same weights in another precision stayed below 0.002.
_SAMPLER_KL = 0.1


@dataclass(frozen=True)
class Settings:
    """Settings of an agent: alarms suggest only options that it has and that are not set yet.

    Attributes:
        dtype: Dtype of the model's weights, which decides how far rounding alone moves ratios from 1.
        target_kl: The learner's limit of the KL divergence per update; None for no limit.
        calibrates_choices: Whether choices are scored relative to the model's prior for them.
        has_prefix: Whether replies begin with a `response_prefix`.
        has_reference: Whether the KL to a reference policy is penalized.
        sets_critic: Whether the critic's learning rate or clipping range was passed.
        epochs_option: Name of the option for the passes over a batch; empty without one.
    """

    dtype: torch.dtype = torch.float32
    target_kl: float | None = None
    calibrates_choices: bool = True
    has_prefix: bool = False
    has_reference: bool = False
    sets_critic: bool = False
    epochs_option: str = "ppo_epochs"

    @property
    def reduced_precision_advice(self) -> list[str]:
        """Suggestions if the precision of the weights may be the cause."""
        if self.dtype == torch.float32:
            return []
        return ["load the model with dtype='float32'"]


class Alarms:
    """Watches the statistics of successive updates.

    Attributes:
        settings: The agent's settings.

    >>> alarms = Alarms()
    >>> [alarm.split(":")[0] for alarm in alarms.check({"approx_kl": 0.3})]
    ['approx_kl jumped to 0.300']
    >>> alarms.check({"approx_kl": 0.3}), alarms.check({"approx_kl": 0.01})
    ([], [])
    >>> len(alarms.check({"approx_kl": 0.3}))
    1
    """

    def __init__(self, settings: Settings | None = None) -> None:
        """Creates alarms without a history.

        Args:
            settings: The agent's settings; None is the defaults.
        """
        self.settings = settings or Settings()
        self._history: deque[Stats] = deque(maxlen=_HISTORY_LENGTH)
        # Names of the rules that warned about the latest update.
        self._active: set[str] = set()
        self._rules: dict[str, Callable[[History, Settings], str | None]] = {
            "skipped": _skipped,
            "same_reply": _same_reply,
            "certain": _certain,
            "equal_returns": _equal_returns,
            "invalid_high": _invalid_high,
            "invalid_climbs": _invalid_climbs,
            "kl_jump": _kl_jump,
            "undone": _undone,
            "useless_critic": _useless_critic,
            "ratio_error": _ratio_error,
            "sampler_kl": _sampler_kl,
        }

    def check(self, stats: Stats, offers_choices: bool = True) -> list[str]:
        """Adds an update's statistics to the history and applies the rules.

        Args:
            stats: Statistics from `Learner.update`.
            offers_choices: Whether any turn of the batch was a choice; only choices can be calibrated.

        Returns:
            One warning for each alarm that starts with this update. An alarm that continues is not repeated; after it
            has ceased, it may start again.
        """
        self._history.append(dict(stats))
        history = list(self._history)
        settings = self.settings
        if not offers_choices:
            settings = replace(settings, calibrates_choices=True)
        warnings = {}
        for name, rule in self._rules.items():
            text = rule(history, settings)
            if text:
                warnings[name] = text
        new = [text for name, text in warnings.items() if name not in self._active]
        self._active = set(warnings)
        return new

    def state_dict(self) -> dict[str, Any]:
        """Returns the history and the active alarms."""
        return {"history": list(self._history), "active": sorted(self._active)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state from `state_dict`."""
        self._history = deque(map(dict, state["history"]), maxlen=_HISTORY_LENGTH)
        self._active = set(state["active"])


def ratio_tolerance(dtype: torch.dtype) -> float:
    """Returns how far from 1 rounding alone may move the ratio of sampled and trained probabilities."""
    return _RATIO_ERROR if dtype == torch.float32 else _RATIO_ERROR_HALF


def _one_of(suggestions: Sequence[str]) -> str:
    """Returns suggestions, the most promising one first, as a sentence.

    >>> _one_of(["lower a", "raise b", "set c"])
    'Lower a, raise b, or set c.'
    """
    *others, last = suggestions
    text = f"{', '.join(others)}, or {last}" if others else last
    return f"{text[0].upper()}{text[1:]}."


def _same_reply(history: History, settings: Settings) -> str | None:
    share = _latest(history, "commonest_reply")
    if share is None or share < _SAME_REPLY or not _has_at_least(_MIN_TURNS, history, "deciding_turns"):
        return None
    suggestions = []
    if (_latest(history, "deciding_turns") or 0.0) < FULL_BATCH:
        suggestions.append("a larger batch_size")
    if not settings.calibrates_choices:
        suggestions.append("calibrate_choices=True")
    if settings.target_kl is None:
        suggestions.append("target_kl=0.03")
    suggestions.append("a higher entropy_coef")
    suggestions[0] = f"start again with {suggestions[0]}"
    return (
        f"{share:.1%} of all replies are one and the same: unless it is right everywhere, the policy has collapsed and "
        f"cannot find anything better. {_one_of(suggestions)}"
    )


def _skipped(history: History, settings: Settings) -> str | None:
    skipped = sum(_latest(history, name) or 0.0 for name in ("skipped_steps", "replay_skipped_steps"))
    if not skipped:
        return None
    return f"{skipped:.0f} optimizer steps were skipped, since their losses or gradients were not finite. " + _one_of(
        ["look at rewards for extreme values", "lower learning_rate", *settings.reduced_precision_advice]
    )


def _certain(history: History, settings: Settings) -> str | None:
    entropy = _latest(history, "entropy")
    returns = _values(history, "return_mean")
    if entropy is None or entropy > _CERTAIN or len(returns) < 2 * _WINDOW or _trend(returns) > 0:
        return None
    return (
        f"entropy is {entropy:.3f} nats and return_mean stays at {_mean(returns[-_WINDOW:]):.3g}: nothing new is tried "
        "any more. If higher returns are possible, start again with a higher entropy_coef or a lower learning_rate."
    )


def _equal_returns(history: History, settings: Settings) -> str | None:
    spread = _latest(history, "return_std")
    if spread is None or spread > _EQUAL or not _has_at_least(_MIN_EPISODES, history, "episodes"):
        return None
    return (
        f"all {history[-1]['episodes']:.0f} episodes returned the same: nothing tells a good action from a bad one. If "
        "it is not the best possible return, collect more episodes a batch, start with an easier task, or warm-start "
        "from demonstrations."
    )


def _invalid_high(history: History, settings: Settings) -> str | None:
    rates = _values(history, "invalid_rate")
    if not rates or rates[-1] < _INVALID_HIGH or _trend(rates) < 0 or not _has_at_least(_MIN_TURNS, history, "turns"):
        return None
    suggestions = ["offer get_action_choices()"]
    if not settings.has_prefix:
        suggestions.append("open the reply with response_prefix")
    suggestions.append("accept more wordings in extract_action()")
    return (
        f"{rates[-1]:.0%} of the replies name no action: the format is learned instead of the game. "
        f"{_one_of(suggestions)}"
    )


def _invalid_climbs(history: History, settings: Settings) -> str | None:
    rates = _values(history, "invalid_rate")
    if _trend(rates) <= 0 or _mean(rates[-_WINDOW:]) < _INVALID_NOTICED:
        return None
    suggestions = ["lower learning_rate or entropy_coef"]
    if not settings.has_reference:
        suggestions.append("hold it with init_kl_coef")
    suggestions.append("make invalid_action_penalty larger")
    return (
        f"invalid_rate climbed to {_mean(rates[-_WINDOW:]):.1%}: the policy is losing the format. "
        f"{_one_of(suggestions)}"
    )


def _kl_jump(history: History, settings: Settings) -> str | None:
    kl = _latest(history, "approx_kl")
    if kl is None or kl <= _KL_JUMP:
        return None
    suggestions = ["lower learning_rate"]
    if settings.epochs_option:
        suggestions[0] += f" or {settings.epochs_option}"
    if settings.target_kl is None:
        suggestions.append("set target_kl=0.03")
    return (
        f"approx_kl jumped to {kl:.3f}: the update moved the policy further than its samples can tell. "
        f"{_one_of(suggestions)}"
    )


def _undone(history: History, settings: Settings) -> str | None:
    # A flat batch makes no steps that could be undone.
    informative = [stats for stats in history if not stats.get("flat_batch")][-_INFORMATIVE_UPDATES:]
    undone = sum(stats.get("stopped_early", 0.0) for stats in informative)
    if undone < _UNDONE:
        return None
    return (
        f"in {undone:.0f} of the last {len(informative)} updates with information a step led beyond target_kl and was "
        "undone, although the learning rate has fallen to its minimum: hardly anything is learned. "
        + _one_of(["raise target_kl or batch_size", *settings.reduced_precision_advice])
    )


def _useless_critic(history: History, settings: Settings) -> str | None:
    explained = _values(history, "explained_variance")[-_CRITIC_UPDATES:]
    if len(explained) < _CRITIC_UPDATES or max(explained) >= _EXPLAINS_NOTHING:
        return None
    suggestions = []
    if settings.sets_critic:
        suggestions.append("leave value_learning_rate and cliprange_value out")
    suggestions.append("show in the observation what the return depends on")
    return (
        f"explained_variance has not passed {max(explained):.2f} in {_CRITIC_UPDATES} updates: the value head predicts "
        f"nothing, and advantages are as noisy as returns. {_one_of(suggestions)}"
    )


def _ratio_error(history: History, settings: Settings) -> str | None:
    tolerance = ratio_tolerance(settings.dtype)
    error = _latest(history, "ratio_error")
    if error is None or error <= tolerance:
        return None
    return (
        f"ratio_error is {error:.2g}, where rounding explains {tolerance:.0g}: the policy that sampled is not the one "
        "that is trained. Change weights, temperature or choices only between an update and the next episode; if you "
        "changed none, report this as a bug."
    )


def _sampler_kl(history: History, settings: Settings) -> str | None:
    kl = _latest(history, "sampler_kl")
    if kl is None or kl <= _SAMPLER_KL:
        return None
    return (
        f"sampler_kl is {kl:.2g} nats per token, where rounding explains {_SAMPLER_KL:.1g}: the server's weights "
        "are not the learner's. Look whether it serves the same base model, in a similar precision, and whether its "
        "log reports that it loaded the adapter."
    )


def _values(history: History, name: str) -> list[float]:
    """Returns a statistic over time, oldest first; empty if the latest update does not have it."""
    if _latest(history, name) is None:
        return []
    return [stats[name] for stats in history if name in stats and not math.isnan(stats[name])]


def _latest(history: History, name: str) -> float | None:
    """Returns a statistic of the latest update; None if it does not have it, or if it is NaN."""
    value = history[-1].get(name, math.nan)
    return None if math.isnan(value) else value


def _has_at_least(count: int, history: History, name: str) -> bool:
    """Whether a statistic of the latest update is at least `count`."""
    return (_latest(history, name) or 0) >= count


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _trend(values: Sequence[float]) -> int:
    """Returns 1 if the last window's mean is above that of the window before it, -1 if below, else 0.

    Means are equal if they differ by less than two standard errors of their difference, or if there are too few values.

    >>> _trend([0.0] * 5 + [1.0] * 5), _trend([1.0, 0.0] * 5), _trend([1.0])
    (1, 0, 0)
    """
    if len(values) < 2 * _WINDOW:
        return 0
    before = values[-2 * _WINDOW : -_WINDOW]
    after = values[-_WINDOW:]
    change = _mean(after) - _mean(before)
    deviations = [value - _mean(before) for value in before]
    deviations += [value - _mean(after) for value in after]
    # Unlike a sum of squares, hypot() does not overflow.
    error = math.hypot(*deviations) / math.sqrt((_WINDOW - 1) * _WINDOW)
    if not math.isfinite(change) or abs(change) <= 2 * error:
        return 0
    return 1 if change > 0 else -1
