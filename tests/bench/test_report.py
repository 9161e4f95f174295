from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from paceline.bench.config import BenchConfig
from paceline.bench.record import RequestRecord
from paceline.bench.report import (
    BenchResult,
    LevelResult,
    Spread,
    document,
    failure_lines,
    level_line,
    percentile,
    summary,
    table,
)

LINE = (
    "C=  1 |  10 requests | throughput:   81.9 tok/s | per-req:   82.1 tok/s"
    " | latency avg/p50/p99:  6.3/ 6.3/ 6.7s | ok: 10/10"
)


def record(index: int = 0, **values: Any) -> RequestRecord:
    """A request of 2 s with 10 tokens, the first after 0.2 s, unless `values` say otherwise."""
    usual: dict[str, Any] = {
        "prompt": "p", "due": 100.0, "sent": 100.0, "first": 100.2, "end": 102.0,
        "gaps": (0.6, 1.2), "chunks": 3, "output_tokens": 10, "token_count": "usage",
        "finish_reason": "length", "text": "abc",
    }  # fmt: skip
    return RequestRecord(index=index, **(usual | values))


def level_of(*records: RequestRecord, concurrency: int = 1) -> LevelResult:
    return LevelResult.of(records, concurrency=concurrency, start=100.0, max_tokens=10)


def result_of(*levels: LevelResult, **values: Any) -> BenchResult:
    return BenchResult(
        config=values.pop("config", BenchConfig()), started="now", model="m", levels=levels,
        complete=True, **values,
    )  # fmt: skip


def test_the_line_is_exactly_this() -> None:
    level = dataclasses.replace(
        level_of(*(record(i) for i in range(10))),
        throughput=81.9,
        per_request=82.1,
        latency=Spread(mean=6.3, p50=6.3, p99=6.7),
    )
    assert level_line(level) == LINE


def test_large_numbers_keep_the_lines_parts() -> None:
    level = dataclasses.replace(
        level_of(record()),
        concurrency=1024,
        requests=5000,
        ok=4999,
        throughput=12345.67,
        per_request=1234.5,
        latency=Spread(mean=123.44, p50=100.0, p99=200.0),
    )
    assert level_line(level) == (
        "C=1024 | 5000 requests | throughput: 12345.7 tok/s | per-req: 1234.5 tok/s"
        " | latency avg/p50/p99: 123.4/100.0/200.0s | ok: 4999/5000"
    )


def test_throughput_is_tokens_of_good_requests_over_wall_time() -> None:
    level = level_of(
        record(0),
        record(1, due=102.0, sent=102.0, first=103.0, end=104.0, output_tokens=20),
        record(2, end=110.0, failure="broke", output_tokens=99),
    )
    assert level.wall == 10.0
    assert level.output_tokens == 30
    assert level.throughput == 3.0
    assert level.per_request == pytest.approx((10 / 2 + 20 / 2) / 2)
    assert (level.ok, level.requests, level.failed) == (2, 3, 1)
    assert level.latency == Spread(mean=2.0, p50=2.0, p99=2.0)
    assert level.ttft is not None
    assert level.ttft.p50 == pytest.approx(0.6)
    assert level.itl is not None
    assert level.itl.p50 == pytest.approx((1.8 / 9 + 1.0 / 19) / 2)
    assert level.gap is not None
    assert (level.gap.p50, level.gap.p99) == pytest.approx((0.9, 1.2))


def test_percentiles_lie_between_values() -> None:
    values = [float(i) for i in range(1, 11)]
    assert percentile(values, 50) == 5.5
    assert percentile(values, 99) == pytest.approx(9.91)
    assert percentile(values, 100) == 10.0
    assert percentile([3.0], 99) == 3.0
    assert Spread.of([None, 2.0, 1.0]) == Spread(mean=1.5, p50=1.5, p99=1.99)
    assert Spread.of([None]) is None


def test_one_request_counted_by_chunks_makes_the_level_so() -> None:
    assert level_of(record(0), record(1)).token_count == "usage"
    assert level_of(record(0), record(1, token_count="chunks")).token_count == "chunks"
    assert level_of(record(0), record(1, token_count="chunks", failure="x")).token_count == "usage"


def test_short_outputs_are_counted() -> None:
    assert level_of(record(0), record(1, output_tokens=9)).short == 1


def test_a_level_without_success_has_reasons_and_no_figures() -> None:
    level = level_of(*(record(i, failure="refused" if i else "HTTP 500: no") for i in range(3)))
    assert level_line(level).endswith("ok: 0/3")
    assert failure_lines(level) == [
        "         2 failed: refused",
        "         1 failed: HTTP 500: no",
    ]
    assert level.latency is None
    assert " 0.0" not in table([level])
    figures = summary(result_of(level), "out.json")["levels"][0]
    assert figures["throughput_tok_s"] is None
    assert figures["latency_s"] is None


def test_many_reasons_are_cut() -> None:
    lines = failure_lines(level_of(*(record(i, failure=f"reason {i}") for i in range(8))))
    assert len(lines) == 6
    assert "3 failed: for other reasons" in lines[-1]
    assert failure_lines(level_of(record())) == []


def test_the_table_has_a_row_a_level_within_its_width() -> None:
    big = dataclasses.replace(level_of(record(), concurrency=128), throughput=99999.9)
    text = table([level_of(record()), big])
    assert "0.90" not in text  # seconds of the gap are shown as milliseconds
    assert "900.0 / 1194.0" in text
    assert "99999.9" in text
    assert "tokens counted by usage" in text
    assert "…" not in text
    assert max(len(line) for line in text.splitlines()) <= 100


def test_the_document_has_everything_but_the_key() -> None:
    config = BenchConfig(api_key="secret-key", save_texts=True)
    level = level_of(record(0), record(1, failure="x"))
    text = json.dumps(document(result_of(level, config=config, warmup=level)), allow_nan=False)
    assert "secret-key" not in text
    read = json.loads(text)
    assert read["config"]["max_tokens"] == 512
    assert (read["ok"], read["failed"]) == (False, 2)
    entry = read["levels"][0]["records"][0]
    assert (entry["due_s"], entry["latency_s"], entry["ttft_s"]) == (0.0, 2.0, 0.2)
    assert entry["text"] == "abc"
    assert read["levels"][0]["records"][1]["failure"] == "x"


def test_texts_are_kept_only_when_asked_for() -> None:
    read = document(result_of(level_of(record())))
    assert "text" not in read["levels"][0]["records"][0]
    assert read["ok"] is True


def test_an_unfinished_run_is_not_ok() -> None:
    result = dataclasses.replace(result_of(level_of(record())), complete=False)
    assert document(result)["ok"] is False
