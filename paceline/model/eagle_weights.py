"""Tensors of an EAGLE-3 drafter by canonical name: read, made up, written.

Knows safetensors and pytorch_model.bin, of which only tensors are read, never code. Knows nothing
of the network's arithmetic.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from paceline.checkpoint import stored_tensors
from paceline.errors import CheckpointError
from paceline.model.eagle_config import EagleConfig, check_tensors, config_values, draft_tensors
from paceline.model.eagle_layout import shown

if TYPE_CHECKING:
    from paceline.drafter_checkpoint import DrafterCheckpoint

_CPU = torch.device("cpu")
_DUMMY_STD = 0.02
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_WHOLE = (torch.int64, torch.int32)


def load_drafter(
    checkpoint: DrafterCheckpoint, *, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> dict[str, torch.Tensor]:
    """The tensors of `draft_tensors(checkpoint.config)`, in that order, on `device`.

    In `dtype`, but d2t, which is int64. seed: of weights that are made up. Raises CheckpointError
    if a tensor is missing, unknown, of a wrong shape or kind, or if d2t leads out of the target's
    vocabulary.
    """
    if checkpoint.file is None:
        return dummy_drafter(checkpoint.config, seed, dtype=dtype, device=device)
    where = str(checkpoint.file)
    found = _read(checkpoint, checkpoint.file)
    shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
    check_tensors(checkpoint.config, shapes, where)
    for name, tensor in found.items():
        if tensor.dtype not in (_WHOLE if name == "d2t" else _FLOATS):
            raise CheckpointError(
                f"{where}: tensor {name} is stored as {tensor.dtype}, which cannot be read here: "
                "use the original weights"
            )
        if not bool(tensor.isfinite().all()):
            raise CheckpointError(
                f"{where}: tensor {name} holds infinities or what is no number: fetch it again, or "
                "use a drafter that was trained well"
            )
    if "d2t" in found:
        _check_table(found["d2t"], checkpoint.config, where)
    return {
        name: found[name].to(
            device=device,
            dtype=torch.int64 if name == "d2t" else dtype,
            copy=True,  # not a view of the file
            memory_format=torch.contiguous_format,
        )
        for name in draft_tensors(checkpoint.config)
    }


def dummy_drafter(
    config: EagleConfig, seed: int, *, dtype: torch.dtype, device: torch.device = _CPU
) -> dict[str, torch.Tensor]:
    """Random weights, the same for a seed and a kind of device: norms 1, all else normal(0, 0.02).

    The draft vocabulary is spread evenly over the target's.
    """
    generator = torch.Generator(device).manual_seed(seed)
    tensors = {}
    for name, shape in draft_tensors(config).items():
        if name == "d2t":
            rows = torch.arange(config.draft_vocab_size, device=device)
            tensors[name] = rows * config.vocab_size // config.draft_vocab_size - rows
        elif name.endswith("norm.weight") or name.startswith("fc_norm."):
            tensors[name] = torch.ones(shape, dtype=dtype, device=device)
        else:
            values = torch.empty(shape, dtype=dtype, device=device)
            tensors[name] = values.normal_(0.0, _DUMMY_STD, generator=generator)
    return tensors


def save_drafter(
    directory: Path | str, config: EagleConfig, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Write config.json and model.safetensors, in the layout that most programs read.

    directory: made if need be. tensors: those of `draft_tensors(config)`, kept in their dtypes.
    Opening the directory gives the same config and tensors back. Raises CheckpointError if the
    tensors are not those of the config, or if the files cannot be written.
    """
    directory = Path(directory)
    where = str(directory)
    check_tensors(config, {name: tuple(t.shape) for name, t in tensors.items()}, where)
    stored = {
        name: tensors[name].detach().cpu().clone(memory_format=torch.contiguous_format)
        for name in draft_tensors(config)
    }
    if "d2t" in stored:
        ids = _check_table(stored["d2t"], config, where)
        stored["d2t"] = stored["d2t"].long()
        stored["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    dtype = str(stored["fc.weight"].dtype).removeprefix("torch.")
    text = json.dumps(config_values(config, dtype=dtype), indent=2) + "\n"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
        (directory / "config.json").write_text(text)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {directory}: {shown(str(error))}") from None


def _check_table(table: torch.Tensor, config: EagleConfig, where: str) -> torch.Tensor:
    """Target id of each draft id: (draft vocab,) int64."""
    ids = torch.arange(len(table)) + table.long()
    if not 0 <= int(ids.min()) <= int(ids.max()) < config.vocab_size:
        raise CheckpointError(
            f"{where}: d2t leads to tokens {int(ids.min())} to {int(ids.max())}, the target has "
            f"{config.vocab_size} tokens: use the drafter of this target"
        )
    if config.draft_vocab_size == config.vocab_size and table.any():
        raise CheckpointError(
            f"{where}: d2t reorders a full vocabulary, which is not supported: fetch the files "
            "again"
        )
    return ids


# --- files -------------------------------------------------------------------------------------


def _read(checkpoint: DrafterCheckpoint, weights: Path) -> dict[str, torch.Tensor]:
    """The tensors of the file by canonical name, as stored; they may be views of it."""
    if weights.suffix == ".bin":
        stored = read_pickle(weights)
        _require(checkpoint, stored)
        return {own: stored[name] for own, name in checkpoint.names.items()}
    found = {}
    try:
        headers = stored_tensors(checkpoint.path)
        _require(checkpoint, headers)
        for path in {headers[name].file for name in checkpoint.names.values()}:
            with safe_open(path, framework="pt", device="cpu") as file:
                for own, name in checkpoint.names.items():
                    if headers[name].file == path:
                        found[own] = file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"cannot read {weights}: {shown(str(error))}") from None
    return found


def _require(checkpoint: DrafterCheckpoint, stored: Mapping[str, object]) -> None:
    gone = [name for name in checkpoint.names.values() if name not in stored]
    if gone:
        raise CheckpointError(
            f"{checkpoint.file} has lost tensor {shown(gone[0])} since it was opened: start again"
        )


def read_pickle(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a pytorch_model.bin, on the CPU; views of the file where it allows them.

    Nothing but tensors is unpickled. Raises CheckpointError.
    """
    try:
        # Files of PyTorch before 1.6 are no archives and cannot be mapped.
        mapped = zipfile.is_zipfile(path)
        values = torch.load(path, weights_only=True, mmap=mapped, map_location="cpu")
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(
            f"{path} cannot be read ({type(error).__name__}): it is damaged or holds more than "
            "tensors; fetch it again or use model.safetensors"
        ) from None
    if not isinstance(values, Mapping) or not all(
        isinstance(name, str) and _is_plain(tensor) for name, tensor in values.items()
    ):
        raise CheckpointError(
            f"{path} holds more than named tensors: fetch it again or use model.safetensors"
        )
    return dict(values)


def _is_plain(value: object) -> bool:
    """A tensor with a number of its own in memory for every element?"""
    return (
        isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and not value.is_quantized
        and value.untyped_storage().nbytes() >= value.numel() * value.element_size()
    )
