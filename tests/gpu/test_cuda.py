"""What only a GPU can show. Skipped, and said so, where there is none."""

from __future__ import annotations

import pytest
import torch

from paceline.model import noise
from paceline.model.llama import LlamaModel

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


def tiny(device: torch.device) -> LlamaModel:
    from paceline.model.llama import build_model
    from paceline.model.weights import dummy_weights
    from tests.test_engine import CONFIG

    weights = dummy_weights(CONFIG, 0, dtype=torch.float32)
    return build_model(CONFIG, ((n, (t * 8).to(device)) for n, t in weights))


def test_the_engine_generates_on_cuda_what_it_generates_on_the_cpu() -> None:
    from tests.test_engine import make_engine, requests, run

    cpu = run(make_engine(tiny(torch.device("cpu"))), requests(12))
    cuda = run(make_engine(tiny(CUDA), device=CUDA), requests(12))
    same = sum(cpu[name] == cuda[name] for name in cpu)
    assert same >= 11, f"{same} of {len(cpu)} texts agree"  # one near tie may fall otherwise


def test_eagle_trees_change_no_text_on_cuda() -> None:
    from tests.eagle_support import drafter_model, eagle_config, make_drafter
    from tests.test_eagle import RandomShapes
    from tests.test_engine import make_engine, requests, run

    target = tiny(CUDA)
    plain = run(make_engine(target, device=CUDA), requests(12))
    drafter = make_drafter(drafter_model(target, eagle_config()), pages=200, page_size=4, slots=8)
    engine = make_engine(target, device=CUDA, drafter=drafter, policy=RandomShapes(0), batched=90)
    drafted = run(engine, requests(12))
    assert engine.stats.drafter_failures_total == 0
    assert engine.stats.drafted_tokens_total > 100
    same = sum(plain[name] == drafted[name] for name in plain)
    assert same >= 11, f"{same} of {len(plain)} texts agree"
