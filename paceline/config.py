"""The engine's configuration: one frozen value, resolved once, never edited afterwards.

Each field of `EngineConfig` and `ServerConfig` is a command-line flag; its `help` metadata is the
flag's help line (`paceline.cli` makes the flags from these fields). No torch, no files.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from paceline.errors import ConfigError

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "bfloat16", "float32")
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
ALGORITHMS = ("NONE", "NGRAM")
POLICIES = ("off", "static", "threshold", "schedule")
MAX_DEPTH = 8


def flag(default: Any, help: str, *, choices: tuple[str, ...] = ()) -> Any:
    """A configuration field that the command line turns into a flag with this help line."""
    return dataclasses.field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What the user asked of the engine. None means: computed from the model and the machine."""

    model: str | None = dataclasses.field(
        default=None,
        metadata={
            "positional": True,
            "help": "a Hugging Face directory or a .gguf file; the demo model when left out",
        },
    )
    device: str = flag("auto", "where the model runs", choices=DEVICES)
    dtype: str = flag("auto", "number format of weights and K/V (auto: bfloat16)", choices=DTYPES)
    load_format: str = flag(
        "auto",
        "how weights are stored; dummy: random weights from the config alone",
        choices=LOAD_FORMATS,
    )
    max_model_len: int | None = flag(
        None,
        "longest prompt + output in tokens "
        "(default: the model's own limit, as far as memory allows)",
    )
    max_running_requests: int = flag(64, "requests decoded at the same time")
    max_batched_tokens: int | None = flag(
        None,
        "tokens of one step at most; longer prompts are "
        "prefilled in chunks (default: 128 on a CPU, else 2048)",
    )
    page_size: int = flag(16, "tokens of one K/V page")
    kv_tokens: int | None = flag(
        None, "tokens the K/V cache holds over all requests (default: from free memory)"
    )
    seed: int = flag(0, "seed of dummy weights and of requests that bring none")

    speculative_algorithm: str = flag(
        "NONE",
        "who drafts: NGRAM continues a text as it went on the last time it ended like this",
        choices=ALGORITHMS,
    )
    speculative_policy: str = flag(
        "static",
        "when to speculate: off, static (always), threshold (up to a number of requests), "
        "schedule (a table)",
        choices=POLICIES,
    )
    speculative_num_steps: int = flag(3, "draft tokens of a request in one step (the depth)")
    speculative_disable_batch_threshold: int | None = flag(
        None, "policy threshold: speculate up to this many decoding requests, decode plainly above"
    )
    speculative_schedule: str | None = flag(
        None,
        "policy schedule: JSON rows of [first, last, draft tokens] by decoding requests, "
        "as [[1,4,5],[5,16,3],[17,512,0]]",
    )

    def __post_init__(self) -> None:
        self._check_speculation()
        _require(self.device in DEVICES, "--device", f"one of {', '.join(DEVICES)}", self.device)
        _require(self.dtype in DTYPES, "--dtype", f"one of {', '.join(DTYPES)}", self.dtype)
        _require(
            self.load_format in LOAD_FORMATS,
            "--load-format",
            f"one of {', '.join(LOAD_FORMATS)}",
            self.load_format,
        )
        _positive("--max-model-len", self.max_model_len, none_ok=True)
        _positive("--max-running-requests", self.max_running_requests)
        _positive("--max-batched-tokens", self.max_batched_tokens, none_ok=True)
        _positive("--page-size", self.page_size)
        _positive("--kv-tokens", self.kv_tokens, none_ok=True)

    def _check_speculation(self) -> None:
        algorithm, policy = self.speculative_algorithm, self.speculative_policy
        _require(
            algorithm in ALGORITHMS,
            "--speculative-algorithm",
            f"one of {', '.join(ALGORITHMS)}",
            algorithm,
        )
        _require(
            policy in POLICIES, "--speculative-policy", f"one of {', '.join(POLICIES)}", policy
        )
        _require(
            1 <= self.speculative_num_steps <= MAX_DEPTH,
            "--speculative-num-steps",
            f"between 1 and {MAX_DEPTH}",
            self.speculative_num_steps,
        )
        _positive(
            "--speculative-disable-batch-threshold",
            self.speculative_disable_batch_threshold,
            none_ok=True,
        )
        for option, value, owner in (
            (
                "--speculative-disable-batch-threshold",
                self.speculative_disable_batch_threshold,
                "threshold",
            ),
            ("--speculative-schedule", self.speculative_schedule, "schedule"),
        ):
            if value is not None and (policy != owner or algorithm == "NONE"):
                raise ConfigError(
                    f"{option} is read by --speculative-policy {owner} with a "
                    "--speculative-algorithm only: give both, or leave it out"
                )
            if value is None and policy == owner:
                raise ConfigError(f"--speculative-policy {owner} needs {option}")
        if algorithm == "NONE" and policy not in ("off", "static"):
            raise ConfigError(
                f"--speculative-policy {policy} needs a drafter: give --speculative-algorithm"
            )


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """What the user asked of the HTTP side."""

    host: str = flag("127.0.0.1", "address to listen on; 0.0.0.0 for every interface")
    port: int = flag(30000, "port to listen on; 0 picks a free one")
    served_model_name: str | None = flag(
        None, "model name that clients send (default: the file's or directory's own)"
    )
    api_key: str | None = flag(
        None, "clients must send it as a bearer token (also read from PACELINE_API_KEY)"
    )
    max_queued_requests: int = flag(1024, "requests in the server at most; one more gets a 429")
    max_body_mb: int = flag(16, "largest request body in MiB; a larger one gets a 413")

    def __post_init__(self) -> None:
        _require(0 <= self.port <= 65535, "--port", "between 0 and 65535", self.port)
        _positive("--max-queued-requests", self.max_queued_requests)
        _positive("--max-body-mb", self.max_body_mb)


def _require(ok: bool, flag: str, wanted: str, got: object) -> None:
    if not ok:
        raise ConfigError(f"{flag} must be {wanted}, not {got!r}")


def _positive(flag: str, value: int | None, *, none_ok: bool = False) -> None:
    if value is None and none_ok:
        return
    _require(isinstance(value, int) and value >= 1, flag, "at least 1", value)
