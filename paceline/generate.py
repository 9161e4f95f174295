"""`paceline generate`: text from a model without a server, streamed to stdout."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass

from paceline.config import EngineConfig, flag
from paceline.errors import ConfigError
from paceline.types import SamplingParams


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """What to generate. The sampling fields mean what they mean in the API."""

    prompt: str | None = flag(None, "text to continue; '-' or none reads it from standard input")
    chat: bool = flag(False, "treat the prompt as a user's message and answer it")
    max_tokens: int = flag(128, "tokens to generate at most")
    temperature: float = flag(0.0, "0 is greedy")
    top_p: float = flag(1.0, "keep the most likely tokens up to this probability")
    top_k: int = flag(0, "keep this many most likely tokens; 0 keeps all")
    sampling_seed: int = flag(0, "seed of the sampling noise")

    def __post_init__(self) -> None:
        for ok, name, wanted, got in (
            (self.max_tokens >= 1, "--max-tokens", "at least 1", self.max_tokens),
            (self.temperature >= 0, "--temperature", "at least 0", self.temperature),
            (0 < self.top_p <= 1, "--top-p", "above 0 and at most 1", self.top_p),
            (self.top_k >= 0, "--top-k", "at least 0", self.top_k),
        ):
            if not ok:
                raise ConfigError(f"{name} must be {wanted}, not {got}")


def generate(engine: EngineConfig, config: GenerateConfig) -> int:
    """Generate once and print as it comes. Returns the exit code."""
    prompt = config.prompt
    if prompt is None or prompt == "-":
        prompt = sys.stdin.read()
    if not prompt:
        raise ConfigError("the prompt is empty: give one with --prompt")
    from paceline.llm import LLM

    print("loading the model ...", file=sys.stderr, flush=True)
    llm = LLM(**dataclasses.asdict(engine))
    params = SamplingParams(
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        seed=config.sampling_seed,
    )
    given = llm.chat_prompt([{"role": "user", "content": prompt}]) if config.chat else prompt
    if not config.chat:
        print(prompt, end="", flush=True)
    for text in llm.stream(given, params):
        print(text, end="", flush=True)
    print()
    return 0
