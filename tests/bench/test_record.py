from __future__ import annotations

import pytest

from paceline.bench.record import RequestRecord


def test_figures_of_a_request() -> None:
    record = RequestRecord(
        index=0, prompt="p", due=10.0, sent=10.5, first=11.0, end=15.0, output_tokens=41
    )
    assert record.ok
    assert record.latency == 5.0
    assert record.wait == 0.5
    assert record.ttft == 1.0
    assert record.itl == pytest.approx(4.0 / 40)
    assert record.tokens_per_second == pytest.approx(41 / 5)


def test_figures_that_do_not_exist() -> None:
    record = RequestRecord(index=0, prompt="p", due=1.0, sent=1.0, first=None, end=1.0, failure="x")
    assert not record.ok
    assert record.ttft is None
    assert record.itl is None
    assert record.tokens_per_second == 0.0


def test_one_token_has_no_inter_token_latency() -> None:
    record = RequestRecord(
        index=0, prompt="p", due=0.0, sent=0.0, first=1.0, end=2.0, output_tokens=1
    )
    assert record.itl is None
