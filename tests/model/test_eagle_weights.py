"""Reading, making up and writing a drafter's tensors."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from paceline.drafter_checkpoint import open_drafter, open_readings
from paceline.errors import CheckpointError
from paceline.model.config import RopeConfig
from paceline.model.eagle_config import EagleConfig, draft_tensors
from paceline.model.eagle_weights import dummy_drafter, load_drafter, save_drafter
from tests.tiny_drafters import MORE, SHAPES, TARGET, tensors_of, values_of, write_drafter

CPU = torch.device("cpu")
IDS = "eagle_aux_hidden_state_layer_ids"
BASE = EagleConfig(
    hidden_size=16,
    target_hidden_size=16,
    intermediate_size=24,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    rms_norm_eps=1e-5,
    max_position=64,
    vocab_size=48,
    draft_vocab_size=20,
    boundaries=(2, 6, 9),
)


def load(path: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return load_drafter(open_drafter(str(path), TARGET), dtype=dtype, device=CPU)


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- writing -----------------------------------------------------------------------------------

ROPES = st.one_of(
    st.builds(RopeConfig, theta=st.floats(1e3, 1e7)),
    st.builds(
        RopeConfig,
        theta=st.floats(1e3, 1e7),
        kind=st.sampled_from(["linear", "yarn"]),
        factor=st.floats(0.5, 64),
        original_max_position=st.sampled_from([16, 64, 4096]),
        beta_fast=st.sampled_from([32.0, 16.0]),
        attention_factor=st.sampled_from([None, 1.5]),
        mscale=st.sampled_from([None, 0.7]),
        truncate=st.booleans(),
    ),
    st.builds(
        RopeConfig,
        kind=st.just("llama3"),
        factor=st.floats(1, 32),
        original_max_position=st.sampled_from([16, 64, 4096]),
        low_freq_factor=st.sampled_from([1.0, 2.0]),
        high_freq_factor=st.sampled_from([4.0, 8.0]),
    ),
)


@st.composite
def configs(draw: st.DrawFn) -> EagleConfig:
    hidden = draw(st.sampled_from([16, 8]))
    vocabulary = draw(st.sampled_from([20, 48]))
    free = hidden == 16 and vocabulary == 48
    norms = draw(st.sampled_from([(False, False), (True, False), (False, True)]))
    names = ("norm_before_residual", "norm_head", "feed_normed", "qk_norm", "qkv_bias", "fc_bias")
    flags: dict[str, Any] = {name: draw(st.booleans()) for name in names}
    return dataclasses.replace(
        BASE,
        hidden_size=hidden,
        draft_vocab_size=vocabulary,
        boundaries=tuple(sorted(draw(st.sets(st.integers(0, 12), min_size=1, max_size=4)))),
        max_position=draw(st.sampled_from([16, 64, 100000])),
        rope=draw(ROPES),
        norm_before_fc=norms[0],
        fc_norm=norms[1],
        own_embedding=hidden == 8 or draw(st.booleans()),
        own_head=not free or draw(st.booleans()),
        **flags,
    )


@settings(deadline=None, max_examples=80)
@given(configs(), st.integers(0, 9), st.sampled_from([torch.float32, torch.bfloat16]))
def test_what_is_written_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, config: EagleConfig, seed: int, dtype: torch.dtype
) -> None:
    path = tmp_path_factory.mktemp("drafters") / "drafter"
    tensors = dummy_drafter(config, seed, dtype=dtype)
    save_drafter(path, config, tensors)
    assert open_drafter(str(path), TARGET).config == config
    assert open_readings(str(path), TARGET) == [("auto", "auto")]
    found = load(path, dtype)
    assert list(found) == list(tensors) == list(draft_tensors(config))
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


@settings(deadline=None, max_examples=40)
@given(configs(), st.integers(0, 9))
def test_config_json_alone_gives_the_same_drafter_with_made_up_weights(
    tmp_path_factory: pytest.TempPathFactory, config: EagleConfig, seed: int
) -> None:
    """What only tensors tell is as usual: the target's embedding where it fits, an own head."""
    path = tmp_path_factory.mktemp("drafters") / "drafter"
    save_drafter(path, config, dummy_drafter(config, seed, dtype=torch.float32))
    (path / "model.safetensors").unlink()
    assert "fetch the drafter's weights" in refused(path)
    wide = config.hidden_size == TARGET.hidden_size
    usual = dataclasses.replace(config, own_embedding=not wide, own_head=True)
    checkpoint = open_drafter(str(path), TARGET, dummy=True)
    assert checkpoint.config == usual and checkpoint.file is None
    found = load_drafter(checkpoint, dtype=torch.float32, device=CPU, seed=seed)
    wanted = dummy_drafter(usual, seed, dtype=torch.float32)
    assert list(found) == list(draft_tensors(usual))
    assert all(torch.equal(found[name], wanted[name]) for name in found)


def written(path: Path, **changes: Any) -> dict[str, Any]:
    """config.json of a drafter like BASE."""
    config = dataclasses.replace(BASE, **changes)
    save_drafter(path, config, dummy_drafter(config, 0, dtype=torch.bfloat16))
    values: dict[str, Any] = json.loads((path / "config.json").read_text())
    return values


def test_every_program_finds_its_own_keys(tmp_path: Path) -> None:
    values = written(tmp_path, rope=RopeConfig(theta=5e5, kind="linear", factor=2.0))
    assert values["architectures"] == ["LlamaForCausalLMEagle3"]
    assert values["eagle_config"] == {IDS: [1, 5, 8], "use_aux_hidden_state": True}
    assert values[IDS] == values["paceline_boundaries"] == [2, 6, 9]
    assert (values["rope_theta"], values["dtype"]) == (5e5, "bfloat16")
    assert values["rope_scaling"]["type"] == values["rope_scaling"]["rope_type"] == "linear"
    assert values["rope_parameters"]["rope_theta"] == 5e5
    assert "norm_output" not in values and "target_hidden_size" not in values
    assert written(tmp_path, feed_normed=True)["norm_output"] is True
    assert written(tmp_path, norm_head=False)["norm_output"] is False
    assert IDS not in written(tmp_path, boundaries=(0, 4, 12))["eagle_config"]
    assert "Eagle3Qwen3ForCausalLM" in written(tmp_path, qk_norm=True)["architectures"]


def test_without_our_keys_the_written_file_means_the_same(tmp_path: Path) -> None:
    config = dataclasses.replace(BASE, boundaries=(1, 4, 10))
    values = {
        k: v for k, v in written(tmp_path, boundaries=(1, 4, 10)).items() if k[:8] != "paceline"
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert open_drafter(str(tmp_path), TARGET).config == config


def test_vocabulary_maps_are_written_where_they_are_needed(tmp_path: Path) -> None:
    written(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    ids = torch.arange(20) + stored["d2t"]
    assert stored["d2t"].dtype == torch.int64 and stored["t2d"].dtype == torch.bool
    assert torch.equal(stored["t2d"].nonzero().flatten(), ids)
    written(tmp_path, draft_vocab_size=48)
    assert not {"d2t", "t2d"} & set(load_file(tmp_path / "model.safetensors"))


def test_only_the_tensors_of_the_config_are_written(tmp_path: Path) -> None:
    tensors = dummy_drafter(BASE, 0, dtype=torch.float32)
    with pytest.raises(CheckpointError, match="fc_norm"):
        save_drafter(tmp_path, dataclasses.replace(BASE, fc_norm=True), tensors)
    with pytest.raises(CheckpointError, match=r"fc\.bias is unknown"):
        save_drafter(tmp_path, BASE, tensors | {"fc.bias": torch.zeros(16)})
    with pytest.raises(CheckpointError, match="d2t leads to tokens"):
        save_drafter(tmp_path, BASE, tensors | {"d2t": torch.full((20,), 40)})
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write"):
        save_drafter(tmp_path / "file", BASE, tensors)


def test_shared_and_strided_tensors_are_written(tmp_path: Path) -> None:
    tensors = dummy_drafter(BASE, 0, dtype=torch.float32)
    norm = torch.ones(16)
    tensors |= {"norm.weight": norm, "midlayer.hidden_norm.weight": norm}
    tensors["fc.weight"] = tensors["fc.weight"].t().contiguous().t().requires_grad_()
    save_drafter(tmp_path, BASE, tensors)
    assert torch.equal(load(tmp_path)["fc.weight"], tensors["fc.weight"])


# --- dummies -----------------------------------------------------------------------------------


def test_dummies_repeat_by_seed_and_spread_the_vocabulary() -> None:
    config = dataclasses.replace(BASE, fc_norm=True, own_embedding=True)
    one, same, other = (dummy_drafter(config, seed, dtype=torch.float32) for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["fc.weight"], other["fc.weight"])
    assert {name: tuple(t.shape) for name, t in one.items()} == draft_tensors(config)
    ones = {name for name, tensor in one.items() if bool((tensor == 1).all())}
    assert ones == {name for name in one if "norm" in name}
    assert one["embed_tokens.weight"].std() == pytest.approx(0.02, rel=0.2)
    ids = torch.arange(20) + one["d2t"]
    assert ids[0] == 0 and ids[-1] == 45 and set(ids.diff().tolist()) == {2, 3}


# --- reading -----------------------------------------------------------------------------------


def test_loading_casts_and_owns_its_memory(tmp_path: Path) -> None:
    for pickled in (False, True):
        stored = tensors_of(SHAPES)
        stored["d2t"] = stored["d2t"].int()
        path = write_drafter(tmp_path / str(pickled), "EAGLE", tensors=stored, pickled=pickled)
        found = load(path, torch.bfloat16)
        assert found["d2t"].dtype == torch.int64
        kinds = {tensor.dtype for name, tensor in found.items() if name != "d2t"}
        assert kinds == {torch.bfloat16}
        same = load(path, torch.float32)
        file = open_drafter(str(path), TARGET).file
        file.write_bytes(bytes(file.stat().st_size))
        assert torch.equal(same["fc.weight"], stored["fc.weight"])


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"d2t": torch.full((20,), 29)}, "d2t leads to tokens 29 to 48, the target has 48"),
        ({"d2t": torch.full((20,), -1)}, "d2t leads to tokens -1 to 18"),
        ({"d2t": torch.full((20,), 2**63 - 1)}, "d2t leads to tokens"),
        ({"d2t": torch.zeros(20)}, "tensor d2t is stored as torch.float32"),
        ({"norm.weight": torch.ones(16).int()}, "tensor norm.weight is stored as torch.int32"),
        ({"norm.weight": torch.ones(16).to(torch.float8_e5m2)}, "torch.float8_e5m2"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_tensors_that_cannot_be_served(
    tmp_path: Path, changed: dict[str, torch.Tensor], says: str
) -> None:
    tensors = tensors_of(SHAPES) | changed
    assert says in refused(write_drafter(tmp_path / "drafter", "EAGLE", tensors=tensors))


def test_a_table_of_a_full_vocabulary_is_the_identity(tmp_path: Path) -> None:
    whole = SHAPES | {"lm_head.weight": (48, 16), "d2t": (48,), "t2d": MORE["t2d"]}
    values = values_of("SpecForge", draft_vocab_size=48)
    tensors = tensors_of(whole) | {"d2t": torch.zeros(48, dtype=torch.int64)}
    path = write_drafter(tmp_path / "drafter", "SpecForge", values=values, tensors=tensors)
    assert "d2t" not in load(path)
    tensors["d2t"][0], tensors["d2t"][1] = 1, -1
    write_drafter(path, "SpecForge", values=values, tensors=tensors)
    assert "d2t reorders a full vocabulary" in refused(path)


def test_a_changed_shape_names_both_sides(tmp_path: Path) -> None:
    path = write_drafter(tmp_path / "drafter", "EAGLE")
    checkpoint = open_drafter(str(path), TARGET)
    write_drafter(path, "EAGLE", tensors=tensors_of(SHAPES | {"norm.weight": (8,)}))
    with pytest.raises(CheckpointError, match=r"norm\.weight has shape \(8,\), expected \(16,\)"):
        load_drafter(checkpoint, dtype=torch.float32, device=CPU)
