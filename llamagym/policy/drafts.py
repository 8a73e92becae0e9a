"""Drafts: guesses of a reply's next tokens, which the model verifies in one pass (speculative decoding).

Agents repeat formats, commands and words of their observations, and with few rows a pass over several tokens takes
little longer than over one. A draft is looked up, not sampled: the tokens that followed when the last few tokens
occurred before, in an earlier reply (as in suffix decoding, Oliaro et al. 2024, https://arxiv.org/abs/2411.04975) or in
the reply's own context (prompt lookup, Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding).

Drafts do not change what is sampled. Each token is drawn from the policy, and a draft only decides for how many
positions one pass computes it: sampling stops at the first token that differs from the draft. That is rejection
sampling (Leviathan et al. 2023, https://arxiv.org/abs/2211.17192) with a deterministic draft. With the
same random numbers the replies are the same, but for rounding: a pass over several tokens sums in another order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Ids = tuple[int, ...]

# Match lengths for earlier replies, and for the context.
_REPLY_LENGTHS = (8, 4, 2)
_CONTEXT_LENGTH = 2
# The source of guesses from the context; the others are lengths.
_CONTEXT = 0
# Where in a reply a guess is made: at its beginning, after a right guess, after a wrong one or none.
_Place = Literal["start", "hit", "miss"]
# Tokens at a context's end in which a sequence is looked up.
_CONTEXT_TOKENS = 512
# Remembered sequences of each length; the least recently seen are forgotten first.
_MAX_SEQUENCES = 2**16
# Running mean over about this many guesses, with a prior of four guesses, two right.
_RATE_WINDOW = 64
_FIRST_RATE = 0.5
_FIRST_GUESSES = 4
# Drafting stops below this probability.
_MIN_PROBABILITY = 0.01


@dataclass(frozen=True, slots=True)
class Draft:
    """A guess of a reply's next tokens.

    Attributes:
        ids: The guessed tokens.
        probabilities: For each of them, the estimated probability that it and all before are right.
    """

    ids: Ids
    probabilities: tuple[float, ...]


class DraftContext:
    """The end of a context, in which the continuations of a reply's tokens are looked up."""

    def __init__(self, ids: Ids) -> None:
        """Indexes the last tokens of `ids`, which end with the generation prompt."""
        ids = ids[-_CONTEXT_TOKENS:]
        self.tail = ids[-_REPLY_LENGTHS[0] :]
        self.following: dict[Ids, int] = {}
        for end in range(_CONTEXT_LENGTH, len(ids)):
            self.following[ids[end - _CONTEXT_LENGTH : end]] = ids[end]


class _HitRate:
    """A running mean of whether guesses are right."""

    __slots__ = ("count", "mean")

    def __init__(self) -> None:
        self.mean = _FIRST_RATE
        self.count = _FIRST_GUESSES

    def add(self, is_right: bool) -> None:
        self.count = min(self.count + 1, _RATE_WINDOW)
        self.mean += (is_right - self.mean) / self.count


class Drafter:
    """Guesses tokens from what followed the same tokens before.

    It measures how often guesses are right, whether or not they are verified: for each length of a matching sequence,
    and separately at the beginning of a reply, after a right guess and after a wrong one or none.
    """

    def __init__(self) -> None:
        """Starts without earlier replies."""
        self._following: dict[int, dict[Ids, int]] = {length: {} for length in _REPLY_LENGTHS}
        # By the guess's source, a length or the context, and its place in the reply.
        self._rates: dict[tuple[int, _Place], _HitRate] = defaultdict(_HitRate)

    def draft(self, context: DraftContext, reply: Ids, max_tokens: int) -> Draft:
        """Guesses the tokens that follow the beginning of a reply, up to `max_tokens`."""
        known = (context.tail + reply)[-_REPLY_LENGTHS[0] - 1 :]
        place: _Place = "start"
        if reply:
            before = self._best_guess(context, known[:-1], "hit" if len(reply) > 1 else "start")
            place = "hit" if before is not None and before[1] == known[-1] else "miss"
        ids: list[int] = []
        probabilities: list[float] = []
        probability = 1.0
        while len(ids) < max_tokens:
            guess = self._best_guess(context, known, place)
            if guess is None:
                break
            source, token = guess
            probability *= self._rates[source, place].mean
            if probability < _MIN_PROBABILITY:
                break
            ids.append(token)
            probabilities.append(probability)
            known = (*known, token)[-_REPLY_LENGTHS[0] :]
            place = "hit"
        return Draft(tuple(ids), tuple(probabilities))

    def add(self, context: DraftContext, reply: Ids) -> None:
        """Compares the guesses for a finished reply with it, and then remembers the reply."""
        ids = context.tail + reply
        start = len(context.tail)
        place: _Place = "start"
        for end in range(start, len(ids)):
            known = ids[max(0, end - _REPLY_LENGTHS[0]) : end]
            best = self._best_guess(context, known, place)
            for source, token in self._guesses(context, known):
                self._rates[source, place].add(token == ids[end])
            place = "hit" if best is not None and best[1] == ids[end] else "miss"
        for length, following in self._following.items():
            for end in range(max(start, length), len(ids)):
                sequence = ids[end - length : end]
                # Removed first, so that it moves to the end.
                following.pop(sequence, None)
                following[sequence] = ids[end]
            while len(following) > _MAX_SEQUENCES:
                del following[next(iter(following))]

    def _best_guess(self, context: DraftContext, known: Ids, place: _Place) -> tuple[int, int] | None:
        """The source and the token of the guess that is most often right; None if no source knows these tokens."""
        guesses = self._guesses(context, known)
        return max(guesses, key=lambda guess: self._rates[guess[0], place].mean, default=None)

    def _guesses(self, context: DraftContext, known: Ids) -> list[tuple[int, int]]:
        """The source and the token of each guess at what follows these tokens."""
        guesses: list[tuple[int, int]] = []
        for length, following in self._following.items():
            token = following.get(known[-length:])
            if token is not None:
                guesses.append((length, token))
        token = context.following.get(known[-_CONTEXT_LENGTH:])
        if token is not None:
            guesses.append((_CONTEXT, token))
        return guesses


def best_draft_length(drafts: Sequence[Draft], weights_cost: int) -> int:
    """The length up to which verifying the drafts of one pass pays.

    A pass takes the time of reading all weights, M, and of computing its tokens, one for each of B rows and one for
    each row and column of drafts, padding included. So a token takes (M + B) / B without drafts, and a column takes B,
    and about one more to guess. It pays if the tokens that it is expected to add would take longer without it.

    Args:
        drafts: Drafts of one or more rows.
        weights_cost: M, in tokens that are computed in the same time.

    >>> best_draft_length([Draft((5, 6, 7), (0.9, 0.8, 0.01))], 20)
    2
    """
    rows = len(drafts)
    length = 0
    while True:
        expected = sum(draft.probabilities[length] for draft in drafts if len(draft.ids) > length)
        if expected * (weights_cost + rows) / rows < rows + 1:
            return length
        length += 1
