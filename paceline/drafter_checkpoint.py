"""From a path to what an EAGLE-3 drafter's files hold: shape, tensor names, the weight file.

Knows the names that programs give to the same tensors, and brings them to one. Reads config.json
and headers only, without torch unless the weights are a pytorch_model.bin. Tensors are read by
`paceline.model.eagle_weights`. Every failure is a CheckpointError of one line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint import read_json, stored_tensors
from paceline.errors import CheckpointError
from paceline.model.config import ModelConfig
from paceline.model.eagle_config import EagleConfig, eagle_config, readings, shapes_of
from paceline.model.eagle_layout import shown

_SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
_PICKLE = "pytorch_model.bin"
# One network, several spellings: what tensors are called elsewhere, and here.
_SPELLINGS = {
    "layers.0.": "midlayer.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}


@dataclass(frozen=True, kw_only=True)
class DrafterCheckpoint:
    """A drafter on disk.

    path: its directory. file: the weights, or the index of their shards; None: there are none, they
    are made up. names: what each tensor is called in the file, by the name of `draft_tensors`.
    """

    path: Path
    config: EagleConfig
    file: Path | None
    names: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class _Found:
    """What lies in a directory. shapes and names: by canonical name."""

    path: Path
    values: Mapping[str, Any]
    file: Path | None
    shapes: Mapping[str, tuple[int, ...]]
    names: Mapping[str, str]


def open_drafter(
    path: str, target: ModelConfig, *, layer_ids: str = "auto", norm_output: str = "auto",
    dummy: bool = False,
) -> DrafterCheckpoint:  # fmt: skip
    """Find and check a drafter for this target. path: a directory with config.json and weights.

    layer_ids, norm_output: how to read keys that have two meanings, as `eagle_config` has them.
    dummy: config.json is enough, weights are made up. Raises CheckpointError.
    """
    found = _find(path, made_up_for=target if dummy else None)
    config = eagle_config(
        found.values,
        found.shapes,
        target,
        layer_ids=layer_ids,
        norm_output=norm_output,
        where=str(found.path),
    )
    return DrafterCheckpoint(path=found.path, config=config, file=found.file, names=found.names)


def open_readings(path: str, target: ModelConfig) -> list[tuple[str, str]]:
    """The pairs (layer_ids, norm_output) by which `open_drafter` finds different drafters here.

    One pair if the checkpoint is unambiguous. Raises CheckpointError.
    """
    found = _find(path)
    return readings(found.values, found.shapes, target, str(found.path))


def canonical_names(names: Iterable[str], where: str) -> dict[str, str]:
    """Canonical name -> name in the file, without what serving needs no more (t2d, rotary tables).

    Raises CheckpointError if two tensors are the same one.
    """
    found: dict[str, str] = {}
    for name in names:
        own = name.removeprefix("model.")
        for theirs, ours in _SPELLINGS.items():
            if own.startswith(theirs):
                own = ours + own.removeprefix(theirs)
        if own == "t2d" or own.endswith("rotary_emb.inv_freq"):
            continue
        if own in found:
            raise CheckpointError(
                f"{where}: tensors {shown(found[own])} and {shown(name)} are the same one: "
                "fetch the files again"
            )
        found[own] = name
    return found


def _find(path: str, made_up_for: ModelConfig | None = None) -> _Found:
    """made_up_for: a target for which weights are made up; tensors are then those that config.json
    speaks of."""
    directory = Path(path).expanduser()
    file: Path | None = None
    try:
        if not directory.exists():
            raise CheckpointError(
                f"no drafter at {path}: name a local directory with config.json and "
                f"{_SAFETENSORS[0]} (Paceline downloads nothing)"
            )
        if not directory.is_dir():
            raise CheckpointError(f"{path} is a file: name the drafter's directory")
        values = read_json(directory / "config.json")
        if made_up_for is None:
            file, stored = _weights(directory)
        else:
            stored = dict(shapes_of(values, made_up_for, str(directory)))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from None
    names = canonical_names(stored, str(directory))
    return _Found(
        path=directory,
        values=values,
        file=file,
        shapes={own: stored[name] for own, name in names.items()},
        names=names,
    )


def _weights(directory: Path) -> tuple[Path, dict[str, tuple[int, ...]]]:
    """(the file, shape of each tensor in it)."""
    for name in _SAFETENSORS:
        if (directory / name).is_file():
            stored = stored_tensors(directory)
            return directory / name, {key: tensor.shape for key, tensor in stored.items()}
    file = directory / _PICKLE
    if not file.is_file():
        raise CheckpointError(
            f"{directory} holds neither {_SAFETENSORS[0]} nor {_PICKLE}: fetch the drafter's "
            "weights"
        )
    from paceline.model.eagle_weights import read_pickle

    return file, {name: tuple(tensor.shape) for name, tensor in read_pickle(file).items()}
