"""OpenAI's request bodies: their fields, their limits, and how each mistake is named.

Turns bytes into a `CompletionRequest` or a `ChatRequest` with `SamplingParams`, or raises
InvalidRequest with the field in `param`. A field that OpenAI defines and this server lacks is
accepted only with the value that means "off"; unknown fields are errors. Knows nothing of
tokenizers, models, engines or HTTP.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from paceline.errors import InvalidRequest
from paceline.types import TREE_WIDTH, SamplingParams

MAX_N = 8
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_USER_MAX_TOKENS = 2**31 - 1
DEFAULT_COMPLETION_TOKENS = 16
_INT64 = range(-(2**63), 2**63)
# The field `speculative` to draft tokens of one step at most.
_MOST_DRAFTS = {None: TREE_WIDTH - 1, True: TREE_WIDTH - 1, False: 0}


# --- What the rest of the server gets ------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Options:
    """What both kinds of request share. `params.max_tokens` None: up to the context.

    include_draft_usage: the usage also counts draft tokens.
    """

    model: str
    params: SamplingParams
    n: int
    stream: bool
    include_usage: bool
    include_draft_usage: bool


@dataclass(frozen=True, kw_only=True)
class CompletionRequest:
    """prompts: each a text, or token ids that are not yet checked against a vocabulary."""

    options: Options
    prompts: tuple[str | tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """messages: each with "role" (system, user or assistant) and "content", both text."""

    options: Options
    messages: tuple[dict[str, str], ...]


# --- Bodies as they come -------------------------------------------------------------------------


class _StreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class _Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields of both bodies. `user`, `metadata` and the like mean nothing to a text generator."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    # Extensions of this server.
    top_k: int | None = None
    min_p: float | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    speculative: bool | None = None
    include_draft_usage: bool | None = None
    # Not supported unless they say "off".
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    # Harmless: who asks and why.
    user: str | None = None


class _CompletionBody(_Body, kw_only=True):
    prompt: str | list[str | int | list[int]]
    suffix: str | None = None
    echo: bool | None = None
    best_of: int | None = None
    logprobs: int | None = None


class _Part(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: str
    text: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    refusal: Any = None


class _Message(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    role: str
    content: str | list[_Part] | None = None
    name: str | None = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None
    function_call: Any = None
    refusal: str | None = None
    audio: Any = None
    annotations: list[Any] | None = None


class _ChatBody(_Body, kw_only=True):
    messages: list[_Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    functions: list[Any] | None = None
    function_call: Any = None
    parallel_tool_calls: bool | None = None
    response_format: Any = None
    prediction: Any = None
    audio: Any = None
    modalities: list[str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    web_search_options: Any = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None


# Fields that this version lacks, with the values (besides null) that ask for nothing.
_OFF_BOTH: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "logit_bias": ({},),
}
_OFF_COMPLETION: dict[str, tuple[Any, ...]] = {
    **_OFF_BOTH,
    "suffix": ("",),
    "echo": (False,),
    "logprobs": (),
}
_OFF_CHAT: dict[str, tuple[Any, ...]] = {
    **_OFF_BOTH,
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "prediction": (),
    "audio": (),
    "modalities": (["text"],),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
}
_OFF_MESSAGE: dict[str, tuple[Any, ...]] = {
    "name": (),
    "tool_calls": ([],),
    "tool_call_id": (),
    "function_call": (),
    "refusal": ("",),
    "audio": (),
    "annotations": ([],),
}
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

_completion_decoder = msgspec.json.Decoder(_CompletionBody)
_chat_decoder = msgspec.json.Decoder(_ChatBody)
_BodyType = TypeVar("_BodyType", _CompletionBody, _ChatBody)


def parse_completion(body: bytes) -> CompletionRequest:
    """Read the body of /v1/completions. Raises InvalidRequest."""
    fields = _decode(_completion_decoder, body)
    _refuse_unless_off(fields, _OFF_COMPLETION, where="")
    _check_best_of(fields)
    limit = _limit("max_tokens", fields.max_tokens)
    options = _options(fields, max_tokens=DEFAULT_COMPLETION_TOKENS if limit is None else limit)
    return CompletionRequest(options=options, prompts=_prompts(fields.prompt))


def parse_chat(body: bytes) -> ChatRequest:
    """Read the body of /v1/chat/completions. Raises InvalidRequest."""
    fields = _decode(_chat_decoder, body)
    _refuse_unless_off(fields, _OFF_CHAT, where="")
    old = _limit("max_tokens", fields.max_tokens)
    new = _limit("max_completion_tokens", fields.max_completion_tokens)
    if old is not None and new is not None and old != new:
        raise InvalidRequest(
            "max_tokens and max_completion_tokens differ; give one of them", param="max_tokens"
        )
    options = _options(fields, max_tokens=old if new is None else new)
    if not fields.messages:
        raise InvalidRequest("messages must have at least one message", param="messages")
    messages = tuple(_message(message, number) for number, message in enumerate(fields.messages))
    return ChatRequest(options=options, messages=messages)


# --- Decoding ------------------------------------------------------------------------------------

_AT_PATH = re.compile(r" - at `\$\.?(.*)`$")
_FIELD = re.compile(r"^Object (?:contains unknown|missing required) field `(.*?)`", re.DOTALL)


def _decode(decoder: msgspec.json.Decoder[_BodyType], body: bytes) -> _BodyType:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _named(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None


def _named(message: str) -> InvalidRequest:
    """The error for a message of msgspec's, which ends with the path of the value."""
    at = _AT_PATH.search(message)
    path = at.group(1) if at else ""
    said = message[: at.start()] if at else message
    field = _FIELD.match(said)
    if field is None:
        return InvalidRequest(f"{path or 'body'}: {said}", param=path or None)
    name = f"{path}.{field.group(1)}" if path else field.group(1)
    if "unknown" in said.split("`")[0]:
        # Such as messages[0].content[1].cache_control.
        return InvalidRequest(f"unknown field {name}", param=name, code="unknown_parameter")
    return InvalidRequest(f"{name} is missing", param=name, code="missing_required_parameter")


def _refuse_unless_off(
    fields: msgspec.Struct, off: Mapping[str, tuple[Any, ...]], *, where: str
) -> None:
    for name, harmless in off.items():
        value = getattr(fields, name)
        if value is not None and value not in harmless:
            raise InvalidRequest(
                f"{where}{name} is not supported by this server",
                param=f"{where}{name}",
                code="unsupported_parameter",
            )


# --- Values --------------------------------------------------------------------------------------


def _options(fields: _Body, *, max_tokens: int | None) -> Options:
    n = 1 if fields.n is None else fields.n
    _require(1 <= n <= MAX_N, "n", f"between 1 and {MAX_N}")
    include_usage = _include_usage(fields)
    return Options(
        model=fields.model,
        params=_sampling(fields, max_tokens=max_tokens),
        n=n,
        stream=bool(fields.stream),
        include_usage=include_usage,
        include_draft_usage=_include_draft_usage(fields, include_usage),
    )


def _sampling(fields: _Body, *, max_tokens: int | None) -> SamplingParams:
    temperature = 1.0 if fields.temperature is None else fields.temperature
    top_p = 1.0 if fields.top_p is None else fields.top_p
    top_k = 0 if fields.top_k in (None, -1) else fields.top_k
    min_p = 0.0 if fields.min_p is None else fields.min_p
    assert top_k is not None
    _require(0.0 <= temperature <= 2.0, "temperature", "between 0 and 2")
    _require(0.0 < top_p <= 1.0, "top_p", "above 0 and at most 1")
    _require(0 <= top_k < 2**31, "top_k", "at least 0 (or -1, which is the same as 0)")
    _require(0.0 <= min_p <= 1.0, "min_p", "between 0 and 1")
    _require(fields.seed is None or fields.seed in _INT64, "seed", "a 64-bit integer")
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=fields.seed,
        stop=_stops(fields.stop),
        stop_token_ids=_stop_token_ids(fields.stop_token_ids),
        ignore_eos=bool(fields.ignore_eos),
        max_draft_tokens=_MOST_DRAFTS[fields.speculative],
    )


def _include_usage(fields: _Body) -> bool:
    options = fields.stream_options
    if options is None:
        return False
    _require(bool(fields.stream), "stream_options", "left out unless stream is true")
    if options.include_obfuscation:
        raise InvalidRequest(
            "stream_options.include_obfuscation is not supported by this server",
            param="stream_options.include_obfuscation",
            code="unsupported_parameter",
        )
    return bool(options.include_usage)


def _include_draft_usage(fields: _Body, include_usage: bool) -> bool:
    wanted = bool(fields.include_draft_usage)
    _require(
        not wanted or not fields.stream or include_usage,
        "include_draft_usage",
        "left out of a stream unless stream_options.include_usage is true",
    )
    return wanted


def _limit(name: str, value: int | None) -> int | None:
    if value is None:
        return None
    _require(value >= 1, name, "at least 1")
    return min(value, MAX_USER_MAX_TOKENS)


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    _require(len(stops) <= MAX_STOPS, "stop", f"at most {MAX_STOPS} strings")
    _require(all(stops), "stop", "strings that are not empty")
    _require(
        all(len(text) <= MAX_STOP_CHARS for text in stops),
        "stop",
        f"strings of at most {MAX_STOP_CHARS} characters",
    )
    return stops


def _stop_token_ids(ids: list[int] | None) -> tuple[int, ...]:
    _require(
        len(ids or ()) <= MAX_STOP_TOKEN_IDS, "stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS} ids"
    )
    return tuple(ids or ())


def _check_best_of(fields: _CompletionBody) -> None:
    n = 1 if fields.n is None else fields.n
    if fields.best_of is not None and fields.best_of != n:
        raise InvalidRequest(
            f"best_of other than n ({n}) is not supported by this server",
            param="best_of",
            code="unsupported_parameter",
        )


def _prompts(prompt: str | list[str | int | list[int]]) -> tuple[str | tuple[int, ...], ...]:
    """One text, several texts, one list of ids or several: told apart by the first element."""
    if not prompt:
        raise InvalidRequest("prompt must not be empty", param="prompt")
    if isinstance(prompt, str):
        return (prompt,)
    kind = type(prompt[0])
    _require(
        all(type(item) is kind for item in prompt),
        "prompt",
        "a text, a list of texts, a list of token ids or a list of such lists",
    )
    if kind is int:
        return (tuple(item for item in prompt if isinstance(item, int)),)
    texts_or_ids = [
        item if isinstance(item, str) else tuple(item)
        for item in prompt
        if not isinstance(item, int)
    ]
    _require(all(texts_or_ids), "prompt", "without empty prompts")
    return tuple(texts_or_ids)


def _message(message: _Message, number: int) -> dict[str, str]:
    where = f"messages[{number}]"
    role = _ROLES.get(message.role)
    if role is None:
        raise InvalidRequest(
            f"{where}.role must be one of {', '.join(_ROLES)}, not {message.role!r}",
            param=f"{where}.role",
        )
    _refuse_unless_off(message, _OFF_MESSAGE, where=f"{where}.")
    return {"role": role, "content": _content(message.content, param=f"{where}.content")}


def _content(content: str | list[_Part] | None, *, param: str) -> str:
    """The text of a message; its parts are joined by line breaks."""
    if isinstance(content, str):
        return content
    _require(bool(content), param, "a text or a list of text parts")
    texts: list[str] = []
    for part in content or ():
        if part.type != "text":
            raise InvalidRequest(
                f"{param}: parts of type {part.type!r} are not supported by this server",
                param=param,
                code="unsupported_parameter",
            )
        if part.text is None:
            raise InvalidRequest(f"{param}: a part of type 'text' has no text", param=param)
        texts.append(part.text)
    return "\n".join(texts)


def _require(ok: bool, param: str, wanted: str) -> None:
    if not ok:
        raise InvalidRequest(f"{param} must be {wanted}", param=param)
