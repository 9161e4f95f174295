"""A suffix index over one growing text: how did it go on the last time it ended like this?"""

from __future__ import annotations

from collections.abc import Iterable

LONGEST = 4  # tokens of the ending that are matched at most
SHORTEST = 2  # a single token recurs too easily to tell what follows


class SuffixIndex:
    """Positions after the most recent occurrence of every run of 2 to 4 tokens, kept up by token.

    A token costs three dictionary entries when it is added; a continuation three look-ups.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._text: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Add tokens. The ending itself is entered once it is known what follows it."""
        text, after = self._text, self._after
        for token in tokens:
            here = len(text)
            for length in range(SHORTEST, min(LONGEST, here) + 1):
                after[tuple(text[here - length :])] = here
            text.append(token)

    def continuation(self, count: int) -> tuple[int, ...]:
        """Up to `count` tokens that followed the longest ending seen before, else nothing.

        Runs on into itself where the earlier occurrence is that recent: a text that repeats is
        continued by its repetition.
        """
        text = self._text
        for length in range(min(LONGEST, len(text)), SHORTEST - 1, -1):
            start = self._after.get(tuple(text[len(text) - length :]))
            if start is not None:
                period = len(text) - start
                return tuple(text[start + i % period] for i in range(count))
        return ()
