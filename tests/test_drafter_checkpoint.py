"""Finding, opening, refusing drafters on disk: every failure is a CheckpointError of one line."""

from __future__ import annotations

import json
import pickle
import shutil
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from paceline.drafter_checkpoint import canonical_names, open_drafter, open_readings
from paceline.errors import CheckpointError
from paceline.model.eagle_config import draft_tensors
from paceline.model.eagle_weights import load_drafter
from tests.tiny_drafters import (
    LAYOUTS,
    MORE,
    SHAPES,
    TARGET,
    name_in,
    shapes_of,
    tensors_of,
    values_of,
    write_drafter,
)

CPU = torch.device("cpu")


def load(path: Path) -> dict[str, torch.Tensor]:
    return load_drafter(open_drafter(str(path), TARGET), dtype=torch.float32, device=CPU)


def refused(path: Path | str) -> str:
    """The message of opening and loading a drafter that must not load."""
    with pytest.raises(CheckpointError) as caught:
        load(Path(path))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_opens_and_loads(tmp_path: Path, layout: str, pickled: bool) -> None:
    stored = tensors_of(shapes_of(layout))
    path = write_drafter(tmp_path / "drafter", layout, tensors=stored, pickled=pickled)
    checkpoint = open_drafter(str(path), TARGET)
    assert checkpoint.path == path and checkpoint.config.layout == layout
    assert checkpoint.file.name == ("pytorch_model.bin" if pickled else "model.safetensors")
    names = set(shapes_of(layout)) - {"t2d"}
    assert checkpoint.names == {name: name_in(layout, name) for name in names}
    found = load(path)
    assert list(found) == list(draft_tensors(checkpoint.config))
    for name in names:
        assert torch.equal(found[name], stored[name]), name
    assert open_readings(str(path), TARGET)[0] == ("auto", "auto")


def test_ambiguous_files_open_when_told_how(tmp_path: Path) -> None:
    ids = {"eagle_aux_hidden_state_layer_ids": [2, 6, 9]}
    values = values_of("SpecForge", eagle_config=ids, norm_output=True)
    path = write_drafter(tmp_path / "drafter", "SpecForge", values=values)
    assert "--speculative-draft-layer-ids boundary|output" in refused(path)
    configs = {
        open_drafter(str(path), TARGET, layer_ids=by_id, norm_output=by_norm).config
        for by_id, by_norm in open_readings(str(path), TARGET)
    }
    assert len(configs) == 4


def test_safetensors_come_before_pickles_and_may_be_sharded(tmp_path: Path) -> None:
    path = write_drafter(tmp_path / "drafter", "EAGLE")
    (path / "pytorch_model.bin").write_bytes(b"x")
    assert open_drafter(str(path), TARGET).file.name == "model.safetensors"
    (path / "model.safetensors").unlink()
    shard_of = {}
    for index, name in enumerate(SHAPES):
        shard_of[name] = f"{index % 2}.safetensors"
    for shard in set(shard_of.values()):
        part = {n: t for n, t in tensors_of(SHAPES).items() if shard_of[n] == shard}
        save_file(part, path / shard)
    index_file = path / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"weight_map": shard_of}))
    assert open_drafter(str(path), TARGET).file == index_file
    assert set(load(path)) == set(SHAPES)
    (path / "1.safetensors").unlink()
    assert "shard 1.safetensors is missing" in refused(path)


# --- names -------------------------------------------------------------------------------------


def test_names_are_brought_to_one_spelling() -> None:
    names = {
        "model.layers.0.self_attn.q_proj.weight": "midlayer.self_attn.q_proj.weight",
        "model.midlayer.hidden_norm.weight": "midlayer.hidden_norm.weight",
        "aux_norm_low.weight": "fc_norm.0.weight",
        "model.aux_norm_mid.weight": "fc_norm.1.weight",
        "aux_norm_high.weight": "fc_norm.2.weight",
        "model.model.norm.weight": "model.norm.weight",
        "layers.1.mlp.up_proj.weight": "layers.1.mlp.up_proj.weight",
        "lm_head.weight": "lm_head.weight",
    }
    ignored = ["t2d", "rotary_emb.inv_freq", "model.midlayer.self_attn.rotary_emb.inv_freq"]
    assert canonical_names([*names, *ignored], "/x") == {own: name for name, own in names.items()}


def test_one_tensor_under_two_names_is_refused(tmp_path: Path) -> None:
    tensors = tensors_of(SHAPES | {"model.fc.weight": (16, 48)})
    path = write_drafter(tmp_path / "drafter", "EAGLE", tensors=tensors)
    assert "tensors fc.weight and model.fc.weight are the same" in refused(path)


def test_prefixed_names_load(tmp_path: Path) -> None:
    path = write_drafter(tmp_path / "drafter", "EAGLE")
    (path / "model.safetensors").unlink()
    tensors = {f"model.{name}": tensor for name, tensor in tensors_of(SHAPES).items()}
    save_file(tensors, path / "model.safetensors")
    assert open_drafter(str(path), TARGET).names["fc.weight"] == "model.fc.weight"
    assert set(load(path)) == set(SHAPES)


def test_unknown_tensors_and_other_designs_are_refused(tmp_path: Path) -> None:
    biased = tensors_of(SHAPES | {"midlayer.self_attn.o_proj.bias": (16,)})
    path = write_drafter(tmp_path / "a", "ModelOpt", tensors=biased)
    assert "o_proj.bias is unknown" in refused(path)
    two = tensors_of(SHAPES | {"layers.1.input_layernorm.weight": (16,)})
    assert "2 decoder layers" in refused(write_drafter(tmp_path / "b", "ModelOpt", tensors=two))
    norms = tensors_of(SHAPES | {"input_norm.weight": MORE["input_norm.weight"]})
    values = values_of("SpecForge", norm_before_fc=False)
    path = write_drafter(tmp_path / "c", "SpecForge", values=values, tensors=norms)
    assert "norm_before_fc false" in refused(path)


# --- broken files ------------------------------------------------------------------------------


def test_missing_and_broken_files(tmp_path: Path) -> None:
    path = write_drafter(tmp_path / "drafter", "EAGLE")
    assert "name the drafter's directory" in refused(path / "config.json")
    assert "no drafter at /nowhere" in refused("/nowhere/at/all")
    weights = path / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    assert "truncated" in refused(path)
    weights.write_bytes(struct.pack("<Q", 2**42) + whole[8:])
    assert "truncated" in refused(path)
    weights.unlink()
    assert "neither model.safetensors nor pytorch_model.bin" in refused(path)
    (path / "config.json").write_text('{"a": ')
    assert "config.json is not valid JSON" in refused(path)
    (path / "config.json").write_text("[]")
    assert "does not hold a JSON object" in refused(path)
    (path / "config.json").unlink()
    assert "cannot read" in refused(path)


def test_a_file_that_changes_after_opening(tmp_path: Path) -> None:
    for pickled in (False, True):
        path = write_drafter(tmp_path / str(pickled), "EAGLE", pickled=pickled)
        checkpoint = open_drafter(str(path), TARGET)
        fewer = {k: v for k, v in tensors_of(SHAPES).items() if k != "norm.weight"}
        write_drafter(path, "EAGLE", tensors=fewer, pickled=pickled)
        with pytest.raises(CheckpointError, match=r"has lost tensor norm.weight"):
            load_drafter(checkpoint, dtype=torch.float32, device=CPU)
        checkpoint.file.unlink()
        with pytest.raises(CheckpointError):
            load_drafter(checkpoint, dtype=torch.float32, device=CPU)


class Attack:
    """A pickle of it runs code when it is loaded as pickles usually are."""

    def __init__(self, victim: Path) -> None:
        self.victim = victim

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.victim,))


def test_pickles_that_need_code_are_refused_unrun(tmp_path: Path) -> None:
    path = write_drafter(tmp_path / "drafter", "EAGLE", pickled=True)
    file, victim = path / "pytorch_model.bin", tmp_path / "victim"
    torch.save({"fc.weight": Attack(victim)}, file)
    assert "holds more than tensors" in refused(path)
    file.write_bytes(pickle.dumps(Attack(victim)))
    assert "pytorch_model.bin cannot be read" in refused(path)
    assert not victim.exists()


@pytest.mark.parametrize(
    "value",
    [
        [torch.zeros(2)],
        torch.zeros(2),
        {"fc.weight": 3},
        {3: torch.zeros(2)},
        {"state_dict": {"fc.weight": torch.zeros(2)}},
        {"fc.weight": torch.zeros(2, 2).to_sparse()},
        {"fc.weight": torch.zeros(1).expand(10**6, 10**6)},
        {"fc.weight": torch.zeros(2, device="meta")},
    ],
    ids=lambda value: str(value)[:40],
)
def test_pickles_of_something_else(tmp_path: Path, value: Any) -> None:
    path = write_drafter(tmp_path / "drafter", "EAGLE", pickled=True)
    torch.save(value, path / "pytorch_model.bin")
    message = refused(path)
    assert "more than named tensors" in message or "cannot be read" in message


def test_pickles_of_old_pytorch_load(tmp_path: Path) -> None:
    path = write_drafter(tmp_path / "drafter", "EAGLE", pickled=True)
    tensors = tensors_of(SHAPES)
    torch.save(tensors, path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert torch.equal(load(path)["fc.weight"], tensors["fc.weight"])


def test_an_archive_without_its_parts(tmp_path: Path) -> None:
    path = write_drafter(tmp_path / "drafter", "EAGLE", pickled=True)
    with zipfile.ZipFile(path / "pytorch_model.bin", "w") as archive:
        archive.writestr("x", "y")
    assert "cannot be read" in refused(path)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(["config.json", "model.safetensors", "pytorch_model.bin"]),
    st.floats(0, 1),
    st.integers(0, 255),
    st.booleans(),
)
def test_a_damaged_file_is_an_error_not_a_crash(
    tmp_path_factory: pytest.TempPathFactory, name: str, at: float, byte: int, cut: bool
) -> None:
    base = tmp_path_factory.getbasetemp() / "undamaged"
    if not base.exists():
        write_drafter(base, "ModelOpt", pickled=True)
        write_drafter(base, "ModelOpt")
    directory = shutil.copytree(base, tmp_path_factory.mktemp("damaged") / "drafter")
    if name == "pytorch_model.bin":
        (directory / "model.safetensors").unlink()
    data = bytearray((directory / name).read_bytes())
    place = int(at * (len(data) - 1))
    if cut:
        del data[place:]
    else:
        data[place] = byte
    (directory / name).write_bytes(data)
    try:
        load(directory)
    except CheckpointError as error:
        assert "\n" not in str(error)
