"""The demo model over HTTP: throughput, time to first token, prefix hits, start-up, memory.

    python benchmarks/serving.py --output benchmarks/results/serving.json

Starts `paceline serve` with its defaults; every request has a prompt of its own:
  levels   `paceline bench`, 128 output tokens, greedy, prompts of about 40 tokens, per concurrency
  ttft     median over single requests with 40-token prompts
  prefix   1,000-token prompts: first time against the same prompt again
  memory   resident memory of both processes after 16 requests of 1,000 tokens at once
All times are taken by the client. A failed request makes the run fail.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

LEVELS = (1, 2, 4, 8, 16)
PEERS = {1: 62, 2: 87, 4: 122, 8: 170, 16: 257}  # best bf16 peer on its own machine, tok/s
WORDS = [
    "river",
    "market",
    "winter",
    "garden",
    "letter",
    "captain",
    "island",
    "window",
    "bridge",
    "paper",
    "yellow",
    "morning",
    "engine",
    "teacher",
    "village",
    "forest",
    "silver",
    "kitchen",
    "harbour",
    "mountain",
    "story",
    "painter",
    "summer",
    "travel",
    "music",
]


def prompt(rng: random.Random, words: int) -> str:
    """A prompt that shares no beginning with any other."""
    middle = " ".join(rng.choice(WORDS) for _ in range(words))
    return f"{rng.randrange(10**6)} words came to mind: {middle}. Write a short story with them."


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    return urllib.request.urlopen(request, timeout=300)


def first_token_seconds(url: str, text: str | list[int]) -> float:
    """From sending a request to the first chunk with text."""
    body = {"model": MODEL, "prompt": text, "max_tokens": 4, "temperature": 0, "stream": True}
    started = time.perf_counter()
    with post(url, body) as reply:
        for line in reply:
            if b'"text"' in line:
                elapsed = time.perf_counter() - started
                reply.read()
                return elapsed
    raise RuntimeError("the stream ended without text")


MODEL = "SmolLM2-135M-Instruct"


def resident_mib(process: subprocess.Popen[str]) -> dict[str, float]:
    """Resident memory of the server and the engine process, now and at its peak."""
    found = {}
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for name, pid in (("http", str(process.pid)), ("engine", children[0])):
        status = Path(f"/proc/{pid}/status").read_text()
        for key in ("VmRSS", "VmHWM"):
            found[f"{name} {key}"] = int(re.findall(rf"{key}:\s+(\d+)", status)[0]) / 1024
    return found


def levels(url: str, rng: random.Random, requests: int) -> list[dict[str, Any]]:
    rows = []
    for concurrency in LEVELS:
        count = max(requests, 2 * concurrency)
        with tempfile.TemporaryDirectory() as folder:
            prompts = Path(folder) / "prompts.jsonl"
            lines = [json.dumps({"prompt": prompt(rng, 24)}) for _ in range(count + 5)]
            prompts.write_text("\n".join(lines) + "\n")
            command = [
                sys.executable, "-m", "paceline.cli", "bench", "--server-url", url,
                "--api", "completions", "--prompts", str(prompts), "--max-tokens", "128",
                "--concurrency", str(concurrency), "--requests-per-level", str(count),
                "--output", str(Path(folder) / "result.json"),
            ]  # fmt: skip
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(done.stdout + done.stderr)
            result = json.loads(done.stdout.splitlines()[-1])
        level = result["levels"][0]
        print(next(line for line in done.stdout.splitlines() if line.startswith("C=")), flush=True)
        rows.append(
            {
                "concurrency": concurrency,
                "requests": level["requests"],
                "ok": level["ok"],
                "throughput_tok_s": level["throughput_tok_s"],
                "ttft_ms_p50": level["ttft_s"]["p50"] * 1e3,
                "inter_token_ms_p50": level["itl_s"]["p50"] * 1e3,
                "prompt_tokens": level["prompt_tokens"],
                "cached_prompt_tokens": level["cached_prompt_tokens"],
                "peer_tok_s": PEERS[concurrency],
            }
        )
    return rows


def single_requests(url: str, rng: random.Random) -> dict[str, Any]:
    """Times to first token, one request at a time; prompts as token ids of exact length."""

    def ids(count: int) -> list[int]:
        return [rng.randrange(1000, 40000) for _ in range(count)]

    first_token_seconds(url, ids(40))
    short = [first_token_seconds(url, ids(40)) for _ in range(15)]
    new, again = [], []
    for _ in range(5):
        long = ids(1000)
        new.append(first_token_seconds(url, long))
        again.append(first_token_seconds(url, long))
    result = {
        "ttft_40_tokens_ms": statistics.median(short) * 1e3,
        "ttft_1000_tokens_new_ms": statistics.median(new) * 1e3,
        "ttft_1000_tokens_again_ms": statistics.median(again) * 1e3,
    }
    result["again_is_faster_by"] = (
        result["ttft_1000_tokens_new_ms"] / result["ttft_1000_tokens_again_ms"]
    )
    return result


def sixteen_of_a_thousand(url: str, rng: random.Random) -> None:
    """16 requests at once, each 900 prompt and 100 output tokens."""

    def one(ids: list[int]) -> None:
        body = {"model": MODEL, "prompt": ids, "max_tokens": 100, "ignore_eos": True}
        with post(url, body) as reply:
            assert json.loads(reply.read())["usage"]["completion_tokens"] == 100

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(one, [[rng.randrange(1000, 40000) for _ in range(900)] for _ in range(16)]))


@contextlib.contextmanager
def served(*flags: str) -> Iterator[tuple[str, subprocess.Popen[str], float]]:
    """A server of its own: address, process, seconds until it was ready."""
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline.cli", "serve", "--port", "0", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        ready = time.perf_counter() - started
        print(f"{line.strip()}\nready after {ready:.1f} s", flush=True)
        yield re.findall(r"http://[\d.]+:\d+", line)[0], process, ready
    finally:
        process.terminate()
        process.wait(20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10, help="requests a level at least")
    parser.add_argument("--output", help="write the result there as JSON")
    arguments = parser.parse_args()
    rng = random.Random(0)
    result: dict[str, Any] = {
        "benchmark": "serving",
        "command": "python benchmarks/serving.py",
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}",
    }
    with served() as (url, process, ready):
        result |= {"ready_s": ready, "memory_mib_idle": resident_mib(process)}
        sixteen_of_a_thousand(url, rng)
        result["memory_mib_after_16_of_1000"] = resident_mib(process)
    with served() as (url, process, _):
        result["single"] = single_requests(url, rng)
        result["levels"] = levels(url, rng, arguments.requests)
    if arguments.output:
        Path(arguments.output).parent.mkdir(parents=True, exist_ok=True)
        Path(arguments.output).write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
