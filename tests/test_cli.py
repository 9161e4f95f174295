"""The command line as a user meets it: help, flags, one-line errors."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.bench.config import BenchConfig
from paceline.cli import main
from paceline.config import EngineConfig, ServerConfig


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "paceline.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("command", "configs"),
    [("serve", (EngineConfig, ServerConfig)), ("bench", (BenchConfig,))],
)
def test_every_field_is_a_flag_with_help(
    command: str, configs: tuple[type, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for config in configs:
        for field in dataclasses.fields(config):
            if not field.metadata.get("positional"):
                assert "--" + field.name.replace("_", "-") in text
            words = field.metadata["help"].split()
            assert " ".join(words[:4]) in text, field.name


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["serve", "--prot", "1"], "--prot"),
        (["serve", "--port", "x"], "--port"),
        (["serve", "--port", "70000"], "--port must be between 0 and 65535"),
        (["serve", "--page-size", "0"], "--page-size must be at least 1"),
        (["serve", "--dtype", "int3"], "--dtype"),
        (["serve", "/no/such/model"], "no model at /no/such/model"),
        (["serve", "--kv-tokens", "16"], "two pages"),
        (["serve", "--max-model-len", "9000"], "made for"),
        (["serve", "--max-model-len", "500", "--kv-tokens", "400"], "--kv-tokens"),
        (["serve", "--speculative-num-steps", "0"], "--speculative-num-steps"),
        (["serve", "--speculative-policy", "threshold"], "needs --speculative-disable"),
        (["serve", "--speculative-disable-batch-threshold", "5"], "--speculative-policy threshold"),
        (
            [
                "serve",
                "--speculative-algorithm",
                "NGRAM",
                "--speculative-policy",
                "schedule",
                "--speculative-schedule",
                "[[1,4,5],[6,9,0]]",
            ],
            "gap",
        ),
        (["generate", "--prompt", ""], "the prompt is empty"),
        (["generate", "--prompt", "x", "--top-p", "0"], "--top-p"),
        (["bench", "--concurrency", "0"], "--concurrency"),
        (["sing"], "sing"),
        ([], "required"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_a_mistake_is_one_line(arguments: list[str], says: str) -> None:
    done = run(*arguments)
    assert done.returncode in (1, 2), done
    errors = [line for line in done.stderr.splitlines() if line.startswith("paceline")]
    assert len(errors) == 1 and says in errors[0], done.stderr
    assert "Traceback" not in done.stderr


def test_a_broken_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF\x03\x00")
    done = run("serve", str(tmp_path / "model.gguf"))
    assert done.returncode == 1 and done.stderr.count("\n") <= 3
    assert "model.gguf" in done.stderr and "Traceback" not in done.stderr


def test_generate_continues_a_prompt() -> None:
    done = run("generate", "--prompt", "The capital of France is", "--max-tokens", "4")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("The capital of France is Paris.")


def test_generate_reads_standard_input_and_chats() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "paceline.cli", "generate", "--chat", "--max-tokens", "20"],
        input="What is the capital of France?",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and "Paris" in done.stdout


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.startswith("paceline 0.")
