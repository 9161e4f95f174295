"""Text copying, one request at a time: n-gram drafts against plain decoding, interleaved.

    python benchmarks/ngram.py --output benchmarks/results/ngram.json

The demo model in bfloat16 continues texts that repeat themselves (lists, code, refrains), greedy,
--tokens each. Arms in turn A B A B; medians of tokens per second; the texts must be equal.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

from paceline import LLM, SamplingParams

PASSAGES = (
    "def area(width, height):\n    return width * height\n\n",
    "Row, row, row your boat, gently down the stream. Merrily, merrily, life is but a dream.\n",
    "| name | town | age |\n| Ada | London | 36 |\n| Alan | Manchester | 41 |\n",
    "The committee met on Monday. The committee agreed on the budget for the coming year.\n",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=96, help="tokens to generate for each text")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of both arms")
    parser.add_argument("--output", help="write the result there as JSON")
    arguments = parser.parse_args()
    params = SamplingParams(max_tokens=arguments.tokens, temperature=0, ignore_eos=True)
    arms = {
        "plain": LLM(kv_tokens=8192),
        "ngram, depth 3": LLM(
            kv_tokens=8192, speculative_algorithm="NGRAM", speculative_policy="static"
        ),
    }
    rates: dict[str, list[float]] = {name: [] for name in arms}
    equal = total = 0
    for _ in range(arguments.rounds):
        for passage in PASSAGES:
            texts = []
            for name, llm in arms.items():
                started = time.perf_counter()
                (completion,) = llm.generate(passage * 4, params)
                rates[name].append(arguments.tokens / (time.perf_counter() - started))
                texts.append(completion.tokens)
            total += 1
            equal += texts[0] == texts[1]
    medians = {name: statistics.median(values) for name, values in rates.items()}
    stats = arms["ngram, depth 3"].engine.stats
    result = {
        "benchmark": "ngram",
        "command": "python benchmarks/ngram.py",
        "date": time.strftime("%Y-%m-%d"),
        "tokens_per_second": medians,
        "ratio": medians["ngram, depth 3"] / medians["plain"],
        "accepted_share": stats.accepted_tokens_total / max(stats.drafted_tokens_total, 1),
        "texts_equal": f"{equal}/{total}",
    }
    if arguments.output:
        Path(arguments.output).write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
