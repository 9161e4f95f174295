from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from paceline.checkpoint import Checkpoint, open_checkpoint
from paceline.errors import CheckpointError
from paceline.model.gguf import hf_name
from paceline.model.weights import expected_tensors, load_weights
from tests.tiny_models import SHAPE, tensors_of, write_gguf

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
BIASED = {"attention_bias": True, "mlp_bias": True}
MODELS: dict[str, tuple[type[PreTrainedModel], type[Any], dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama tied, biased": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True, **BIASED}),
    "mistral": (MistralForCausalLM, MistralConfig, {"head_dim": 16}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 12}),
    "qwen3 biased": (Qwen3ForCausalLM, Qwen3Config, {"attention_bias": True}),
}


def saved(path: Path, name: str = "llama", **options: Any) -> PreTrainedModel:
    model_class, config_class, values = MODELS[name]
    torch.manual_seed(0)
    model = model_class(config_class(**SIZES, **values))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)  # biases and norms, too
    model.save_pretrained(path, **options)
    return model


def loaded(path: Path, load_format: str = "auto") -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(str(path), load_format)
    return dict(load_weights(checkpoint, dtype=torch.float32, device=CPU))


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0, msg=name)


# --- safetensors -------------------------------------------------------------------------------


@pytest.mark.parametrize("shard", ["5GB", "8KB"])
@pytest.mark.parametrize("name", MODELS)
def test_tensors_equal_transformers(tmp_path: Path, name: str, shard: str) -> None:
    model = saved(tmp_path, name, max_shard_size=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "8KB")
    state = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    same(loaded(tmp_path), state)
    config = open_checkpoint(str(tmp_path), "auto").config
    assert expected_tensors(config) == {key: tuple(value.shape) for key, value in state.items()}


def test_dtype_progress_and_one_tensor_at_a_time(tmp_path: Path) -> None:
    model = saved(tmp_path)
    seen: list[tuple[int, int]] = []
    weights = load_weights(
        open_checkpoint(str(tmp_path), "auto"),
        dtype=torch.bfloat16,
        device=CPU,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert isinstance(weights, Iterator)
    for name, tensor in weights:
        assert torch.equal(tensor, model.state_dict()[name].bfloat16())
    count = len(model.state_dict())
    assert seen == [(done, count) for done in range(1, count + 1)]


def changed(path: Path, edit: dict[str, torch.Tensor | None]) -> None:
    """Rewrite model.safetensors with some tensors replaced, added or (None) removed."""
    tensors: dict[str, torch.Tensor | None] = {**load_file(path / "model.safetensors"), **edit}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, path / "model.safetensors")


def test_harmless_extra_tensors_are_passed_over(tmp_path: Path) -> None:
    model = saved(tmp_path, "llama tied, biased")
    changed(
        tmp_path,
        {
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
            "model.rotary_emb.inv_freq": torch.ones(4),
            "lm_head.weight": model.get_input_embeddings().weight.detach().clone(),
        },
    )
    assert loaded(tmp_path).keys() == model.state_dict().keys() - {"lm_head.weight"}


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        ({"model.norm.weight": None}, r"model\.norm\.weight of shape \(32,\) is missing"),
        ({"model.norm.weight": torch.ones(31)}, r"shape \(31,\), .* says \(32,\)"),
        ({"model.norm.bias": torch.ones(32)}, r"model\.norm\.bias' is unknown to LlamaForCausalLM"),
        ({"model.norm.weight": torch.ones(32, dtype=torch.int8)}, "stored as I8"),
        ({"model.norm.weight": torch.ones(32).to(torch.float8_e4m3fn)}, "stored as F8_E4M3"),
    ],
    ids=["missing", "shape", "unknown", "integer", "float8"],
)
def test_tensors_that_do_not_fit_are_named(
    tmp_path: Path, edit: dict[str, torch.Tensor | None], says: str
) -> None:
    saved(tmp_path)
    changed(tmp_path, edit)
    checkpoint = open_checkpoint(str(tmp_path), "auto")
    with pytest.raises(CheckpointError, match=says):  # at the call, before the first tensor
        load_weights(checkpoint, dtype=torch.float32, device=CPU)


def test_a_file_that_vanishes_is_reported(tmp_path: Path) -> None:
    saved(tmp_path)
    checkpoint = open_checkpoint(str(tmp_path), "auto")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="cannot read"):
        list(load_weights(checkpoint, dtype=torch.float32, device=CPU))


# --- dummy -------------------------------------------------------------------------------------


def dummies(checkpoint: Checkpoint, seed: int) -> dict[str, torch.Tensor]:
    return dict(load_weights(checkpoint, dtype=torch.float32, device=CPU, seed=seed))


def test_dummy_weights_need_a_config_alone(tmp_path: Path) -> None:
    saved(tmp_path, "qwen3")
    (tmp_path / "model.safetensors").unlink()
    checkpoint = open_checkpoint(str(tmp_path), "dummy")
    first = dummies(checkpoint, 1)
    shapes = {name: tuple(tensor.shape) for name, tensor in first.items()}
    assert shapes == expected_tensors(checkpoint.config)
    same(dummies(checkpoint, 1), first)
    assert not torch.equal(dummies(checkpoint, 2)["lm_head.weight"], first["lm_head.weight"])
    assert first["lm_head.weight"].std() == pytest.approx(0.02, rel=0.1)
    assert not torch.equal(first["lm_head.weight"], first["model.embed_tokens.weight"])
    for name in ("model.norm", "model.layers.1.self_attn.q_norm", "model.layers.0.input_layernorm"):
        assert torch.equal(first[f"{name}.weight"], torch.ones_like(first[f"{name}.weight"]))


def test_dummy_weights_of_a_gguf(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(write_gguf(tmp_path / "x.gguf")), "dummy")
    assert dummies(checkpoint, 0).keys() == expected_tensors(checkpoint.config).keys()


# --- GGUF --------------------------------------------------------------------------------------


def converted(rows: np.ndarray, heads: int) -> np.ndarray:
    """The row order that llama.cpp's converter gives to q and k of the Llama architecture."""
    size = len(rows) // heads
    order = [
        head * size + pair + half * size // 2
        for head in range(heads)
        for pair in range(size // 2)
        for half in (0, 1)
    ]
    return rows[order]


@pytest.mark.parametrize("kind", ["F32", "F16", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_gguf_tensors_are_dequantised_and_in_plain_order(
    tmp_path: Path, architecture: str, kind: str
) -> None:
    quantised = GGMLQuantizationType[kind]
    plain = tensors_of(SHAPE, vocabulary=40)
    plain["output.weight"] = plain["token_embd.weight"] + 1
    if architecture == "qwen2":
        for part, rows in (("q", 64), ("k", 32), ("v", 32)):
            for layer in (0, 1):
                plain[f"blk.{layer}.attn_{part}.bias"] = np.arange(rows, dtype=np.float32)
    stored = dict(plain)
    if architecture == "llama":
        for layer in (0, 1):
            for part, heads in (("q", 4), ("k", 2)):
                name = f"blk.{layer}.attn_{part}.weight"
                stored[name] = converted(plain[name], heads)
    path = write_gguf(
        tmp_path / "x.gguf", architecture=architecture, tensors=stored, quantised=quantised
    )
    wanted = {}
    for name, array in plain.items():
        tensor = torch.tensor(array)
        if array.ndim == 2:
            tensor = torch.tensor(dequantize(quantize(array, quantised), quantised))
            if kind.startswith("Q"):  # stands for a bfloat16 tensor
                tensor = tensor.bfloat16().float()
        wanted[str(hf_name(name))] = tensor
    same(loaded(path), wanted)


def test_gguf_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    tensors = tensors_of(SHAPE, vocabulary=40)
    for edit, says in (
        ({"output_norm.weight": np.ones(63, np.float32)}, r"model\.norm\.weight has shape \(63,\)"),
        (
            {"blk.0.ffn_gate_inp.weight": np.ones(63, np.float32)},
            r"ffn_gate_inp\.weight' is unknown",
        ),
    ):
        path = write_gguf(tmp_path / "x.gguf", tensors={**tensors, **edit})
        with pytest.raises(CheckpointError, match=says):
            loaded(path)
    del tensors["blk.1.attn_k.weight"]
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.k_proj\.weight of shape"):
        loaded(write_gguf(tmp_path / "y.gguf", tensors=tensors))


def test_large_tensors_come_in_chunks_without_seams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "x.gguf", quantised=GGMLQuantizationType.Q8_0)
    whole = loaded(path)
    monkeypatch.setattr("paceline.model.weights._CHUNK", 7 * 64)
    same(loaded(path), whole)


def test_demo_model_has_every_tensor() -> None:
    checkpoint = open_checkpoint(None, "auto")
    weights = load_weights(checkpoint, dtype=torch.bfloat16, device=CPU)
    shapes = {name: tuple(tensor.shape) for name, tensor in weights}
    assert shapes == expected_tensors(checkpoint.config)


def test_index_may_name_shards_of_any_name(tmp_path: Path) -> None:
    model = saved(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "part one.safetensors")
    names = dict.fromkeys(model.state_dict(), "part one.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    same(loaded(tmp_path), dict(model.state_dict()))
