"""The story this project began with, over real HTTP with real processes.

Speculation with a tree of 16 drafts up to 5 requests, plain decoding above: at concurrency 1 and 10
every request must succeed, and every text must be the one without speculation.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from paceline.checkpoint import open_checkpoint
from paceline.model.eagle_config import EagleConfig
from paceline.model.eagle_weights import dummy_drafter, save_drafter
from tests.serve.test_real_server import MODEL, metrics, running_server

SHARED = ("--dtype", "float32", "--kv-tokens", "8192", "--max-model-len", "1024")
THRESHOLD = (
    "--speculative-policy", "threshold", "--speculative-disable-batch-threshold", "5",
)  # fmt: skip
TREE = (
    "--speculative-num-steps", "4", "--speculative-eagle-topk", "4",
    "--speculative-num-draft-tokens", "16",
)  # fmt: skip
SAMPLING = {"greedy": ("--temperature", "0"), "sampled": ("--temperature", "0.8", "--seed", "7")}

Texts = dict[str, list[list[str]]]
"""By kind of sampling: the texts of each level."""


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An EAGLE-3 drafter of random weights for the demo model."""
    folder = tmp_path_factory.mktemp("drafter")
    config = EagleConfig.usual(open_checkpoint(None, "auto").config, draft_vocab_size=2000)
    save_drafter(folder, config, dummy_drafter(config, 0, dtype=torch.float32))
    return folder


def bench(url: str, folder: Path, *flags: str) -> list[list[str]]:
    """`paceline bench` at concurrency 1 and 10; every request must succeed. Texts by level."""
    command = [sys.executable, "-m", "paceline.cli", "bench", "--server-url", url]
    command += ["--concurrency", "1", "10", "--requests-per-level", "10", "--warmup", "1"]
    command += ["--max-tokens", "20", "--save-texts", "--output", str(folder / "result.json")]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"ok: (\d+/\d+)", done.stdout) == ["10/10", "10/10"]
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return [
        [r["text"] for r in sorted(level["records"], key=lambda r: r["index"])]
        for level in result["levels"]
    ]


def texts_of(url: str, folder: Path) -> Texts:
    return {name: bench(url, folder, *flags) for name, flags in SAMPLING.items()}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    with running_server(*SHARED) as (url, _):
        return texts_of(url, tmp_path_factory.mktemp("plain"))


def asked(url: str, path: str) -> dict[str, Any]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        reply: dict[str, Any] = client.get(path, cast_to=object)  # type: ignore[assignment]
    return reply


def test_without_speculation_load_changes_no_text(plain: Texts) -> None:
    for levels in plain.values():
        assert levels[0] == levels[1]
        assert len(set(levels[0])) == 10
    assert plain["greedy"] != plain["sampled"]


def arms(drafter: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    yield "ngram", ("--speculative-algorithm", "NGRAM", *THRESHOLD)
    eagle = ("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(drafter))
    yield "EAGLE-3", (*eagle, *TREE, *THRESHOLD)


@pytest.mark.parametrize("arm", [0, 1], ids=["ngram", "eagle"])
def test_speculation_off_above_a_threshold_fails_and_changes_nothing(
    plain: Texts, drafter: Path, tmp_path: Path, arm: int
) -> None:
    name, flags = list(arms(drafter))[arm]
    with running_server(*SHARED, *flags) as (url, _):
        assert texts_of(url, tmp_path) == plain
        seen = metrics(url)
        assert seen["paceline_drafted_tokens_total"] > 0
        assert seen["paceline_drafter_failures_total"] == 0
        said = asked(url, "/speculation")
        assert said["policy"] == "threshold" and said["drafter_failures"] == 0
        shapes = {(shape["depth"] > 0, shape["reason"]) for shape in said["shapes"]}
        assert (True, "at most 5 requests") in shapes
        assert (False, "more than 5 requests") in shapes
        if name == "EAGLE-3":
            rise_and_fall(url)


def rise_and_fall(url: str) -> None:
    """One request, then ten at once, twenty times: nothing fails, changes or stays behind."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:

        def ask(i: int) -> str:
            reply = client.completions.create(
                model=MODEL,
                prompt=f"{i} things I like about my town:",
                max_tokens=5,
                temperature=0.8 if i % 2 else 0,
                seed=i,
                extra_body={"speculative": False} if i == 3 else None,
            )
            return reply.choices[0].text

        alone = [ask(i) for i in range(10)]
        with ThreadPoolExecutor(10) as pool:
            for turn in range(20):
                assert ask(turn % 10) == alone[turn % 10]
                assert list(pool.map(ask, range(10))) == alone
    seen = metrics(url)
    assert seen["paceline_drafter_failures_total"] == 0
    assert seen["paceline_requests_running"] == seen["paceline_requests_waiting"] == 0
    pages = {s: seen[f'paceline_kv_pages{{state="{s}"}}'] for s in ("free", "cached", "used")}
    assert pages["used"] == 0 and pages["free"] + pages["cached"] == 8192 / 16


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--speculative-algorithm", "EAGLE3"), "--speculative-draft-model-path"),
        (
            ("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "/nowhere"),
            "/nowhere",
        ),
        (("--speculative-algorithm", "NGRAM", "--speculative-eagle-topk", "2"), "EAGLE3"),
        (
            ("--speculative-algorithm", "NGRAM", "--speculative-policy", "schedule",
             "--speculative-schedule", "[[1,4,3],[6,9,1]]"),
            "gap",
        ),
    ],
)  # fmt: skip
def test_mistakes_are_one_line_at_start(flags: tuple[str, ...], says: str) -> None:
    command = [sys.executable, "-m", "paceline.cli", "serve", "--port", "0", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode in (1, 2)
    errors = [line for line in done.stderr.splitlines() if "paceline:" in line]
    assert len(errors) == 1 and says in errors[0], done.stderr
    assert "Traceback" not in done.stderr


def test_a_drafter_of_another_model_is_one_line_at_start(drafter: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    config = json.loads((drafter / "config.json").read_text())
    for key, value, says in (
        ("hidden_size", 512, "hidden"),
        ("vocab_size", 32000, "vocab"),
    ):
        other.mkdir(exist_ok=True)
        (other / "config.json").write_text(json.dumps(config | {key: value}))
        (other / "model.safetensors").write_bytes((drafter / "model.safetensors").read_bytes())
        command = [sys.executable, "-m", "paceline.cli", "serve", "--port", "0"]
        command += ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path"]
        done = subprocess.run([*command, str(other)], capture_output=True, text=True, timeout=60)
        errors = [line for line in done.stderr.splitlines() if "paceline:" in line]
        assert done.returncode == 1 and len(errors) == 1 and says in errors[0], done.stderr
