"""Tiny models on disk for tests: a trained byte-level tokenizer, GGUF files of a given shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

TEXTS = (
    "The capital of France is Paris. The capital of Italy is Rome.",
    "In 1984 he'd paid 12345 crowns; we'll see. naïve café 日本語 😀\n\n\ttabs  and   spaces",
    "def add(first, second):\n    return first + second\n" * 3,
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def tiny_tokenizer() -> Tokenizer:
    """Byte-level BPE of 400 tokens that splits as SmolLM's does; special tokens come first."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator(TEXTS * 4, trainer)
    return inner


def tokenizer_fields(inner: Tokenizer) -> dict[str, Any]:
    """GGUF's tokenizer keys (below "tokenizer.ggml.") of a byte-level BPE."""
    import json

    model = json.loads(inner.to_str())["model"]
    tokens = [inner.id_to_token(number) for number in range(inner.get_vocab_size())]
    return {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "merges": [" ".join(pair) for pair in model["merges"]],
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


SHAPE = {
    "block_count": 2,
    "context_length": 64,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
}


def tensors_of(shape: dict[str, Any], *, vocabulary: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Random tensors by GGUF name for a Llama of this shape with tied embeddings."""
    hidden, inner = shape["embedding_length"], shape["feed_forward_length"]
    kv = hidden // shape["attention.head_count"] * shape["attention.head_count_kv"]
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (vocabulary, hidden)}
    for layer in range(shape["block_count"]):
        block = {
            "attn_norm": (hidden,),
            "attn_q": (hidden, hidden),
            "attn_k": (kv, hidden),
            "attn_v": (kv, hidden),
            "attn_output": (hidden, hidden),
            "ffn_norm": (hidden,),
            "ffn_gate": (inner, hidden),
            "ffn_up": (inner, hidden),
            "ffn_down": (hidden, inner),
        }
        shapes |= {f"blk.{layer}.{name}": dims for name, dims in block.items()}
    shapes["output_norm"] = (hidden,)
    random = np.random.default_rng(seed)
    return {
        f"{name}.weight": random.normal(0, 0.5, dims).astype(np.float32)
        for name, dims in shapes.items()
    }


def write_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    shape: dict[str, Any] | None = None,
    tokenizer: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    quantised: GGMLQuantizationType = GGMLQuantizationType.F32,
    more: dict[str, Any] | None = None,
) -> Path:
    """Write a GGUF file: matrices as `quantised`, vectors as F32. `more`: whole keys to add."""
    shape = SHAPE if shape is None else shape
    tokenizer = {} if tokenizer is None else tokenizer
    count = len(tokenizer.get("tokens", [0] * 300))
    tensors = tensors_of(shape, vocabulary=count) if tensors is None else tensors
    writer = gguf.GGUFWriter(path, architecture)
    values = {f"{architecture}.{key}": value for key, value in shape.items()}
    values |= {f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()}
    for key, value in (values | (more or {})).items():
        add(writer, key, value)
    for name, array in tensors.items():
        if array.ndim == 2:
            blocks = gguf.quants.quantize(array, quantised)
            writer.add_tensor(name, blocks, raw_dtype=quantised)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
