"""Request bodies: what is understood, and the name of the field in every refusal."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import InvalidRequest
from paceline.serve.protocol import ChatRequest, CompletionRequest, parse_chat, parse_completion
from paceline.types import TREE_WIDTH, SamplingParams

USER = {"role": "user", "content": "hi"}


def completion(**fields: Any) -> CompletionRequest:
    return parse_completion(json.dumps({"model": "m", "prompt": "hi", **fields}).encode())


def chat(**fields: Any) -> ChatRequest:
    return parse_chat(json.dumps({"model": "m", "messages": [USER], **fields}).encode())


# --- What is understood --------------------------------------------------------------------------


def test_defaults() -> None:
    options = completion().options
    assert options.params == SamplingParams(max_tokens=16)
    assert (options.model, options.n, options.stream, options.include_usage) == (
        "m",
        1,
        False,
        False,
    )
    assert chat().options.params == SamplingParams()


def test_every_parameter() -> None:
    given_params = {
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.1,
        "seed": -(2**63),
        "stop": ["a", "b"],
        "stop_token_ids": [7],
        "ignore_eos": True,
        "max_tokens": 9,
    }
    expected = SamplingParams(
        max_tokens=9,
        temperature=0.0,
        top_p=0.5,
        top_k=3,
        min_p=0.1,
        seed=-(2**63),
        stop=("a", "b"),
        stop_token_ids=(7,),
        ignore_eos=True,
    )
    for request in (completion(**given_params), chat(**given_params)):
        assert request.options.params == expected
    options = chat(n=8, stream=True, stream_options={"include_usage": True}).options
    assert (options.n, options.stream, options.include_usage) == (8, True, True)


def test_other_spellings() -> None:
    assert completion(top_k=-1).options.params.top_k == 0
    assert completion(stop="x").options.params.stop == ("x",)
    assert chat(max_completion_tokens=5).options.params.max_tokens == 5
    assert chat(max_completion_tokens=5, max_tokens=5).options.params.max_tokens == 5


def test_a_request_may_do_without_drafts() -> None:
    for parse in (completion, chat):
        assert parse(speculative=False).options.params.max_draft_tokens == 0
        assert parse(speculative=True) == parse(speculative=None) == parse()
        assert parse().options.params.max_draft_tokens == TREE_WIDTH - 1


def test_draft_counts_come_on_request() -> None:
    in_stream = {"stream": True, "stream_options": {"include_usage": True}}
    for parse in (completion, chat):
        assert parse().options.include_draft_usage is False
        assert parse(include_draft_usage=False, stream=True).options.include_draft_usage is False
        assert parse(include_draft_usage=True).options.include_draft_usage is True
        assert parse(include_draft_usage=True, **in_stream).options.include_draft_usage is True


def test_nulls_are_as_if_left_out() -> None:
    names = (
        *("max_tokens", "temperature", "top_p", "n", "seed", "stop", "stream", "stream_options"),
        *("speculative", "include_draft_usage"),
    )
    assert completion(**dict.fromkeys(names)) == completion()
    assert chat(**dict.fromkeys(names)) == chat()


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hi", ("hi",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
    ],
)
def test_prompts(prompt: object, expected: object) -> None:
    assert completion(prompt=prompt).prompts == expected


def test_messages() -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "system", "content": ""},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": []},
    ]
    assert chat(messages=messages).messages == (
        {"role": "system", "content": "be brief"},
        {"role": "system", "content": ""},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c"},
    )


OFF_BOTH = {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "user": "u"}
OFF_COMPLETION = {**OFF_BOTH, "best_of": 1, "echo": False, "suffix": "", "logprobs": None}
OFF_CHAT = {
    **OFF_BOTH,
    "logprobs": False,
    "top_logprobs": 0,
    "tools": [],
    "tool_choice": "auto",
    "functions": [],
    "function_call": "none",
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "prediction": None,
    "audio": None,
    "modalities": ["text"],
    "store": False,
    "metadata": {"a": "b"},
    "service_tier": "auto",
    "reasoning_effort": None,
    "verbosity": "medium",
    "prompt_cache_key": "k",
    "safety_identifier": "s",
}


def test_fields_that_ask_for_nothing_are_accepted() -> None:
    assert completion(**OFF_COMPLETION) == completion()
    assert completion(n=2, best_of=2) == completion(n=2)
    assert chat(**OFF_CHAT) == chat()


# --- What is refused -----------------------------------------------------------------------------

BAD_BOTH: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 2**31}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": -0.1}, "min_p"),
    ({"min_p": 1.1}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": 9}, "n"),
    ({"n": 1.5}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"seed": 2**63}, "seed"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": "a" * 2000}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [1] * 300}, "stop_token_ids"),
    ({"ignore_eos": "yes"}, "ignore_eos"),
    ({"speculative": "false"}, "speculative"),
    ({"speculative": 0}, "speculative"),
    ({"speculative": 1.0}, "speculative"),
    ({"speculative": {"depth": 2}}, "speculative"),
    ({"include_draft_usage": "yes"}, "include_draft_usage"),
    ({"include_draft_usage": 1}, "include_draft_usage"),
    ({"include_draft_usage": True, "stream": True}, "include_draft_usage"),
    (
        {
            "include_draft_usage": True,
            "stream": True,
            "stream_options": {"include_usage": False},
        },
        "include_draft_usage",
    ),
    ({"speculation": False}, "speculation"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
    ),
    ({"presence_penalty": 0.5}, "presence_penalty"),
    ({"frequency_penalty": -0.5}, "frequency_penalty"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"model": None}, "model"),
    ({"model": 5}, "model"),
    ({"temprature": 1}, "temprature"),
    ({"repetition_penalty": 1.1}, "repetition_penalty"),
]
BAD_COMPLETION: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": [[1], []]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [1, [1]]}, "prompt"),
    ({"prompt": [1.5]}, "prompt[0]"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": [["a"]]}, "prompt[0][0]"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"echo": True}, "echo"),
    ({"best_of": 2}, "best_of"),
    ({"n": 2, "best_of": 1}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"logprobs": 0}, "logprobs"),
    ({"logprobs": 5}, "logprobs"),
    ({"max_completion_tokens": 5}, "max_completion_tokens"),
    ({"messages": [USER]}, "messages"),
]
BAD_CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [USER, {"content": "x"}]}, "messages[1].role"),
    ({"messages": [USER, {"role": "tool", "content": "x"}]}, "messages[1].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (
        {
            "messages": [
                USER,
                USER,
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            ]
        },
        "messages[2].content",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
        "messages[0].content[0].text",
    ),
    ({"messages": [{**USER, "name": "bob"}]}, "messages[0].name"),
    ({"messages": [{**USER, "tool_calls": [{"id": "x"}]}]}, "messages[0].tool_calls"),
    ({"messages": [{**USER, "foo": 1}]}, "messages[0].foo"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 5, "max_tokens": 6}, "max_tokens"),
    ({"logprobs": True}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"prediction": {"type": "content"}}, "prediction"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"store": True}, "store"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"verbosity": "low"}, "verbosity"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"suffix": "x"}, "suffix"),
    ({"prompt": "x"}, "prompt"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_BOTH + BAD_COMPLETION)
def test_bad_completions(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        completion(**fields)
    assert caught.value.param == param
    assert param in caught.value.message


@pytest.mark.parametrize(("fields", "param"), BAD_BOTH + BAD_CHAT)
def test_bad_chats(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    assert caught.value.param == param
    assert param in caught.value.message


@pytest.mark.parametrize("name", ["model", "prompt"])
def test_missing_fields_are_named(name: str) -> None:
    body = {"model": "m", "prompt": "hi"}
    del body[name]
    with pytest.raises(InvalidRequest) as caught:
        parse_completion(json.dumps(body).encode())
    assert caught.value.param == name


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b"[]",
        b"null",
        b'{"model": "m", "prompt": "\xff"}',
        b'{"model": "m", "prompt": "\\ud800"}',
        b'{"model": "m", "prompt": "hi", "temperature": NaN}',
        b'{"model": "m", "prompt": "hi", "temperature": Infinity}',
        b'{"model": "m", "prompt": "hi"} x',
        b'{"model": "m", "prompt": ' + b"[" * 100_000,
        b'{"model": "m", "prompt": "hi", "logit_bias": ' + b'{"a":' * 100_000,
    ],
)
def test_what_is_not_json(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_completion(body)


def test_numbers_out_of_range_are_named() -> None:
    for text in ("1e999", "9" * 5000):
        with pytest.raises(InvalidRequest) as caught:
            parse_completion(b'{"model": "m", "prompt": "hi", "top_p": %b}' % text.encode())
        assert caught.value.param == "top_p"


def test_deep_nesting_in_a_field_of_any_type() -> None:
    deep = b"[" * 100_000 + b"]" * 100_000
    with pytest.raises(InvalidRequest):
        parse_chat(b'{"model": "m", "messages": [], "audio": %b}' % deep)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.binary())
def test_any_bytes_are_parsed_or_refused(body: bytes) -> None:
    for parse in (parse_completion, parse_chat):
        with pytest.raises(InvalidRequest):
            parse(body)


@given(
    st.dictionaries(
        st.sampled_from(
            [
                *(*OFF_COMPLETION, *OFF_CHAT, "n", "stop", "seed", "temperature", "top_k"),
                *("speculative", "include_draft_usage"),
            ]
        ),
        JSON,
        max_size=4,
    ),
    JSON,
)
def test_any_fields_are_parsed_or_refused(fields: dict[str, Any], main: Any) -> None:
    for parse, name in ((parse_completion, "prompt"), (parse_chat, "messages")):
        body = json.dumps({"model": "m", name: main, **fields}).encode()
        try:
            request = parse(body)
        except InvalidRequest as error:
            assert error.message
        else:
            assert 1 <= request.options.n <= 8
