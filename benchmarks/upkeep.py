"""What a loaded EAGLE-3 drafter costs while nobody drafts, and what an n-gram proposal costs.

    python benchmarks/upkeep.py --output benchmarks/results/upkeep.json

The demo model in bfloat16, --context tokens a request. Two engines in turn, A B A B, step by step:
without a drafter, and with an EAGLE-3 drafter of random weights (32,000 draft tokens) under policy
`off`, whose K/V and features the target's pass keeps up to date all the same. Medians over all
steps. Then the n-gram drafter alone: one proposal of 3 tokens for 16 requests of 2,000 tokens each,
and the upkeep of its index by what was committed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from step import decode_steps, seconds

from paceline.cache.pool import PagePool
from paceline.checkpoint import open_checkpoint
from paceline.config import EngineConfig
from paceline.engine import Engine
from paceline.exec.drafter import NgramDrafter
from paceline.model.eagle_config import EagleConfig
from paceline.model.eagle_weights import dummy_drafter, save_drafter
from paceline.plan.step import Admission, Choice, DraftShape, Row, RowResult, StepPlan
from paceline.types import SamplingParams

BATCHES = (1, 4, 10, 16)


def random_drafter(directory: Path) -> Path:
    """A checkpoint of the usual shape for the demo model; its drafts are as good as random."""
    config = EagleConfig.usual(open_checkpoint(None, "auto").config, draft_vocab_size=32000)
    directory.mkdir(exist_ok=True)
    save_drafter(directory, config, dummy_drafter(config, 0, dtype=torch.bfloat16))
    return directory


def measure(rounds: int, context: int, drafter: Path) -> dict[str, dict[str, float]]:
    arms: dict[str, dict[str, Any]] = {
        "no drafter": {},
        "EAGLE-3, off": {
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": str(drafter),
            "speculative_policy": "off",
        },
    }
    checkpoint = open_checkpoint(None, "auto")
    engines = {
        name: Engine.start(EngineConfig(kv_tokens=16384, **options), checkpoint, lambda _: None)
        for name, options in arms.items()
    }
    table = {}
    for batch in BATCHES:
        times: dict[str, list[float]] = {name: [] for name in arms}
        for engine in engines.values():
            decode_steps(engine, batch, context)
        for _ in range(rounds):
            for name, engine in engines.items():
                times[name].append(seconds(engine.step))
        for engine in engines.values():
            engine.abort(tuple(engine.scheduler.by_id))
        row = {name: statistics.median(values) * 1e3 for name, values in times.items()}
        row["ratio"] = row["EAGLE-3, off"] / row["no drafter"]
        table[str(batch)] = row
        print(
            f"B={batch:2d}  no drafter {row['no drafter']:6.2f} ms  "
            f"EAGLE-3, off {row['EAGLE-3, off']:6.2f} ms  ratio {row['ratio']:.3f}",
            flush=True,
        )
    return table


def ngram_ms(requests: int = 16, length: int = 2000, rounds: int = 200) -> dict[str, float]:
    """Milliseconds of one proposal and one round of bookkeeping, medians."""
    rng = random.Random(0)
    drafter = NgramDrafter()
    words = [[rng.randrange(49152) for _ in range(8)] for _ in range(60)]
    rows = []
    for slot in range(requests):
        text = [token for _ in range(length // 8) for token in rng.choice(words)]
        params = SamplingParams(temperature=0, seed=0)
        drafter.admit(Admission(slot=slot, params=params, tokens=tuple(text)))
        rows.append(Row(slot=slot, generation=1, start=length - 1, drafts=3))
    plan = StepPlan(
        rows=tuple(rows),
        choice=Choice(shape=DraftShape(depth=3, budget=3 * requests), reason="benchmark"),
        reservation=PagePool(1, 1).reserve({}),
    )
    propose, observe = [], []
    for _ in range(rounds):
        started = time.perf_counter()
        drafter.propose(plan, None)  # type: ignore[arg-type]
        proposed = time.perf_counter()
        for row in rows:
            drafter.observe(row, RowResult(tokens=(rng.randrange(9), 5, 7)))
        propose.append(proposed - started)
        observe.append(time.perf_counter() - proposed)
    return {
        "propose": statistics.median(propose) * 1e3,
        "observe": statistics.median(observe) * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100, help="steps of each arm")
    parser.add_argument("--context", type=int, default=200, help="tokens each request attends to")
    parser.add_argument("--output", help="write the result there as JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        steps = measure(arguments.rounds, arguments.context, random_drafter(Path(folder)))
    result = {
        "benchmark": "upkeep",
        "command": "python benchmarks/upkeep.py",
        "date": time.strftime("%Y-%m-%d"),
        "model": "SmolLM2-135M-Instruct, bfloat16",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "context": arguments.context,
        "unit": "ms, median",
        "step": steps,
        "ngram, 16 requests of 2,000 tokens": ngram_ms(),
    }
    if arguments.output:
        Path(arguments.output).parent.mkdir(parents=True, exist_ok=True)
        Path(arguments.output).write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
