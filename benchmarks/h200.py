"""An 8B model's serving rate on one GPU, by arm and number of requests. Weights are random.

    python benchmarks/h200.py --output benchmarks/results/h200.json

Llama-3.1-8B's shape with an EAGLE-3 drafter of one layer (draft vocabulary 32,000), bfloat16,
weights random, acceptance synthetic: a chain's draft survives with 0.7. Closed loop: B requests at
once, 128 random prompt tokens, 256 tokens each, greedy, no end token; output tokens per second of
the whole call, prompts included, medians. `off` has the drafter and never drafts: what its upkeep
costs. PEER is the best arm of another engine on such a machine, vLLM 0.26.0 (plain, chain 3, 5).
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from paceline import LLM, SamplingParams

PEER_PLAIN = {1: 203, 4: 804, 16: 3017, 32: 5474, 64: 9436, 128: 14694, 256: 18400}
PEER_BEST = {1: 371, 4: 1431, 16: 5125, 32: 8630, 64: 12834, 128: 14794, 256: 18400}
TARGET = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256,
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
    "bos_token_id": 128000, "eos_token_id": 128001,
}  # fmt: skip
DRAFTER = {
    "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "draft_vocab_size": 32000, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
}  # fmt: skip
STATIC: dict[str, Any] = {"speculative_policy": "static"}
TREE = {"speculative_eagle_topk": 4, "speculative_num_draft_tokens": 16}
ARMS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "off": {"speculative_policy": "off"},
    "chain 3": STATIC | {"speculative_num_steps": 3},
    "chain 5": STATIC | {"speculative_num_steps": 5},
    "tree 16": STATIC | TREE | {"speculative_num_steps": 5},
    "adaptive": {"speculative_num_steps": 5} | TREE,
}


def engine(directory: Path, arm: str) -> LLM:
    options: dict[str, Any] = {}
    if (drafting := ARMS[arm]) is not None:
        options = drafting | {
            "speculative_algorithm": "EAGLE3", "synthetic_acceptance": 0.7,
            "speculative_draft_model_path": str(directory / "drafter"),
        }  # fmt: skip
    return LLM(
        str(directory / "target"), skip_tokenizer_init=True, load_format="dummy",
        max_running_requests=256, max_model_len=512, **options,
    )  # fmt: skip


def rate(llm: LLM, requests: int, seed: int) -> float:
    rng = random.Random(seed)
    prompts = [[rng.randrange(1000, 100_000) for _ in range(128)] for _ in range(requests)]
    params = SamplingParams(max_tokens=256, temperature=0, ignore_eos=True)
    torch.cuda.synchronize()
    started = time.perf_counter()
    done = llm.generate(prompts, params)
    seconds = time.perf_counter() - started
    assert all(len(each.tokens) == 256 for each in done)
    return requests * 256 / seconds


def measure(arms: list[str], levels: list[int], repeats: int, out: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for part, values in (("target", TARGET), ("drafter", DRAFTER)):
            (directory / part).mkdir()
            (directory / part / "config.json").write_text(json.dumps(values))
        for arm in arms:
            started = time.perf_counter()
            llm = engine(directory, arm)
            found: dict[str, Any] = {"start_s": round(time.perf_counter() - started, 1)}
            for level in levels:
                rate(llm, level, 99)
                rates = [rate(llm, level, seed) for seed in range(repeats)]
                found[str(level)] = round(statistics.median(rates), 1)
                print(arm, level, found[str(level)], flush=True)
            said = llm.engine.stats.speculation
            found["acceptance"] = [round(x, 3) for x in said.recent]
            found["prediction_error"] = [said.prediction.median, said.prediction.p90]
            out[arm] = found
            del llm
            gc.collect()
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--levels", type=int, nargs="+", default=list(PEER_BEST))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", help="write the result there as JSON")
    arguments = parser.parse_args()
    result: dict[str, Any] = {
        "benchmark": "h200",
        "command": " ".join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{torch.cuda.get_device_name()}, torch {torch.__version__}",
        "setting": "8B shape, random weights, synthetic acceptance 0.7, 128 in, 256 out",
        "peer": {"plain": PEER_PLAIN, "best": PEER_BEST},
        "tok_s": {},
    }
    measure(arguments.arms, arguments.levels, arguments.repeats, result["tok_s"])
    if arguments.output:
        Path(arguments.output).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
