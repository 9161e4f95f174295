"""The EAGLE-3 drafter: its network, its trees, and that it is never behind.

Whatever came before (depths, shapes, chunks, preemptions, prefix hits, neighbours), its drafts are
those of a drafter that has seen nothing but the request's committed text.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.attention.base import KVLayout
from paceline.attention.reference import ReferenceKernels
from paceline.checkpoint import open_checkpoint
from paceline.config import EngineConfig
from paceline.engine import Engine
from paceline.exec.drafter import Drafts
from paceline.exec.eagle import EagleDrafter
from paceline.exec.slots import Slots
from paceline.exec.tree import Plot
from paceline.model.eagle import EagleModel
from paceline.model.eagle_config import EagleConfig
from paceline.model.llama import LlamaModel
from paceline.plan.policy import Static, Threshold, WithoutCosts
from paceline.plan.step import (
    PLAIN,
    Admission,
    Choice,
    DraftShape,
    Load,
    RequestShape,
    Row,
    RowResult,
    StepPlan,
)
from paceline.types import AddRequest, SamplingParams
from tests import counting
from tests.eagle_support import (
    Dense,
    State,
    dense_tree,
    drafter_model,
    eagle_config,
    make_drafter,
    recomputed,
    state_of,
)
from tests.model.support import chunk_view
from tests.test_engine import CONFIG, CPU, alone, make_engine, model, requests, run
from tests.test_speculation import LOADS, SETTINGS, oracle, random_load

__all__ = ["alone", "model"]  # fixtures

VARIANTS: list[dict[str, Any]] = [
    {},
    {"norm_before_residual": True, "feed_normed": True},
    {"norm_before_fc": True, "qk_norm": True},
    {"fc_norm": True, "own_embedding": True, "boundaries": (1, 2)},
    {"norm_head": False, "qkv_bias": True, "draft_vocab_size": 300},
]
GREEDY = SamplingParams(temperature=0.0, seed=0)


def features_of(target: LlamaModel, tokens: list[int], config: EagleConfig) -> torch.Tensor:
    layout = KVLayout(
        pages=len(tokens), page_size=1, kv_heads=CONFIG.num_kv_heads, head_dim=CONFIG.head_dim,
        dtype=torch.float32,
    )  # fmt: skip
    step = ReferenceKernels(CONFIG, 400, CPU).begin(chunk_view(0, len(tokens), len(tokens)))
    caches = [layout.allocate(CPU) for _ in target.layers]
    return target.forward(torch.tensor(tokens), step, caches, config.boundaries)[1]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize(
    ("depth", "branching", "drafts"), [(1, 1, 1), (4, 1, 4), (1, 5, 5), (3, 4, 16), (4, 3, 7)]
)
@torch.inference_mode()
def test_trees_are_those_of_the_published_network(
    model: LlamaModel, variant: dict[str, Any], depth: int, branching: int, drafts: int
) -> None:
    config = eagle_config(**variant)
    rng = random.Random(depth + branching)
    text = [rng.randrange(300) for _ in range(30)]
    dense = Dense(config, model)
    fused = dense.fuse(features_of(model, text[:-1], config))
    wanted = dense_tree(dense, text, fused, depth=depth, branching=branching, drafts=drafts)
    shape = DraftShape(depth=depth, branching=branching, budget=drafts)
    (tokens, parents), state = recomputed(
        model, drafter_model(model, config), text, GREEDY, shape, drafts
    )
    torch.testing.assert_close(state.root, fused[-1], atol=1e-4, rtol=1e-4)
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*paths[parent], token))
    assert sorted(paths[1:]) == sorted(each.path for each in wanted)


@given(drafts=st.integers(1, 63), depth=st.integers(1, 8), branching=st.integers(1, 8))
def test_a_plot_fits_its_places(drafts: int, depth: int, branching: int) -> None:
    plot = Plot.of(drafts, depth, branching)
    taken = [place for level in range(plot.depth) for place in plot.places(level)]
    assert taken == list(range(len(taken)))
    assert len(taken) <= drafts + 1
    assert 1 <= plot.beam <= branching and 1 <= plot.depth <= depth


@dataclass
class RandomShapes(WithoutCosts):
    """Another shape each step: plain, chains, trees."""

    seed: int
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def choose(self, load: Load) -> Choice:
        depth, branching = self.rng.randint(1, 4), self.rng.randint(1, 4)
        drafts = self.rng.choice((0, 0, depth, 2 * depth, 16))
        shape = PLAIN
        if drafts * load.decodes:
            shape = DraftShape(depth=depth, branching=branching, budget=drafts * load.decodes)
        return Choice(shape=shape, reason="random")


Guess = Callable[..., tuple[tuple[int, ...], tuple[int, ...]]]


class Watched(EagleDrafter):
    """Compares, at every proposal, with a drafter that recomputes all from the committed text.

    guess: what to verify instead of its own drafts, half of the time: random weights are hardly
    ever right, and accepted drafts are where a drafter may lose track.
    """

    def watch(
        self, target: LlamaModel, rate: float, rng: random.Random, guess: Guess | None
    ) -> Watched:
        self.target, self.rate, self.rng, self.guess = target, rate, rng, guess
        self.texts: dict[int, tuple[list[int], SamplingParams]] = {}
        self.compared = self.equal = 0
        return self

    def admit(self, admission: Admission) -> None:
        super().admit(admission)
        self.texts[admission.slot] = (list(admission.tokens), admission.params)

    def observe(self, row: Row, result: RowResult) -> None:
        self.texts[row.slot][0].extend(result.tokens)

    def propose(self, plan: StepPlan, slots: Slots) -> Drafts:
        states: dict[int, State] = {
            i: state_of(self, slots, row.slot, row.start)
            for i, row in enumerate(plan.rows)
            if self._reaches(row, plan.shape) and self.rng.random() < self.rate
        }
        drafts = super().propose(plan, slots)
        for i, state in states.items():
            row = plan.rows[i]
            text, params = self.texts[row.slot]
            assert len(text) == row.start + 1
            wanted, fresh = recomputed(
                self.target, self.model, text, params, plan.shape, row.drafts
            )
            for now, then in ((state.entries, fresh.entries), (state.root, fresh.root)):
                largest = float(then.abs().max()) if then.numel() else 0.0
                torch.testing.assert_close(now, then, atol=1e-4 * (1 + largest), rtol=0)
            self.compared += 1
            self.equal += (drafts.tokens[i], drafts.parents[i]) == wanted
        if self.guess is None or self.rng.random() < 0.5:
            return drafts
        guesses = [
            self.guess(self.texts[row.slot][0], row.drafts, self.rng) if row.drafts else ((), ())
            for row in plan.rows
        ]
        return Drafts(tuple(t for t, _ in guesses), tuple(p for _, p in guesses))


def watched_engine(
    model: LlamaModel, network: EagleModel, seed: int, rate: float, policy: Any = None,
    guess: Guess | None = None, **setting: Any,
) -> tuple[Any, Watched]:  # fmt: skip
    sizes = {"pages": 200, "page_size": 4, "running": 8} | setting
    plain = make_drafter(
        network, pages=sizes["pages"], page_size=sizes["page_size"], slots=sizes["running"],
        reference=setting.get("reference", False),
    )  # fmt: skip
    plain.__class__ = Watched
    assert isinstance(plain, Watched)
    drafter = plain.watch(model, rate, random.Random(seed), guess)
    engine = make_engine(model, drafter=drafter, policy=policy or RandomShapes(seed), **setting)
    return engine, drafter


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("variant", VARIANTS[:3], ids=str)
def test_drafts_are_those_of_a_drafter_that_recomputed_everything(
    model: LlamaModel, alone: dict[str, Any], setting: dict[str, Any], variant: dict[str, Any]
) -> None:
    network = drafter_model(model, eagle_config(**variant))
    engine, drafter = watched_engine(model, network, 1, 0.3, guess=oracle(alone), **setting)
    assert run(engine, requests(16)) == alone
    assert run(engine, requests(16)) == alone  # now from the prefix cache
    assert engine.stats.drafter_failures_total == 0
    assert engine.stats.cached_prompt_tokens_total > 0
    if setting.get("pages") == 34:
        assert engine.stats.preemptions_total > 0
    assert engine.stats.accepted_tokens_total > 50
    assert drafter.compared > 30
    assert drafter.equal == drafter.compared


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(**LOADS)
def test_any_load_any_memory_any_shapes(
    model: LlamaModel, alone: dict[str, Any], seed: int, running: int, extra: int, pages: int,
    page_size: int, order: list[int], aborted: set[int],
) -> None:  # fmt: skip
    network = drafter_model(model, eagle_config())
    engine, drafter = watched_engine(
        model, network, seed, 0.1, running=running, batched=running + extra, pages=pages,
        page_size=page_size, guess=oracle(alone),
    )  # fmt: skip
    random_load(engine, alone, seed=seed, order=order, aborted=aborted)
    assert drafter.equal == drafter.compared


def test_after_a_plain_stretch_drafting_goes_on_as_if_there_had_been_none(
    model: LlamaModel,
) -> None:
    """One long request; ten more arrive, so that it decodes plainly; they leave."""
    network = drafter_model(model, eagle_config())
    policy = Threshold(RequestShape(depth=3, branching=2, drafts=6), 1)
    engine, drafter = watched_engine(model, network, 0, 1.0, policy, running=11, batched=60)
    long = SamplingParams(max_tokens=200, temperature=0.9, seed=5, ignore_eos=True)
    engine.add(AddRequest(id="long", prompt=(5, 6, 7), params=long))
    for _ in range(10):
        engine.step()
    before = drafter.compared
    short = SamplingParams(max_tokens=60, temperature=0, seed=1, ignore_eos=True)
    for i in range(10):
        engine.add(AddRequest(id=f"short {i}", prompt=(i, 9, 4), params=short))
    while not engine.idle:
        engine.step()
    depths = {(s.depth, s.reason): s.steps for s in engine.stats.speculation.shapes}
    assert depths[(0, "more than 1 requests")] > 50
    assert drafter.compared > before + 10
    assert drafter.equal == drafter.compared


def test_no_drafts_past_the_drafters_positions(model: LlamaModel, alone: dict[str, Any]) -> None:
    network = drafter_model(model, eagle_config(max_position=40))
    engine, _ = watched_engine(
        model, network, 0, 0.0, Static(RequestShape(depth=3, branching=2, drafts=6))
    )
    assert run(engine, requests(16)) == alone
    assert engine.stats.drafter_failures_total == 0
    assert engine.stats.drafted_tokens_total > 50
    params = SamplingParams(max_tokens=30, temperature=0, seed=0, ignore_eos=True)
    drafted = engine.stats.drafted_tokens_total
    prompt = tuple(i % 300 for i in range(45))
    run(engine, [AddRequest(id="x", prompt=prompt, params=params)])
    assert engine.stats.drafted_tokens_total == drafted


@pytest.mark.parametrize("where", ["fuse", "forward"])
def test_a_drafter_whose_numbers_are_broken_harms_no_request(
    model: LlamaModel, alone: dict[str, Any], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(EagleModel, where)

    def broken(*args: Any) -> Any:
        out = real(*args)
        return out * torch.nan if where == "fuse" else (out[0] * torch.nan, out[1])

    with monkeypatch.context() as patch:
        patch.setattr(EagleModel, where, broken)
        network = drafter_model(model, eagle_config())
        engine, _ = watched_engine(
            model, network, 0, 0.0, Static(RequestShape(depth=3, branching=2, drafts=6))
        )
        assert run(engine, requests(16)) == alone
        assert engine.stats.drafter_failures_total > 3
        assert engine.stats.drafted_tokens_total == 0
    # Mended, it works again for whoever comes next: nothing of it stays behind.
    other = [
        AddRequest(
            id="y",
            prompt=(1, 2, 3, 4, 5),
            params=SamplingParams(max_tokens=250, seed=1, ignore_eos=True),
        )
    ]
    failures = engine.stats.drafter_failures_total
    run(engine, other)
    assert engine.stats.drafter_failures_total == failures
    assert engine.stats.drafted_tokens_total > 0


def test_a_request_that_opts_out_decodes_plainly_beside_the_others(
    model: LlamaModel, alone: dict[str, Any]
) -> None:
    network = drafter_model(model, eagle_config())
    engine, _ = watched_engine(
        model, network, 0, 0.0, Static(RequestShape(depth=3, branching=2, drafts=6)), batched=90
    )
    out = {str(i) for i in range(0, 16, 3)}
    messages = [
        msgspec.structs.replace(m, params=msgspec.structs.replace(m.params, max_draft_tokens=0))
        if m.id in out
        else m
        for m in requests(16)
    ]
    for message in messages:
        engine.add(message)
    drafted = dict.fromkeys(alone, 0)
    tokens: dict[str, list[int]] = {name: [] for name in alone}
    while not engine.idle:
        for delta in engine.step():
            drafted[delta.id] += delta.drafted
            tokens[delta.id] += delta.tokens
    assert tokens == {name: text for name, (text, _) in alone.items()}
    assert all(drafted[name] == 0 for name in out)
    assert sum(drafted.values()) == engine.stats.drafted_tokens_total > 100


@pytest.fixture(scope="module")
def counting_engine(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Engine]:
    folder = tmp_path_factory.mktemp("counting")
    target = counting.write_target(folder / "target")
    drafter = counting.write_drafter(folder / "drafter", paceline_boundaries=[2, 4, 6])

    def start(**options: Any) -> Engine:
        config = EngineConfig(
            model=str(target), dtype="float32", kv_tokens=4096, speculative_algorithm="EAGLE3",
            speculative_draft_model_path=str(drafter), **{"speculative_policy": "static"} | options,
        )  # fmt: skip
        return Engine.start(config, open_checkpoint(str(target), "auto"), lambda _: None)

    return start


def counts(temperature: float) -> list[AddRequest]:
    params = [SamplingParams(max_tokens=60, temperature=temperature, seed=i) for i in range(6)]
    return [
        AddRequest(
            id=str(i), prompt=tuple((i + j) % counting.V for j in range(1 + 5 * i)), params=p
        )
        for i, p in enumerate(params)
    ]


TREE: dict[str, Any] = {"speculative_eagle_topk": 3, "speculative_num_draft_tokens": 8}


@pytest.mark.parametrize("shape", [{}, TREE], ids=["chain", "tree"])
def test_a_drafter_that_knows_is_always_right(
    counting_engine: Callable[..., Engine], shape: dict[str, Any]
) -> None:
    engine = counting_engine(**shape)
    done = run(engine, counts(0.0))
    for message in counts(0.0):
        first = message.prompt[-1] + 1
        assert done[message.id][0] == [(first + i) % counting.V for i in range(60)]
    said = engine.stats.speculation
    assert said.attempts[0] > 50 and said.attempts == said.accepted


@pytest.mark.parametrize("shape", [{}, TREE], ids=["chain", "tree"])
def test_drafter_and_target_draw_with_the_same_noise(
    counting_engine: Callable[..., Engine], shape: dict[str, Any]
) -> None:
    """Alike at temperature 2 they agree mostly; with noise of their own they would in 15 %."""
    engine = counting_engine(**shape)
    plain = counting_engine(speculative_policy="off")
    assert run(engine, counts(2.0)) == run(plain, counts(2.0))
    said = engine.stats.speculation
    assert len({tuple(tokens) for tokens, _ in run(plain, counts(2.0)).values()}) == 6
    assert said.accepted[0] / said.attempts[0] > 0.6
    assert plain.stats.drafted_tokens_total == 0
