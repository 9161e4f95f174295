"""Paceline: serve large language models with speculation that never costs anything."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.llm import LLM, Completion

from paceline.errors import PacelineError
from paceline.types import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "Completion", "PacelineError", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Import `LLM` only when asked for: it needs torch, the rest of the package does not."""
    if name in ("LLM", "Completion"):
        from paceline import llm

        return {"LLM": llm.LLM, "Completion": llm.Completion}[name]
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")
