"""Speculation off above five requests: what it costs at concurrency 1 and 10, over HTTP.

    python benchmarks/threshold.py --output benchmarks/results/threshold.json

The demo model in bfloat16; three servers side by side, of which one at a time has work:
  plain       no drafter
  off         an EAGLE-3 drafter of random weights is loaded, policy off
  threshold   the same drafter, trees of 16 drafts up to 5 requests, plain decoding above
and `paceline bench` on each in turn, A B C A B C. Medians of --rounds rounds; ratios to `off`. A
failed request makes the run fail. Random weights are never right, so at concurrency 1 `threshold`
shows the whole price of a tree that earns nothing. At concurrency 10 the requests are as long as
`paceline bench` makes them by default: while the first come and the last go, five or fewer run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from serving import served
from upkeep import random_drafter

LEVELS = {1: 32, 10: 512}  # output tokens of a request by concurrency


def bench(url: str, folder: Path) -> dict[int, float]:
    """Tokens per second by concurrency, 10 requests each."""
    rates = {}
    for concurrency, tokens in LEVELS.items():
        command = [
            sys.executable, "-m", "paceline.cli", "bench", "--server-url", url, "--ignore-eos",
            "--concurrency", str(concurrency), "--requests-per-level", "10", "--warmup", "0",
            "--max-tokens", str(tokens), "--output", str(folder / "result.json"),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)
        (level,) = json.loads((folder / "result.json").read_text())["levels"]
        rates[concurrency] = level["throughput_tok_s"]
    return rates


def measure(rounds: int) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        eagle = (
            "--speculative-algorithm", "EAGLE3",
            "--speculative-draft-model-path", str(random_drafter(folder / "drafter")),
        )  # fmt: skip
        tree = (
            "--speculative-num-steps", "4", "--speculative-eagle-topk", "4",
            "--speculative-num-draft-tokens", "16", "--speculative-policy", "threshold",
            "--speculative-disable-batch-threshold", "5",
        )  # fmt: skip
        arms = {"plain": (), "off": (*eagle, "--speculative-policy", "off"),
                "threshold": (*eagle, *tree)}  # fmt: skip
        urls = {
            name: stack.enter_context(served("--kv-tokens", "16384", *flags))[0]
            for name, flags in arms.items()
        }
        rates: dict[str, dict[int, list[float]]] = {
            name: {level: [] for level in LEVELS} for name in arms
        }
        for number in range(rounds):
            for name, url in urls.items():
                found = bench(url, folder)
                print(f"round {number + 1} {name:10s} {found}", flush=True)
                for level, rate in found.items():
                    rates[name][level].append(rate)
    medians = {
        name: {level: statistics.median(values) for level, values in by_level.items()}
        for name, by_level in rates.items()
    }
    ratios = {
        name: {level: medians[name][level] / medians["off"][level] for level in LEVELS}
        for name in arms
    }
    return {"tok_s": medians, "ratio_to_off": ratios, "rounds": rates}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="rounds of all arms")
    parser.add_argument("--output", help="write the result there as JSON")
    arguments = parser.parse_args()
    result = {
        "benchmark": "threshold",
        "command": "python benchmarks/threshold.py",
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}",
        **measure(arguments.rounds),
    }
    if arguments.output:
        Path(arguments.output).parent.mkdir(parents=True, exist_ok=True)
        Path(arguments.output).write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
