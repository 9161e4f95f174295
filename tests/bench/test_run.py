from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.bench import run
from paceline.bench.config import BenchConfig
from paceline.errors import ConfigError, PacelineError

from .fake_server import MODEL, Answer, FakeServer, chat_chunk, event, refuse, stream

LINE = re.compile(
    r"C= *\d+ \| +\d+ requests \| throughput: +\d+\.\d tok/s \| per-req: +\d+\.\d tok/s"
    r" \| latency avg/p50/p99: +\d+\.\d/ *\d+\.\d/ *\d+\.\ds \| ok: \d+/\d+"
)


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(run.API_KEY_VARIABLE, raising=False)
    yield


def config_for(url: str, **values: Any) -> BenchConfig:
    usual: dict[str, Any] = {
        "requests_per_level": 4, "concurrency": (1, 3), "warmup": 2, "max_tokens": 3,
        "output": "out/bench.json",
    }  # fmt: skip
    return BenchConfig(server_url=url, **(usual | values))


def good(index: int, body: dict[str, Any]) -> Answer:
    return stream(["a", "b", "c"], usage=3)


def read(name: str = "out/bench.json") -> Any:
    return json.loads(Path(name).read_text())


def test_a_good_run(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(good) as server:
        assert run.main(config_for(server.url)) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert [bool(LINE.fullmatch(line)) for line in lines[:3]] == [True, True, False]
    assert lines[0].startswith("C=  1 |   4 requests | ")
    assert lines[1].endswith(" | ok: 4/4")
    assert "TTFT ms" in printed.out
    last = json.loads(lines[-1])
    assert (last["ok"], last["failed"], last["model"]) == (True, 0, MODEL)
    assert [level["concurrency"] for level in last["levels"]] == [1, 3]
    assert last["levels"][0]["token_count"] == "usage"
    assert last["output"] == "out/bench.json"
    assert "warm-up: 2/2 ok" in printed.err
    document = read()
    assert document["complete"]
    assert document["warmup"]["ok"] == 2
    assert [len(level["records"]) for level in document["levels"]] == [4, 4]
    assert len(server.bodies) == 2 + 4 + 4
    assert server.bodies[0]["model"] == MODEL


def test_each_level_gets_the_same_prompts_and_two_runs_too() -> None:
    with FakeServer(good) as server:
        run.main(config_for(server.url, concurrency=(1, 1), warmup=0, save_texts=True))
        first = [body["messages"] for body in server.bodies]
        run.main(config_for(server.url, concurrency=(1, 1), warmup=0))
    assert first[:4] == first[4:]
    assert first == [body["messages"] for body in server.bodies[8:]]


def test_texts_are_kept() -> None:
    with FakeServer(good) as server:
        run.main(config_for(server.url, save_texts=True))
    assert {entry["text"] for entry in read()["levels"][1]["records"]} == {"abc"}


def test_the_default_file_and_given_model(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(good) as server:
        assert run.main(config_for(server.url, output=None, model="mine")) == 0
    (path,) = Path("results").glob("bench-*.json")
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["output"] == str(path)
    assert server.bodies[0]["model"] == "mine"


def test_concurrency_is_kept_and_may_exceed_the_requests() -> None:
    with FakeServer(good) as server:
        run.main(config_for(server.url, concurrency=(2,), requests_per_level=12, warmup=0))
        assert server.most_in_flight <= 2
    with FakeServer(good) as server:
        assert run.main(config_for(server.url, concurrency=(64,))) == 0


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(good) as server:
        url = server.url
    assert run.main(config_for(url)) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("ok: 0/4")
    assert "4 failed: connection refused by 127.0.0.1" in lines[1]
    last = json.loads(lines[-1])
    assert (last["ok"], last["failed"]) == (False, 2 + 4 + 4)
    assert read()["levels"][0]["ok"] == 0


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (refuse(503, "starting"), "HTTP 503: starting"),
        (Answer((chat_chunk("a"), event({"error": {"message": "lost"}}))), "in the stream: lost"),
        (Answer((chat_chunk("a"),)), "stream ended early"),
    ],
)
def test_one_failed_request_is_counted_shown_and_fails_the_run(
    capsys: pytest.CaptureFixture[str], answer: Answer, reason: str
) -> None:
    with FakeServer(lambda i, body: answer if i == 2 else good(i, body)) as server:
        assert run.main(config_for(server.url, concurrency=(1,), warmup=0)) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("ok: 3/4")
    assert "  1 failed: " in lines[1]
    assert reason in lines[1]
    assert json.loads(lines[-1])["levels"][0]["output_tokens"] == 9


def test_a_failed_warm_up_request_fails_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(lambda i, body: good(i, body) if i else refuse(500, "cold")) as server:
        assert run.main(config_for(server.url)) == 1
    printed = capsys.readouterr()
    assert "1 failed: HTTP 500: cold" in printed.err
    assert json.loads(printed.out.splitlines()[-1])["failed"] == 1


def test_a_server_that_stops_in_the_middle(capsys: pytest.CaptureFixture[str]) -> None:
    def script(index: int, body: dict[str, Any]) -> Answer:
        return Answer(dies=True) if index == 2 else good(index, body)

    with FakeServer(script) as server:
        config = config_for(server.url, concurrency=(1,), warmup=0, requests_per_level=6)
        assert run.main(config) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("ok: 2/6")
    failures = json.loads(lines[-1])["levels"][0]["failures"]
    assert sum(failures.values()) == 4
    assert any("refused" in reason for reason in failures)


def test_poisson_arrivals() -> None:
    with FakeServer(good) as server:
        assert run.main(config_for(server.url, arrivals="poisson", rate=500.0)) == 0
    due = [entry["due_s"] for entry in read()["levels"][0]["records"]]
    assert due == sorted(due)
    assert due[0] > 0


def test_a_rejected_ignore_eos_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    def script(index: int, body: dict[str, Any]) -> Answer:
        if "ignore_eos" in body:
            return refuse(400, "extra field ignore_eos")
        return stream(["a"])

    with FakeServer(script) as server:
        assert run.main(config_for(server.url)) == 0
    printed = capsys.readouterr()
    assert "the server rejects ignore_eos: going on without it" in printed.err
    assert "8 requests ended before 3 tokens" in printed.err
    assert read()["rejected_fields"] == ["ignore_eos"]
    notes = json.loads(printed.out.splitlines()[-1])["notes"]
    assert len(notes) == 3
    assert "counted by chunks" in notes[2]


def test_a_server_without_a_model_list_gets_a_stand_in(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer(good, models=refuse(404, "what?")) as server:
        assert run.main(config_for(server.url)) == 0
    assert "HTTP 404: what?" in capsys.readouterr().err
    assert server.bodies[0]["model"] == "default"


def test_the_key_comes_from_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(run.API_KEY_VARIABLE, "from-outside")
    with FakeServer(good) as server:
        run.main(config_for(server.url))
    assert server.headers[0]["Authorization"] == "Bearer from-outside"
    assert "from-outside" not in Path("out/bench.json").read_text()


def test_prompts_of_a_file_are_sent() -> None:
    Path("mine.txt").write_text("one\ntwo\n")
    with FakeServer(good) as server:
        run.main(config_for(server.url, prompts="mine.txt", api="completions"))
    assert {body["prompt"] for body in server.bodies} == {"one", "two"}


def test_an_impossible_output_is_one_clear_line() -> None:
    Path("file").write_text("")
    for output in ("file/out.json", "."):
        with pytest.raises(ConfigError, match="--output"):
            run.main(config_for("http://127.0.0.1:9", output=output))


def test_an_interrupt_keeps_the_finished_levels(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = run._Phase.measure

    async def interrupted(self: Any, prompts: Any, concurrency: int) -> Any:
        if concurrency == 3:
            raise KeyboardInterrupt
        return await measure(self, prompts, concurrency)

    monkeypatch.setattr(run._Phase, "measure", interrupted)
    with FakeServer(good) as server:
        assert run.main(config_for(server.url)) == run.INTERRUPTED
    assert "finished levels: 1, in out/bench.json" in capsys.readouterr().err
    document = read()
    assert (document["complete"], document["ok"]) == (False, False)
    assert [level["concurrency"] for level in document["levels"]] == [1]
    Path("out/bench.json").unlink()
    with FakeServer(good) as server:
        assert run.main(config_for(server.url, concurrency=(3,))) == run.INTERRUPTED
    assert "no level was finished" in capsys.readouterr().err
    assert not Path("out/bench.json").exists()


def test_a_disk_that_fills_up_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with (
        FakeServer(good) as server,
        pytest.raises(PacelineError, match=r"cannot write out/bench\.json: No space"),
    ):
        run.main(config_for(server.url))
