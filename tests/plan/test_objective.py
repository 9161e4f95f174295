"""Three aims, and where they part."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import ConfigError
from paceline.plan.objective import Goodput, Latency, Throughput, objective_of

ROWS = np.array([2.0, 6.0])
SECONDS = st.floats(0.001, 1)
TOKENS = st.floats(1, 6)


@given(SECONDS, TOKENS)
def test_all_agree_where_all_requests_are_alike(seconds: float, tokens: float) -> None:
    each, step = np.array([tokens, tokens]), np.array(seconds)
    rate = 8 * tokens / seconds
    assert Throughput().score(ROWS, each, step) == pytest.approx(rate)
    assert Latency().score(ROWS, each, step) == pytest.approx(rate / 8)
    assert Goodput(1e9).score(ROWS, each, step) == pytest.approx(rate)


def test_latency_minds_those_who_wait() -> None:
    """A step that takes a third longer for the sake of two requests out of eight."""
    tokens = np.array([[3.0, 1.0], [1.0, 1.0]])  # (groups, candidates)
    seconds = np.array([0.0135, 0.010])
    assert Throughput().score(ROWS, tokens, seconds).argmax() == 0
    assert Latency().score(ROWS, tokens, seconds).argmax() == 1


def test_goodput_counts_only_who_is_served_in_time() -> None:
    tokens = np.array([[3.0, 1.0], [1.0, 1.0]])
    seconds = np.array([0.012, 0.010])
    assert Goodput(0.011).score(ROWS, tokens, seconds).argmax() == 1
    assert Goodput(0.013).score(ROWS, tokens, seconds).argmax() == 0
    assert (
        Goodput(1e-6).score(ROWS, tokens, seconds).argmax()
        == Latency().score(ROWS, tokens, seconds).argmax()
    )


def test_read_from_text() -> None:
    assert objective_of("throughput") == Throughput()
    assert objective_of("latency") == Latency()
    assert objective_of("goodput:25") == Goodput(0.025)


@pytest.mark.parametrize(
    "text", ["", "speed", "goodput", "goodput:", "goodput:0", "goodput:-3", "goodput:nan",
             "goodput:inf", "goodput:fast", "latency:3", "throughput "]
)  # fmt: skip
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--objective must be"):
        objective_of(text)
