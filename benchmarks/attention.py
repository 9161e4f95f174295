"""Times of the attention kernels on a GPU, against the reference first.

    python benchmarks/attention.py --output benchmarks/results/h200_attention.json
    python benchmarks/attention.py --sweep 300    (other cuts of the kernels, to choose from)

32 query and 8 K/V heads of 128, bfloat16, pages of 16 in random order; graph replays over as many
layers' storage as do not fit into the cache. Microseconds of a layer, medians; `bandwidth` counts
K/V read once.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from paceline.attention.base import AttentionView
from paceline.attention.gpu import Cut, GpuKernels, Tuning
from paceline.attention.reference import ReferenceKernels
from paceline.model.config import ModelConfig

HEADS, KV_HEADS, SIZE = 32, 8, 128
PAGE = 16
CELLS = ((1, 1024), (8, 1024), (32, 1024), (64, 2048), (128, 2048), (1, 8192), (256, 384))
KINDS = {"decode": 1, "chain of 4": 4, "tree of 16": 16}
LIBRARY = {  # the peer's, from the design: microseconds of decode, chain of 4, tree of 16
    (1, 1024): (8.8, 9.4, 19.2), (8, 1024): (20.4, 22.0, 51.8), (32, 1024): (41.8, 42.0, 103),
    (64, 2048): (138, 139, 364), (128, 2048): (269, 271, 709),
}  # fmt: skip
MODEL = ModelConfig(
    architecture="LlamaForCausalLM", vocab_size=128256, hidden_size=4096, intermediate_size=14336,
    num_layers=1, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=SIZE, rms_norm_eps=1e-5,
    max_position=16384,
)  # fmt: skip


def replays(run: Any, repeats: int = 15) -> float:
    """Seconds of a graph replay of `run`, the median."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(repeats + 3):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        graph.replay()
        after.record()
        after.synchronize()
        times.append(before.elapsed_time(after) / 1000)
    return statistics.median(times[3:])


def view_of(requests: int, context: int, tokens: int, kind: str) -> AttentionView:
    """Tiles of `tokens`; a tree has two children a node."""
    cuda = torch.device("cuda")
    each = -(-(context + tokens) // PAGE)
    pages = torch.randperm(requests * each, device=cuda).int().view(requests, each)
    masks: list[int] = []
    for i in range(tokens):
        parent = (i - 1) // 2 if kind.startswith("tree") else i - 1
        masks.append((masks[parent] if i else 0) | 1 << min(i, 62))
    at = context + torch.arange(tokens, device=cuda).repeat(requests)
    row = torch.arange(requests, device=cuda).repeat_interleave(tokens)
    return AttentionView(
        positions=at,
        cache_index=pages[row, at // PAGE].long() * PAGE + at % PAGE,
        ancestors=torch.tensor(masks * requests, device=cuda),
        tile_starts=torch.arange(0, requests * tokens + 1, tokens, dtype=torch.int32, device=cuda),
        contexts=torch.full((requests,), context, dtype=torch.int32, device=cuda),
        pages=pages,
        bounds=(),
        tails=torch.full((requests,), tokens, dtype=torch.int32, device=cuda),
    )


def storage(pages: int) -> list[torch.Tensor]:
    """Some layers' K/V, so much that the cache cannot hold it."""
    layer = pages * 2 * KV_HEADS * PAGE * SIZE * 2
    count = max(1, min(48, int(1.5e9 / layer)))
    return [
        torch.randn(pages, 2, KV_HEADS, PAGE, SIZE, device="cuda", dtype=torch.bfloat16)
        for _ in range(count)
    ]


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def cell(requests: int, context: int, kind: str, tuning: Tuning) -> dict[str, float]:
    tokens = KINDS[kind]
    view = view_of(requests, context, tokens, kind)
    caches = storage(int(view.pages.max()) + 1)
    q = torch.randn(requests * tokens, HEADS * SIZE, device="cuda", dtype=torch.bfloat16)
    kernels = GpuKernels(MODEL, 16384, torch.device("cuda"), tuning)
    step = kernels.begin(view)
    few = min(requests, 3)
    some = dataclasses.replace(
        view, bounds=tuple(range(0, few * tokens + 1, tokens)), contexts=view.contexts[:few],
        pages=view.pages[:few], tails=view.tails[:few],
        ancestors=view.ancestors[: few * tokens], positions=view.positions[: few * tokens],
    )  # fmt: skip
    reference = ReferenceKernels(MODEL, 16384, torch.device("cuda")).begin(some)
    wanted = reference.attend(q[: few * tokens], caches[0])
    wrong = error(step.attend(q, caches[0])[: few * tokens], wanted)
    assert wrong < 1e-2, (requests, context, kind, wrong)
    seconds = replays(lambda: [step.attend(q, cache) for cache in caches]) / len(caches)
    size = requests * (context + tokens) * KV_HEADS * SIZE * 4
    return {"us": seconds * 1e6, "bandwidth_tb_s": size / seconds / 1e12, "error": wrong}


def prefill(tokens: int, context: int, tuning: Tuning) -> dict[str, float]:
    view = view_of(1, context, tokens, "chain")
    view = dataclasses.replace(view, bounds=(0, tokens))
    caches = storage(int(view.pages.max()) + 1)
    q = torch.randn(tokens, HEADS * SIZE, device="cuda", dtype=torch.bfloat16)
    step = GpuKernels(MODEL, 16384, torch.device("cuda"), tuning).begin(view)
    reference = ReferenceKernels(MODEL, 16384, torch.device("cuda")).begin(view)
    wrong = error(step.attend(q, caches[0]), reference.attend(q, caches[0]))
    assert wrong < 1e-2, (tokens, wrong)
    seconds = replays(lambda: [step.attend(q, cache) for cache in caches]) / len(caches)
    seen = tokens * context + tokens * (tokens + 1) / 2
    return {"us": seconds * 1e6, "tflop_s": 4 * HEADS * SIZE * seen / seconds / 1e12}


def table(tuning: Tuning) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for requests, context in CELLS:
        row: dict[str, Any] = {kind: cell(requests, context, kind, tuning) for kind in KINDS}
        base = row["decode"]["us"]
        row["chain / decode"] = row["chain of 4"]["us"] / base
        row["tree / decode"] = row["tree of 16"]["us"] / base
        if (requests, context) in LIBRARY:
            peers = LIBRARY[requests, context]
            row["times the library"] = [
                round(row[kind]["us"] / peer, 3) for kind, peer in zip(KINDS, peers, strict=True)
            ]
        found[f"{requests} x {context}"] = row
        short = {k: round(v["us"], 1) if isinstance(v, dict) else v for k, v in row.items()}
        print(f"{requests} x {context}", json.dumps(short), flush=True)
    for tokens, context in ((2048, 0), (2048, 4096), (512, 0)):
        found[f"chunk of {tokens} after {context}"] = prefill(tokens, context, tuning)
        print(tokens, context, found[f"chunk of {tokens} after {context}"], flush=True)
    return found


FEW = [
    Cut(rows=16, keys=keys, stages=stages, programs=programs, registers=registers)
    for keys, stages, programs, registers in (
        (32, 3, 4, 128), (32, 2, 4, 128), (64, 3, 2, None), (64, 2, 3, 168), (32, 3, 3, 168),
        (32, 2, 5, 96),
    )
]  # fmt: skip
MANY = [
    Cut(rows=rows, keys=keys, stages=stages, programs=programs)
    for rows, keys, stages, programs in (
        (64, 64, 3, 2), (64, 64, 2, 2), (64, 32, 2, 4), (32, 64, 3, 2), (128, 64, 2, 1),
    )
]  # fmt: skip
CHUNK = [
    Cut(rows=rows, keys=keys, stages=stages, programs=0, warps=warps)
    for rows in (64, 128) for keys in (64, 32) for warps in (4, 8) for stages in (2, 3)
]  # fmt: skip


def decoding(tuning: Tuning) -> dict[str, float]:
    return {
        f"{requests} x {context} {kind}": round(cell(requests, context, kind, tuning)["us"], 1)
        for requests, context in ((64, 2048), (256, 384), (1, 1024))
        for kind in KINDS
    }


def sweep(seconds: float) -> list[dict[str, Any]]:
    """Time other cuts, one of the tuning's at a time, for so long at most."""
    found, started = [], time.monotonic()
    cuts = [(name, cut, decoding) for name, all_of in (("one", FEW), ("few", FEW), ("many", MANY))
            for cut in all_of]  # fmt: skip
    cuts += [("chunk", cut, lambda tuning: prefill(2048, 0, tuning)) for cut in CHUNK]
    for name, cut, run in cuts:
        if time.monotonic() - started > seconds:
            break
        row: dict[str, Any] = {name: dataclasses.asdict(cut)}
        try:
            row |= run(dataclasses.replace(Tuning(), **{name: cut}))
        except Exception as problem:  # a cut may not fit
            row["failed"] = repr(problem)[:200]
        print(json.dumps(row), flush=True)
        found.append(row)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--sweep", type=float, default=0, metavar="SECONDS", help="try other cuts for so long"
    )
    parser.add_argument("--page", type=int, default=16, help="positions of a page")
    parser.add_argument("--output", help="write the result there as JSON")
    arguments = parser.parse_args()
    global PAGE
    PAGE = arguments.page
    result: dict[str, Any] = {
        "benchmark": "attention",
        "command": " ".join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{torch.cuda.get_device_name()}, torch {torch.__version__}",
        "cut": dataclasses.asdict(Tuning()),
        "cells": table(Tuning()),
    }
    if arguments.sweep:
        result["sweep"] = sweep(arguments.sweep)
    if arguments.output:
        Path(arguments.output).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
