"""`LLM` with the demo model, in this process."""

from __future__ import annotations

import functools

import pytest

from paceline import LLM, PacelineError, SamplingParams
from paceline.types import FinishReason


@functools.cache
def llm() -> LLM:
    return LLM(dtype="float32", kv_tokens=4096, max_running_requests=8)


def test_text_ids_and_lists_of_them() -> None:
    greedy = SamplingParams(max_tokens=5, temperature=0.0)
    (one,) = llm().generate("The capital of France is", greedy)
    assert one.text.startswith(" Paris") and one.finish is FinishReason.LENGTH
    assert len(one.tokens) == 5
    (ids,) = llm().generate(one.prompt, greedy)
    both = llm().generate(["The capital of Italy is", list(one.prompt)], greedy)
    assert ids.text == both[1].text == one.text and both[0].text.startswith(" Rome")


def test_a_stop_string_cuts_text_and_tokens() -> None:
    params = SamplingParams(max_tokens=30, temperature=0.0, stop=("Paris",))
    (cut,) = llm().generate("The capital of France is", params)
    assert (cut.text, cut.finish) == (" ", FinishReason.STOP)
    assert len(cut.tokens) == 1
    assert llm().engine.idle


def test_streaming_is_the_same_text_and_may_be_left() -> None:
    params = SamplingParams(max_tokens=12, temperature=0.9, seed=5)
    (whole,) = llm().generate("Once upon a time", params)
    assert "".join(llm().stream("Once upon a time", params)) == whole.text
    stream = llm().stream("Once upon a time", params)
    next(stream)
    stream.close()
    assert llm().engine.idle
    stats = llm().engine.stats
    assert stats.pages_free + stats.pages_cached == stats.pages_total


def test_chat_prompts_follow_the_template() -> None:
    ids = llm().chat_prompt([{"role": "user", "content": "What is the capital of France?"}])
    (answer,) = llm().generate(ids, SamplingParams(max_tokens=20, temperature=0.0))
    assert "Paris" in answer.text


def test_seeds_decide_the_text() -> None:
    def text(seed: int) -> str:
        params = SamplingParams(max_tokens=8, temperature=1.0, seed=seed)
        return llm().generate("My favourite animal is", params)[0].text

    texts = [text(seed) for seed in range(10)]
    assert texts == [text(seed) for seed in range(10)]
    assert len(set(texts)) >= 8


def test_bad_prompts_are_errors() -> None:
    for prompt in ("", [5] * 5000):
        with pytest.raises(PacelineError):
            llm().generate(prompt)


def test_requests_without_a_seed_differ_and_repeat_in_a_new_engine() -> None:
    one, other = (LLM(dtype="float32", kv_tokens=1024, seed=4) for _ in range(2))
    params = SamplingParams(max_tokens=8, temperature=1.5)
    first = [one.generate("A word:", params)[0].text for _ in range(2)]
    assert first[0] != first[1]
    assert first == [other.generate("A word:", params)[0].text for _ in range(2)]
