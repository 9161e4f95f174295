from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import MODEL_ARCH, GGUFReader, get_tensor_name_map
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.checkpoint import open_checkpoint
from paceline.errors import CheckpointError
from paceline.model.config import RopeConfig
from paceline.model.gguf import TensorData, gguf_config, hf_name, plain_row_order, read_gguf
from paceline.model.weights import expected_tensors, load_weights
from paceline.serve.tokenizer import load_tokenizer
from tests.tiny_models import (
    SHAPE,
    tensors_of,
    tiny_tokenizer,
    tokenizer_fields,
    write_gguf,
)

WRITABLE = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


def same_as_package(path: Path) -> None:
    """Compare our reading of a file with the gguf package's: every key, every tensor."""
    ours, theirs = read_gguf(path), GGUFReader(path)
    keys = {name for name in theirs.fields if not name.startswith("GGUF.")}
    assert set(ours.metadata) == keys
    for name in keys:
        assert ours.metadata[name] == theirs.fields[name].contents(), name
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    data = TensorData(ours)
    for their in theirs.tensors:
        tensor = ours.tensors[their.name]
        assert tensor.shape == tuple(reversed(their.shape.tolist()))
        assert (tensor.offset, tensor.size) == (their.data_offset, their.n_bytes)
        floats = data.floats(tensor, data.rows(tensor)).reshape(tensor.shape)
        np.testing.assert_array_equal(floats, dequantize(their.data, their.tensor_type))


@pytest.mark.parametrize("kind", WRITABLE)
def test_reads_what_the_package_reads(tmp_path: Path, kind: str) -> None:
    path = write_gguf(
        tmp_path / "x.gguf",
        tokenizer=tokenizer_fields(tiny_tokenizer()),
        quantised=GGMLQuantizationType[kind],
        more={"a.float": 0.5, "a.flags": [True, False], "a.floats": [0.25, 1.5], "a.text": "é"},
    )
    same_as_package(path)


def test_names_are_hugging_faces(tmp_path: Path) -> None:
    file = read_gguf(write_gguf(tmp_path / "x.gguf", more={"general.architecture": "llama"}))
    names = get_tensor_name_map(MODEL_ARCH.QWEN3, 3)
    for ours in expected_tensors(gguf_config(file)):
        theirs = names.get_name(ours, try_suffixes=(".weight", ".bias"))
        assert theirs is not None
        assert hf_name(theirs) == ours
    assert hf_name("blk.12.attn_q_norm.weight") == "model.layers.12.self_attn.q_norm.weight"
    assert hf_name("output.weight") == "lm_head.weight"
    for unknown in ("rope_freqs.weight", "blk.0.ffn_gate_exps.weight", "blk.0.attn_q.scale", "x"):
        assert hf_name(unknown) is None


def test_row_order_of_the_converter_is_undone() -> None:
    heads, size = 3, 8
    rows = np.arange(heads * size * 2, dtype=np.uint8).reshape(heads * size, 2)
    # llama.cpp's converter: the halves of each head become neighbouring rows.
    halves = rows.reshape(heads, 2, size // 2, 2)
    converted = np.stack([halves[:, 0], halves[:, 1]], axis=2).reshape(rows.shape)
    np.testing.assert_array_equal(plain_row_order(converted, heads), rows)


# --- configuration -----------------------------------------------------------------------------


def config_of(tmp_path: Path, **more: Any) -> Any:
    architecture = more.pop("architecture", "llama")
    tensors = more.pop("tensors", None)
    keys = {f"{architecture}.{key}": value for key, value in more.items()}
    path = write_gguf(tmp_path / "x.gguf", architecture=architecture, more=keys, tensors=tensors)
    return gguf_config(read_gguf(path))


def test_demo_config() -> None:
    config = open_checkpoint(None, "auto").config
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (30, 9, 3)
    assert (config.hidden_size, config.head_dim, config.vocab_size) == (576, 64, 49152)
    assert (config.max_position, config.rope) == (8192, RopeConfig(theta=100000.0))
    assert (config.eos_token_ids, config.bos_token_id) == ((2,), 1)
    assert config.tie_embeddings


def test_config_from_metadata_and_tensors(tmp_path: Path) -> None:
    tensors = tensors_of(SHAPE, vocabulary=40)
    tensors["output.weight"] = tensors["token_embd.weight"]
    tensors["blk.0.attn_q.bias"] = np.zeros(64, np.float32)
    tensors["blk.0.attn_q_norm.weight"] = np.ones(16, np.float32)
    config = config_of(
        tmp_path, architecture="qwen3", tensors=tensors, **{"attention.sliding_window": 32}
    )
    assert (config.architecture, config.vocab_size) == ("Qwen3ForCausalLM", 40)
    assert (config.tie_embeddings, config.qkv_bias, config.out_bias) == (False, True, False)
    assert (config.qk_norm, config.mlp_bias, config.sliding_window) == (True, False, 32)
    assert config.rms_norm_eps == pytest.approx(1e-5)


def test_linear_and_yarn_scaling(tmp_path: Path) -> None:
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    assert config_of(tmp_path, **linear).rope == RopeConfig(kind="linear", factor=4.0)
    yarn = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 2.0,
        "rope.scaling.original_context_length": 32,
        "rope.freq_base": 5000.0,
    }
    assert config_of(tmp_path, **yarn).rope == RopeConfig(
        theta=5000.0, kind="yarn", factor=2.0, original_max_position=32
    )


def divisors(factor: float, theta: float, size: int) -> np.ndarray:
    """Llama 3.1's divisors of the frequencies, as Hugging Face's formula gives them."""
    out = []
    for index in range(0, size, 2):
        wavelength = 2 * math.pi * theta ** (index / size)
        smooth = min(max((8192 / wavelength - 1) / 3, 0), 1)
        out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, np.float32)


def test_llama3_scaling_is_recognised_by_its_divisors(tmp_path: Path) -> None:
    tensors = tensors_of(SHAPE, vocabulary=40)
    tensors["rope_freqs.weight"] = divisors(32.0, 500000.0, 16)
    rope = config_of(tmp_path, tensors=tensors, **{"rope.freq_base": 500000.0}).rope
    assert rope == RopeConfig(
        theta=500000.0, kind="llama3", factor=32.0, original_max_position=8192
    )
    for wrong in (divisors(32.0, 10000.0, 16), np.zeros(8, np.float32), np.ones(3, np.float32)):
        tensors["rope_freqs.weight"] = wrong
        with pytest.raises(CheckpointError, match="frequency factors"):
            config_of(tmp_path, tensors=tensors, **{"rope.freq_base": 500000.0})


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"architecture": "gemma2"}, "'gemma2' is not supported"),
        ({"expert_count": 8}, "mixture-of-experts"),
        ({"block_count": "two"}, "llama.block_count must be a whole number"),
        ({"attention.head_count": [4, 4]}, "must be a whole number of at least 1, not a list of 2"),
        ({"rope.dimension_count": 8}, "rope.dimension_count"),
        ({"attention.value_length": 8}, "attention.value_length"),
        ({"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}, "'longrope'"),
        ({"rope.scaling.type": "yarn"}, "rope.scaling.factor is missing"),
    ],
    ids=str,
)
def test_what_cannot_run_is_refused(tmp_path: Path, more: dict[str, Any], says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        config_of(tmp_path, **more)


def test_a_tensor_the_package_cannot_dequantise(tmp_path: Path) -> None:
    tensor = read_gguf(write_gguf(tmp_path / "x.gguf")).tensors["token_embd.weight"]
    file = read_gguf(tmp_path / "x.gguf")
    integers = type(tensor)(
        name="token_embd.weight", shape=(1, 1), kind=int(GGMLQuantizationType.I32),
        offset=tensor.offset, size=4,
    )  # fmt: skip
    data = TensorData(file)
    with pytest.raises(CheckpointError, match="stored as I32"):
        data.floats(integers, data.rows(integers))


# --- damage ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "damaged or truncated"),
        (b"GGU", "not a GGUF file"),
        (b"PK\x03\x04" + bytes(40), "not a GGUF file"),
        (b"GGUF" + (1).to_bytes(4, "little") + bytes(40), "version 1"),
        (b"GGUF" + (3).to_bytes(4, "big") + bytes(40), "big-endian"),
        (b"GGUF" + (3).to_bytes(4, "little") + b"\xff" * 16, "damaged or truncated"),
        (b"GGUF" + (3).to_bytes(4, "little") + bytes(16), "general.architecture is missing"),
    ],
)
def test_files_that_are_no_gguf(tmp_path: Path, raw: bytes, says: str) -> None:
    (tmp_path / "x.gguf").write_bytes(raw)
    with pytest.raises(CheckpointError, match=says):
        gguf_config(read_gguf(tmp_path / "x.gguf"))


def test_parts_of_a_split_model(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "x.gguf", more={"split.count": 3})
    with pytest.raises(CheckpointError, match="one part of several"):
        read_gguf(path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "x.gguf"
    write_gguf(path, tokenizer=tokenizer_fields(tiny_tokenizer()))
    return path.read_bytes()


@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_a_truncated_file_is_reported_at_once(
    whole: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("cut") / "x.gguf"
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(CheckpointError) as caught:
        read_gguf(path)
    assert "\n" not in str(caught.value)


@given(place=st.integers(0, 400) | st.integers(0, 2**20), byte=st.integers(0, 255))
@settings(deadline=None, max_examples=100)
def test_a_damaged_header_loads_or_is_refused(
    whole: bytes, tmp_path_factory: pytest.TempPathFactory, place: int, byte: int
) -> None:
    damaged = bytearray(whole)
    damaged[place % (whole.index(b"output_norm.weight") + 40)] = byte
    path = tmp_path_factory.mktemp("damaged") / "x.gguf"
    path.write_bytes(damaged)
    try:
        checkpoint = open_checkpoint(str(path), "auto")
        load_tokenizer(checkpoint)
        list(load_weights(checkpoint, dtype=torch.float32, device=torch.device("cpu")))
    except CheckpointError as error:
        assert "\n" not in str(error)
