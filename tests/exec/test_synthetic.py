"""Synthetic acceptance: the draws, and a whole engine of random weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import LLM, SamplingParams
from paceline.errors import InvalidRequest
from paceline.exec.synthetic import as_sampled, synthetic
from paceline.model.accept import DraftTable, accept
from paceline.model.sampling import SamplingView
from paceline.plan.simulation import child_rates

CPU = torch.device("cpu")
VOCAB = 50


def view_of(positions: torch.Tensor, seeds: torch.Tensor) -> SamplingView:
    count = len(positions)
    return SamplingView(
        positions=positions, seeds=seeds, temperature=torch.zeros(count), top_p=torch.ones(count),
        top_k=torch.zeros(count, dtype=torch.int64), min_p=torch.zeros(count), samples=False,
        filtered=(),
    )  # fmt: skip


def chains(rows: int, depth: int) -> tuple[torch.Tensor, torch.Tensor, DraftTable, SamplingView]:
    """Chains of one request each, at the same positions: seeds tell them apart."""
    chosen = torch.randint(VOCAB, (rows * (depth + 1),))
    nodes = torch.arange(rows * (depth + 1)).view(rows, depth + 1)
    drafts = DraftTable(
        tokens=torch.randint(VOCAB, (rows, depth)), parents=torch.arange(depth).repeat(rows, 1)
    )
    positions = torch.arange(7, 8 + depth).repeat(rows)
    return (
        chosen,
        nodes,
        drafts,
        view_of(positions, torch.arange(rows).repeat_interleave(depth + 1)),
    )


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.7, 1.0])
def test_a_draft_of_a_chain_survives_as_often_as_asked(acceptance: float) -> None:
    torch.manual_seed(0)
    rows, depth = 20_000, 4
    chosen, nodes, drafts, view = chains(rows, depth)
    right = synthetic(acceptance, CPU)(chosen, nodes, drafts, view)
    verdict = accept(right, drafts, depth)
    for j in range(depth):
        share = float((verdict.accepted > j).float().mean())
        assert share == pytest.approx(acceptance ** (j + 1), abs=0.012)
    walked = verdict.tokens[:, :depth] == drafts.tokens
    assert bool(walked[verdict.accepted == depth].all())  # what is accepted is what was drafted
    again = synthetic(acceptance, CPU)(chosen, nodes, drafts, view)
    assert torch.equal(right, again)


def test_children_win_by_their_rank() -> None:
    torch.manual_seed(0)
    rows, children = 20_000, 4
    nodes = torch.arange(rows * (children + 1)).view(rows, children + 1)
    drafts = DraftTable(
        tokens=torch.arange(children).repeat(rows, 1),
        parents=torch.zeros(rows, children, dtype=torch.int64),
    )
    seeds = torch.arange(rows).repeat_interleave(children + 1)
    view = view_of(torch.full((len(seeds),), 3), seeds)
    right = synthetic(0.6, CPU)(torch.randint(VOCAB, (len(seeds),)), nodes, drafts, view)
    verdict = accept(right, drafts, 1)
    for rank, rate in enumerate(child_rates(0.6, children)):
        share = float((verdict.path[:, 0] == rank + 1).float().mean())
        assert share == pytest.approx(rate, abs=0.012)
    assert float((verdict.accepted == 0).float().mean()) == pytest.approx(
        1 - sum(child_rates(0.6, children)), abs=0.012
    )


@settings(deadline=None, max_examples=60)
@given(st.data(), st.floats(0, 1))
def test_any_tree_gets_a_verdict_that_follows_its_edges(
    data: st.DataObject, acceptance: float
) -> None:
    """Ids are few here, so that what was sampled often is a child that lost."""
    width, vocab = data.draw(st.integers(0, 8)), 20
    parents = [data.draw(st.integers(0, j)) for j in range(width)]
    tokens = [3 * j % vocab for j in range(width)]
    drafts = DraftTable(
        tokens=torch.tensor([tokens], dtype=torch.int64).view(1, width),
        parents=torch.tensor([parents], dtype=torch.int64).view(1, width),
    )
    nodes = torch.arange(width + 1)[None]
    chosen = torch.tensor([data.draw(st.integers(0, vocab - 1)) for _ in range(width + 1)])
    view = view_of(torch.arange(width + 1), torch.full((width + 1,), data.draw(st.integers(0, 99))))
    right = synthetic(acceptance, CPU)(chosen, nodes, drafts, view)
    assert right.shape == (1, width + 1) and int(right.min()) >= 0
    verdict = accept(right, drafts, width)
    if acceptance == 0.0:
        assert int(verdict.accepted) == 0
    node = 0
    for step in verdict.path[0, : int(verdict.accepted)].tolist():
        assert parents[step - 1] == node
        node = step
    assert torch.equal(as_sampled(chosen, nodes, drafts, view), chosen[None])


TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 96,
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
DRAFTER = {
    "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 32, "intermediate_size": 48,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96, "draft_vocab_size": 64,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
}  # fmt: skip


def from_configs_alone(tmp_path: Path, **options: object) -> LLM:
    """Target and drafter from a config.json each: no weights, no tokenizer."""
    for name, values in (("target", TINY), ("drafter", DRAFTER)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(values))
    return LLM(
        str(tmp_path / "target"), skip_tokenizer_init=True, load_format="dummy", dtype="float32",
        kv_tokens=2048, speculative_algorithm="EAGLE3", profile="none",
        speculative_draft_model_path=str(tmp_path / "drafter"), **options,
    )  # fmt: skip


@pytest.mark.parametrize("topk", [1, 3])
def test_two_config_files_are_enough_to_measure(tmp_path: Path, topk: int) -> None:
    llm = from_configs_alone(
        tmp_path, synthetic_acceptance=0.7, speculative_policy="static", speculative_num_steps=3,
        speculative_eagle_topk=topk,
    )  # fmt: skip
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    done = llm.generate([[5, 6, 7], [8, 9]] * 4, params)
    assert all(len(each.tokens) == 60 and each.text == "" for each in done)
    stats = llm.engine.stats
    assert stats.speculation.synthetic_acceptance == 0.7
    assert "SYNTHETIC ACCEPTANCE 0.7" in llm.engine.ready().description
    first = stats.speculation.accepted[0] / stats.speculation.attempts[0]
    expected = 0.7 if topk == 1 else sum(child_rates(0.7, topk))
    assert first == pytest.approx(expected, abs=0.1)


def test_without_a_tokenizer_texts_and_stop_strings_are_refused(tmp_path: Path) -> None:
    llm = from_configs_alone(tmp_path)
    for prompt, params in (("text", SamplingParams()), ([1, 2], SamplingParams(stop=("a",)))):
        with pytest.raises(InvalidRequest, match="no tokenizer"):
            llm.generate(prompt, params)
    assert llm.engine.idle
    (done,) = llm.generate([1, 2], SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(done.tokens) == 3
