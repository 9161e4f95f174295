"""From committed token ids to the text, finish reason and token count of one choice. No asyncio.

Shared by the HTTP routes and by `LLM.generate`. Knows the detokeniser and stop strings; the result
does not depend on how the ids are cut into deltas. Knows nothing of requests, JSON or engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from paceline.serve.detokenize import IncrementalDetokenizer, StopStrings
from paceline.serve.tokenizer import Tokenizer
from paceline.types import FinishReason


class Piece(NamedTuple):
    """New text of one choice. `finish` is set in the last piece; text may be empty."""

    text: str
    finish: FinishReason | None


class TextAssembler:
    """Text of one choice as its tokens arrive.

    stop: strings that end the text. after: the prompt's ids where the text continues the prompt.
    completion_tokens: ids that count in the usage: up to and including the one that completed a
        stop string or, without a match, all (an end-of-sequence id counts but is not text).
    finish: why it ended, None before.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, stop: Sequence[str] = (), after: Sequence[int] = ()
    ) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, after=after)
        self._stops = StopStrings(stop) if stop else None
        self.completion_tokens = 0
        self.finish: FinishReason | None = None

    def feed(self, tokens: Sequence[int], finish: FinishReason | None) -> Piece:
        """Add one delta. `STOP` as `finish` means that the last id of the request ended it.

        The piece may end with STOP although `finish` is None: a stop string was completed, and the
        caller aborts the engine's request. Must not be called again after a piece with a finish.
        """
        assert self.finish is None
        ends_with_stop_id = finish is FinishReason.STOP and len(tokens) > 0
        shown = tokens[:-1] if ends_with_stop_id else tokens
        if self._stops is None:
            text = self._detokenizer.feed(shown) if shown else ""
            self.completion_tokens += len(shown)
        else:
            text = self._feed_until_stop(shown, self._stops)
        if self.finish is None and finish is not None:
            self.completion_tokens += len(tokens) - len(shown)
            self.finish = finish
            text += self._flush()
        return Piece(text, self.finish)

    def _feed_until_stop(self, tokens: Sequence[int], stops: StopStrings) -> str:
        """Feeds id by id, so that the count says which one completed the stop string."""
        pieces: list[str] = []
        for token in tokens:
            emitted, stopped = stops.feed(self._detokenizer.feed((token,)))
            pieces.append(emitted)
            self.completion_tokens += 1
            if stopped:
                self.finish = FinishReason.STOP
                break
        return "".join(pieces)

    def _flush(self) -> str:
        """What was held back, at the end: half characters, the beginning of a stop string."""
        rest = self._detokenizer.flush()
        if self._stops is None:
            return rest
        text = self._stops.feed(rest)[0] + self._stops.flush()
        if self._stops.stopped:
            self.finish = FinishReason.STOP
        return text


class NoText:
    """Counts the tokens of a choice that nobody wants as text. As `TextAssembler`."""

    def __init__(self) -> None:
        self.completion_tokens = 0

    def feed(self, tokens: Sequence[int], finish: FinishReason | None) -> Piece:
        self.completion_tokens += len(tokens)
        return Piece("", finish)
