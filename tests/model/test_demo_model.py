"""The demo model against reference values: ids of llama.cpp, numbers of transformers in float32."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.attention.base import Kernels, KVLayout
from paceline.attention.reference import ReferenceKernels
from paceline.checkpoint import open_checkpoint
from paceline.model.llama import LlamaModel, build_model
from paceline.model.weights import load_weights
from paceline.serve.tokenizer import load_tokenizer
from tests.model.support import LENGTH, compiled_kernels, run_alone

CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent.parent / "data" / "smollm2_reference.json").read_text()
)["cases"]
CPU = torch.device("cpu")


@functools.cache
def demo(dtype: torch.dtype) -> LlamaModel:
    checkpoint = open_checkpoint(None, "auto")
    return build_model(checkpoint.config, load_weights(checkpoint, dtype=dtype, device=CPU))


def logits_of(model: LlamaModel, kernels: Kernels, ids: list[int], dtype: torch.dtype):  # type: ignore[no-untyped-def]
    c = model.config
    layout = KVLayout(
        pages=LENGTH // 16, page_size=16, kv_heads=c.num_kv_heads, head_dim=c.head_dim, dtype=dtype
    )
    return run_alone(model, kernels, [ids], layout)[0]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["text"][:12].encode().hex())
@pytest.mark.parametrize("kind", ["compiled", "reference"])
def test_float32_equals_the_reference(case: dict[str, Any], kind: str) -> None:
    model = demo(torch.float32)
    if kind == "compiled":
        kernels = compiled_kernels(model.config, torch.float32)
    else:
        kernels = ReferenceKernels(model.config, LENGTH, CPU)
    tokenizer = load_tokenizer(open_checkpoint(None, "auto"))
    ids = tokenizer.encode(case["text"], add_special_tokens=True)
    assert ids == case["ids"]
    logits = logits_of(model, kernels, ids + case["greedy"], torch.float32)
    log_probs = logits[len(ids) - 1].log_softmax(-1)
    for token, value in case["top10"]:
        assert abs(log_probs[token].item() - value) < 1e-3
    for i, (token, margin) in enumerate(zip(case["greedy"], case["margins"], strict=True)):
        if margin > 1e-3:
            assert logits[len(ids) - 1 + i].argmax().item() == token


@pytest.mark.parametrize("case", CASES[:6], ids=lambda c: c["text"][:12].encode().hex())
def test_bfloat16_agrees_where_the_reference_is_sure(case: dict[str, Any]) -> None:
    model = demo(torch.bfloat16)
    kernels = compiled_kernels(model.config, torch.bfloat16)
    logits = logits_of(model, kernels, case["ids"] + case["greedy"], torch.bfloat16)
    sure = [i for i, margin in enumerate(case["margins"]) if margin > 0.5]
    assert sure
    for i in sure:
        assert logits[len(case["ids"]) - 1 + i].argmax().item() == case["greedy"][i]
