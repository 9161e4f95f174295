"""Every architecture against transformers, on small random models, in float32."""

from __future__ import annotations

import functools
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
from tests.model.support import LENGTH, chunk_view, compiled_kernels, run_alone

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
PAGE = 16
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
    "llama, yarn in full": (
        "Llama",
        dict(
            rope_parameters=YARN
            | dict(beta_fast=8.0, beta_slow=0.5, mscale=1.0, mscale_all_dim=0.5, truncate=False)
        ),
    ),
    "mistral": ("Mistral", dict(head_dim=32, sliding_window=None)),
    "mistral, in its window": ("Mistral", dict(sliding_window=160, num_key_value_heads=4)),
    "qwen2": ("Qwen2", dict(tie_word_embeddings=True)),
    "qwen3": ("Qwen3", dict(head_dim=32)),
    "qwen3, biases": ("Qwen3", dict(head_dim=64, attention_bias=True, tie_word_embeddings=True)),
    "qwen3, one head, large epsilon": (
        "Qwen3",
        dict(num_attention_heads=1, num_key_value_heads=1, head_dim=32, rms_norm_eps=0.5),
    ),
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


def kernels_of(kind: str, model: LlamaModel) -> Kernels:
    if kind == "compiled":
        return compiled_kernels(model.config, torch.float32)
    return ReferenceKernels(model.config, LENGTH, CPU)


def layout_of(model: LlamaModel) -> KVLayout:
    c = model.config
    return KVLayout(
        pages=LENGTH // PAGE,
        page_size=PAGE,
        kv_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        dtype=torch.float32,
    )


def random_ids(count: int) -> list[int]:
    return torch.randint(0, 200, (count,), generator=torch.Generator().manual_seed(count)).tolist()


@functools.cache
def saved(name: str, directory: Path) -> tuple[LlamaModel, dict[int, torch.Tensor]]:
    """Our model of the saved one, and its logits by the number of tokens.

    Within and past the scaled ropes' original length; compiled loops and a chunk.
    """
    kind, options = MODELS[name]
    theirs = their_model(kind, options)
    path = directory / name.replace(" ", "_")
    theirs.save_pretrained(path, max_shard_size="40KB" if name == "llama" else "5GB")
    assert (path / "model.safetensors.index.json").exists() == (name == "llama")
    with torch.inference_mode():
        wanted = {n: theirs(torch.tensor([random_ids(n)])).logits[0] for n in (20, 150)}
    return our_model(path), wanted


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("kind", ["reference", "compiled"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name: str, kind: str, directory: Path) -> None:
    ours, theirs = saved(name, directory)
    for length, wanted in theirs.items():
        assert wanted.std() > 0.3  # logits that say something
        layout = layout_of(ours)
        (got,) = run_alone(ours, kernels_of(kind, ours), [random_ids(length)], layout)
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["reference", "compiled"])
@pytest.mark.parametrize(
    "cuts",
    [(70, 71), (1, 2, 3, 4, 90, 91), (64, 128, 149), (65, 130, *range(131, 150))],
    ids=["a token between", "tokens before", "at the tree's width", "two chunks, then decode"],
)
@pytest.mark.parametrize("name", ["qwen3", "llama, yarn"])
def test_chunks_and_single_tokens_equal_one_pass(
    name: str, cuts: tuple[int, ...], kind: str, directory: Path
) -> None:
    model, theirs = saved(name, directory)
    chunks = [random_ids(150)[a:b] for a, b in itertools.pairwise((0, *cuts, 150))]
    parts = run_alone(model, kernels_of(kind, model), chunks, layout_of(model))
    torch.testing.assert_close(torch.cat(parts), theirs[150], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["reference", "compiled"])
@torch.inference_mode()
def test_the_residual_stream_is_that_of_transformers(kind: str, directory: Path) -> None:
    """Before each layer, as drafters read it; what comes after the last is never normed."""
    ours, _ = saved("qwen3", directory)
    theirs = their_model(*MODELS["qwen3"])
    ids = random_ids(20)
    wanted = theirs(torch.tensor([ids]), output_hidden_states=True).hidden_states
    caches = [layout_of(ours).allocate(CPU) for _ in ours.layers]
    step = kernels_of(kind, ours).begin(chunk_view(0, 20, LENGTH // PAGE))
    hidden, seen = ours.forward(torch.tensor(ids), step, caches, (0, 1, 3))
    first, second, last = seen.chunk(3, 1)
    torch.testing.assert_close(first, wanted[0][0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(second, wanted[1][0], atol=1e-4, rtol=1e-4)
    assert torch.equal(last, hidden)
    normed = theirs.model.norm(last)  # transformers norms its last one
    torch.testing.assert_close(normed, wanted[3][0], atol=1e-4, rtol=1e-4)
    again, nothing = ours.forward(torch.tensor(ids), step, caches)
    assert torch.equal(again, hidden) and nothing.shape == (20, 0)
