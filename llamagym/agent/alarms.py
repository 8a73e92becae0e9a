"""Alarms: warns when learning goes wrong, and says what to try next.

A rule looks at the statistics of the latest updates and returns a sentence, or None if all is well. Rules skip
statistics that an algorithm does not have.
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

# Updates that are remembered: as many with information as without, of which the latest 20 with information count. How
# many at each end are compared: means of five are steady enough to tell a trend.
_REMEMBERED, _UPDATES, _WINDOW = 40, 20, 5
# Shares are judged from this many turns, and spreads from this many episodes, on: fewer agree by chance.
_MIN_TURNS, _MIN_EPISODES = 32, 8
# Beyond this share of one reply a batch of some hundred turns holds next to no other to learn from.
_SAME_REPLY = 0.99
# In nats. Of two choices the other one is then taken 3 times in 1000: what is not tried is not learned.
_CERTAIN = 0.02
# Returns whose deviation is below this are equal up to rounding.
_EQUAL = 1e-8
# From one reply in ten on, a good part of the gradient is about the format instead of the game.
_INVALID_HIGH = 0.1
# A rise that stays below this is not worth a word.
_INVALID_NOTICED = 0.02
# In nats per decision. approx_kl is 0.02 where the log-ratios of two even choices have the size of the usual clipping
# range, 0.2. Within the default target_kl it stays below 0.045.
_KL_JUMP = 0.05
# Of the updates that are remembered. Each one whose last step is undone lowers the learning rate by a third, so after
# this many it is at its minimum, a thousandth.
_UNDONE = 19
# The critic starts at 0 and learns within a few updates if there is anything to learn.
_CRITIC_UPDATES, _EXPLAINS_NOTHING = 10, 0.01
# Rounding stays below it; a wrong mask, position or temperature does not. In half precision sampling and learning round
# differently from the first attention on, and thirty layers make up to 0.3 of that on whole conversations.
_RATIO_ERROR, _RATIO_ERROR_HALF = 1e-3, 0.5


@dataclass(frozen=True)
class Settings:
    """Settings of an agent: alarms suggest only what is not set yet, and only what it has.

    Attributes:
        dtype: Of the model's weights: how far rounding alone makes ratios differ from 1.
        target_kl: KL by which an update may move the policy.
        calibrates_choices: Whether choices are measured against what the model says anyway.
        has_prefix: Whether replies are opened with a `response_prefix`.
        has_reference: Whether the KL to a reference is penalized.
        sets_critic: Whether the critic's learning rate or range was passed.
        epochs_option: Name of the option that sets the passes over a batch; empty without one.
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
        """What to do where the precision of the weights may be at fault."""
        return [] if self.dtype == torch.float32 else ["load the model with dtype='float32'"]


class Alarms:
    """Watches the statistics of successive updates.

    >>> alarms = Alarms()
    >>> [alarm.split(":")[0] for alarm in alarms.check({"approx_kl": 0.3})]
    ['approx_kl jumped to 0.300']
    >>> alarms.check({"approx_kl": 0.3}), alarms.check({"approx_kl": 0.01})
    ([], [])
    >>> len(alarms.check({"approx_kl": 0.3}))
    1
    """

    def __init__(self, settings: Settings | None = None) -> None:
        """Start without a history.

        Args:
            settings: The agent's; None: those of `Settings`.
        """
        self._settings = settings or Settings()
        self._history: deque[Stats] = deque(maxlen=_REMEMBERED)
        self._ringing: set[str] = set()
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
        }

    def check(self, stats: Stats, offers_choices: bool = True) -> list[str]:
        """Take in an update's statistics.

        Args:
            stats: As `update` returns them.
            offers_choices: Whether any of its turns was a choice: no other can be calibrated.

        Returns:
            One sentence for each alarm that starts with this update. One that goes on is not repeated; one that ceased
            may start again.
        """
        self._history.append(dict(stats))
        history = list(self._history)
        settings = self._settings if offers_choices else replace(self._settings, calibrates_choices=True)
        found = {name: text for name, rule in self._rules.items() if (text := rule(history, settings))}
        new = [text for name, text in found.items() if name not in self._ringing]
        self._ringing = set(found)
        return new

    def state_dict(self) -> dict[str, Any]:
        """The statistics that are remembered, and the alarms that go on."""
        return {"history": list(self._history), "ringing": sorted(self._ringing)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what was saved."""
        self._history = deque(map(dict, state["history"]), maxlen=_REMEMBERED)
        self._ringing = set(state["ringing"])


def ratio_tolerance(dtype: torch.dtype) -> float:
    """How far from 1 rounding alone makes the ratio of what samples and what is trained."""
    return _RATIO_ERROR if dtype == torch.float32 else _RATIO_ERROR_HALF


def _either(suggestions: Sequence[str]) -> str:
    """Suggestions as a sentence, the most likely one first.

    >>> _either(["lower a", "raise b", "set c"])
    'Lower a, raise b, or set c.'
    """
    *others, last = suggestions
    text = f"{', '.join(others)}, or {last}" if others else last
    return f"{text[0].upper()}{text[1:]}."


def _same_reply(history: History, settings: Settings) -> str | None:
    share = _last(history, "commonest_reply")
    if share is None or share < _SAME_REPLY or not _enough(history, "deciding_turns", _MIN_TURNS):
        return None
    is_small = (_last(history, "deciding_turns") or 0.0) < FULL_BATCH
    suggestions = [
        *["a larger batch_size"] * is_small,
        *["calibrate_choices=True"] * (not settings.calibrates_choices),
        *["target_kl=0.03"] * (settings.target_kl is None),
        "a higher entropy_coef",
    ]
    return (
        f"{share:.1%} of all replies are one and the same: unless it is right everywhere, the policy has collapsed and "
        f"cannot find anything better. {_either(['start again with ' + suggestions[0], *suggestions[1:]])}"
    )


def _skipped(history: History, settings: Settings) -> str | None:
    skipped = sum(_last(history, name) or 0.0 for name in ("skipped_steps", "replay_skipped_steps"))
    if not skipped:
        return None
    return f"{skipped:.0f} optimizer steps were skipped, since their losses or gradients were not finite. " + _either(
        ["look at rewards for extreme values", "lower learning_rate", *settings.reduced_precision_advice]
    )


def _certain(history: History, settings: Settings) -> str | None:
    entropy = _last(history, "entropy")
    returns = _values(history, "return_mean")
    if entropy is None or entropy > _CERTAIN or len(returns) < 2 * _WINDOW or _trend(returns) > 0:
        return None
    return (
        f"entropy is {entropy:.3f} nats and return_mean stays at {_mean(returns[-_WINDOW:]):.3g}: nothing new is tried "
        "any more. If this is not as good as it gets, start again with a higher entropy_coef or a lower learning_rate."
    )


def _equal_returns(history: History, settings: Settings) -> str | None:
    spread = _last(history, "return_std")
    if spread is None or spread > _EQUAL or not _enough(history, "episodes", _MIN_EPISODES):
        return None
    return (
        f"all {history[-1]['episodes']:.0f} episodes returned the same: nothing tells a good action from a bad one. If "
        "it is not the best possible return, collect more episodes a batch, start with an easier task, or warm-start "
        "from demonstrations."
    )


def _invalid_high(history: History, settings: Settings) -> str | None:
    rates = _values(history, "invalid_rate")
    if not rates or rates[-1] < _INVALID_HIGH or _trend(rates) < 0 or not _enough(history, "turns", _MIN_TURNS):
        return None
    return f"{rates[-1]:.0%} of the replies name no action: the format is learned instead of the game. " + _either(
        [
            "offer get_action_choices()",
            *["open the reply with response_prefix"] * (not settings.has_prefix),
            "accept more wordings in extract_action()",
        ]
    )


def _invalid_climbs(history: History, settings: Settings) -> str | None:
    rates = _values(history, "invalid_rate")
    if _trend(rates) <= 0 or _mean(rates[-_WINDOW:]) < _INVALID_NOTICED:
        return None
    return f"invalid_rate climbed to {_mean(rates[-_WINDOW:]):.1%}: the policy is losing the format. " + _either(
        [
            "lower learning_rate or entropy_coef",
            *["hold it with init_kl_coef"] * (not settings.has_reference),
            "make invalid_action_penalty larger",
        ]
    )


def _kl_jump(history: History, settings: Settings) -> str | None:
    kl = _last(history, "approx_kl")
    if kl is None or kl <= _KL_JUMP:
        return None
    options = " or ".join(["learning_rate", *[settings.epochs_option] * bool(settings.epochs_option)])
    return f"approx_kl jumped to {kl:.3f}: the update moved the policy further than its samples can tell. " + _either(
        [f"lower {options}", *["set target_kl=0.03"] * (settings.target_kl is None)]
    )


def _undone(history: History, settings: Settings) -> str | None:
    # Batches without information make no steps that could be undone.
    informative = [stats for stats in history if not stats.get("flat_batch")][-_UPDATES:]
    undone = sum(stats.get("stopped_early", 0.0) for stats in informative)
    if undone < _UNDONE:
        return None
    return (
        f"in {undone:.0f} of the last {len(informative)} updates with information a step led beyond target_kl and was "
        "undone, although the learning rate has fallen to its minimum: next to nothing is learned. "
        + _either(["raise target_kl or batch_size", *settings.reduced_precision_advice])
    )


def _useless_critic(history: History, settings: Settings) -> str | None:
    explained = _values(history, "explained_variance")[-_CRITIC_UPDATES:]
    if len(explained) < _CRITIC_UPDATES or max(explained) >= _EXPLAINS_NOTHING:
        return None
    return (
        f"explained_variance has not passed {max(explained):.2f} in {_CRITIC_UPDATES} updates: the value head predicts "
        "nothing, and advantages are as noisy as returns. "
        + _either(
            [
                *["leave value_learning_rate and cliprange_value out"] * settings.sets_critic,
                "show in the observation what the return depends on",
            ]
        )
    )


def _ratio_error(history: History, settings: Settings) -> str | None:
    tolerance = ratio_tolerance(settings.dtype)
    error = _last(history, "ratio_error")
    if error is None or error <= tolerance:
        return None
    return (
        f"ratio_error is {error:.2g}, where rounding explains {tolerance:.0g}: the policy that sampled is not the one "
        "that is trained. Change weights, temperature or choices only between an update and the next episode; if you "
        "changed none, report this as a bug."
    )


def _values(history: History, name: str) -> list[float]:
    """A statistic over time, oldest first; empty if the latest update does not have it."""
    if _last(history, name) is None:
        return []
    return [stats[name] for stats in history if name in stats and not math.isnan(stats[name])]


def _last(history: History, name: str) -> float | None:
    value = history[-1].get(name, math.nan)
    return None if math.isnan(value) else value


def _enough(history: History, name: str, count: int) -> bool:
    return (_last(history, name) or 0) >= count


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _trend(values: Sequence[float]) -> int:
    """1 if the last window's mean is above that of the window before it, -1 if below, 0 if noise or too few values.

    Means count as different when they lie two standard errors of their difference apart.

    >>> _trend([0.0] * 5 + [1.0] * 5), _trend([1.0, 0.0] * 5), _trend([1.0])
    (1, 0, 0)
    """
    if len(values) < 2 * _WINDOW:
        return 0
    before, after = values[-2 * _WINDOW : -_WINDOW], values[-_WINDOW:]
    change = _mean(after) - _mean(before)
    # Unlike a sum of squares, hypot() does not overflow.
    distance = math.hypot(*(value - _mean(part) for part in (before, after) for value in part))
    error = distance / math.sqrt((_WINDOW - 1) * _WINDOW)
    if not math.isfinite(change) or abs(change) <= 2 * error:
        return 0
    return 1 if change > 0 else -1
