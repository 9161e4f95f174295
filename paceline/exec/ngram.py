"""A suffix index over one growing text: how did it go on the last time it ended like this?"""

from __future__ import annotations

from collections.abc import Iterable

LONGEST = 4  # tokens of the ending that are matched at most
SHORTEST = 2  # a single token recurs too easily to tell what follows


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

    def continuation(self, count: int) -> tuple[int, ...]:
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
                return tuple(text[start + i % period] for i in range(count))
        return ()
