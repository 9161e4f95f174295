from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from paceline.errors import CheckpointError
from paceline.serve import tokenizer as serve_tokenizer
from paceline.serve.detokenize import IncrementalDetokenizer, StopStrings


def byte_level(*added: str) -> serve_tokenizer.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [("Ġ", "a"), ("Ã", "©"), ("ð", "Ł"), ("ðŁ", "ĺ"), ("Ģ", "b")]
    vocabulary = {token: n for n, token in enumerate(alphabet + [a + b for a, b in pairs])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken("<|end|>", special=True)])
    inner.add_tokens(list(added))
    return serve_tokenizer.Tokenizer(inner)


def spelled() -> serve_tokenizer.Tokenizer:
    words = ["<unk>", "▁", "▁a", "a", "b", "é", "▁▁", ""] + [f"<0x{n:02X}>" for n in range(256)]
    inner = Tokenizer(models.BPE(vocab={word: n for n, word in enumerate(words)}, merges=[]))
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    inner.add_special_tokens([AddedToken("<s>", special=True)])
    return serve_tokenizer.Tokenizer(inner)


def plain_words() -> serve_tokenizer.Tokenizer:
    return serve_tokenizer.Tokenizer(Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2}, "a")))


def metaspace() -> serve_tokenizer.Tokenizer:
    words = ["<unk>", "▁a", "a", "▁", "b▁"]
    inner = Tokenizer(models.BPE(vocab={word: n for n, word in enumerate(words)}, merges=[]))
    inner.decoder = decoders.Metaspace()
    return serve_tokenizer.Tokenizer(inner)


TOKENIZERS = {
    "byte_level": byte_level(),
    # The spelling of the second is that of a lone byte, which `decode` takes it for.
    "added_tokens": byte_level("日本", "é"),
    "spelled": spelled(),
    "plain_words": plain_words(),
    "metaspace": metaspace(),
}


def chunks_of(data: st.DataObject, items: list[int]) -> list[list[int]]:
    places = st.lists(st.integers(0, len(items)), max_size=8)
    cuts = [0, *sorted(data.draw(places)), len(items)]
    return [items[a:b] for a, b in itertools.pairwise(cuts)]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data(), skip=st.booleans())
@settings(deadline=None)
def test_pieces_make_the_decoded_whole(name: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = TOKENIZERS[name]
    # A few ids beyond the vocabulary, which decode to nothing.
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=40))
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    pieces = [detokenizer.feed(chunk) for chunk in chunks_of(data, ids)]
    assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(ids, skip_special_tokens=skip)


@given(text=st.text(max_size=30), data=st.data())
@settings(deadline=None)
def test_text_never_shows_half_a_character(text: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    text = text.replace("é", "e")  # an added token of that name decodes to a single stray byte
    ids = tokenizer.encode(text, add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(tokenizer)
    so_far = ""
    for chunk in chunks_of(data, ids):
        so_far += detokenizer.feed(chunk)
        assert text.startswith(so_far)
    assert so_far + detokenizer.flush() == text


@pytest.mark.parametrize("name", ["byte_level", "spelled"])
@given(data=st.data())
@settings(deadline=None)
def test_text_after_a_prompt_is_what_the_prompt_did_not_show(
    name: str, data: st.DataObject
) -> None:
    tokenizer = TOKENIZERS[name]
    # A prompt that ends in a whole character.
    ends = tokenizer.encode("a", add_special_tokens=False)
    ids = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=10)
    prompt, output = data.draw(ids) + ends, data.draw(ids)
    detokenizer = IncrementalDetokenizer(tokenizer, after=prompt)
    text = detokenizer.feed(output) + detokenizer.flush()
    assert tokenizer.decode(prompt) + text == tokenizer.decode(prompt + output)


def test_an_incomplete_character_waits_and_is_replaced_at_the_end() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("a😀", add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.feed((number,)) for number in ids[:-1]] == ["a", *[""] * (len(ids) - 2)]
    assert detokenizer.flush() == "\ufffd"


def test_a_run_of_bytes_that_an_empty_token_ends_counts_as_text() -> None:
    tokenizer = TOKENIZERS["spelled"]
    ids = [8 + 0x41, 7, 1]  # <0x41>, the empty token, "▁": its space is not the first
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.feed((number,)) for number in ids] == ["", "A", " "]
    assert tokenizer.decode(ids) == "A "


def test_unsupported_decoders_are_refused() -> None:
    for decoder in (
        decoders.WordPiece(),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(content=" ", left=0, right=1)]),
    ):
        inner = Tokenizer(models.WordLevel({"a": 0}, "a"))
        inner.decoder = decoder
        with pytest.raises(CheckpointError, match="decoder"):
            IncrementalDetokenizer(serve_tokenizer.Tokenizer(inner))


# --- stop strings ------------------------------------------------------------------------------

SHORT = st.text(alphabet="ab", min_size=1, max_size=4)


def cut(text: str, stops: list[str]) -> str:
    places = [text.find(stop) for stop in stops if stop in text]
    return text[: min(places)] if places else text


@given(text=st.text(alphabet="abc", max_size=30), stops=st.lists(SHORT, max_size=4), data=st.data())
def test_stops_cut_at_the_first_match_however_chunked(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    matcher = StopStrings(stops)
    emitted, stopped = "", False
    for chunk in chunks_of(data, [ord(character) for character in text]):
        piece, stopped = matcher.feed("".join(map(chr, chunk)))
        emitted += piece
        assert cut(text, stops).startswith(emitted)
        assert stopped == matcher.stopped
    emitted += matcher.flush()
    assert emitted == cut(text, stops)
    assert matcher.stopped == (emitted != text)
    assert matcher.flush() == ""


def test_a_match_waits_for_one_that_begins_before_it() -> None:
    matcher = StopStrings(["abcd", "b"])
    assert matcher.feed("xab") == ("x", False)
    assert matcher.feed("c") == ("", False)
    assert matcher.feed("e") == ("a", True)
    assert matcher.feed("more") == ("", True)
    assert matcher.flush() == ""


def test_a_match_held_at_the_end_still_cuts() -> None:
    matcher = StopStrings(["abcd", "b"])
    assert matcher.feed("xab") == ("x", False)
    assert (matcher.flush(), matcher.stopped) == ("a", True)


def test_text_that_cannot_match_is_not_held() -> None:
    matcher = StopStrings(["</s>"])
    assert matcher.feed("hello <") == ("hello ", False)
    assert matcher.feed("b>") == ("<b>", False)
    assert StopStrings([]).feed("all") == ("all", False)
