"""Blackjack in words, as examples/blackjack.py puts it; without imports, for interpreters that lack this library."""

SYSTEM = "You play blackjack. You see your sum and the dealer's card. Answer with one word: stick or hit."
# Sum, dealer's card, whether an ace is usable.
STATES = [(12 + index % 9, 1 + (3 * index) % 10, index % 4 == 3) for index in range(64)]


def observed(state: tuple[int, int, bool]) -> str:
    """One short line."""
    player, dealer, usable_ace = state
    return f"{'soft ' if usable_ace else ''}{player} against {'ace' if dealer == 1 else dealer}"
