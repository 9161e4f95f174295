"""The load generator's configuration: one frozen value, checked once, never edited afterwards.

Each field of `BenchConfig` is a command-line flag; its `help` metadata is the flag's help line.
Knows no HTTP and reads no files.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from paceline.errors import ConfigError

APIS = ("chat", "completions")
ARRIVALS = ("closed", "poisson")


def flag(default: Any, help: str, *, choices: tuple[str, ...] = ()) -> Any:
    return dataclasses.field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """What the user asked of the load generator. Raises ConfigError for values without sense."""

    server_url: str = flag(
        "http://127.0.0.1:30000", "address of the server, with or without /v1 at its end"
    )
    api: str = flag("chat", "endpoint that gets the requests", choices=APIS)
    model: str | None = flag(None, "model name to send (default: the first of /v1/models)")
    api_key: str | None = flag(
        None,
        "sent as a bearer token (also read from PACELINE_API_KEY); never written to the result",
    )
    concurrency: tuple[int, ...] = flag(
        (1, 10), "requests in flight at most, one level for each number"
    )
    requests_per_level: int = flag(10, "requests of one level")
    warmup: int = flag(5, "requests before the first level; not measured, but a failed one counts")
    max_tokens: int = flag(512, "tokens to generate for each request")
    ignore_eos: bool = flag(
        True,
        "ask for exactly --max-tokens tokens; left out by itself if the server rejects the field",
    )
    temperature: float = flag(0.0, "sampling temperature; 0 is greedy")
    seed: int = flag(
        0, "fixes the choice of prompts, Poisson arrivals and (above temperature 0) sampling"
    )
    prompts: str | None = flag(
        None,
        'file of prompts: JSON lines with "prompt" or "messages", or plain text with one prompt '
        "a line (default: built-in prompts)",
    )
    arrivals: str = flag(
        "closed",
        "closed: a new request as soon as one ends; poisson: at random moments, --rate a second",
        choices=ARRIVALS,
    )
    rate: float | None = flag(None, "requests a second, for --arrivals poisson")
    timeout: float = flag(600.0, "seconds after which a request has failed")
    extra_body: str | None = flag(None, "JSON object merged into the body of each request")
    save_texts: bool = flag(False, "keep the text of every request in the result")
    output: str | None = flag(
        None, "JSON file for the result (default: results/bench-<timestamp>.json)"
    )

    def __post_init__(self) -> None:
        _url(self.server_url)
        _require(self.api in APIS, "--api", f"one of {', '.join(APIS)}", got=self.api)
        _header(self.api_key)
        _require(bool(self.concurrency), "--concurrency", "one number or more", got="nothing")
        for level in self.concurrency:
            _require(level >= 1, "--concurrency", "at least 1", got=level)
        _require(
            self.requests_per_level >= 1,
            "--requests-per-level",
            "at least 1",
            got=self.requests_per_level,
        )
        _require(self.warmup >= 0, "--warmup", "0 or more", got=self.warmup)
        _require(self.max_tokens >= 1, "--max-tokens", "at least 1", got=self.max_tokens)
        _require(
            math.isfinite(self.temperature) and self.temperature >= 0,
            "--temperature",
            "0 or more",
            got=self.temperature,
        )
        _above_zero("--timeout", self.timeout)
        _arrivals(self.arrivals, self.rate)
        self.extra_fields()

    @property
    def api_base(self) -> str:
        """The server's address up to and with /v1."""
        return self.server_url.rstrip("/").removesuffix("/v1") + "/v1"

    def extra_fields(self) -> dict[str, Any]:
        """`extra_body` as an object; empty when the flag was left out."""
        if self.extra_body is None:
            return {}
        try:
            fields = json.loads(self.extra_body)
            json.dumps(fields, ensure_ascii=False).encode()  # a lone surrogate cannot be sent
        except ValueError as exc:
            raise ConfigError(f"--extra-body is not JSON: {exc}") from None
        _require(isinstance(fields, dict), "--extra-body", "a JSON object", got=self.extra_body)
        return dict(fields)


def _require(ok: bool, flag: str, wanted: str, *, got: object) -> None:
    if not ok:
        raise ConfigError(f"{flag} must be {wanted}, not {got!r}")


def _above_zero(flag: str, value: float) -> None:
    _require(math.isfinite(value) and value > 0, flag, "more than 0", got=value)


def _arrivals(arrivals: str, rate: float | None) -> None:
    _require(arrivals in ARRIVALS, "--arrivals", f"one of {', '.join(ARRIVALS)}", got=arrivals)
    if arrivals == "poisson":
        if rate is None:
            raise ConfigError("--arrivals poisson needs --rate, the requests a second")
        _above_zero("--rate", rate)
    elif rate is not None:
        raise ConfigError("--rate needs --arrivals poisson")


def _url(url: str) -> None:
    wanted = "an address such as http://127.0.0.1:30000"
    try:
        parts = urlsplit(url)
        ok = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        ok = ok and not parts.query and not parts.fragment
    except ValueError:  # a port that is no number, or out of range
        ok = False
    _require(ok, "--server-url", wanted, got=url)


def _header(api_key: str | None) -> None:
    if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key):
        raise ConfigError("--api-key must be printable ASCII")
