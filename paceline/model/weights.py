"""Tensors of a checkpoint by Hugging Face name, one at a time.

Knows the names and shapes that a configuration calls for, and how safetensors, GGUF and dummy
weights yield them. Knows nothing of the model's arithmetic or of how it lays out its parameters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from paceline.checkpoint import Checkpoint
from paceline.errors import CheckpointError
from paceline.model.config import ModelConfig
from paceline.model.gguf import (
    GGUFFile,
    GGUFTensor,
    TensorData,
    hf_name,
    plain_row_order,
    rotary_heads,
)

# Elements de-quantised at a time: bounds the float32 copy of a large tensor to 16 MiB.
_CHUNK = 4 * 1024 * 1024
_CPU = torch.device("cpu")
_DUMMY_STD = 0.02
_READABLE = ("F64", "F32", "F16", "BF16")
# Tensors of known files that the model computes itself.
_HARMLESS = re.compile(
    r"(model\.(layers\.\d+\.self_attn\.)?)?rotary_emb\.inv_freq|rope_freqs\.weight"
)

NamedTensor = tuple[str, torch.Tensor]


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the model, in the order of the forward pass.

    Matrices are (outputs, inputs). Source: the Llama family in Hugging Face checkpoints.
    """
    hidden, inner, size = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * size, config.num_kv_heads * size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}

    def linear(name: str, shape: tuple[int, int], *, bias: bool) -> None:
        shapes[f"{name}.weight"] = shape
        if bias:
            shapes[f"{name}.bias"] = shape[:1]

    for index in range(config.num_layers):
        layer = f"model.layers.{index}"
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        linear(f"{layer}.self_attn.q_proj", (q, hidden), bias=config.qkv_bias)
        linear(f"{layer}.self_attn.k_proj", (kv, hidden), bias=config.qkv_bias)
        linear(f"{layer}.self_attn.v_proj", (kv, hidden), bias=config.qkv_bias)
        if config.qk_norm:
            shapes[f"{layer}.self_attn.q_norm.weight"] = (size,)
            shapes[f"{layer}.self_attn.k_norm.weight"] = (size,)
        linear(f"{layer}.self_attn.o_proj", (hidden, q), bias=config.out_bias)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        linear(f"{layer}.mlp.gate_proj", (inner, hidden), bias=config.mlp_bias)
        linear(f"{layer}.mlp.up_proj", (inner, hidden), bias=config.mlp_bias)
        linear(f"{layer}.mlp.down_proj", (hidden, inner), bias=config.mlp_bias)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def load_weights(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[int, int], None] | None = None,
    seed: int = 0,
) -> Iterator[NamedTensor]:
    """Every tensor of `expected_tensors(checkpoint.config)`, in `dtype` on `device`.

    The order is that of the files. Beyond what the caller keeps, memory holds one tensor at a time.
    progress: called with (tensors done, tensors in all) after each. seed: of dummy weights.
    Raises CheckpointError if a tensor is missing, unknown, of a wrong shape or of a format that
    cannot be read: at the call, before any tensor is read, where the headers tell.
    """
    config = checkpoint.config
    if checkpoint.format == "dummy":
        tensors = dummy_weights(config, seed, dtype=dtype, device=device)
    elif checkpoint.gguf is not None:
        tensors = _gguf_weights(checkpoint.gguf, config, dtype=dtype)
    else:
        tensors = _safetensors_weights(checkpoint, dtype=dtype)
    return _delivered(tensors, len(expected_tensors(config)), device=device, progress=progress)


def _delivered(
    tensors: Iterator[NamedTensor],
    total: int,
    *,
    device: torch.device,
    progress: Callable[[int, int], None] | None,
) -> Iterator[NamedTensor]:
    for done, (name, tensor) in enumerate(tensors, start=1):
        yield name, tensor.to(device)
        if progress is not None:
            progress(done, total)


def _check(path: Path, config: ModelConfig, *, found: Mapping[str, tuple[int, ...]]) -> None:
    """Compare the names and shapes of a file with those that the configuration calls for."""
    expected = expected_tensors(config)
    for name, shape in expected.items():
        if name not in found:
            raise CheckpointError(
                f"{path}: tensor {name} of shape {shape} is missing; fetch the files again"
            )
        if found[name] != shape:
            raise CheckpointError(
                f"{path}: tensor {name} has shape {found[name]}, its configuration says {shape}"
            )
    for name in found:
        if name not in expected:
            raise CheckpointError(f"{path}: tensor {name!r} is unknown to {config.architecture}")


def _needed(name: str, config: ModelConfig) -> bool:
    """Is this no tensor to pass over in silence? A tied output projection is the embedding."""
    if _HARMLESS.fullmatch(name):
        return False
    return not (config.tie_embeddings and name == "lm_head.weight")


# --- dummy -------------------------------------------------------------------------------------


def dummy_weights(
    config: ModelConfig, seed: int, *, dtype: torch.dtype, device: torch.device = _CPU
) -> Iterator[NamedTensor]:
    """Random weights, the same for a seed and a kind of device: norms 1, all else normal(0, 0.02).

    Made on the device: a large model's would take minutes on a CPU.
    """
    generator = torch.Generator(device).manual_seed(seed)
    for name, shape in expected_tensors(config).items():
        tensor = torch.empty(shape, dtype=dtype, device=device)
        if name.endswith("norm.weight"):
            yield name, tensor.fill_(1.0)
        else:
            yield name, tensor.normal_(0.0, _DUMMY_STD, generator=generator)


# --- safetensors -------------------------------------------------------------------------------


def _safetensors_weights(checkpoint: Checkpoint, *, dtype: torch.dtype) -> Iterator[NamedTensor]:
    stored = {
        name: tensor
        for name, tensor in checkpoint.tensors.items()
        if _needed(name, checkpoint.config)
    }
    _check(
        checkpoint.path,
        checkpoint.config,
        found={name: tensor.shape for name, tensor in stored.items()},
    )
    for name, tensor in stored.items():
        if tensor.dtype not in _READABLE:
            raise CheckpointError(
                f"{tensor.file}: tensor {name} is stored as {tensor.dtype}; only "
                f"{', '.join(_READABLE)} can be read: use the original weights"
            )
    files: dict[Path, list[str]] = {}
    for name, tensor in stored.items():
        files.setdefault(tensor.file, []).append(name)
    return _read_files(files, dtype=dtype)


def _read_files(files: Mapping[Path, list[str]], *, dtype: torch.dtype) -> Iterator[NamedTensor]:
    for path, names in files.items():
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in names:
                    yield name, file.get_tensor(name).to(dtype)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"cannot read {path}: {error}") from None


# --- GGUF --------------------------------------------------------------------------------------


def _gguf_weights(
    file: GGUFFile, config: ModelConfig, *, dtype: torch.dtype
) -> Iterator[NamedTensor]:
    named = {
        hf_name(tensor.name) or tensor.name: tensor
        for tensor in file.tensors.values()
        if _needed(tensor.name, config)
    }
    _check(file.path, config, found={name: tensor.shape for name, tensor in named.items()})
    data = TensorData(file)
    return (
        (
            name,
            _dequantised(
                data, tensor, heads=rotary_heads(file, config, name=tensor.name), dtype=dtype
            ),
        )
        for name, tensor in named.items()
    )


def _dequantised(
    data: TensorData, tensor: GGUFTensor, *, heads: int, dtype: torch.dtype
) -> torch.Tensor:
    """One tensor in `dtype`; `heads`: of `rotary_heads`, whose row order is undone."""
    rows = data.rows(tensor)  # (rows, bytes of a row)
    if heads:
        rows = plain_row_order(rows, heads)
    columns = tensor.shape[-1]
    out = torch.empty(len(rows), columns, dtype=dtype)
    step = max(1, _CHUNK // columns)
    # A quantised tensor stands for a bfloat16 one: float32 holds those same values.
    rounds = data.quantised(tensor) and dtype != torch.bfloat16
    for start in range(0, len(rows), step):
        floats = torch.from_numpy(data.floats(tensor, rows[start : start + step]))
        out[start : start + step] = floats.bfloat16() if rounds else floats
    return out.reshape(tensor.shape)
