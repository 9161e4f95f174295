"""Prompts to ids, and deltas to pieces, usage and errors."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from collections.abc import Sequence

import pytest

from paceline.errors import EngineUnavailable, InvalidRequest, RequestError
from paceline.serve.assembler import TextAssembler
from paceline.serve.expand import expand
from paceline.serve.fake import FakeEngine, Reply
from paceline.serve.generation import (
    LONG_TEXT_CHARS,
    ChoicePiece,
    ClientGone,
    Generation,
    encode_chat,
    encode_prompts,
)
from paceline.serve.metrics import Metrics
from paceline.serve.protocol import ChatRequest, CompletionRequest, parse_chat, parse_completion
from paceline.serve.responses import DraftUsage, Usage
from paceline.serve.tokenizer import Tokenizer
from paceline.types import AddRequest, EngineStats, FinishReason, SamplingParams

from .http_support import VOCAB_SIZE, byte_tokenizer, says, served_model, silent

MODEL = served_model()


def completion(prompt: str) -> CompletionRequest:
    return parse_completion(b'{"model": "tiny", "prompt": %b}' % prompt.encode())


def chat(content: str) -> ChatRequest:
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}]}
    return parse_chat(json.dumps(body).encode())


def encode(prompt: str) -> list[Sequence[int]]:
    return asyncio.run(encode_prompts(MODEL, completion(prompt)))


def test_prompts_become_ids() -> None:
    assert encode('"hé"') == [list("hé".encode())]
    assert encode('["a", "b"]') == [[97], [98]]
    assert encode("[256, 0]") == [(256, 0)]


@pytest.mark.parametrize("prompt", [f"[{VOCAB_SIZE}]", "[-1]", "[[1], [1, 99999999999999999999]]"])
def test_ids_outside_the_vocabulary_are_refused(prompt: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        encode(prompt)
    assert caught.value.param == "prompt"


def test_a_chat_goes_through_the_template() -> None:
    (ids,) = asyncio.run(encode_chat(MODEL, chat("hi")))
    assert bytes(ids) == b"[user]hi\n[assistant]"


class NotedThreads(Tokenizer):
    """Remembers in which thread each text was encoded."""

    threads: list[int] = []  # noqa: RUF012 (one test's memory)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.threads.append(threading.get_ident())
        return [1]


def test_long_texts_leave_the_event_loops_thread() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.__class__ = NotedThreads
    model = dataclasses.replace(MODEL, tokenizer=tokenizer)
    here = threading.get_ident()
    long = "x" * (LONG_TEXT_CHARS + 1)
    asyncio.run(encode_prompts(model, completion('"x"')))
    asyncio.run(encode_chat(model, chat("x")))
    asyncio.run(encode_prompts(model, completion(f'"{long}"')))
    asyncio.run(encode_chat(model, chat(long)))
    assert [thread == here for thread in NotedThreads.threads] == [True, True, False, False]


# --- Deltas to pieces ----------------------------------------------------------------------------


def generation(
    engine: FakeEngine, *, prompts: Sequence[Sequence[int]] = ((1, 2),), n: int = 1, stop: str = ""
) -> Generation:
    requests = expand(
        prompts,
        SamplingParams(max_tokens=50, seed=1, stop=(stop,) if stop else ()),
        n=n,
        request_id="r",
        max_model_len=100,
        draw_seed=lambda: 0,
    )
    assemblers = [TextAssembler(MODEL.tokenizer, stop=r.params.stop) for r in requests]
    return Generation(
        engine,
        engine.submit(requests),
        requests=requests,
        assemblers=assemblers,
        n=n,
        arrival=0.0,
        metrics=Metrics(EngineStats),
    )


async def read(generation: Generation) -> list[ChoicePiece]:
    pieces: list[ChoicePiece] = []
    while not generation.finished:
        pieces += await generation.take()
    return pieces


def texts(pieces: list[ChoicePiece], choices: int) -> list[str]:
    return ["".join(p.text for p in pieces if p.choice == c) for c in range(choices)]


def test_choices_and_usage() -> None:
    async def scenario() -> None:
        engine = FakeEngine(reply=says("abc"), cached_tokens=1)
        got = generation(engine, prompts=[(1, 2), (3,)], n=2)
        pieces = await read(got)
        assert texts(pieces, 4) == ["abc"] * 4
        assert [p.finish for p in pieces if p.finish] == [FinishReason.STOP] * 4
        assert got.usage() == Usage(prompt_tokens=3, completion_tokens=16, cached_tokens=2)
        assert engine.aborted == []

    asyncio.run(scenario())


def test_draft_counts_are_those_of_all_choices() -> None:
    async def scenario() -> None:
        # Of each choice: steps of 3, 3 and 2 tokens, each after 4 drafts.
        engine = FakeEngine(reply=says("abcdefg"), tokens_per_step=3, drafts_per_step=4)
        got = generation(engine, prompts=[(1, 2), (3,)], n=2)
        await read(got)
        assert got.usage().drafts is None
        assert got.usage(drafts=True).drafts == DraftUsage(
            drafted_tokens=4 * (4 + 4 + 4), accepted_tokens=4 * (2 + 2 + 1)
        )
        assert engine.stats.drafted_tokens_total == 48
        assert engine.stats.accepted_tokens_total == 20

    asyncio.run(scenario())


def test_draft_counts_end_with_the_delta_that_completes_a_stop_string() -> None:
    def reply(request: AddRequest) -> Reply:
        return Reply(tokens=list(b"abSTOPyyyyyyyyyy" if request.id == "r-0" else b"abcdef"))

    async def scenario() -> None:
        engine = FakeEngine(reply=reply, tokens_per_step=4, drafts_per_step=5)
        got = generation(engine, n=2, stop="STOP")
        assert texts(await read(got), 2) == ["ab", "abcdef"]
        usage = got.usage(drafts=True)
        assert usage.completion_tokens == 6 + 6
        assert usage.drafts == DraftUsage(
            drafted_tokens=(5 + 5) + (5 + 5), accepted_tokens=(3 + 3) + (3 + 1)
        )

    asyncio.run(scenario())


def test_a_stop_string_aborts_that_choice_only() -> None:
    def reply(request: AddRequest) -> Reply:
        return Reply(tokens=list(b"xxSTOPyy" if request.id == "r-0" else b"abcdefghij"))

    async def scenario() -> None:
        engine = FakeEngine(reply=reply)
        got = generation(engine, n=2, stop="STOP")
        pieces = await read(got)
        assert texts(pieces, 2) == ["xx", "abcdefghij"]
        assert engine.aborted == ["r-0"]
        assert got.usage().completion_tokens == 6 + 10

    asyncio.run(scenario())


def test_an_engine_error_is_raised() -> None:
    async def scenario() -> None:
        failing = says("ab", FinishReason.ERROR)
        with pytest.raises(RequestError) as caught:
            await read(generation(FakeEngine(reply=failing)))
        assert caught.value.status == 500

    asyncio.run(scenario())


def test_a_dead_engine_is_another_error() -> None:
    async def scenario() -> None:
        engine = FakeEngine(reply=silent)
        got = generation(engine)
        engine.die("killed")
        with pytest.raises(EngineUnavailable, match="killed"):
            await got.take()

    asyncio.run(scenario())


def test_a_closed_subscription_means_that_the_client_left() -> None:
    async def scenario() -> None:
        engine = FakeEngine(reply=silent)
        got = generation(engine)
        got._subscription.close()
        with pytest.raises(ClientGone):
            await got.take()
        assert engine.aborted == ["r-0"]

    asyncio.run(scenario())
