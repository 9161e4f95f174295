"""CUDA graphs of the target's pass. Skipped, and said so, where there is no GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.exec.target import GraphedPass
from tests.exec.test_synthetic import DRAFTER, TINY

if not torch.cuda.is_available():
    pytest.skip("no GPU here: tests of CUDA graphs are skipped", allow_module_level=True)

PARAMS = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
PROMPTS = [[5 + i, 6, 7 * i % 90] * (1 + 7 * i % 20) for i in range(12)]
WIDER = {"hidden_size": 64}  # heads of 16: the least that a GPU multiplies


def make(path: Path, **options: object) -> LLM:
    for name, values in (("target", TINY), ("drafter", DRAFTER)):
        (path / name).mkdir(parents=True, exist_ok=True)
        (path / name / "config.json").write_text(json.dumps(values | WIDER))
    return LLM(
        str(path / "target"), skip_tokenizer_init=True, load_format="dummy", device="cuda",
        kv_tokens=10000, profile="none", **options,
    )  # fmt: skip


def graphs_of(llm: LLM) -> GraphedPass:
    graphs = llm.engine.executor.graphs
    assert graphs is not None
    return graphs


def test_a_graph_gives_the_bits_of_the_same_launches(tmp_path: Path) -> None:
    llm = make(tmp_path)
    llm.generate(PROMPTS, PARAMS)
    graphs = graphs_of(llm)
    for size in graphs.sizes:
        tokens, view = graphs.buffers.first(size)
        tokens.copy_(torch.randint(90, (size,)))
        view.tile_starts.copy_(torch.arange(size + 1))
        view.contexts.fill_(9)
        view.tails.fill_(1)
        view.ancestors.fill_(1)
        view.pages.copy_(torch.arange(size)[:, None].expand_as(view.pages))
        view.cache_index.copy_(torch.arange(size) * 16 + 9)
        view.positions.fill_(9)
        with torch.inference_mode():
            for cache in llm.engine.executor.caches:
                cache.zero_()  # what nobody wrote may hold any number
            graphs.run(size)
            wanted = graphs.hidden[:size].clone()
            assert bool(wanted.isfinite().all())
            graphs.hidden.fill_(torch.nan)
            graphs.graphs[size].replay()
            assert torch.equal(graphs.hidden[:size], wanted), size


STATIC = {"speculative_policy": "static"}


@pytest.mark.parametrize("options", [
    {},
    STATIC | {"speculative_algorithm": "EAGLE3"},
    STATIC | {"speculative_algorithm": "EAGLE3", "speculative_eagle_topk": 3},
    STATIC | {"speculative_algorithm": "NGRAM"},
])  # fmt: skip
def test_texts_with_graphs_are_those_without(tmp_path: Path, options: dict[str, object]) -> None:
    """In float32, where ties are rare."""
    if options.get("speculative_algorithm") == "EAGLE3":
        options = options | {"speculative_draft_model_path": str(tmp_path / "drafter")}
    texts = []
    for most in (0, 512):
        llm = make(tmp_path, dtype="float32", cuda_graph_max_tokens=most, **options)
        assert (llm.engine.executor.graphs is None) == (most == 0)
        texts.append([done.tokens for done in llm.generate(PROMPTS, PARAMS)])
    same = sum(a == b for a, b in zip(*texts, strict=True))
    assert same >= len(PROMPTS) - 1, f"{same} of {len(PROMPTS)} texts agree"


def test_one_page_is_nobodys(tmp_path: Path) -> None:
    llm = make(tmp_path)
    pages = llm.engine.resolved.pages
    assert len(llm.engine.executor.caches[0]) == pages + 1
    assert graphs_of(llm).buffers.spare == pages * llm.engine.resolved.page_size
