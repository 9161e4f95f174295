"""The text routes in process: answers, streams, refusals; each with its status and field."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.serve.app import create_app
from paceline.serve.expand import derive_seed
from paceline.serve.fake import FakeEngine
from paceline.serve.routes import Front
from paceline.types import FinishReason

from .http_support import MODEL, make_front, says, silent
from .test_protocol import BAD_BOTH, BAD_CHAT, BAD_COMPLETION, JSON

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "hi"}
MAIN: dict[str, Any] = {CHAT: {"messages": [USER]}, COMPLETION: {"prompt": "hi"}}


async def send(front: Front, path: str, content: Any) -> httpx.Response:
    transport = httpx.ASGITransport(create_app(front), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.post(path, content=content)


def post(front: Front, path: str, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, **MAIN[path], **fields}
    return asyncio.run(send(front, path, json.dumps(body).encode()))


def events(response: httpx.Response) -> list[Any]:
    """The data of each event; the final [DONE] as it is."""
    assert response.text.endswith("\n\n")
    lines = response.text.removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") for line in lines)
    texts = [line.removeprefix("data: ") for line in lines]
    return [text if text == "[DONE]" else json.loads(text) for text in texts]


def streamed_text(chunks: list[Any], index: int = 0) -> str:
    choices = [c for chunk in chunks if chunk != "[DONE]" for c in chunk["choices"]]
    mine = [choice for choice in choices if choice["index"] == index]
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in mine)


# --- Answers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_an_answer(path: str) -> None:
    response = post(make_front(FakeEngine(reply=says("héllo 😀"), cached_tokens=1)), path)
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "stop"
    text = choice["message"]["content"] if path == CHAT else choice["text"]
    assert text == "héllo 😀"
    prompt_tokens = len("[user]hi\n[assistant]") if path == CHAT else 2
    assert body["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 12,
        "total_tokens": prompt_tokens + 12,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize("tokens_per_step", [1, 5])
def test_a_stream_says_the_same_as_an_answer(path: str, tokens_per_step: int) -> None:
    front = make_front(FakeEngine(reply=says("héllo 😀 END no"), tokens_per_step=tokens_per_step))
    wanted = {"stop": ["END"], "n": 2}
    whole = post(front, path, **wanted).json()
    response = post(front, path, stream=True, stream_options={"include_usage": True}, **wanted)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    *chunks, usage, done = events(response)
    assert done == "[DONE]"
    assert (usage["choices"], usage["usage"]) == ([], whole["usage"])
    assert all(chunk["usage"] is None for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1
    for index in range(2):
        assert streamed_text(chunks, index) == "héllo 😀 "
        ends = [c for k in chunks for c in k["choices"] if c["index"] == index]
        assert [c["finish_reason"] for c in ends if c["finish_reason"]] == ["stop"]
        if path == CHAT:
            assert ends[0]["delta"] == {"role": "assistant", "content": ""}


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_draft_counts_are_in_the_usage_of_who_asks(path: str) -> None:
    # Of each choice: steps of 5, 5 and 2 tokens, each after 3 drafts.
    engine = FakeEngine(reply=says("héllo 😀"), tokens_per_step=5, drafts_per_step=3)
    front = make_front(engine)
    in_stream = {"stream": True, "stream_options": {"include_usage": True}, "n": 2}
    asked = {"include_draft_usage": True}
    plain = post(front, path, n=2).json()["usage"]
    assert "speculation" not in plain
    wanted = {**plain, "speculation": {"drafted_tokens": 18, "accepted_tokens": 14}}
    assert post(front, path, n=2, **asked).json()["usage"] == wanted
    *_, usage, _ = events(post(front, path, **in_stream, **asked))
    assert usage["usage"] == wanted
    *_, usage, _ = events(post(front, path, **in_stream))
    assert usage["usage"] == plain


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([CHAT, COMPLETION]),
    st.integers(1, 8),
    st.integers(1, 6),
    st.integers(0, 8),
    st.integers(1, 40),
    st.sampled_from([None, True, False]),
)
def test_draft_counts_hold_for_any_stream(
    path: str, n: int, tokens_per_step: int, drafts: int, tokens: int, speculative: bool | None
) -> None:
    engine = FakeEngine(tokens_per_step=tokens_per_step, drafts_per_step=drafts)
    front = make_front(engine)
    asked = {"max_tokens": tokens, "n": n, "include_draft_usage": True, "speculative": speculative}
    whole = post(front, path, **asked).json()["usage"]
    *_, chunk, _ = events(
        post(front, path, stream=True, stream_options={"include_usage": True}, **asked)
    )
    assert chunk["usage"] == whole
    counts = whole["speculation"]
    assert 2 * counts["drafted_tokens"] == engine.stats.drafted_tokens_total
    assert 2 * counts["accepted_tokens"] == engine.stats.accepted_tokens_total
    assert 0 <= counts["accepted_tokens"] <= counts["drafted_tokens"]
    assert counts["accepted_tokens"] < whole["completion_tokens"] == n * tokens
    assert counts["drafted_tokens"] == 0 or speculative is not False


def test_without_include_usage_no_chunk_speaks_of_it() -> None:
    *chunks, done = events(post(make_front(FakeEngine(reply=says("ab"))), CHAT, stream=True))
    assert done == "[DONE]"
    assert not any("usage" in chunk for chunk in chunks)


def test_an_answer_without_text_still_has_its_role() -> None:
    *chunks, _ = events(post(make_front(FakeEngine(reply=says(""))), CHAT, stream=True))
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {},
    ]


def test_several_prompts() -> None:
    engine = FakeEngine()
    body = post(make_front(engine), COMPLETION, prompt=["a", "bc"], n=2, max_tokens=3).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [request.prompt for request in engine.requests] == [(97,), (97,), (98, 99), (98, 99)]
    assert body["usage"]["prompt_tokens"] == 3
    assert body["usage"]["completion_tokens"] == 12


def test_token_ids_as_prompt() -> None:
    engine = FakeEngine()
    assert post(make_front(engine), COMPLETION, prompt=[256, 1]).status_code == 200
    assert engine.requests[0].prompt == (256, 1)


def test_what_the_engine_is_asked() -> None:
    engine = FakeEngine()
    front = make_front(engine)
    post(front, CHAT, seed=5, n=2, temperature=0.5, stop="x", top_k=4)
    first, second = (request.params for request in engine.requests)
    assert (first.seed, second.seed) == (5, derive_seed(5, 1))
    assert first.max_tokens == 1000 - len("[user]hi\n[assistant]")
    assert (first.temperature, first.top_k, first.stop) == (0.5, 4, ("x",))
    post(front, COMPLETION, max_tokens=5000)
    last = engine.requests[-1].params
    assert last.max_tokens == 1000 - 2
    assert last.seed is not None


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_every_choice_of_a_request_does_without_drafts(path: str) -> None:
    engine = FakeEngine(tokens_per_step=4, drafts_per_step=3)
    fields = {"n": 3, "max_tokens": 8, "include_draft_usage": True}
    plain = post(make_front(engine), path, speculative=False, **fields).json()["usage"]
    assert [request.params.max_draft_tokens for request in engine.requests] == [0, 0, 0]
    assert plain["speculation"] == {"drafted_tokens": 0, "accepted_tokens": 0}
    usual = post(make_front(engine), path, speculative=True, **fields).json()["usage"]
    assert {request.params.max_draft_tokens for request in engine.requests[3:]} == {63}
    assert usual["speculation"] == {"drafted_tokens": 18, "accepted_tokens": 18}


def test_seeds_drawn_for_requests_follow_the_servers_seed() -> None:
    def drawn(seed: int) -> list[int | None]:
        engine = FakeEngine()
        front = make_front(engine, seed=seed)
        for _ in range(2):
            post(front, COMPLETION)
        return [request.params.seed for request in engine.requests]

    assert drawn(1) == drawn(1)
    assert len({*drawn(1), *drawn(2)}) == 4


# --- Refusals ------------------------------------------------------------------------------------


def check_error(response: httpx.Response, status: int, param: str | None) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    return error


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [(COMPLETION, *case) for case in BAD_BOTH + BAD_COMPLETION]
    + [(CHAT, *case) for case in BAD_BOTH + BAD_CHAT],
)
def test_bad_fields(path: str, fields: dict[str, Any], param: str) -> None:
    engine = FakeEngine()
    check_error(post(make_front(engine), path, **fields), 400, param)
    assert engine.requests == []


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b'"hi"', b'{"model": "tiny", "n": NaN}'])
def test_what_is_not_json(path: str, content: bytes) -> None:
    response = asyncio.run(send(make_front(), path, content))
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_an_unknown_model() -> None:
    error = check_error(post(make_front(), CHAT, model="gpt-9"), 404, "model")
    assert error["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETION, {"prompt": "x" * 1000}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 1000}]}, "messages"),
    ],
)
def test_a_prompt_longer_than_the_context(path: str, fields: dict[str, Any], param: str) -> None:
    error = check_error(post(make_front(), path, **fields), 400, param)
    assert error["code"] == "context_length_exceeded"


def test_ids_outside_the_vocabulary() -> None:
    check_error(post(make_front(), COMPLETION, prompt=[257]), 400, "prompt")
    check_error(post(make_front(), CHAT, stop_token_ids=[-1]), 400, "stop_token_ids")


def test_more_choices_than_the_server_ever_takes() -> None:
    fields = {"prompt": ["a"] * 20, "n": 6}
    check_error(post(make_front(), COMPLETION, **fields), 400, "prompt")


def test_a_body_over_the_limit() -> None:
    response = post(make_front(max_body=100), COMPLETION, prompt="x" * 200)
    check_error(response, 413, None)

    async def in_parts() -> httpx.Response:
        async def parts() -> Any:
            for _ in range(50):
                yield b"x" * 10
            raise AssertionError("the server read past its limit")

        return await send(make_front(max_body=100), COMPLETION, parts())

    # The transport hands the body over part by part; the server stops asking at its limit.
    check_error(asyncio.run(in_parts()), 413, None)


def test_a_full_server() -> None:
    async def scenario() -> httpx.Response:
        engine = FakeEngine(reply=silent)
        front = make_front(engine, max_queued=3)
        body = json.dumps({"model": MODEL, "prompt": "hi", "n": 2}).encode()
        first = asyncio.create_task(send(front, COMPLETION, body))
        while engine.open_requests < 2:
            await asyncio.sleep(0)
        second = await send(front, COMPLETION, body)
        first.cancel()
        await asyncio.wait([first])
        assert engine.open_requests == 0
        assert engine.aborted == [request.id for request in engine.requests]
        return second

    response = asyncio.run(scenario())
    error = check_error(response, 429, None)
    assert error["type"] == "rate_limit_error"
    assert int(response.headers["retry-after"]) >= 1


def test_a_starting_or_dead_engine() -> None:
    check_error(post(make_front(model=None), CHAT), 503, None)
    engine = FakeEngine()
    front = make_front(engine)
    engine.die("killed")
    check_error(post(front, CHAT), 503, None)


def test_while_a_client_does_not_read_its_chunks_become_one() -> None:
    sent: list[bytes] = []

    async def scenario() -> None:
        engine = FakeEngine(reply=says("a" + "b" * 100, FinishReason.LENGTH))
        reads = asyncio.Event()
        body = json.dumps({"model": MODEL, "prompt": "hi", "stream": True}).encode()
        incoming = asyncio.Queue[Any]()
        incoming.put_nowait({"type": "http.request", "body": body})

        async def send_when_read(message: Any) -> None:
            sent.append(message.get("body", b""))
            if b'"a"' in sent[-1]:
                await reads.wait()

        app = create_app(make_front(engine))
        scope = {"type": "http", "method": "POST", "path": COMPLETION, "headers": []}
        request = asyncio.create_task(app(scope, incoming.get, send_when_read))
        while not engine.requests or engine.stats.running:
            await asyncio.sleep(0)
        reads.set()
        await request

    asyncio.run(scenario())
    start, first, rest = sent
    assert start == b""
    assert b'"a"' in first
    assert b"b" * 100 in rest and rest.endswith(b"[DONE]\n\n")


# --- Failures on the way -------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_before_the_first_token_has_its_status(stream: bool) -> None:
    front = make_front(FakeEngine(reply=says("", FinishReason.ERROR)))
    check_error(post(front, CHAT, stream=stream), 500, None)


def test_an_error_within_a_stream_is_its_last_event() -> None:
    front = make_front(FakeEngine(reply=says("ab", FinishReason.ERROR)))
    response = post(front, CHAT, stream=True)
    assert response.status_code == 200
    *chunks, error = events(response)
    assert streamed_text(chunks).startswith("a")
    assert set(error) == {"error"}
    assert error["error"]["type"] == "server_error"
    assert 'paceline_requests_total{status="500"} 1.0' in front.metrics.text().decode()


def test_death_within_a_stream() -> None:
    async def scenario() -> httpx.Response:
        engine = FakeEngine(reply=says("ab", None))
        front = make_front(engine)
        body = json.dumps({"model": MODEL, "prompt": "hi", "stream": True}).encode()
        answer = asyncio.create_task(send(front, COMPLETION, body))
        while engine.stats.committed_tokens_total < 2:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        engine.die("the engine process was killed by SIGKILL")
        return await answer

    *chunks, error = events(asyncio.run(scenario()))
    assert streamed_text(chunks) == "ab"
    assert "SIGKILL" in error["error"]["message"]


def test_a_fault_of_ours_within_a_stream_is_its_last_event(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine(reply=says("abc", None))
    front = make_front(engine)
    seen: list[float] = []

    def broken(value: float) -> None:
        seen.append(value)
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(front.metrics.inter_token, "observe", broken)
    *chunks, error = events(post(front, COMPLETION, stream=True))
    assert streamed_text(chunks) == "a"
    assert error["error"]["message"] == "internal error"
    assert engine.open_requests == 0
    assert "secret detail" in caplog.text


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([CHAT, COMPLETION]),
    st.dictionaries(
        st.sampled_from(["messages", "prompt", "n", "stop", "stream", "seed", "max_tokens"])
        | st.text(),
        JSON | st.sampled_from([[USER], "hi", 1, True]),
        max_size=4,
    ),
)
def test_no_body_makes_a_server_error(path: str, fields: dict[str, Any]) -> None:
    assert post(make_front(), path, **fields).status_code in (200, 400, 404)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([CHAT, COMPLETION]), st.binary(max_size=50) | JSON)
def test_no_bytes_make_a_server_error(path: str, content: Any) -> None:
    raw = content if isinstance(content, bytes) else json.dumps(content).encode()
    assert asyncio.run(send(make_front(), path, raw)).status_code == 400
