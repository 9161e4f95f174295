"""What only a GPU can show. Skipped, and said so, where there is none."""

from __future__ import annotations

import pytest
import torch

from paceline.model import noise

if not torch.cuda.is_available():
    pytest.skip("no GPU here: CUDA tests are skipped", allow_module_level=True)

CUDA = torch.device("cuda")


def test_noise_has_the_same_bits_as_on_the_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    seeds = torch.randint(-(2**63), 2**63 - 1, (64,), generator=generator)
    positions = torch.randint(0, 100_000, (64,), generator=generator)
    ids = torch.arange(151_936, dtype=torch.int32)
    here = noise.gumbel(noise.row_keys(seeds, positions), ids)
    there = noise.gumbel(noise.row_keys(seeds.to(CUDA), positions.to(CUDA)), ids.to(CUDA))
    assert torch.equal(here, there.cpu())


def test_the_engine_generates_on_cuda_what_it_generates_on_the_cpu() -> None:
    from paceline.model.llama import build_model
    from paceline.model.weights import dummy_weights
    from tests.test_engine import CONFIG, make_engine, requests, run

    def model(device: torch.device):  # type: ignore[no-untyped-def]
        weights = dummy_weights(CONFIG, 0, dtype=torch.float32)
        return build_model(CONFIG, ((n, (t * 8).to(device)) for n, t in weights))

    cpu = run(make_engine(model(torch.device("cpu"))), requests(12))
    cuda = run(make_engine(model(CUDA), device=CUDA), requests(12))
    same = sum(cpu[name] == cuda[name] for name in cpu)
    assert same >= 11, f"{same} of {len(cpu)} texts agree"  # one near tie may fall otherwise
