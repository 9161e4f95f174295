"""Choices of a request: seeds, limits, ids."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import InvalidRequest
from paceline.serve.expand import allowed_tokens, derive_seed, expand
from paceline.types import SamplingParams

INT64 = st.integers(-(2**63), 2**63 - 1)


def test_the_first_choice_has_the_seed_itself() -> None:
    assert derive_seed(7, 0) == 7
    assert derive_seed(-(2**63), 0) == -(2**63)


def test_other_choices_have_known_seeds() -> None:
    # Fixed for ever: the same request gives the same texts in every version.
    assert [derive_seed(7, choice) for choice in (1, 2)] == [
        7409489766742325744,
        2252303445529681137,
    ]


@given(INT64, INT64)
def test_seeds_differ_between_choices_and_requests(first: int, second: int) -> None:
    seeds = [derive_seed(first, choice) for choice in range(8)]
    assert len(set(seeds)) == 8
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
    if first != second:
        assert derive_seed(first, 1) != derive_seed(second, 1)


def test_the_context_limits_what_is_generated() -> None:
    def allowed(wanted: int | None, prompt: int) -> int:
        return allowed_tokens(wanted, prompt, max_model_len=10, param="prompt")

    assert allowed(None, 3) == 7
    assert allowed(5, 3) == 5
    assert allowed(8, 3) == 7
    assert allowed(8, 9) == 1
    with pytest.raises(InvalidRequest) as caught:
        allowed(1, 10)
    assert caught.value.param == "prompt"
    assert caught.value.code == "context_length_exceeded"


def test_every_prompt_has_its_choices() -> None:
    draws = itertools.count(100)
    requests = expand(
        [[1, 2], [3]],
        SamplingParams(max_tokens=50, temperature=0.5, stop=("x",)),
        n=2,
        request_id="r",
        max_model_len=20,
        draw_seed=lambda: next(draws),
    )
    assert [request.id for request in requests] == ["r-0", "r-1", "r-2", "r-3"]
    assert [request.prompt for request in requests] == [(1, 2), (1, 2), (3,), (3,)]
    assert [request.params.max_tokens for request in requests] == [18, 18, 19, 19]
    assert [request.params.seed for request in requests] == [
        100,
        derive_seed(100, 1),
        101,
        derive_seed(101, 1),
    ]
    assert {request.params.stop for request in requests} == {("x",)}


def test_a_given_seed_is_used_for_every_prompt() -> None:
    def never() -> int:
        raise AssertionError("the request has a seed")

    requests = expand(
        [[1], [2]],
        SamplingParams(seed=5),
        n=1,
        request_id="r",
        max_model_len=20,
        draw_seed=never,
    )
    assert [request.params.seed for request in requests] == [5, 5]
