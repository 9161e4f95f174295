"""One choice's text: cut at stops, counted, and the same however the ids come."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from paceline.serve.assembler import TextAssembler
from paceline.types import FinishReason

from .http_support import EOS, byte_tokenizer

TOKENIZER = byte_tokenizer()
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def assemble(
    deltas: Sequence[tuple[Sequence[int], FinishReason | None]], stop: Sequence[str] = ()
) -> tuple[str, FinishReason | None, int]:
    """Text, finish reason and count; stops feeding at the end, as the routes do."""
    assembler = TextAssembler(TOKENIZER, stop=stop)
    text = ""
    for tokens, finish in deltas:
        piece = assembler.feed(tokens, finish)
        text += piece.text
        if piece.finish is not None:
            break
    return text, assembler.finish, assembler.completion_tokens


def ids(text: str) -> list[int]:
    return list(text.encode())


def test_the_end_of_sequence_id_counts_and_is_not_text() -> None:
    assert assemble([([*ids("hi"), EOS], STOP)]) == ("hi", STOP, 3)


def test_any_id_that_ended_the_request_is_not_text() -> None:
    assert assemble([(ids("hi!"), STOP)]) == ("hi", STOP, 3)


def test_an_end_without_tokens() -> None:
    assert assemble([(ids("hi"), None), ((), LENGTH)]) == ("hi", LENGTH, 2)


def test_a_character_comes_whole() -> None:
    first, *rest = ids("😀")
    assembler = TextAssembler(TOKENIZER)
    assert assembler.feed([first], None).text == ""
    assert assembler.feed(rest, None).text == "😀"


def test_half_a_character_at_the_end_is_a_replacement_character() -> None:
    assert assemble([(ids("a😀")[:3], LENGTH)]) == ("a�", LENGTH, 3)


def test_a_stop_string_cuts_text_and_count() -> None:
    assert assemble([(ids("one two three"), None)], [" two"]) == ("one", STOP, 7)


def test_a_stop_string_inside_the_last_delta_beats_its_finish() -> None:
    assert assemble([(ids("abcd"), LENGTH)], ["c"]) == ("ab", STOP, 3)
    assert assemble([([*ids("abcd"), EOS], STOP)], ["c"]) == ("ab", STOP, 3)


def test_a_stop_string_of_the_last_token() -> None:
    assert assemble([(ids("abc"), LENGTH)], ["bc"]) == ("a", STOP, 3)


def test_what_only_began_a_stop_string_comes_out_at_the_end() -> None:
    assert assemble([(ids("abc"), LENGTH)], ["bcd"]) == ("abc", LENGTH, 3)


def test_the_id_that_ends_a_request_never_completes_a_stop_string() -> None:
    assert assemble([(ids("ab"), STOP)], ["ab"]) == ("a", STOP, 2)


def test_a_stop_string_that_waits_for_a_longer_one_still_stops() -> None:
    # "bc" is found inside what may become "abcde"; the text ends before it does.
    assert assemble([(ids("xabc"), LENGTH)], ["abcde", "bc"]) == ("xa", STOP, 4)


TEXTS = st.text(st.sampled_from("ab é😀\n"), max_size=20)


@st.composite
def cut_up(draw: st.DrawFn) -> tuple[list[int], list[list[int]]]:
    tokens = draw(TEXTS.map(ids) | st.lists(st.integers(0, 255), max_size=20))
    cuts = sorted(draw(st.lists(st.integers(0, len(tokens)), max_size=6)))
    edges = [0, *cuts, len(tokens)]
    return tokens, [tokens[a:b] for a, b in itertools.pairwise(edges)]


@given(
    cut_up(),
    st.lists(TEXTS.filter(bool), max_size=3),
    st.sampled_from([STOP, LENGTH]),
)
def test_the_result_does_not_depend_on_the_deltas(
    case: tuple[list[int], list[list[int]]], stop: list[str], finish: FinishReason
) -> None:
    tokens, parts = case
    tail = [EOS] if finish is STOP else []
    whole = assemble([([*tokens, *tail], finish)], stop)
    assert assemble([*((part, None) for part in parts), (tail, finish)], stop) == whole
    singly = [([token], None) for token in tokens]
    assert assemble([*singly, (tail, finish)], stop) == whole
    text, _, count = whole
    assert count <= len(tokens) + len(tail)
    plain = bytes(tokens).decode(errors="replace")
    assert plain.startswith(text)
    assert not any(string in text for string in stop)
