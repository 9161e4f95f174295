"""The kernels for an NVIDIA GPU: Triton between the weight GEMMs. `Unavailable` says why not.

Nothing here looks at the device's numbers from the host, and a step's buffers have sizes that
follow from its shapes alone: so a step can be captured in a CUDA graph. A view without `bounds`
(a graph's) has all of its tiles done by the one kernel for few tokens; with bounds, long chunks of
prompts go to a kernel of their own.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch

from paceline.attention.base import AttentionView, Geometry, attention_scale
from paceline.attention.compiled import Unavailable
from paceline.model.rope import rope_table
from paceline.types import TREE_WIDTH

try:
    import triton

    from paceline.attention import triton_attention, triton_fused, triton_prefill, triton_sampling
except ImportError as error:  # pragma: no cover - depends on the machine
    raise Unavailable(f"there is no Triton here ({error}): pip install triton") from None

LOG2_E = math.log2(math.e)
OLDEST = (8, 0)  # compute capability
COLUMNS = 4096  # of logits that one program looks at
ANY = 1 << 30  # no limit
TOKENS_OF_ONE = 4  # a step of so few is mostly one request's


@dataclass(frozen=True, slots=True)
class Cut:
    """How `triton_attention.attend` is cut. rows: query heads x tokens of a program, keys:
    positions of a block, programs: of each multiprocessor, registers: of a thread at most."""

    rows: int
    keys: int
    stages: int
    programs: int
    warps: int = 4
    registers: int | None = None


@dataclass(frozen=True, slots=True)
class Tuning:
    """Found by `benchmarks/attention.py` on an H200.

    one: for steps of at most `TOKENS_OF_ONE` tokens. few: for tiles of as few tokens as it takes at
    once. many: for others. chunk: for long chunks of prompts.
    """

    one: Cut = Cut(rows=16, keys=64, stages=2, programs=3, registers=168)
    few: Cut = Cut(rows=16, keys=32, stages=3, programs=4, registers=128)
    many: Cut = Cut(rows=64, keys=64, stages=3, programs=2)
    chunk: Cut = Cut(rows=64, keys=64, stages=2, programs=0)


class GpuKernels:
    """Implements `Kernels`. Raises Unavailable where it cannot work."""

    name = "triton"
    capturable = True

    def __init__(
        self, config: Geometry, max_length: int, device: torch.device, tuning: Tuning | None = None
    ) -> None:
        size = config.head_dim
        if size & (size - 1) or not 16 <= size <= 256:
            raise Unavailable(f"heads of {size} numbers have no GPU kernel")
        self.sms = 4
        if device.type == "cuda":
            found = torch.cuda.get_device_capability(device)
            if found < OLDEST:
                raise Unavailable(
                    f"this GPU has compute capability {found[0]}.{found[1]}, "
                    f"the kernels need {OLDEST[0]}.{OLDEST[1]}"
                )
            self.sms = torch.cuda.get_device_properties(device).multi_processor_count
        self.config = config
        self.device = device
        self.tuning = tuning or Tuning()
        cos, sin = rope_table(config.rope, size, max_length)
        self.cos, self.sin = cos.to(device), sin.to(device)
        self.scale = attention_scale(config) * LOG2_E

    def begin(self, view: AttentionView) -> GpuStep:
        return GpuStep(self, view)

    def noisy_argmax(
        self, logits: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        count, columns = logits.shape
        blocks = triton.cdiv(columns, COLUMNS)
        values = logits.new_empty(count, blocks, dtype=torch.float32)
        places = logits.new_empty(count, blocks, dtype=torch.int32)
        found = logits.new_empty(count, dtype=torch.int64)
        if count:
            triton_sampling.best_of_block[(count, blocks)](
                logits, seeds, positions, values, places, columns, BLOCK=COLUMNS,
                num_warps=8, enable_fp_fusion=False,
            )  # fmt: skip
            triton_sampling.best_of_blocks[(count,)](
                values, places, found, blocks, columns, BLOCKS=triton.next_power_of_2(blocks),
                num_warps=1,
            )  # fmt: skip
        return found

    def add_noise(
        self, logits: torch.Tensor, ids: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
    ) -> None:
        count, columns = logits.shape
        if count:
            triton_sampling.add_noise[(count, triton.cdiv(columns, COLUMNS))](
                logits, ids, seeds, positions, columns, BLOCK=COLUMNS,
                num_warps=8, enable_fp_fusion=False,
            )  # fmt: skip


class _Items:
    """What one cut of the kernel has to do in a step: its plan, and room for partial results."""

    def __init__(self, kernels: GpuKernels, view: AttentionView, cut: Cut, least: int, most: int):
        """least, most: tokens of the tiles that it takes."""
        c, device = kernels.config, view.positions.device
        self.cut = cut
        self.programs = kernels.sms * cut.programs
        tokens, tiles = len(view.positions), len(view.contexts)
        group = c.num_heads // c.num_kv_heads
        fine = triton_attention.FINEST.value * self.programs // c.num_kv_heads + 1
        parts = tiles + triton.cdiv(tokens * group, cut.rows)
        capacity = fine + parts
        partial = triton.cdiv(cut.rows, group) * fine + tokens
        size = triton_attention.HEAD.value + capacity * triton_attention.FIELDS.value
        self.plan = torch.empty(size, dtype=torch.int32, device=device)
        self.met = torch.zeros(parts, c.num_kv_heads, dtype=torch.int32, device=device)
        self.mixed = torch.empty(partial, c.num_heads, c.head_dim, device=device)
        self.weight = torch.empty(partial, c.num_heads, device=device)
        triton_attention.plan[(1,)](
            self.plan, view.tile_starts, view.contexts, view.tails, tiles, capacity, least, most,
            KV_HEADS=c.num_kv_heads, GROUP=group, ROWS=cut.rows, KEYS=cut.keys,
            PROGRAMS=self.programs, TILES=triton.next_power_of_2(tiles), num_warps=4,
        )  # fmt: skip


class GpuStep:
    """Implements `Step`."""

    def __init__(self, kernels: GpuKernels, view: AttentionView) -> None:
        self.kernels, self.view = kernels, view
        self.planned = False

    def _plan(self) -> None:
        """Cut the step's tiles; at the first attention, since a step may have none."""
        kernels, view = self.kernels, self.view
        c, t = kernels.config, kernels.tuning
        self.planned = True
        self.chunks = self._chunks()
        tokens = len(view.positions)
        narrow = t.one if tokens <= TOKENS_OF_ONE else t.few
        few = max(narrow.rows * c.num_kv_heads // c.num_heads, 1)
        widths = [hi - lo for lo, hi in itertools.pairwise(view.bounds)] or [1, tokens]
        self.items: list[_Items] = []
        if min(widths) <= few:
            self.items.append(_Items(kernels, view, narrow, 1, few))
        if any(few < width and (width <= TREE_WIDTH or self.chunks is None) for width in widths):
            most = ANY if self.chunks is None else TREE_WIDTH
            self.items.append(_Items(kernels, view, t.many, few + 1, most))

    def _chunks(self) -> torch.Tensor | None:
        """(N, 2) int32, tile and first row of each block of long tiles; None if there is none."""
        bounds, rows = self.view.bounds, self.kernels.tuning.chunk.rows
        blocks = [
            (tile, above)
            for tile, (lo, hi) in enumerate(itertools.pairwise(bounds))
            if hi - lo > TREE_WIDTH
            for above in range(0, hi - lo, rows)
        ]
        if not blocks:
            return None
        table = torch.tensor(blocks[::-1], dtype=torch.int32)
        return table.to(self.view.positions.device, non_blocking=True)

    def add_norm(
        self, residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor
    ) -> torch.Tensor:
        out = torch.empty_like(residual)
        rows, width = residual.shape
        if rows:
            triton_fused.add_norm[(rows,)](
                residual, residual if delta is None else delta, weight, out, width,
                self.kernels.config.rms_norm_eps, ADD=delta is not None,
                BLOCK=triton.next_power_of_2(width), num_warps=4 if width <= 2048 else 8,
            )  # fmt: skip
        return out

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        cache: torch.Tensor,
        norms: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        c = self.kernels.config
        q = qkv.new_empty(len(qkv), c.num_heads * c.head_dim)
        q_norm, k_norm = (None, None) if norms is None else norms
        self._rotate(qkv, q, cache, q_norm, k_norm, heads=c.num_heads)
        return q

    def store(self, kv: torch.Tensor, cache: torch.Tensor, norm: torch.Tensor | None) -> None:
        self._rotate(kv, kv, cache, norm, norm, heads=0)

    def _rotate(
        self, x: torch.Tensor, q: torch.Tensor, cache: torch.Tensor, q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None, *, heads: int,
    ) -> None:  # fmt: skip
        c, view = self.kernels.config, self.view
        if len(x):
            triton_fused.rotate_and_store[(len(x), heads + 2 * c.num_kv_heads)](
                x, q, cache, self.kernels.cos, self.kernels.sin, view.positions, view.cache_index,
                q_norm if q_norm is not None else x, k_norm if k_norm is not None else x,
                x.shape[1], c.rms_norm_eps,
                HEADS=heads, KV_HEADS=c.num_kv_heads, SIZE=c.head_dim, PAGE=cache.shape[3],
                NORM=q_norm is not None, HALF=c.head_dim // 2, num_warps=1,
            )  # fmt: skip

    def attend(self, q: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        c, t, view = self.kernels.config, self.kernels.tuning, self.view
        if not self.planned:
            self._plan()
        out = torch.empty_like(q)
        shape = {
            "HEADS": c.num_heads, "KV_HEADS": c.num_kv_heads, "SIZE": c.head_dim,
            "PAGE": cache.shape[3],
        }  # fmt: skip
        for items in self.items:
            cut = items.cut
            triton_attention.attend[(items.programs,)](
                q, cache, out, items.mixed, items.weight, items.met, items.plan, view.pages,
                view.ancestors, view.pages.shape[1], view.hidden, self.kernels.scale, **shape,
                ROWS=cut.rows, KEYS=cut.keys, num_warps=cut.warps, num_stages=cut.stages,
                maxnreg=cut.registers,
            )  # fmt: skip
        if self.chunks is not None:
            triton_prefill.attend_chunks[(len(self.chunks), c.num_heads)](
                q, cache, out, self.chunks, view.tile_starts, view.contexts, view.pages,
                view.pages.shape[1], view.hidden, self.kernels.scale, **shape,
                ROWS=t.chunk.rows, KEYS=t.chunk.keys,
                num_warps=t.chunk.warps, num_stages=t.chunk.stages,
            )  # fmt: skip
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        rows, width = len(gate_up), gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, width)
        if rows:
            triton_fused.silu_mul[(rows, triton.cdiv(width, 1024))](
                gate_up, out, width, BLOCK=1024, num_warps=4
            )
        return out
