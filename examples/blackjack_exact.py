"""Exact expected return of any Blackjack-v1 policy, by enumerating the game instead of playing it.

The game is Gymnasium's `Blackjack-v1` with `natural=False, sab=False`: cards are drawn with replacement, an ace counts
11 while that does not bust, the dealer draws below 17 (and stands on a soft 17), reward is +1, 0 or -1 at the end.
A policy is the probability of hitting in each of the 280 observations in which a player can act. The mean return, and
how often a hand passes through each observation, then follow from two short recursions, free of sampling noise: the
standard error of 10,000 played hands, 0.0095, is as large as the differences one wants to see.

>>> always_stick = {state: 0.0 for state in STATES}
>>> print(f"{expected_return(always_stick):.3f} {expected_return(optimal_policy()):.3f}")
-0.186 -0.047
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache

State = tuple[int, int, int]
"""An observation: the player's sum, the dealer's face-up card (1 is an ace), 1 if the player holds a usable ace."""

CARDS: dict[int, float] = {card: (4 if card == 10 else 1) / 13 for card in range(1, 11)}
"""Probability of drawing each card value; ten, jack, queen and king all count 10."""


def _hard_total(state: State) -> int:
    """The player's total with every ace counted as 1; it grows with every card, so it orders the states in time."""
    return state[0] - 10 * state[2]


STATES: list[State] = sorted(
    [(total, dealer, 0) for total in range(4, 22) for dealer in CARDS]
    + [(total, dealer, 1) for total in range(12, 22) for dealer in CARDS],
    key=lambda state: (_hard_total(state), state),
)
"""Every observation in which the player can act, earlier ones in a hand first."""


def _best_sum(hard_total: int, has_ace: bool) -> tuple[int, int]:
    """The value of a hand, and 1 if an ace counts 11 in it, else 0."""
    usable = has_ace and hard_total + 10 <= 21
    return (hard_total + 10, 1) if usable else (hard_total, 0)


@cache
def _dealer_outcomes(hard_total: int, has_ace: bool) -> dict[int, float]:
    """Distribution of the dealer's final score, 17 to 21 or 0 for a bust, from the cards already drawn."""
    score, _ = _best_sum(hard_total, has_ace)
    if score >= 17:
        return {score if score <= 21 else 0: 1.0}
    outcomes: dict[int, float] = {}
    for card, chance in CARDS.items():
        for final, probability in _dealer_outcomes(hard_total + card, has_ace or card == 1).items():
            outcomes[final] = outcomes.get(final, 0.0) + chance * probability
    return outcomes


@cache
def _stick_value(state: State) -> float:
    """Expected return of sticking: the chance to beat the dealer less the chance to lose to them."""
    player, dealer, _ = state
    outcomes = _dealer_outcomes(dealer, dealer == 1)
    return sum(chance * ((player > final) - (player < final)) for final, chance in outcomes.items())


def _draws(state: State) -> Iterator[tuple[float, State | None]]:
    """Outcomes of hitting: the probability of each card and the next state, None for a bust."""
    _, dealer, usable = state
    for card, chance in CARDS.items():
        # A hard hand's aces can never count 11 again, so only a usable or a fresh ace matters from here on.
        total, still_usable = _best_sum(_hard_total(state) + card, bool(usable) or card == 1)
        yield chance, (total, dealer, still_usable) if total <= 21 else None


def _hit_value(state: State, values: Mapping[State, float]) -> float:
    """Expected return of hitting, given the values of the states that may follow."""
    return sum(chance * (-1.0 if after is None else values[after]) for chance, after in _draws(state))


def _deals() -> Iterator[tuple[float, State]]:
    """The chance of each first observation; one observation may come up more than once."""
    for first, chance_first in CARDS.items():
        for second, chance_second in CARDS.items():
            total, usable = _best_sum(first + second, 1 in (first, second))
            for dealer, chance_dealer in CARDS.items():
                yield chance_first * chance_second * chance_dealer, (total, dealer, usable)


def _check_policy(hit_probability: Mapping[State, float]) -> None:
    """Raise unless the policy gives a probability for every state."""
    missing = [state for state in STATES if state not in hit_probability]
    if missing:
        raise ValueError(
            f"The policy lacks {len(missing)} of {len(STATES)} states, the first is {missing[0]} (player's sum, "
            "dealer's card, usable ace). Give a probability of hitting for every state in STATES."
        )
    for state in STATES:
        if not 0.0 <= hit_probability[state] <= 1.0:
            raise ValueError(
                f"The probability of hitting in state {state} is {hit_probability[state]}, expected a number from 0 to "
                "1. Normalize over the two actions first."
            )


def expected_return(hit_probability: Mapping[State, float]) -> float:
    """Mean return of one hand, in the game's unit (win +1, draw 0, loss -1), exact up to float rounding.

    Args:
        hit_probability: For every state in `STATES` the probability of hitting.

    Raises:
        ValueError: If a state is missing or a probability lies outside 0 to 1.
    """
    _check_policy(hit_probability)
    values: dict[State, float] = {}
    for state in reversed(STATES):
        hit = hit_probability[state]
        values[state] = hit * _hit_value(state, values) + (1 - hit) * _stick_value(state)
    return sum(chance * values[state] for chance, state in _deals())


@cache
def _optimal_actions() -> tuple[int, ...]:
    """The better action in each of `STATES`, by backward induction."""
    values: dict[State, float] = {}
    actions: dict[State, int] = {}
    for state in reversed(STATES):
        hit, stick = _hit_value(state, values), _stick_value(state)
        values[state], actions[state] = max(hit, stick), int(hit > stick)
    return tuple(actions[state] for state in STATES)


def optimal_policy() -> dict[State, int]:
    """The best policy there is: 1 (hit) or 0 (stick) for every state, sticking where both are equally good."""
    return dict(zip(STATES, _optimal_actions(), strict=True))


def baseline_returns() -> dict[str, float]:
    """Exact expected returns that a policy is compared with, worst first.

    >>> {name: round(value, 3) for name, value in baseline_returns().items()}
    {'random': -0.396, 'always_stick': -0.186, 'optimum': -0.047}
    """
    return {
        "random": expected_return(dict.fromkeys(STATES, 0.5)),
        "always_stick": expected_return(dict.fromkeys(STATES, 0.0)),
        "optimum": expected_return(optimal_policy()),
    }


def state_visit_probabilities(hit_probability: Mapping[State, float]) -> dict[State, float]:
    """Probability that a hand played with the policy passes through each state.

    No state can occur twice in a hand, so this is also the expected number of visits.

    Args:
        hit_probability: For every state in `STATES` the probability of hitting.

    Raises:
        ValueError: If a state is missing or a probability lies outside 0 to 1.
    """
    _check_policy(hit_probability)
    visits = dict.fromkeys(STATES, 0.0)
    for chance, state in _deals():
        visits[state] += chance
    for state in STATES:
        reached_and_hit = visits[state] * hit_probability[state]
        for chance, after in _draws(state):
            if after is not None:
                visits[after] += reached_and_hit * chance
    return visits


def _cell(hit: float, best: int) -> str:
    """One entry of the strategy table, four characters wide."""
    letter = "H" if hit >= 0.95 else "S" if hit <= 0.05 else f"{100 * hit:.0f}"
    better_is_likelier = hit > 0.5 if best else hit < 0.5
    return f"{letter:>3}{' ' if better_is_likelier else '*'}"


def strategy_table(hit_probability: Mapping[State, float]) -> str:
    """The policy as two text tables, hard and soft sums by dealer card, at most 80 columns wide.

    Args:
        hit_probability: For every state in `STATES` the probability of hitting.

    Returns:
        `H` where it hits at least 95% of the time, `S` where it sticks that often, else the percentage of hits.
        A `*` marks states in which the worse action is at least as likely as the better one.

    Raises:
        ValueError: If a state is missing or a probability lies outside 0 to 1.
    """
    _check_policy(hit_probability)
    best = optimal_policy()
    dealers = [*range(2, 11), 1]
    header = "  sum |" + "".join(f"{'A' if dealer == 1 else dealer:>3} " for dealer in dealers)
    lines = ["H hits, S sticks, a number is the % of hits; * marks where the worse is likelier"]
    for usable, title, lowest in ((0, "Hard sums", 4), (1, "Soft sums (usable ace)", 12)):
        lines += ["", f"{title} by dealer's card", header.rstrip(), "  ----+" + "-" * 4 * len(dealers)]
        for total in range(21, lowest - 1, -1):
            states = [(total, dealer, usable) for dealer in dealers]
            cells = (_cell(hit_probability[state], best[state]) for state in states)
            lines.append(f"  {total:>3} |{''.join(cells)}".rstrip())
    return "\n".join(lines)
