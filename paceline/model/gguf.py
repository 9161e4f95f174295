"""A GGUF file as plain values: metadata, tensor directory and de-quantised rows. No torch.

Knows the container (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), the names that
llama.cpp's converter gives to tensors and metadata keys, and the row order it gives to q and k.
Block formats are the `gguf` package's. Knows nothing of tokenizers or of the model's arithmetic.

The header is read here and not by `gguf.GGUFReader`: that makes one numpy view for each of the
vocabulary's strings (2.6 s for a 49k vocabulary, here 0.06 s) and lets damaged files escape as
errors of many kinds.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from paceline.errors import CheckpointError
from paceline.model.config import Fields, ModelConfig, RopeConfig

Scalar: TypeAlias = int | float | bool | str
Value: TypeAlias = Scalar | list[int] | list[float] | list[bool] | list[str]
Floats: TypeAlias = npt.NDArray[np.float32]

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
# GGUF value type -> numpy type of its little-endian bytes (7 is a bool of one byte).
_NUMBERS = {
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4",
    6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, kw_only=True)
class GGUFTensor:
    """Where one tensor lies. `shape` is outermost first (rows, columns), as in PyTorch.

    kind: ggml's number of the block format. offset, size: bytes, from the start of the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int
    size: int


@dataclass(frozen=True, kw_only=True)
class GGUFFile:
    """A file's header: metadata by key, tensors by GGUF name in file order."""

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, GGUFTensor]


def read_gguf(path: Path) -> GGUFFile:
    """Read and check the header of a GGUF file; tensor data is not touched.

    Raises CheckpointError if the file is unreadable, damaged, truncated (also in its tensor data),
    one part of several, or of a version or byte order other than 2 or 3, little-endian.
    """
    try:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            return _read(path, data)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    except (struct.error, ValueError, OverflowError, MemoryError) as error:
        raise CheckpointError(f"{path} is damaged or truncated ({error}); fetch it again") from None


def _read(path: Path, data: mmap.mmap) -> GGUFFile:
    if data[:4] != _MAGIC:
        raise CheckpointError(f"{path} is not a GGUF file (it does not begin with 'GGUF')")
    cursor = _Cursor(data)
    version = cursor.unpack("<I")
    if version not in (2, 3):
        raise CheckpointError(
            f"{path} has GGUF version {version} or is big-endian; "
            "Paceline reads versions 2 and 3, little-endian: convert it again"
        )
    tensor_count, value_count = cursor.unpack("<Q"), cursor.unpack("<Q")
    metadata: dict[str, Value] = {}
    for _ in range(value_count):
        key = cursor.string()
        if key in metadata:
            raise ValueError(f"metadata key {key!r} occurs twice")
        metadata[key] = cursor.value()
    if metadata.get("split.count", 1) not in (0, 1):
        raise CheckpointError(f"{path} is one part of several: merge them with llama-gguf-split")
    raw = [cursor.tensor() for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError("general.alignment is not a positive number")
    start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, kind, offset in raw:
        if name in tensors:
            raise ValueError(f"tensor {name!r} occurs twice")
        tensor = _located(name, shape, kind=kind, offset=start + offset)
        if tensor.offset + tensor.size > len(data):
            raise ValueError(
                f"tensor {name!r} ends at byte {tensor.offset + tensor.size} of {len(data)}"
            )
        tensors[name] = tensor
    return GGUFFile(path=path, metadata=metadata, tensors=tensors)


def _located(name: str, shape: tuple[int, ...], *, kind: int, offset: int) -> GGUFTensor:
    block, block_bytes = _block(kind)
    if 0 in shape or shape[-1] % block:
        raise ValueError(f"tensor {name!r} of shape {shape} does not divide into blocks of {block}")
    size = math.prod(shape) // block * block_bytes
    return GGUFTensor(name=name, shape=shape, kind=kind, offset=offset, size=size)


def _block(kind: int) -> tuple[int, int]:
    """(elements, bytes) of one block of a ggml format."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        elements, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (KeyError, ValueError):
        raise CheckpointError(
            f"ggml tensor format {kind} is unknown here; upgrade the gguf package"
        ) from None
    return int(elements), int(size)


class _Cursor:
    """Reads values in file order; struct.error or ValueError at the end of the data."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._size = len(data)
        self.at = len(_MAGIC)

    def unpack(self, code: str) -> int:
        value: int = struct.unpack_from(code, self._data, self.at)[0]
        self.at += struct.calcsize(code)
        return value

    def string(self) -> str:
        return self._strings(1)[0]

    def value(self) -> Value:
        kind = self.unpack("<I")
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            kind, count = self.unpack("<I"), self.unpack("<Q")
            return self._strings(count) if kind == _STRING else self._numbers(kind, count)
        scalar: Scalar = self._numbers(kind, 1)[0]
        return scalar

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """(name, shape outermost first, ggml format, offset within the data section)."""
        name, rank = self.string(), self.unpack("<I")
        if not 1 <= rank <= 4:
            raise ValueError(f"tensor {name!r} has {rank} dimensions")
        dims = tuple(self.unpack("<Q") for _ in range(rank))
        return name, dims[::-1], self.unpack("<I"), self.unpack("<Q")

    def _strings(self, count: int) -> list[str]:
        data, at, out = self._data, self.at, []
        self._claim(count, _U64.size)
        for _ in range(count):
            (length,) = _U64.unpack_from(data, at)
            end = at + _U64.size + length
            if end > self._size:
                raise ValueError(f"a string ends at byte {end} of {self._size}")
            out.append(data[at + _U64.size : end].decode())
            at = end
        self.at = at
        return out

    def _numbers(self, kind: int, count: int) -> list[Any]:
        if kind not in _NUMBERS:
            raise ValueError(f"value type {kind} at byte {self.at}")
        dtype = np.dtype(_NUMBERS[kind])
        end = self.at + self._claim(count, dtype.itemsize)
        numbers = np.frombuffer(self._data[self.at : end], dtype)
        self.at = end
        return list(numbers.tolist())

    def _claim(self, count: int, size: int) -> int:
        """Bytes of `count` items of `size` bytes, which must be left in the file."""
        if count * size > self._size - self.at:
            raise ValueError(f"{count} values at byte {self.at} of {self._size}")
        return count * size


# --- tensors -----------------------------------------------------------------------------------

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK_NAME = re.compile(r"blk\.(\d+)\.(\w+)")


def hf_name(name: str) -> str | None:
    """Hugging Face's name of a GGUF tensor; None if the Llama family has no such tensor."""
    stem, _, suffix = name.rpartition(".")
    if suffix not in ("weight", "bias"):
        return None
    if stem in _TOP:
        return f"{_TOP[stem]}.{suffix}"
    match = _BLOCK_NAME.fullmatch(stem)
    if match is None or match[2] not in _LAYER:
        return None
    return f"model.layers.{int(match[1])}.{_LAYER[match[2]]}.{suffix}"


def rotary_heads(file: GGUFFile, config: ModelConfig, *, name: str) -> int:
    """Heads whose rows the converter has interleaved in this tensor; 0 where it has not.

    llama.cpp rotates neighbouring elements (2i, 2i+1) in its "llama" architecture, Hugging Face
    the halves (i, i + head_dim/2), so the converter reorders the rows of q and k in each head.
    name: GGUF's.
    """
    if file.metadata.get("general.architecture") != "llama":
        return 0
    match = _BLOCK_NAME.match(name)
    part = match[2] if match else ""
    return {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(part, 0)


class TensorData:
    """The tensor data of one GGUF file, mapped; rows are de-quantised on demand."""

    def __init__(self, file: GGUFFile) -> None:
        self._path = file.path
        self._bytes = np.memmap(file.path, dtype=np.uint8, mode="r")

    def rows(self, tensor: GGUFTensor) -> npt.NDArray[np.uint8]:
        """The raw blocks: (rows, bytes of one row); a vector is one row."""
        raw = self._bytes[tensor.offset : tensor.offset + tensor.size]
        return raw.reshape(math.prod(tensor.shape[:-1]), -1)

    def quantised(self, tensor: GGUFTensor) -> bool:
        """Whether `tensor` is stored in blocks of few bits, not as plain floats."""
        from gguf.constants import GGMLQuantizationType as Kind

        return Kind(tensor.kind) not in (Kind.F64, Kind.F32, Kind.F16, Kind.BF16)

    def floats(self, tensor: GGUFTensor, raw: npt.NDArray[np.uint8]) -> Floats:
        """De-quantise rows of `tensor`: (rows, bytes) -> (rows, columns) in float32."""
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        kind = GGMLQuantizationType(tensor.kind)
        try:
            with np.errstate(all="ignore"):  # scales that are not finite make NaN, not a warning
                floats: Floats = dequantize(np.ascontiguousarray(raw), kind)
        except NotImplementedError:
            raise CheckpointError(
                f"{self._path}: tensor {tensor.name} is stored as {kind.name}, which the gguf "
                "package cannot de-quantise; use another quantisation"
            ) from None
        return floats if floats.flags.writeable else floats.copy()


def plain_row_order(rows: npt.NDArray[np.uint8], heads: int) -> npt.NDArray[np.uint8]:
    """Undo the converter's interleaving of q or k: (heads * head_dim, n) -> the same shape."""
    pairs = rows.reshape(heads, -1, 2, rows.shape[-1])  # (heads, head_dim/2, 2, n)
    return pairs.swapaxes(1, 2).reshape(rows.shape)


# --- configuration -----------------------------------------------------------------------------

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def gguf_config(file: GGUFFile) -> ModelConfig:
    """The model's shape from the metadata and tensor directory of a GGUF file.

    Raises CheckpointError for an architecture, rope type or variant that Paceline does not run.
    """
    architecture = gguf_fields(file, "general").text("architecture")
    if architecture not in _ARCHITECTURES:
        raise CheckpointError(
            f"{file.path}: GGUF architecture {architecture!r} is not supported; "
            f"supported: {', '.join(_ARCHITECTURES)}"
        )
    keys = gguf_fields(file, architecture)
    if keys.integer("expert_count", 0):
        raise CheckpointError(f"{file.path}: mixture-of-experts models are not supported")
    heads = keys.integer("attention.head_count", minimum=1)
    hidden = keys.integer("embedding_length", minimum=1)
    head_dim = keys.integer("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.integer(key, head_dim) != head_dim:
            raise CheckpointError(f"{file.path}: {key} other than the head size is not supported")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{file.path}: token_embd.weight is missing or is not a matrix")
    tokenizer = gguf_fields(file, "tokenizer.ggml")
    ends = [tokenizer.optional_integer(f"{key}_token_id") for key in ("eos", "eot", "eom")]
    return ModelConfig(
        architecture=_ARCHITECTURES[architecture],
        vocab_size=embedding.shape[0],
        hidden_size=hidden,
        intermediate_size=keys.integer("feed_forward_length"),
        num_layers=keys.integer("block_count"),
        num_heads=heads,
        num_kv_heads=keys.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        rms_norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        max_position=keys.integer("context_length"),
        rope=_rope(file, keys, head_dim=head_dim),
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        out_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        tie_embeddings="output.weight" not in file.tensors,
        sliding_window=keys.integer("attention.sliding_window", 0) or None,
        eos_token_ids=tuple(dict.fromkeys(token for token in ends if token is not None)),
        bos_token_id=tokenizer.optional_integer("bos_token_id"),
    )


def gguf_fields(file: GGUFFile, prefix: str) -> Fields:
    """The metadata keys `<prefix>.<key>`."""
    return Fields(file.metadata, str(file.path), prefix=f"{prefix}.")


def _rope(file: GGUFFile, keys: Fields, *, head_dim: int) -> RopeConfig:
    theta = keys.number("rope.freq_base", 10000.0)
    if "rope_freqs.weight" in file.tensors:
        return _llama3_rope(file, theta, head_dim=head_dim)
    kind = keys.text("rope.scaling.type", "none")
    if kind == "none":
        return RopeConfig(theta=theta)
    factor = keys.number("rope.scaling.factor")
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=factor)
    if kind == "yarn" and keys.number("rope.scaling.attn_factor", 1.0) == 1.0:
        original = keys.integer("rope.scaling.original_context_length", minimum=1)
        return RopeConfig(
            theta=theta,
            kind="yarn",
            factor=factor,
            original_max_position=original,
            beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
        )
    raise CheckpointError(f"{file.path}: rope scaling {kind!r} of this kind is not supported")


def _llama3_rope(file: GGUFFile, theta: float, *, head_dim: int) -> RopeConfig:
    """Llama 3.1's scaling. GGUF keeps its divisors of the head_dim / 2 frequencies, no parameters.

    All published Llama 3.1 to 3.3 models share every parameter but the factor, which is the
    largest divisor; the other divisors must then come out as stored.
    """
    tensor = file.tensors["rope_freqs.weight"]
    data = TensorData(file)
    stored = data.floats(tensor, data.rows(tensor)).reshape(-1)  # (head_dim / 2,)
    factor = float(stored.max()) if stored.min() >= 1 else 1.0
    rope = RopeConfig(theta=theta, kind="llama3", factor=factor, original_max_position=8192)
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    blend = np.clip((rope.original_max_position / wavelength - low) / (high - low), 0.0, 1.0)
    divisors = 1 / (blend + (1 - blend) / rope.factor)
    if stored.shape != divisors.shape or not np.allclose(stored, divisors, rtol=1e-3):
        raise CheckpointError(
            f"{file.path}: the rope frequency factors are not those of Llama 3.1 to 3.3; "
            "use the safetensors checkpoint"
        )
    return rope
