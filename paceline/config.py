"""The engine's configuration: one frozen value, resolved once, never edited afterwards.

Each field of `EngineConfig` and `ServerConfig` is a command-line flag; its `help` metadata is the
flag's help line (`paceline.cli` makes the flags from these fields). No torch, no files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import ConfigError
from paceline.types import TREE_WIDTH

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "bfloat16", "float16", "float32")
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
ALGORITHMS = ("NONE", "NGRAM", "EAGLE3")
POLICIES = ("adaptive", "off", "static", "threshold", "schedule")
PROFILES = ("cached", "fresh", "none")
LAYER_IDS = ("auto", "boundary", "output")
NORM_OUTPUT = ("auto", "head", "feedback")
MAX_DEPTH = 8
MAX_BRANCHING = 8
MAX_DRAFTS = TREE_WIDTH - 1
DEFAULT_DEPTH = 3


def flag(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    read_with: Mapping[str, tuple[str, ...]] | None = None,
    required: bool = False,
) -> Any:
    """A configuration field that the command line turns into a flag with this help line.

    choices: the values it may have. read_with: other fields and the values with which this one is
    read at all; given without them it is an error, and `required`, with them it must be given.
    """
    meta = {"help": help, "choices": choices, "read_with": read_with or {}, "required": required}
    return dataclasses.field(default=default, metadata=meta)


_EAGLE = {"speculative_algorithm": ("EAGLE3",)}
_DRAFTS = {"speculative_algorithm": tuple(name for name in ALGORITHMS if name != "NONE")}


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
        "how weights are stored; dummy: random weights from config.json alone, the drafter's too",
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
    memory_fraction: float | None = flag(
        None,
        "share of the memory that weights leave free, for K/V (default: 0.9 on a GPU, 0.25 of a "
        "host's)",
    )
    cuda_graph_max_tokens: int = flag(
        512, "GPU: steps of up to so many tokens are replayed as CUDA graphs; 0: none are"
    )
    page_size: int = flag(16, "tokens of one K/V page")
    kv_tokens: int | None = flag(
        None, "tokens the K/V cache holds over all requests (default: from free memory)"
    )
    seed: int = flag(0, "seed of dummy weights and of requests that bring none")

    speculative_algorithm: str = flag(
        "NONE",
        "who drafts: EAGLE3 a small network of its own; NGRAM continues a text as it went on the "
        "last time it ended like this",
        choices=ALGORITHMS,
    )
    speculative_draft_model_path: str | None = flag(
        None, "directory of the drafter's checkpoint", read_with=_EAGLE, required=True
    )
    speculative_policy: str = flag(
        "adaptive",
        "when to speculate: adaptive (as far as it pays, by measured costs), off, static (always), "
        "threshold (up to a number of requests), schedule (a table)",
        choices=POLICIES,
    )
    speculative_num_steps: int | None = flag(
        None,
        f"draft levels (the depth), 1 to {MAX_DEPTH} (default: {DEFAULT_DEPTH})",
        read_with=_DRAFTS,
    )
    speculative_eagle_topk: int | None = flag(
        None,
        f"children of a draft token, 1 (a chain) to {MAX_BRANCHING} (a tree) (default: 1)",
        read_with=_EAGLE,
    )
    speculative_num_draft_tokens: int | None = flag(
        None,
        f"draft tokens of a request in one step, up to {MAX_DRAFTS}: the best of the tree "
        "(default: steps x topk)",
        read_with={**_DRAFTS, "speculative_policy": ("adaptive", "off", "static", "threshold")},
    )
    speculative_max_draft_tokens: int | None = flag(
        None,
        "policy adaptive: draft tokens of a step at most, over all requests",
        read_with={**_DRAFTS, "speculative_policy": ("adaptive",)},
    )
    objective: str = flag(
        "throughput",
        "policy adaptive: what it aims at: throughput (tokens a second), latency (the mean wait of "
        "a request for a token) or goodput:TPOT_MS (tokens of requests that wait at most so many "
        "milliseconds for one)",
        read_with={**_DRAFTS, "speculative_policy": ("adaptive",)},
    )
    trace: str | None = flag(
        None, "JSON-lines file that gets every step's load, choice and time, for `paceline replay`"
    )
    profile: str = flag(
        "cached",
        "policy adaptive: step times are measured at the first start and kept (cached), measured "
        "now (fresh), or guessed and learnt (none)",
        choices=PROFILES,
    )
    speculative_disable_batch_threshold: int | None = flag(
        None,
        "policy threshold: speculate up to this many running requests, decode plainly above",
        read_with={"speculative_policy": ("threshold",)},
        required=True,
    )
    speculative_schedule: str | None = flag(
        None,
        "policy schedule: JSON rows of [first, last, draft tokens] by running requests, "
        "as [[1,4,5],[5,16,3],[17,512,0]]",
        read_with={"speculative_policy": ("schedule",)},
        required=True,
    )
    synthetic_acceptance: float | None = flag(
        None,
        "for measurements with random weights: drafts are accepted by a draw, the first of a node "
        "with this probability; what is generated then means nothing",
        read_with=_DRAFTS,
    )
    speculative_draft_layer_ids: str = flag(
        "auto",
        "which layers the checkpoint's layer ids mean: id (boundary) or id + 1 (output); "
        "`paceline check-drafter` tells",
        choices=LAYER_IDS,
        read_with=_EAGLE,
    )
    speculative_draft_norm_output: str = flag(
        "auto",
        "what the checkpoint's norm_output speaks of: the norm before the head, or of what "
        "is fed back; `paceline check-drafter` tells",
        choices=NORM_OUTPUT,
        read_with=_EAGLE,
    )

    def __post_init__(self) -> None:
        check_choices(self)
        _check_readers(self)
        self._check_speculation()
        _positive("--max-model-len", self.max_model_len, none_ok=True)
        _positive("--max-running-requests", self.max_running_requests)
        _positive("--max-batched-tokens", self.max_batched_tokens, none_ok=True)
        _positive("--page-size", self.page_size)
        _positive("--kv-tokens", self.kv_tokens, none_ok=True)
        most = self.cuda_graph_max_tokens
        _require(most >= 0, "--cuda-graph-max-tokens", "0 or more", most)
        share = self.memory_fraction
        _require(share is None or 0 < share <= 1, "--memory-fraction", "above 0, up to 1", share)
        if share is not None and self.kv_tokens is not None:
            raise ConfigError("--memory-fraction is not read with --kv-tokens: give one of them")
        drawn = self.synthetic_acceptance
        _require(drawn is None or 0 <= drawn <= 1, "--synthetic-acceptance", "0 to 1", drawn)

    @property
    def policy(self) -> str:
        """The policy at work: without a drafter none of them has anything to decide."""
        return "off" if self.speculative_algorithm == "NONE" else self.speculative_policy

    @property
    def draft_depth(self) -> int:
        most = self.speculative_num_draft_tokens or DEFAULT_DEPTH
        return self.speculative_num_steps or min(DEFAULT_DEPTH, most)

    @property
    def draft_branching(self) -> int:
        return self.speculative_eagle_topk or 1

    @property
    def draft_tokens(self) -> int:
        """Draft tokens of a request in one step."""
        most = self.draft_depth * self.draft_branching
        return self.speculative_num_draft_tokens or min(most, MAX_DRAFTS)

    def _check_speculation(self) -> None:
        for option, number, most in (
            ("--speculative-num-steps", self.speculative_num_steps, MAX_DEPTH),
            ("--speculative-eagle-topk", self.speculative_eagle_topk, MAX_BRANCHING),
            ("--speculative-num-draft-tokens", self.speculative_num_draft_tokens, MAX_DRAFTS),
        ):
            _require(number is None or 1 <= number <= most, option, f"1 to {most}", number)
        _positive("--speculative-max-draft-tokens", self.speculative_max_draft_tokens, none_ok=True)
        _positive(
            "--speculative-disable-batch-threshold",
            self.speculative_disable_batch_threshold,
            none_ok=True,
        )
        policy = self.speculative_policy
        if self.speculative_algorithm == "NONE" and policy in ("threshold", "schedule"):
            raise ConfigError(
                f"--speculative-policy {policy} needs a drafter: give --speculative-algorithm"
            )
        if policy == "schedule" and self.draft_branching == 1 and self.speculative_num_steps:
            raise ConfigError(
                "--speculative-num-steps is not read with a schedule of chains, each row of which "
                "says how long they are: leave it out, or raise --speculative-eagle-topk"
            )
        self._check_tree()

    def _check_tree(self) -> None:
        depth, branching = self.draft_depth, self.draft_branching
        tokens = self.speculative_num_draft_tokens
        if tokens is None:
            return
        most = branching + (depth - 1) * branching**2
        if tokens < depth:
            raise ConfigError(
                f"--speculative-num-draft-tokens {tokens} cannot fill "
                f"--speculative-num-steps {depth} levels: lower the steps or raise the tokens"
            )
        if tokens > most:
            raise ConfigError(
                f"--speculative-num-draft-tokens {tokens} is more than the {most} candidates of "
                f"{depth} steps with topk {branching}: raise --speculative-num-steps"
                + (" or --speculative-eagle-topk" if self.speculative_algorithm == "EAGLE3" else "")
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


def check_choices(config: Any) -> None:
    """Hold every field of a frozen configuration to its `choices`. Raises ConfigError."""
    for field in dataclasses.fields(config):
        choices, value = field.metadata.get("choices"), getattr(config, field.name)
        if choices:
            _require(value in choices, _option(field.name), f"one of {', '.join(choices)}", value)


def _check_readers(config: Any) -> None:
    """Refuse values that nothing would read, and ask for those that something would miss."""
    for field in dataclasses.fields(config):
        given = getattr(config, field.name) != field.default
        readers = field.metadata.get("read_with") or {}
        for owner, values in readers.items():
            reader = f"{_option(owner)} {' or '.join(values)}"
            if given and getattr(config, owner) not in values:
                raise ConfigError(
                    f"{_option(field.name)} is read with {reader} only: give both, or leave it out"
                )
        if field.metadata.get("required") and not given:
            for owner, values in readers.items():
                if getattr(config, owner) in values:
                    reader = f"{_option(owner)} {getattr(config, owner)}"
                    raise ConfigError(f"{reader} needs {_option(field.name)}")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
