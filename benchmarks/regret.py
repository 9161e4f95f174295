"""Adaptive against plain and every fixed depth, by concurrency, on copied texts and free chat.

    python benchmarks/regret.py --output benchmarks/results/regret.json
    python benchmarks/regret.py --weak --output benchmarks/results/regret_weak.json

The demo model in bfloat16 with the n-gram drafter (--weak: with an EAGLE-3 drafter of random
weights, whose drafts are never right), in one process without HTTP; one engine an arm,
of which one at a time works, A B C A B C, each for about a quarter of a second (`slices`): a
machine's speed drifts within seconds, and so it drifts for all alike. An arm's time is the sum of
its slices. Each turn is a closed loop of three requests for each that runs at a time, so that what
one saves is used by the next; at few requests a round has several turns. `plain again` is a second
plain engine: what it differs from `plain` is the noise. Regret of an arm at a level: 1 - its rate /
the best arm's (without `plain again`), of medians over --rounds rounds. bfloat16 lets near ties of
the sampled token fall either way as batches differ: texts that differ are counted, not failed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from upkeep import random_drafter

from paceline import LLM, SamplingParams
from paceline.types import AddRequest

T = TypeVar("T")
SLICE = 0.25  # seconds
REQUESTS = 30  # of a round at the least, about
ARMS: dict[str, dict[str, Any]] = {
    "plain": {"speculative_policy": "off"},
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
WEAK_ARMS = {name: ARMS[name] for name in ("plain", "static 3", "adaptive", "plain again")}
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


def closed_loop(
    llm: LLM, batch: list[list[int]], level: int, tokens: int
) -> Generator[None, None, list[list[int]]]:
    """Generate for all of them, `level` at a time: a new request as soon as one ends. A step each.

    Returns the texts.
    """
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
        yield
    return list(texts.values())


def slices(
    loops: Mapping[str, Generator[None, None, T]], first: int = 0
) -> tuple[dict[str, float], dict[str, T]]:
    """(seconds, what it returned) of each loop; they take turns of `SLICE` until all have ended."""
    left = list(loops)[first:] + list(loops)[:first]
    seconds, results = dict.fromkeys(loops, 0.0), {}
    while left:
        for name in tuple(left):
            began = now = time.perf_counter()
            while now - began < SLICE and name in left:
                try:
                    next(loops[name])
                except StopIteration as end:
                    results[name] = end.value
                    left.remove(name)
                now = time.perf_counter()
            seconds[name] += now - began
    return seconds, results


def engines(arms: dict[str, dict[str, Any]], drafter: dict[str, Any]) -> dict[str, LLM]:
    return {name: LLM(kv_tokens=16384, **drafter, **options) for name, options in arms.items()}


def take_turn(
    llms: dict[str, LLM], workload: str, level: int, turn: int, tokens: int
) -> tuple[dict[str, float], dict[str, list[list[int]]]]:
    """(seconds, texts) of each arm; who is first changes from turn to turn."""
    loops = {
        name: closed_loop(llm, prompts(llm, workload, 3 * level, turn), level, tokens)
        for name, llm in llms.items()
    }
    return slices(loops, turn % len(llms))


def measure(
    llms: dict[str, LLM], workloads: list[str], levels: list[int], *, rounds: int, tokens: int
) -> dict[str, Any]:
    for llm in llms.values():
        slices({"": closed_loop(llm, prompts(llm, "chat", 2, 99), 2, tokens)})
    result: dict[str, Any] = {}
    for workload in workloads:
        result[workload] = {}
        for level in levels:
            rates: dict[str, list[float]] = {name: [] for name in llms}
            differing = 0
            turns = max(REQUESTS // (3 * level), 1)
            for number in range(rounds):
                seconds = dict.fromkeys(llms, 0.0)
                for turn in range(turns * number, turns * (number + 1)):
                    took, texts = take_turn(llms, workload, level, turn, tokens)
                    seconds = {name: seconds[name] + took[name] for name in llms}
                    differing += sum(texts["plain"][i] != other[i] for other in texts.values()
                                     for i in range(len(other)))  # fmt: skip
                for name in llms:
                    rates[name].append(3 * level * turns * tokens / seconds[name])
            said = llms["adaptive"].engine.stats.speculation
            result[workload][str(level)] = summary(rates) | {
                "texts_differing": differing,
                "depth": said.depth,
                "prediction_error": {
                    "median": said.prediction.median, "p90": said.prediction.p90
                },
            }  # fmt: skip
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
    parser.add_argument("--weak", action="store_true", help="an EAGLE-3 drafter of random weights")
    parser.add_argument("--output", help="write the result there as JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        if arguments.weak:
            drafter = str(random_drafter(Path(directory)))
            llms = engines(
                WEAK_ARMS,
                {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": drafter},
            )
        else:
            llms = engines(ARMS, {"speculative_algorithm": "NGRAM"})
        found = measure(
            llms, arguments.workloads, arguments.levels, rounds=arguments.rounds,
            tokens=arguments.tokens,
        )  # fmt: skip
    worst = {
        arm: max(level["regret"][arm] for levels in found.values() for level in levels.values())
        for arm in llms
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
