"""What a decode step of the demo model costs beside its weight GEMMs alone: a table and JSON.

    python benchmarks/step.py --output benchmarks/results/step.json

Three arms, interleaved: `plain GEMMs` (every weight product of one forward through torch's own
bfloat16 linear), `packed GEMMs` (the same through the engine's packed weights) and `step` (the
engine's whole step: plan, batch, forward, attention over --context tokens, sampling, commit).
Medians over --rounds rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from paceline.checkpoint import open_checkpoint
from paceline.config import EngineConfig
from paceline.engine import Engine
from paceline.model.linear import Linear
from paceline.model.weights import load_weights
from paceline.types import AddRequest, SamplingParams

TOKENS = (1, 2, 4, 8, 16)


def seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def plain_gemms() -> Callable[[int], None]:
    """The products of one forward with torch's own linear on the stored weights."""
    checkpoint = open_checkpoint(None, "auto")
    weights = dict(load_weights(checkpoint, dtype=torch.bfloat16, device=torch.device("cpu")))
    matrices = [w for name, w in weights.items() if w.dim() == 2]
    linear = torch.nn.functional.linear

    @torch.inference_mode()
    def run(tokens: int) -> None:
        inputs = {w.shape[1]: torch.randn(tokens, w.shape[1]).bfloat16() for w in matrices}
        for w in matrices:
            linear(inputs[w.shape[1]], w)

    return run


def packed_gemms(engine: Engine) -> Callable[[int], None]:
    """The same products as the engine does them."""
    model = engine.executor.model
    c = model.config
    steps: list[tuple[Linear, int]] = []
    for layer in model.layers:
        steps += [(layer.qkv, c.hidden_size), (layer.out, c.num_heads * c.head_dim)]
        steps += [(layer.gate_up, c.hidden_size), (layer.down, c.intermediate_size)]
    steps.append((model.head, c.hidden_size))

    @torch.inference_mode()
    def run(tokens: int) -> None:
        inputs = {width: torch.randn(tokens, width) for _, width in steps}
        for linear, width in steps:
            linear(inputs[width])

    return run


def decode_steps(engine: Engine, tokens: int, context: int) -> None:
    """Fill the engine with `tokens` requests that all decode."""
    for i in range(tokens):
        prompt = tuple((7 * i + j) % 40000 + 10 for j in range(context))
        params = SamplingParams(max_tokens=4000, temperature=0.0, seed=0, ignore_eos=True)
        engine.add(AddRequest(id=f"{tokens}-{i}", prompt=prompt, params=params))
    while any(r.pending > 1 for r in engine.scheduler.running) or engine.scheduler.waiting:
        engine.step()


def measure(rounds: int, context: int) -> dict[str, dict[str, float]]:
    engine = Engine.start(EngineConfig(), open_checkpoint(None, "auto"), lambda _: None)
    plain, packed = plain_gemms(), packed_gemms(engine)
    table = {}
    for tokens in TOKENS:
        decode_steps(engine, tokens, context)
        times: dict[str, list[float]] = {"plain GEMMs": [], "packed GEMMs": [], "step": []}
        for _ in range(rounds):
            times["plain GEMMs"].append(seconds(partial(plain, tokens)))
            for _ in range(3):
                times["packed GEMMs"].append(seconds(partial(packed, tokens)))
                times["step"].append(seconds(engine.step))
        engine.abort(tuple(engine.scheduler.by_id))
        row = {name: statistics.median(values[1:]) * 1e3 for name, values in times.items()}
        row["step / plain"] = row["step"] / row["plain GEMMs"]
        row["step / packed"] = row["step"] / row["packed GEMMs"]
        table[str(tokens)] = row
        print(
            f"T={tokens:3d}  plain GEMMs {row['plain GEMMs']:7.2f} ms  "
            f"packed GEMMs {row['packed GEMMs']:6.2f} ms  step {row['step']:6.2f} ms  "
            f"step/plain {row['step / plain']:.2f}  step/packed {row['step / packed']:.2f}",
            flush=True,
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12, help="rounds of all arms")
    parser.add_argument("--context", type=int, default=200, help="tokens each request attends to")
    parser.add_argument("--output", help="write the result there as JSON")
    arguments = parser.parse_args()
    result = {
        "benchmark": "step",
        "date": time.strftime("%Y-%m-%d"),
        "model": "SmolLM2-135M-Instruct, bfloat16",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "context": arguments.context,
        "unit": "ms, median",
        "tokens": measure(arguments.rounds, arguments.context),
    }
    if arguments.output:
        Path(arguments.output).parent.mkdir(parents=True, exist_ok=True)
        Path(arguments.output).write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
