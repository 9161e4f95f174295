"""The dashboard: one page at `/`, and the figures that it asks for once a second at `/stats`.

The page is a file that needs nothing else: it works offline. Figures are those of the engine's
latest `EngineStats`; totals are counters, of which the page takes differences. Knows nothing of
HTTP.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.serve.speculation import SpeculationInfo
from paceline.types import EngineStats

PAGE = (Path(__file__).parent / "dashboard.html").read_bytes()
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


def stats_body(model: str, info: SpeculationInfo, stats: EngineStats) -> dict[str, Any]:
    """Everything that the page shows. Seconds, tokens, shares; null: nothing is known yet."""
    said = stats.speculation
    prompt = stats.prompt_tokens_total
    return {
        "model": model,
        "algorithm": info.algorithm,
        "policy": info.policy,
        "draft_model": info.draft_model,
        "state": state(info, stats),
        "reason": said.reason,
        "suspect": said.suspect,
        "synthetic_acceptance": said.synthetic_acceptance,
        "running": stats.running,
        "waiting": stats.waiting,
        "depth": said.depth,
        "branching": said.branching,
        "budget": said.budget,
        "acceptance": said.recent,
        "pages": {
            "used": stats.pages_total - stats.pages_free - stats.pages_cached,
            "cached": stats.pages_cached,
            "free": stats.pages_free,
        },
        "prefix_hits": stats.cached_prompt_tokens_total / prompt if prompt else None,
        "error_median": said.prediction.median,
        "error_p90": said.prediction.p90,
        "totals": {
            "tokens": stats.committed_tokens_total,
            "steps": stats.steps_total,
            "step_seconds": stats.step_seconds_total,
            "drafted": stats.drafted_tokens_total,
            "accepted": stats.accepted_tokens_total,
            "foretold_steps": said.prediction.steps,
            "predicted_seconds": said.prediction.predicted_seconds,
            "real_seconds": said.prediction.real_seconds,
        },
    }


def state(info: SpeculationInfo, stats: EngineStats) -> str:
    """In a word: idle, speculating, plain (it could speculate and does not), no drafter."""
    if not stats.running and not stats.waiting:
        return "idle"
    if info.algorithm == "NONE":
        return "no drafter"
    depth = stats.speculation.depth
    return "speculating" if depth else "plain"
