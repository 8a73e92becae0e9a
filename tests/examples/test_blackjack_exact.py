"""The exact Blackjack evaluation against Gymnasium's own rules, its own environment, and numbers worked out by hand."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.toy_text import blackjack as rules

from tests.helpers import ROOT

sys.path.insert(0, str(ROOT / "examples"))

import blackjack_exact
from blackjack_exact import STATES, State

ALWAYS_STICK = dict.fromkeys(STATES, 0.0)
ALWAYS_HIT = dict.fromkeys(STATES, 1.0)
RANDOM = dict.fromkeys(STATES, 0.5)
HANDS = 20_000


def mixed_policy() -> dict[State, float]:
    """A policy with a probability of its own in every state, none of them 0 or 1."""
    draws = np.random.default_rng(5).uniform(0.05, 0.95, len(STATES))
    return dict(zip(STATES, draws.tolist(), strict=True))


def play(policy: dict[State, float], seed: int) -> tuple[np.ndarray, Counter[State]]:
    """Returns of HANDS hands of the real environment, and how many hands visited each state."""
    env = gymnasium.make("Blackjack-v1", natural=False, sab=False)
    rng = np.random.default_rng(seed)
    returns, visits = np.zeros(HANDS), Counter[State]()
    for hand in range(HANDS):
        observation, _ = env.reset(seed=seed) if hand == 0 else env.reset()
        done = False
        while not done:
            visits[observation] += 1
            observation, reward, done, _, _ = env.step(int(rng.random() < policy[observation]))
            returns[hand] += reward
    env.close()
    return returns, visits


# An independent, slow evaluation: whole hands of cards, Gymnasium's own deck and rule functions.
DECK = {card: count / 13 for card, count in Counter(rules.deck).items()}


@cache
def slow_dealer(cards: tuple[int, ...]) -> dict[int, float]:
    """Distribution of the dealer's final score, given their cards."""
    if rules.sum_hand(list(cards)) >= 17:
        return {rules.score(list(cards)): 1.0}
    total: dict[int, float] = {}
    for card, chance in DECK.items():
        for final, share in slow_dealer((*cards, card)).items():
            total[final] = total.get(final, 0.0) + chance * share
    return total


@cache
def slow_stick(score: int, dealer: int) -> float:
    """Value of standing on `score`; the dealer's face-down card is a draw like any other."""
    return sum(
        chance * share * rules.cmp(score, final)
        for hidden, chance in DECK.items()
        for final, share in slow_dealer((dealer, hidden)).items()
    )


def slow_return(policy: dict[State, float] | None) -> float:
    """Expected return of `policy`, or the best possible one for None, over all hands of cards."""

    @cache
    def value(cards: tuple[int, ...], dealer: int) -> float:
        hand = list(cards)
        if rules.is_bust(hand):
            return -1.0
        stick = slow_stick(rules.score(hand), dealer)
        hit = sum(chance * value(tuple(sorted((*cards, card))), dealer) for card, chance in DECK.items())
        if policy is None:
            return max(stick, hit)
        p = policy[rules.sum_hand(hand), dealer, rules.usable_ace(hand)]
        return p * hit + (1 - p) * stick

    return sum(
        p1 * p2 * p3 * value(tuple(sorted((first, second))), dealer)
        for first, p1 in DECK.items()
        for second, p2 in DECK.items()
        for dealer, p3 in DECK.items()
    )


def test_equals_an_enumeration_of_whole_hands() -> None:
    policy = mixed_policy()
    assert blackjack_exact.expected_return(policy) == pytest.approx(slow_return(policy), abs=1e-12)


def test_optimum_equals_the_best_play_that_sees_every_card() -> None:
    # With replacement the cards behind a sum tell nothing about the next one, so both optima are the same.
    optimum = blackjack_exact.expected_return(blackjack_exact.optimal_policy())
    assert optimum == pytest.approx(slow_return(None), abs=1e-12)
    assert optimum == pytest.approx(-0.0468, abs=1e-3)


@pytest.mark.long
@pytest.mark.parametrize(
    ("policy", "seed"), [(ALWAYS_STICK, 0), (RANDOM, 1), (mixed_policy(), 2)], ids=["stick", "random", "mixed"]
)
def test_agrees_with_hands_played_in_the_environment(policy: dict[State, float], seed: int) -> None:
    returns, visits = play(policy, seed)
    error = returns.std() / math.sqrt(HANDS)
    assert blackjack_exact.expected_return(policy) == pytest.approx(returns.mean(), abs=4 * error)

    assert set(visits) <= set(STATES)
    expected = blackjack_exact.state_visit_probabilities(policy)
    for state in STATES:
        error = math.sqrt(expected[state] * (1 - expected[state]) / HANDS)
        # 280 comparisons: five standard errors, and one hand's worth of slack where next to none is expected.
        assert visits[state] / HANDS == pytest.approx(expected[state], abs=5 * error + 1 / HANDS), state


def test_hand_worked_numbers() -> None:
    # Hitting for ever ends in a bust. Sticking on 4 against a dealer's ten wins only if the dealer busts.
    assert blackjack_exact.expected_return(ALWAYS_HIT) == pytest.approx(-1.0, abs=1e-12)
    # Always sticking, a hand has one state: two aces (1/169) before a dealer's ten (4/13) is (12, 10, 1).
    visits = blackjack_exact.state_visit_probabilities(ALWAYS_STICK)
    assert sum(visits.values()) == pytest.approx(1.0)
    assert visits[12, 10, 1] == pytest.approx(1 / 169 * 4 / 13)
    # A blackjack is an ace and a ten-valued card in either order: 2 * 1/13 * 4/13, before a dealer's 7 (1/13).
    assert visits[21, 7, 1] == pytest.approx(2 * 4 / 169 / 13)
    assert visits[21, 7, 0] == 0.0


def test_no_single_deviation_improves_the_optimum() -> None:
    best = blackjack_exact.optimal_policy()
    optimum = blackjack_exact.expected_return(best)
    visits = blackjack_exact.state_visit_probabilities(best)
    for state in STATES:
        changed = blackjack_exact.expected_return({**best, state: 1 - best[state]})
        assert changed <= optimum + 1e-12
        if visits[state] > 1e-6:
            assert changed < optimum, f"the two actions in {state} cannot be equally good"


def test_optimum_is_the_textbook_strategy() -> None:
    # Basic strategy without doubling and splitting (Sutton and Barto 2018, figure 5.2).
    best = blackjack_exact.optimal_policy()
    assert all(best[total, dealer, 0] == 0 for total in range(17, 22) for dealer in range(1, 11))
    assert all(best[total, dealer, 0] == 1 for total in range(4, 12) for dealer in range(1, 11))
    for total in range(13, 17):
        assert [best[total, dealer, 0] for dealer in range(1, 11)] == [1, 0, 0, 0, 0, 0, 1, 1, 1, 1]
    assert [best[12, dealer, 0] for dealer in range(1, 11)] == [1, 1, 1, 0, 0, 0, 1, 1, 1, 1]
    assert all(best[total, dealer, 1] == 1 for total in range(12, 18) for dealer in range(1, 11))
    assert all(best[total, dealer, 1] == 0 for total in range(19, 22) for dealer in range(1, 11))


def test_baselines() -> None:
    baselines = blackjack_exact.baseline_returns()
    assert list(baselines) == ["random", "always_stick", "optimum"]
    assert baselines["random"] == pytest.approx(-0.40, abs=5e-3)
    assert baselines["always_stick"] == pytest.approx(-0.186, abs=1e-3)


def test_strategy_table_shows_actions_probabilities_and_deviations() -> None:
    best = blackjack_exact.optimal_policy()
    table = blackjack_exact.strategy_table(best)
    assert "*" not in table.split("\n", 1)[1]
    assert max(map(len, table.splitlines())) <= 80
    assert len([line for line in table.splitlines() if line[:5].strip().isdigit()]) == 18 + 10

    # Dealer columns run 2, 3, ..., 10, A.
    policy = {**best, (16, 10, 0): 0.37, (16, 2, 0): 0.96, (13, 1, 1): 0.5, (20, 3, 0): 0.049}
    hard, soft = blackjack_exact.strategy_table(policy).split("Soft sums")
    (row,) = [line for line in hard.splitlines() if line.startswith("   16 |")]
    assert row.split("|")[1].split() == ["H*", "S", "S", "S", "S", "H", "H", "H", "37*", "H"]
    (row,) = [line for line in hard.splitlines() if line.startswith("   20 |")]
    assert row.split("|")[1].split() == ["S"] * 10
    (row,) = [line for line in soft.splitlines() if line.startswith("   13 |")]
    assert row.split("|")[1].split() == ["H"] * 9 + ["50*"]


@pytest.mark.parametrize(
    "evaluate",
    [blackjack_exact.expected_return, blackjack_exact.state_visit_probabilities, blackjack_exact.strategy_table],
)
def test_incomplete_and_improper_policies_are_refused(evaluate: Callable[[dict[State, float]], object]) -> None:
    with pytest.raises(ValueError, match=r"lacks 1 of 280 states.*\(21, 3, 1\)"):
        evaluate({state: 0.5 for state in STATES if state != (21, 3, 1)})
    with pytest.raises(ValueError, match=r"state \(5, 4, 0\) is 1.5"):
        evaluate({**RANDOM, (5, 4, 0): 1.5})
