"""Adaptive against plain and every fixed depth, by concurrency, on copied texts and free chat.

    python benchmarks/regret.py --output benchmarks/results/regret.json

The demo model in bfloat16 with the n-gram drafter, in one process without HTTP; one engine an arm,
of which one at a time works, A B C A B C. Each level is a closed loop of four requests for each
that runs at a time, so that what one saves is used by the next. `plain again` is a second plain
engine: what it differs from `plain` is the noise. Regret of an arm at a level: 1 - its rate / the
best arm's (without `plain again`), of medians over --rounds rounds. bfloat16 lets near ties of the
sampled token fall either way as batches differ: texts that differ are counted, not failed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from paceline import LLM, SamplingParams
from paceline.types import AddRequest

TURNS = 4  # requests of a level, times its concurrency
ARMS: dict[str, dict[str, Any]] = {
    "plain": {"speculative_policy": "off"},
    "static 1": {"speculative_policy": "static", "speculative_num_steps": 1},
    "static 3": {"speculative_policy": "static", "speculative_num_steps": 3},
    "static 5": {"speculative_policy": "static", "speculative_num_steps": 5},
    "adaptive": {"speculative_policy": "adaptive", "speculative_num_steps": 5},
    "plain again": {"speculative_policy": "off"},
}
PASSAGES = (
    "def area(width, height):\n    return width * height\n\n",
    "Row, row, row your boat, gently down the stream. Merrily, merrily, life is but a dream.\n",
    "| name | town | age |\n| Ada | London | 36 |\n| Alan | Manchester | 41 |\n",
    "The committee met on Monday. The committee agreed on the budget for the coming year.\n",
)
QUESTIONS = (
    "Tell me about the history of bridges.",
    "Why is the sky blue?",
    "Write a letter to a friend about a holiday by the sea.",
    "How do I learn to play the piano?",
    "What makes a good teacher?",
    "Describe a day in a small village.",
    "Explain how bread is made.",
    "What should I know before I adopt a dog?",
)


def prompts(llm: LLM, workload: str, count: int, turn: int) -> list[list[int]]:
    """`count` prompts of token ids, other ones each turn."""
    if workload == "copying":
        texts = [f"{turn}{i}\n" + PASSAGES[i % 4] * 4 for i in range(count)]
        return [llm.tokenizer.encode(text, add_special_tokens=True) for text in texts]
    asked = [f"{QUESTIONS[i % 8]} ({turn}, {i})" for i in range(count)]
    return [llm.chat_prompt([{"role": "user", "content": text}]) for text in asked]


def closed_loop(llm: LLM, batch: list[list[int]], level: int, tokens: int) -> dict[str, list[int]]:
    """Generate for all of them, `level` at a time: a new request as soon as one ends."""
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, seed=0)
    waiting = [
        AddRequest(id=str(i), prompt=tuple(prompt), params=params) for i, prompt in enumerate(batch)
    ][::-1]
    texts: dict[str, list[int]] = {}
    running = 0
    while waiting or running:
        while waiting and running < level:
            request = waiting.pop()
            texts[request.id] = []
            llm.engine.add(request)
            running += 1
        for delta in llm.engine.step():
            texts[delta.id] += delta.tokens
            running -= delta.finish is not None
    return texts


def measure(workloads: list[str], levels: list[int], rounds: int, tokens: int) -> dict[str, Any]:
    llms = {
        name: LLM(kv_tokens=16384, speculative_algorithm="NGRAM", **options)
        for name, options in ARMS.items()
    }
    for llm in llms.values():
        closed_loop(llm, prompts(llm, "chat", 2, 99), 2, tokens)
    result: dict[str, Any] = {}
    for workload in workloads:
        result[workload] = {}
        for level in levels:
            rates: dict[str, list[float]] = {name: [] for name in ARMS}
            differing = 0
            for turn in range(rounds):
                texts = []
                for name, llm in llms.items():
                    batch = prompts(llm, workload, TURNS * level, turn)
                    started = time.perf_counter()
                    done = closed_loop(llm, batch, level, tokens)
                    rates[name].append(len(batch) * tokens / (time.perf_counter() - started))
                    texts.append(list(done.values()))
                differing += sum(
                    a != b for other in texts[1:] for a, b in zip(texts[0], other, strict=True)
                )
            result[workload][str(level)] = summary(rates) | {"texts_differing": differing}
            print(workload, level, json.dumps(result[workload][str(level)]["regret"]), flush=True)
    return result


def summary(rates: dict[str, list[float]]) -> dict[str, Any]:
    medians = {name: statistics.median(values) for name, values in rates.items()}
    best = max(rate for name, rate in medians.items() if name != "plain again")
    regret = {name: round(1 - rate / best, 4) for name, rate in medians.items()}
    return {"tok_s": {n: round(r, 1) for n, r in medians.items()}, "regret": regret}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--levels", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--workloads", nargs="+", default=["copying", "chat"])
    parser.add_argument("--rounds", type=int, default=3, help="rounds of all arms")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate per request")
    parser.add_argument("--output", help="write the result there as JSON")
    arguments = parser.parse_args()
    found = measure(arguments.workloads, arguments.levels, arguments.rounds, arguments.tokens)
    worst = {
        arm: max(level["regret"][arm] for levels in found.values() for level in levels.values())
        for arm in ARMS
    }
    result = {
        "benchmark": "regret",
        "command": " ".join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}",
        "worst_regret": worst,
        "workloads": found,
    }
    if arguments.output:
        Path(arguments.output).parent.mkdir(parents=True, exist_ok=True)
        Path(arguments.output).write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
