"""Every architecture against transformers, on small random models, in float32."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from paceline.attention.base import Kernels, KVLayout
from paceline.attention.reference import ReferenceKernels
from paceline.checkpoint import open_checkpoint
from paceline.model.llama import LlamaModel, build_model
from paceline.model.weights import load_weights
from tests.model.support import LENGTH, compiled_kernels, run_alone

CPU = torch.device("cpu")
SMALL: dict[str, Any] = dict(
    vocab_size=200,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=LENGTH,
    rms_norm_eps=1e-5,
    initializer_range=0.2,
)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64)
LINEAR = dict(rope_type="linear", rope_theta=10000.0, factor=2.0)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, tied, biases": (
        "Llama",
        dict(tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    ),
    "llama, head_dim": ("Llama", dict(head_dim=32, num_key_value_heads=1)),
    "llama, llama3 rope": ("Llama", dict(rope_parameters=LLAMA3)),
    "llama, yarn": ("Llama", dict(rope_parameters=YARN)),
    "llama, linear": ("Llama", dict(rope_parameters=LINEAR)),
    "mistral": ("Mistral", dict(head_dim=32, sliding_window=None)),
    "qwen2": ("Qwen2", dict(tie_word_embeddings=True)),
    "qwen3": ("Qwen3", dict(head_dim=32)),
    "qwen3, biases": ("Qwen3", dict(head_dim=64, attention_bias=True, tie_word_embeddings=True)),
}


def their_model(kind: str, options: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**(SMALL | options))
    model = getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()
    with torch.no_grad():  # norms and biases are 1 and 0 when new: give them something to do
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.3)
    return model


def our_model(path: Path) -> LlamaModel:
    checkpoint = open_checkpoint(str(path), "auto")
    return build_model(checkpoint.config, load_weights(checkpoint, dtype=torch.float32, device=CPU))


def all_kernels(model: LlamaModel) -> list[Kernels]:
    return [
        ReferenceKernels(model.config, LENGTH, CPU),
        compiled_kernels(model.config, torch.float32),
    ]


def layout_of(model: LlamaModel) -> KVLayout:
    c = model.config
    return KVLayout(
        pages=LENGTH, page_size=1, kv_heads=c.num_kv_heads, head_dim=c.head_dim, dtype=torch.float32
    )


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    kind, options = MODELS[name]
    theirs = their_model(kind, options)
    shard = "40KB" if name == "llama" else "5GB"
    theirs.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (name == "llama")
    ours = our_model(tmp_path)
    for length in (20, 150):  # within and past the scaled ropes' original length; loops and chunk
        ids = torch.randint(0, 200, (length,)).tolist()
        with torch.inference_mode():
            wanted = theirs(torch.tensor([ids])).logits[0]
        for kernels in all_kernels(ours):
            (got,) = run_alone(ours, kernels, [ids], layout_of(ours))
            torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("cuts", [(70, 71), (1, 2, 3, 4, 90, 91), (64, 128, 149)])
def test_chunks_and_single_tokens_equal_one_pass(cuts: tuple[int, ...], tmp_path: Path) -> None:
    their_model("Qwen3", {"head_dim": 32}).save_pretrained(tmp_path)
    model = our_model(tmp_path)
    ids = torch.randint(0, 200, (150,)).tolist()
    for kernels in all_kernels(model):
        (whole,) = run_alone(model, kernels, [ids], layout_of(model))
        chunks = [ids[a:b] for a, b in itertools.pairwise((0, *cuts, 150)) if a < b]
        parts = torch.cat(run_alone(model, kernels, chunks, layout_of(model)))
        torch.testing.assert_close(parts, whole, atol=1e-4, rtol=1e-4)
