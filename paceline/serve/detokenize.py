"""Text from token ids as they come, and the cut at stop strings. No torch.

Both give the same text however the input is cut into pieces, and cost the same for each token
however long the text already is. Knows the decoder kinds of the Llama family's tokenizers (byte
level, and spellings with byte tokens). Knows nothing of requests, models or HTTP.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence

from paceline.errors import CheckpointError
from paceline.serve.tokenizer import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x..>", re.DOTALL)
# Decoder steps of which a token's text depends on its neighbours only as `_SpelledText` allows for.
_SPELLED = ("Replace", "ByteFallback", "Fuse", "Strip", "Metaspace")


class IncrementalDetokenizer:
    """`Tokenizer.decode` for ids that come one by one.

    All the text returned by `feed` and the final `flush` together is
    `decode(ids, skip_special_tokens=skip_special_tokens)`. A character whose bytes have not all
    come is held back. after: ids before the first, whose text is already known (a prompt that the
    text continues): matters where a tokenizer drops the space before the first word.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, after: Sequence[int] = ()
    ) -> None:
        self._text = _decoder_of(tokenizer)
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        spellings = (self._spelling(number) for number in reversed(after))
        anchor = next((pair for pair in spellings if pair is not None), None)
        if anchor is not None:
            self._text.start_after(*anchor)

    def feed(self, ids: Sequence[int]) -> str:
        """The text that these ids complete; may be empty."""
        pairs = (self._spelling(number) for number in ids)
        return "".join([self._text.feed(*pair) for pair in pairs if pair is not None])

    def flush(self) -> str:
        """The text held back, at the end of the ids: incomplete bytes are U+FFFD."""
        return self._text.flush()

    def _spelling(self, number: int) -> tuple[int, str] | None:
        if number in self._skipped:
            return None
        token = self._tokenizer.token(number)
        return None if token is None else (number, token)


def _decoder_of(tokenizer: Tokenizer) -> _ByteText | _SpelledText:
    steps = tokenizer.decoder()
    kinds = [str(step["type"]) for step in steps]
    if kinds == ["ByteLevel"]:
        return _ByteText()
    strips_right = any(step["type"] == "Strip" and step["stop"] for step in steps)
    if strips_right or not set(kinds) <= set(_SPELLED):
        raise CheckpointError(
            f"tokenizer decoder {' + '.join(kinds)} is not supported; supported: ByteLevel and "
            f"sequences of {', '.join(_SPELLED)}"
        )
    return _SpelledText(tokenizer)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 as itself, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    spelled = {chr(byte): byte for byte in printable}
    return spelled | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_alphabet()


class _ByteText:
    """Byte-level vocabularies: the text is the tokens' bytes, read as UTF-8."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def start_after(self, number: int, token: str) -> None:
        """Nothing to do: a token's bytes do not depend on its neighbours."""

    def feed(self, number: int, token: str) -> str:
        try:
            raw = bytes([_BYTES[character] for character in token])
        except KeyError:  # an added token, spelled as its text
            raw = token.encode()
        return self._utf8.decode(raw)

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _SpelledText:
    """Vocabularies of words with byte tokens <0x00> to <0xFF> for the rest (SentencePiece).

    A run of byte tokens is held until it ends: if it is not UTF-8 as a whole, each of its bytes
    becomes U+FFFD. Other tokens depend only on whether any token came before (a leading space is
    dropped), so `_anchor`, the last of them, stands for all that came before.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._anchor: list[int] = []
        self._held: list[int] = []

    def start_after(self, number: int, token: str) -> None:
        if not _BYTE_TOKEN.fullmatch(token):
            self._anchor = [number]

    def feed(self, number: int, token: str) -> str:
        self._held.append(number)
        if _BYTE_TOKEN.fullmatch(token):
            return ""
        run = self._held
        text = self.flush()
        if token:
            self._anchor = [number]
        elif len(run) > 1:  # an empty token ends a run of bytes, which then is the last text
            self._anchor = run
        return text

    def flush(self) -> str:
        known = self._decode(self._anchor)
        text = self._decode(self._anchor + self._held)[len(known) :]
        self._held = []
        return text

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


class StopStrings:
    """Cuts a text before the first of some strings, whatever the pieces it comes in.

    The first is the one that begins first. Text that may still become a stop string is held back;
    so is a match, while one that begins before it may still complete.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string would stop everything"
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> tuple[str, bool]:
        """(text that is sure to come before any stop string, whether one has been found).

        After a match nothing more is emitted.
        """
        if self.stopped:
            return "", True
        held = self._held + text
        match = _first_match(held, self._stops)
        pending = min(_pending(held, stop) for stop in self._stops) if self._stops else len(held)
        cut = min(match, pending)
        self.stopped = match <= pending and match < len(held)
        self._held = "" if self.stopped else held[cut:]
        return held[:cut], self.stopped

    def flush(self) -> str:
        """The text held back, at the end of the text; sets `stopped` if a match was held."""
        held, self._held = self._held, ""
        match = _first_match(held, self._stops)
        self.stopped = self.stopped or match < len(held)
        return held[:match]


def _first_match(text: str, stops: Sequence[str]) -> int:
    """Where the first stop string begins; the length of the text if there is none."""
    places = (text.find(stop) for stop in stops)
    return min((place for place in places if place >= 0), default=len(text))


def _pending(text: str, stop: str) -> int:
    """Where an incomplete `stop` at the end of the text begins; its length if none does."""
    for start in range(max(0, len(text) - len(stop) + 1), len(text)):
        if stop.startswith(text[start:]):
            return start
    return len(text)
