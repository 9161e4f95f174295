"""Values that cross from the HTTP process to the engine and back. No torch, no HTTP, no clock.

Frozen msgspec structs: the wire format (msgpack) between the two processes and the arguments of the
engine alike. A request is token ids and sampling parameters; text, stop strings and chat templates
belong to the front (`paceline.serve`), device tensors to `paceline.exec`.
"""

from __future__ import annotations

import enum
from typing import TypeAlias

import msgspec

TREE_WIDTH = 64
"""Tokens of one row with its drafts: one bit each in the attention's ancestor masks."""


class FinishReason(enum.StrEnum):
    """Why a request ended. `STOP` and `LENGTH` are OpenAI's own."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is chosen and when a request ends.

    max_tokens: tokens to generate at most; None means up to the context length.
    temperature: 0 is greedy. top_k: 0 means off. top_p: in (0, 1], 1 means off.
    min_p: in [0, 1], relative to the most likely token, 0 means off.
    seed: None draws one at arrival; the same seed gives the same text whatever the load.
    stop: strings that end the text (not part of it). stop_token_ids: ids that end it.
    ignore_eos: go on past the model's end-of-sequence tokens.
    max_draft_tokens: draft tokens of one step at most; 0 decodes plainly. The text is the same.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_draft_tokens: int = TREE_WIDTH - 1


class AddRequest(msgspec.Struct, frozen=True, kw_only=True, tag="add"):
    """Start one request. `params.seed` and `params.max_tokens` are already resolved (not None)."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams


class AbortRequests(msgspec.Struct, frozen=True, kw_only=True, tag="abort"):
    """Drop these requests wherever they are; unknown ids are ignored."""

    ids: tuple[str, ...]


class Shutdown(msgspec.Struct, frozen=True, kw_only=True, tag="shutdown"):
    """End the engine process cleanly."""


ToEngine: TypeAlias = AddRequest | AbortRequests | Shutdown


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """What one step added to one request.

    tokens: ids committed in this step, in order (may be empty with a finish). The end-of-sequence
        token that ended the request is included; the front does not show it as text.
    finish: set in the request's last delta, None before. error: a reason, with FinishReason.ERROR.
    cached_tokens: prompt tokens that came from the prefix cache (known from the first delta on).
    drafted, accepted: draft tokens verified in this step, and those of them that are in `tokens`;
        drafts past the request's end count as neither.
    """

    id: str
    tokens: tuple[int, ...] = ()
    finish: FinishReason | None = None
    error: str | None = None
    cached_tokens: int = 0
    drafted: int = 0
    accepted: int = 0


class ShapeStats(msgspec.Struct, frozen=True, kw_only=True):
    """Steps whose policy chose one shape for one reason, and what came of them.

    committed: tokens generated in those steps; drafted, accepted: draft tokens.
    """

    depth: int
    branching: int
    reason: str
    steps: int
    committed: int
    drafted: int
    accepted: int


ERROR_BOUNDS = (0.01, 0.02, 0.04, 0.06, 0.08, 0.12, 0.16, 0.2, 0.3, 0.5, 1.0)
"""Upper bounds of the buckets in which errors of predicted step times are counted; one more for
what lies beyond the last."""


class PredictionStats(msgspec.Struct, frozen=True, kw_only=True):
    """How well a policy's costs foretell what a step takes, its drafts known, if it has costs.

    predicted_seconds, real_seconds: their sums. errors: steps by |real / predicted - 1|, a count
    for each bucket of `ERROR_BOUNDS`; error_sum: the errors' sum. median, p90: of the error over
    about the last thousand steps; None before the first.
    """

    steps: int = 0
    predicted_seconds: float = 0.0
    real_seconds: float = 0.0
    errors: tuple[int, ...] = (0,) * (len(ERROR_BOUNDS) + 1)
    error_sum: float = 0.0
    median: float | None = None
    p90: float | None = None


class ReliabilityStats(msgspec.Struct, frozen=True, kw_only=True):
    """Drafts that were expected to be accepted about equally often, and how often they were.

    Of drafts whose predecessors had been accepted. expected: the sum of the estimates, in drafts.
    """

    drafts: int = 0
    expected: float = 0.0
    accepted: int = 0


class SpeculationStats(msgspec.Struct, frozen=True, kw_only=True):
    """How speculation goes.

    depth, branching, budget, reason: the policy's latest choice. attempts, accepted: by draft
    position from the first on: rows that carried a draft there, and rows whose draft there was
    accepted. recent: accepted by attempts, over about the last thousand rows. shapes: in order of
    first use. suspect: hardly any draft is accepted (after 100 rows with drafts, under 1 % of the
    first ones lately), or the drafter fails at every step. prediction: of step times. reliability:
    tenths of the expected acceptance, 0 to 10 % first. synthetic_acceptance: drafts are accepted by
    a draw of this probability, and what is generated means nothing; None: they are judged.
    """

    depth: int = 0
    branching: int = 1
    budget: int = 0
    reason: str = ""
    attempts: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    recent: tuple[float, ...] = ()
    shapes: tuple[ShapeStats, ...] = ()
    suspect: bool = False
    prediction: PredictionStats = PredictionStats()
    reliability: tuple[ReliabilityStats, ...] = ()
    synthetic_acceptance: float | None = None


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters and gauges of the engine at one moment; totals count from its start."""

    running: int = 0
    waiting: int = 0
    pages_total: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    steps_total: int = 0
    step_seconds_total: float = 0.0
    prompt_tokens_total: int = 0
    cached_prompt_tokens_total: int = 0
    committed_tokens_total: int = 0
    drafted_tokens_total: int = 0
    accepted_tokens_total: int = 0
    drafter_failures_total: int = 0
    preemptions_total: int = 0
    finished_total: int = 0
    speculation: SpeculationStats = SpeculationStats()


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """A stage of start-up, for people: "loading weights", done out of total (0 total: unknown)."""

    stage: str
    done: int = 0
    total: int = 0


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The engine serves. Limits that only the engine knows after looking at memory."""

    max_model_len: int
    kv_tokens: int
    description: str


class StepOutputs(msgspec.Struct, frozen=True, kw_only=True, tag="outputs"):
    """All deltas of one step with the stats after it (also sent with no deltas, when idle)."""

    deltas: tuple[Delta, ...]
    stats: EngineStats


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The engine cannot start or go on; `message` is one line for people."""

    message: str


FromEngine: TypeAlias = Progress | Ready | StepOutputs | Failed
