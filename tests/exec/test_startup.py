"""What a user leaves open is computed from the model and the machine."""

from __future__ import annotations

import dataclasses

import pytest

from paceline.checkpoint import open_checkpoint
from paceline.config import EngineConfig
from paceline.errors import ConfigError
from paceline.exec import memory, startup
from paceline.exec.startup import _resolve


def resolve(**options: int | None) -> startup.Resolved:
    config = EngineConfig(device="cpu", **options)  # type: ignore[arg-type]
    checkpoint = open_checkpoint(None, "auto")
    device, dtype = startup.torch.device("cpu"), startup.torch.bfloat16
    return _resolve(config, checkpoint.config, device=device, dtype=dtype)


def test_the_defaults_take_a_quarter_of_free_memory_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(startup, "available_host_bytes", lambda: 2**30)
    found = resolve()
    token_bytes = 30 * 2 * 3 * 64 * 2
    assert found.pages == 2**28 // token_bytes // 16
    assert found.max_model_len == 8192 and found.max_running == 64
    monkeypatch.setattr(startup, "available_host_bytes", lambda: 2**50)
    assert resolve().pages * 16 == 64 * 8192  # no more than all requests could fill


def test_a_context_is_never_longer_than_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "available_host_bytes", lambda: 2**24 * 4)
    found = resolve()
    assert found.max_model_len == found.pages * 16 < 8192


def test_every_decoding_request_fits_a_step() -> None:
    assert resolve(max_batched_tokens=8).max_running == 8
    assert resolve(max_running_requests=200).max_running == 200
    assert resolve(max_running_requests=200).max_batched_tokens == 200


@pytest.mark.parametrize(
    "options",
    [
        {"max_model_len": 10_000},
        {"kv_tokens": 16},
        {"max_model_len": 512, "kv_tokens": 400},
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="--"):
        resolve(**options)


def test_memory_is_known_here() -> None:
    assert memory.available_host_bytes() > 2**20
    memory.return_freed_host_memory()


def test_resolved_values_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        resolve().pages = 3  # type: ignore[misc]
