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
