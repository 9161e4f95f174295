from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.exec.ngram import (
    COMPARED,
    LONGEST,
    NOTHING,
    SHORTEST,
    Continuation,
    SuffixIndex,
)


def slow(text: list[int], count: int) -> Continuation:
    """The definition: the most recent earlier place of the longest ending, read on from there."""
    for length in range(min(LONGEST, len(text)), SHORTEST - 1, -1):
        ending = text[len(text) - length :]
        for start in range(len(text) - 1, length - 1, -1):
            if text[start - length : start] == ending:
                going_on = text[start:] * (count + 1)
                while (
                    length < min(start, COMPARED)
                    and text[start - length - 1 : start] == text[len(text) - length - 1 :]
                ):
                    length += 1
                return Continuation(tuple(going_on[:count]), length)
    return NOTHING


@given(st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=8), st.integers(0, 9))
def test_the_index_finds_what_a_search_finds(parts: list[list[int]], count: int) -> None:
    index, text = SuffixIndex(), []
    for part in parts:
        index.extend(part)
        text += part
        assert index.continuation(count) == slow(text, count)


def test_a_loop_is_continued_past_the_end_of_the_text() -> None:
    index = SuffixIndex([9, 1, 2, 3, 1, 2, 3, 1, 2])
    assert index.continuation(7) == Continuation((3, 1, 2, 3, 1, 2, 3), 5)
