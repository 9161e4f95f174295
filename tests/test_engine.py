"""The whole engine on a tiny random model in float32: batches, chunks, hits and preemptions change
nothing of what a request generates."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable

import pytest
import torch

from paceline.attention.reference import ReferenceKernels
from paceline.cache.pool import PagePool
from paceline.engine import Engine
from paceline.exec.drafter import Drafter, NoDrafter
from paceline.exec.drafters import Resolved
from paceline.exec.executor import Executor
from paceline.exec.slots import Slots
from paceline.exec.startup import KVLayout, make_kernels
from paceline.model.config import ModelConfig
from paceline.model.llama import LlamaModel, build_model
from paceline.model.weights import dummy_weights
from paceline.plan.policy import Off, SpeculationPolicy
from paceline.sched.scheduler import Limits, Scheduler
from paceline.types import AddRequest, Delta, FinishReason, SamplingParams

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=300,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    rms_norm_eps=1e-5,
    max_position=400,
    tie_embeddings=True,
    eos_token_ids=tuple(range(0, 300, 10)),
)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model() -> LlamaModel:
    wide = ((n, t * 8) for n, t in dummy_weights(CONFIG, 0, dtype=torch.float32))
    return build_model(CONFIG, wide)


def make_engine(
    model: LlamaModel,
    *,
    running: int = 8,
    batched: int = 32,
    pages: int = 200,
    page_size: int = 4,
    reference: bool = False,
    device: torch.device = CPU,
    drafter: Drafter | None = None,
    policy: SpeculationPolicy | None = None,
) -> Engine:
    resolved = Resolved(
        device=device,
        dtype=torch.float32,
        max_running=running,
        max_batched_tokens=batched,
        max_model_len=min(300, pages * page_size),
        page_size=page_size,
        pages=pages,
    )
    kernels = (
        ReferenceKernels(CONFIG, resolved.max_model_len, device)
        if reference
        else make_kernels(model.config, resolved)
    )
    layout = KVLayout(
        pages=pages, page_size=page_size, kv_heads=2, head_dim=32, dtype=torch.float32
    )
    executor = Executor(
        model=model,
        kernels=kernels,
        caches=[layout.allocate(device).fill_(torch.nan) for _ in range(CONFIG.num_layers)],
        slots=Slots.allocate(running, -(-resolved.max_model_len // page_size), device),
        drafter=drafter or NoDrafter(),
    )
    limits = Limits(
        max_running=running,
        max_batched_tokens=batched,
        max_model_len=resolved.max_model_len,
        eos_token_ids=frozenset(CONFIG.eos_token_ids),
    )
    scheduler = Scheduler(limits, PagePool(pages, page_size), policy or Off())
    return Engine(executor, scheduler, resolved=resolved, checked=True)


def requests(count: int, *, seed: int = 0) -> list[AddRequest]:
    """Greedy, sampled and filtered requests with prompts that share beginnings."""
    rng = random.Random(seed)
    common = tuple(rng.randrange(300) for _ in range(40))
    made = []
    for i in range(count):
        own = tuple(rng.randrange(300) for _ in range(rng.randrange(1, 30)))
        params = SamplingParams(
            max_tokens=rng.randrange(1, 40),
            temperature=rng.choice((0.0, 0.8, 1.3)),
            top_p=rng.choice((1.0, 0.9)),
            top_k=rng.choice((0, 0, 20)),
            min_p=rng.choice((0.0, 0.05)),
            seed=i,
            ignore_eos=rng.random() < 0.5,
        )
        prompt = (common[: rng.randrange(0, 40)] if rng.random() < 0.6 else ()) + own
        made.append(AddRequest(id=str(i), prompt=prompt, params=params))
    return made


def run(engine: Engine, messages: Iterable[AddRequest]) -> dict[str, tuple[list[int], str]]:
    """All at once, to the end: tokens and finish reason by id."""
    for message in messages:
        assert engine.add(message) is None
    tokens: dict[str, list[int]] = defaultdict(list)
    done = {}
    while not engine.idle:
        for delta in engine.step():
            tokens[delta.id] += delta.tokens
            if delta.finish is not None:
                done[delta.id] = (tokens[delta.id], str(delta.finish))
    return done


@pytest.fixture(scope="module")
def alone(model: LlamaModel) -> dict[str, tuple[list[int], str]]:
    """What each request generates in an engine of its own."""
    results = {}
    for message in requests(16):
        results |= run(make_engine(model, running=1, batched=300), [message])
    assert {finish for _, finish in results.values()} == {"stop", "length"}
    return results


@pytest.mark.parametrize(
    "setting",
    [
        {},
        {"batched": 8, "page_size": 1},
        {"running": 3, "batched": 5, "page_size": 7},
        {"running": 16, "batched": 300, "pages": 90},
        {"running": 16, "batched": 20, "pages": 30},
        {"reference": True},
    ],
    ids=lambda s: "-".join(f"{k}={v}" for k, v in s.items()) or "default",
)
def test_a_request_generates_in_company_what_it_generates_alone(
    model: LlamaModel, alone: dict[str, tuple[list[int], str]], setting: dict[str, int]
) -> None:
    engine = make_engine(model, **setting)
    assert run(engine, requests(16)) == alone
    if setting.get("pages") == 30:
        assert engine.stats.preemptions_total > 0
    assert run(engine, requests(16)) == alone  # now from the prefix cache
    assert engine.stats.cached_prompt_tokens_total > 0
    assert engine.stats.pages_free + engine.stats.pages_cached == engine.stats.pages_total


def test_a_step_that_fails_ends_its_own_requests_only(
    model: LlamaModel, alone: dict[str, tuple[list[int], str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(model)
    messages = requests(16)
    assert engine.add(messages[0]) is None
    with monkeypatch.context() as patch:
        patch.setattr(Slots, "prepare", _broken)
        (delta,) = engine.step()
    assert delta.finish is FinishReason.ERROR and "boom" in (delta.error or "")
    assert run(engine, messages[1:4]) == {k: alone[k] for k in ("1", "2", "3")}


def _broken(*_: object) -> None:
    raise RuntimeError("boom")


def test_an_aborted_request_leaves_the_others_unchanged(
    model: LlamaModel, alone: dict[str, tuple[list[int], str]]
) -> None:
    engine = make_engine(model)
    messages = requests(6)
    for message in messages:
        engine.add(message)
    seen: list[Delta] = engine.step()
    engine.abort((messages[0].id, messages[5].id))
    while not engine.idle:
        seen += engine.step()
    tokens: dict[str, list[int]] = defaultdict(list)
    for delta in seen:
        tokens[delta.id] += delta.tokens
    for message in messages[1:5]:
        assert tokens[message.id] == alone[message.id][0]
