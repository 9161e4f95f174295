"""A load that rises from 1 to 32 requests at a time and falls again, with bursts.

    python benchmarks/ramp.py --output benchmarks/results/ramp.json

The demo model in bfloat16 with the n-gram drafter, in one process without HTTP. Every phase is a
closed loop at its concurrency until it has generated its tokens; requests go on into the next one.
The oracle knows the best arm of each phase other than adaptive: its time is the sum of the shortest
phases, medians over --rounds rounds, A B C A B C. `behind`: adaptive's time / the oracle's - 1.
Depth changes a second do not count probes. `plain again`: the noise.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch
from regret import ARMS, engines, prompts

from paceline import LLM, SamplingParams
from paceline.plan.step import UNFREE
from paceline.types import AddRequest

PHASES = (1, 2, 4, 32, 8, 16, 32, 16, 1, 8, 2, 1)
TOKENS = 256  # to generate in each phase, times the square root of its concurrency


def requests(llm: LLM, turn: int, tokens: int) -> deque[AddRequest]:
    """More than a round needs: copied text and chat in turn."""
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, seed=0)
    batches = zip(prompts(llm, "copying", 80, turn), prompts(llm, "chat", 80, turn), strict=True)
    both = [prompt for pair in batches for prompt in pair]
    return deque(
        AddRequest(id=f"{turn}-{i}", prompt=tuple(prompt), params=params)
        for i, prompt in enumerate(both)
    )


def ramp(llm: LLM, turn: int, tokens: int) -> dict[str, Any]:
    """Seconds of each phase, and how often the depth changed."""
    waiting, running, seconds = requests(llm, turn, tokens), 0, []
    changes, depth, failed = 0, 0, 0
    for level in PHASES:
        left = TOKENS * level**0.5
        started = time.perf_counter()
        while left > 0:
            while running < level:
                llm.engine.add(waiting.popleft())
                running += 1
            for delta in llm.engine.step():
                left -= len(delta.tokens)
                running -= delta.finish is not None
                failed += delta.error is not None
            said = llm.engine.stats.speculation
            if said.reason not in UNFREE:
                changes += said.depth != depth
                depth = said.depth
        seconds.append(time.perf_counter() - started)
    llm.engine.abort(tuple(llm.engine.scheduler.by_id))
    return {"seconds": seconds, "changes": changes / sum(seconds), "failed": failed}


def summary(llms: dict[str, LLM], runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    phases = {
        name: [statistics.median(column) for column in zip(*(r["seconds"] for r in each),
                                                           strict=True)]
        for name, each in runs.items()
    }  # fmt: skip
    arms = [name for name in runs if name not in ("adaptive", "plain again")]
    best = [min(arms, key=lambda name: phases[name][i]) for i in range(len(PHASES))]
    oracle = sum(phases[name][i] for i, name in enumerate(best))
    prediction = llms["adaptive"].engine.stats.speculation.prediction
    return {
        "phases": PHASES,
        "seconds": {name: [round(s, 3) for s in row] for name, row in phases.items()},
        "oracle": {"arms": best, "seconds": round(oracle, 3)},
        "behind": {name: round(sum(row) / oracle - 1, 4) for name, row in phases.items()},
        "depth_changes_a_second": {
            name: round(statistics.median(r["changes"] for r in each), 2)
            for name, each in runs.items()
        },
        "failed": sum(r["failed"] for each in runs.values() for r in each),
        "prediction_error": {"median": prediction.median, "p90": prediction.p90},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="rounds of all arms")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate per request")
    parser.add_argument("--output", help="write the result there as JSON")
    arguments = parser.parse_args()
    llms = engines(ARMS, {"speculative_algorithm": "NGRAM"})
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in llms}
    for turn in range(-1, arguments.rounds):
        for name, llm in llms.items():
            done = ramp(llm, turn, arguments.tokens)
            if turn >= 0:  # the first round warms up
                runs[name].append(done)
            print(turn, name, round(sum(done["seconds"]), 2), flush=True)
    result = {
        "benchmark": "ramp",
        "command": " ".join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}",
    } | summary(llms, runs)
    if arguments.output:
        Path(arguments.output).parent.mkdir(parents=True, exist_ok=True)
        Path(arguments.output).write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
