"""What is known of one request after its end. Pure values; knows no HTTP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TokenCount = Literal["usage", "chunks"]


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """One request. All moments are seconds of one monotonic clock.

    index: place in its level, from 0. prompt: the prompt's id.
    due: when it should have been sent. sent: when it was; later than `due` only under Poisson
        arrivals, when the level's concurrency was exhausted.
    first: the first chunk with text; None if none came. end: the stream's end, or the failure.
    gaps: seconds between chunks with text that follow each other (one fewer than the chunks).
    chunks: chunks with text; one may carry several tokens.
    output_tokens: the server's own count when `token_count` is "usage", else `chunks`.
    prompt_tokens, cached_tokens: from the server's usage; None if it did not say.
    finish_reason: as the server gave it. failure: why the request failed; None if it succeeded.
    """

    index: int
    prompt: str
    due: float
    sent: float
    first: float | None
    end: float
    gaps: tuple[float, ...] = ()
    chunks: int = 0
    output_tokens: int = 0
    token_count: TokenCount = "chunks"
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    failure: str | None = None
    text: str = ""

    @property
    def ok(self) -> bool:
        return self.failure is None

    @property
    def latency(self) -> float:
        """Seconds from `due` to `end`: a wait for a free place in the level counts."""
        return self.end - self.due

    @property
    def tokens_per_second(self) -> float:
        """Output tokens / latency."""
        return self.output_tokens / self.latency if self.latency > 0 else 0.0

    @property
    def wait(self) -> float:
        """Seconds between `due` and `sent`."""
        return self.sent - self.due

    @property
    def ttft(self) -> float | None:
        """Time to first token: seconds from `due` to the first chunk with text."""
        return None if self.first is None else self.first - self.due

    @property
    def itl(self) -> float | None:
        """Inter-token latency in seconds: (end - first) / (output tokens - 1).

        None with fewer than two tokens. When the first chunk carries several tokens this is an
        upper bound, as their time lies before `first`.
        """
        if self.first is None or self.output_tokens < 2:
            return None
        return (self.end - self.first) / (self.output_tokens - 1)
