"""A suffix index over one growing text: how did it go on the last time it ended like this?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

LONGEST = 4  # tokens of the ending that are matched at most
COMPARED = 32  # tokens before an occurrence that are compared, to tell how good it is
SHORTEST = 2  # a single token recurs too easily to tell what follows


@dataclass(frozen=True, slots=True)
class Continuation:
    """tokens: what may follow. matched: tokens of the ending that stood before them as well."""

    tokens: tuple[int, ...] = ()
    matched: int = 0


NOTHING = Continuation()


class SuffixIndex:
    """Positions after the most recent occurrence of every run of 2 to 4 tokens, kept up by token.

    A token costs three dictionary entries, when the next continuation is asked for: a text that
    nobody continues is never indexed. A continuation costs three look-ups.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._text: list[int] = list(tokens)
        self._after: dict[tuple[int, ...], int] = {}
        self._indexed = 0  # tokens before which all endings are entered

    def extend(self, tokens: Iterable[int]) -> None:
        self._text.extend(tokens)

    def _catch_up(self) -> None:
        """Enter the endings before each new token; the last of all waits for what follows it."""
        text, after = self._text, self._after
        for here in range(self._indexed, len(text)):
            for length in range(SHORTEST, min(LONGEST, here) + 1):
                after[tuple(text[here - length : here])] = here
        self._indexed = len(text)

    def continuation(self, count: int) -> Continuation:
        """Up to `count` tokens that followed the longest ending seen before, else nothing.

        Runs on into itself where the earlier occurrence is that recent: a text that repeats is
        continued by its repetition.
        """
        self._catch_up()
        text = self._text
        for length in range(min(LONGEST, len(text)), SHORTEST - 1, -1):
            start = self._after.get(tuple(text[len(text) - length :]))
            if start is not None:
                period = len(text) - start
                tokens = tuple(text[start + i % period] for i in range(count))
                return Continuation(tokens, self._matched(start, length))
        return NOTHING

    def _matched(self, start: int, known: int) -> int:
        """How many tokens before `start` equal the text's last ones; `known` of them do."""
        text, count = self._text, known
        while count < min(start, COMPARED) and text[start - count - 1] == text[-count - 1]:
            count += 1
        return count
