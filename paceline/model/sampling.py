"""The one rule by which a token is chosen, with or without speculation.

    y(p) = argmax_v( processed_logits(v) + G(seed, p, v) )

at position p of a request, with keyed Gumbel noise G (`paceline.model.noise`) and no noise at
temperature 0. That is sampling from softmax(processed_logits); and since y depends on the request
alone, the same seed gives the same text whatever the load or the drafter (Daliri, Musco and Suresh,
arXiv 2408.07978). Processing: divide by the temperature, then top-k, top-p over what is left, and
min-p.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.attention.base import Kernels

HEAD = 1024  # candidates looked at before a whole vocabulary is sorted
COLDEST = 1e-6  # a temperature below this counts as this: logits divided by it stay finite


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingView:
    """Sampling state of S rows.

    positions: (S,) int64, position of the token to be chosen. seeds: (S,) int64.
    temperature, top_p, min_p: (S,) float32; top_k: (S,) int64, 0 is off.
    samples: some row has a temperature above 0. filtered: rows with top-k, top-p or min-p.
    """

    positions: torch.Tensor
    seeds: torch.Tensor
    temperature: torch.Tensor
    top_p: torch.Tensor
    top_k: torch.Tensor
    min_p: torch.Tensor
    samples: bool
    filtered: tuple[int, ...]


def choose(logits: torch.Tensor, view: SamplingView, kernels: Kernels) -> torch.Tensor:
    """The next token of each row: (S, vocab) float32 logits, overwritten, to (S,) int64."""
    positions = temper(logits, view)
    if view.filtered:
        filter_rows(logits, view)
    return kernels.noisy_argmax(logits, view.seeds, positions)


def temper(logits: torch.Tensor, view: SamplingView) -> torch.Tensor:
    """Divide by the temperature, in place; returns the positions for the noise, -1 for none."""
    if not view.samples:
        return torch.full_like(view.positions, -1)
    greedy = view.temperature <= 0
    logits.div_(torch.where(greedy, 1.0, view.temperature.clamp(min=COLDEST))[:, None])
    return torch.where(greedy, -1, view.positions)


def filter_rows(logits: torch.Tensor, view: SamplingView) -> None:
    """Set what top-k, top-p and min-p exclude to -inf, in place, in the rows that ask for it.

    Sorts the HEAD most likely tokens first; a row whose nucleus may reach beyond them is sorted
    whole. What equals the smallest kept logit is
    kept as well. `view.filtered` must not be empty.
    """
    rows = torch.tensor(view.filtered, device=logits.device)
    part = logits[rows]
    keep_k = torch.where(view.top_k[rows] > 0, view.top_k[rows], part.shape[1])
    top_p, min_p = view.top_p[rows], view.min_p[rows]
    head, exact = _threshold(part, part.topk(min(HEAD, part.shape[1])).values, keep_k, top_p, min_p)
    if not bool(exact.all()):
        whole, _ = _threshold(part, part.sort(descending=True).values, keep_k, top_p, min_p)
        head = torch.where(exact, head, whole)
    logits[rows] = part.masked_fill(part < head[:, None], -torch.inf)


def _threshold(
    logits: torch.Tensor,
    ranked: torch.Tensor,
    keep_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest kept logit of each row, and whether `ranked` was long enough to know it.

    logits: (F, vocab); ranked: (F, n), its largest ones, descending. Returns (F,) and (F,) bool.
    """
    rank = torch.arange(ranked.shape[1], device=logits.device)
    within_k = rank < keep_k[:, None]
    covers_k = keep_k <= ranked.shape[1]
    # Probabilities among what top-k leaves; without top-k, among the whole vocabulary.
    total = torch.where(
        covers_k,
        ranked.masked_fill(~within_k, -torch.inf).logsumexp(1),
        logits.logsumexp(1),
    )
    p = (ranked - total[:, None]).exp()
    before = p.cumsum(1) - p  # mass ahead of each candidate; rounding may bring it to 1 early
    in_nucleus = (before < top_p[:, None]) | (top_p[:, None] >= 1)
    keep = within_k & in_nucleus & (p >= min_p[:, None] * p[:, :1])
    keep[:, 0] = True
    lowest = ranked.masked_fill(~keep, torch.inf).amin(1)
    # Known for sure if what top-k leaves is ranked whole, or if there is no top-k (so that the
    # whole vocabulary's sum is the right one) and the ranking goes on past the set.
    exact = covers_k | (~keep[:, -1] & (keep_k >= logits.shape[1]))
    unfiltered = (keep_k >= logits.shape[1]) & (top_p >= 1) & (min_p <= 0)
    return torch.where(unfiltered, -torch.inf, lowest), exact | unfiltered
