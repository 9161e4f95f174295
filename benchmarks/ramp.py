"""A load that rises from 1 to 32 requests at a time and falls again, with bursts.

    python benchmarks/ramp.py --output benchmarks/results/ramp.json

The demo model in bfloat16 with the n-gram drafter, in one process without HTTP. Every phase is a
closed loop at its concurrency until it has generated its tokens; requests go on into the next one.
The arms go through a phase together, each for a quarter of a second at a time, so that the drift of
the machine is the same for all. The oracle knows the best arm of each phase other than adaptive:
its time is the sum of the shortest phases, medians over --rounds rounds. `behind`: adaptive's time
/ the oracle's - 1.
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
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
from regret import ARMS, engines, prompts, slices

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


class Ramp:
    """One engine on its way through the phases. changes: of depth. failed: requests."""

    def __init__(self, llm: LLM, turn: int, tokens: int) -> None:
        self.llm = llm
        self.waiting = requests(llm, turn, tokens)
        self.running = self.depth = self.changes = self.failed = 0

    def phase(self, level: int) -> Generator[None, None, None]:
        """A step each, until the phase has generated its tokens."""
        left = TOKENS * level**0.5
        while left > 0:
            while self.running < level:
                self.llm.engine.add(self.waiting.popleft())
                self.running += 1
            for delta in self.llm.engine.step():
                left -= len(delta.tokens)
                self.running -= delta.finish is not None
                self.failed += delta.error is not None
            said = self.llm.engine.stats.speculation
            if said.reason not in UNFREE:
                self.changes += said.depth != self.depth
                self.depth = said.depth
            yield


def ramp(llms: dict[str, LLM], turn: int, tokens: int) -> dict[str, dict[str, Any]]:
    """Seconds of each phase, and how often the depth changed, of each arm."""
    ramps = {name: Ramp(llm, turn, tokens) for name, llm in llms.items()}
    seconds: dict[str, list[float]] = {name: [] for name in llms}
    for number, level in enumerate(PHASES):
        loops = {name: each.phase(level) for name, each in ramps.items()}
        took, _ = slices(loops, (turn + number) % len(loops))
        for name in llms:
            seconds[name].append(took[name])
    for llm in llms.values():
        llm.engine.abort(tuple(llm.engine.scheduler.by_id))
    return {
        name: {
            "seconds": seconds[name],
            "changes": each.changes / sum(seconds[name]),
            "failed": each.failed,
        }
        for name, each in ramps.items()
    }


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
        for name, done in ramp(llms, turn, arguments.tokens).items():
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
