"""From a configuration and a checkpoint to an executor that is ready to step, once per process.

Resolves what the user left open (device, number format, memory for K/V, context length) from the
machine and the model; after this nothing is edited. Reports its stages through a callback.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from paceline.attention.base import Geometry, Kernels, KVLayout
from paceline.attention.compiled import Unavailable
from paceline.attention.reference import ReferenceKernels
from paceline.checkpoint import Checkpoint
from paceline.config import EngineConfig
from paceline.errors import ConfigError
from paceline.exec.drafters import Recipe, Resolved, recipe_of
from paceline.exec.executor import Executor
from paceline.exec.memory import CPU_SHARE, available_host_bytes, return_freed_host_memory
from paceline.exec.slots import Slots
from paceline.exec.synthetic import Judge, as_sampled, synthetic
from paceline.exec.target import EagerPass, GraphedPass
from paceline.model.config import ModelConfig
from paceline.model.llama import LlamaModel, build_model
from paceline.model.weights import load_weights
from paceline.types import Progress

logger = logging.getLogger("paceline")

OnProgress = Callable[[Progress], None]

_DTYPES = {
    "auto": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}

CPU_BATCHED_TOKENS = 128  # a longer chunk gains nothing on a CPU and makes others wait
GPU_BATCHED_TOKENS = 2048
GPU_KV_SHARE = 0.9  # of what weights leave free


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A model that is loaded, before it is known which drafter it will work with."""

    model: LlamaModel
    device: torch.device
    dtype: torch.dtype


def start(
    config: EngineConfig, checkpoint: Checkpoint, on_progress: OnProgress
) -> tuple[Executor, Resolved]:
    """Load the model and make the executor. Raises ConfigError and CheckpointError."""
    recipe = recipe_of(config, checkpoint)
    try:
        target = load_target(config, checkpoint, on_progress)
        return assemble(config, target, recipe, on_progress)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            "out of device memory while loading: use a smaller model or drafter, lower "
            f"--memory-fraction or --kv-tokens, or free memory ({str(error).splitlines()[0]})"
        ) from None


def load_target(config: EngineConfig, checkpoint: Checkpoint, on_progress: OnProgress) -> Target:
    """Read the model's weights."""
    device = _device(config.device)
    dtype = _DTYPES[config.dtype]
    if device.type == "cpu" and dtype == torch.float16:
        raise ConfigError("--dtype float16 is for GPUs: take bfloat16 or float32 on a CPU")
    on_progress(Progress(stage="loading weights"))
    weights = load_weights(checkpoint, dtype=dtype, device=device, seed=config.seed)
    model = build_model(
        checkpoint.config,
        weights,
        progress=lambda done, total: on_progress(
            Progress(stage="loading weights", done=done, total=total)
        ),
    )
    return_freed_host_memory()
    return Target(model=model, device=device, dtype=dtype)


def assemble(
    config: EngineConfig, target: Target, recipe: Recipe, on_progress: OnProgress
) -> tuple[Executor, Resolved]:
    """Size the memory and put target and drafter together."""
    model = target.model
    maker = recipe.load(model, target.dtype, target.device)
    resolved = _resolve(
        config,
        model.config,
        device=target.device,
        dtype=target.dtype,
        more_token_bytes=maker.token_bytes(target.dtype, config.page_size),
    )
    on_progress(Progress(stage="preparing kernels"))
    kernels = make_kernels(model.config, resolved)
    drafter = maker.make(resolved, make_kernels)
    layout = KVLayout(
        pages=resolved.pages + 1,  # the last one is nobody's: for what fills up a graph
        page_size=resolved.page_size,
        kv_heads=model.config.num_kv_heads,
        head_dim=model.config.head_dim,
        dtype=resolved.dtype,
    )
    caches = [layout.allocate(target.device) for _ in model.layers]
    executor = Executor(
        model=model,
        kernels=kernels,
        caches=caches,
        slots=Slots.allocate(
            resolved.max_running,
            math.ceil(resolved.max_model_len / resolved.page_size),
            target.device,
        ),
        drafter=drafter,
        judge=_judge(config, target.device),
        graphs=_graphs(config, EagerPass(model, caches, drafter.boundaries), kernels, resolved),
    )
    if executor.graphs is not None:
        executor.graphs.capture(
            lambda done, total: on_progress(
                Progress(stage="capturing graphs", done=done, total=total)
            )
        )
    return executor, resolved


def _graphs(
    config: EngineConfig, eager: EagerPass, kernels: Kernels, resolved: Resolved
) -> GraphedPass | None:
    """Graphs of the target's pass, not captured yet; None where the kernels allow none."""
    if not kernels.capturable or not config.cuda_graph_max_tokens:
        return None
    return GraphedPass(
        eager,
        kernels,
        most=config.cuda_graph_max_tokens,
        max_pages=math.ceil(resolved.max_model_len / resolved.page_size),
        spare_page=resolved.pages,
    )


def _judge(config: EngineConfig, device: torch.device) -> Judge:
    if config.synthetic_acceptance is None:
        return as_sampled
    logger.warning(
        "synthetic acceptance %g: drafts are accepted by a draw, what is generated means nothing",
        config.synthetic_acceptance,
    )
    return synthetic(config.synthetic_acceptance, device)


def make_kernels(geometry: Geometry, resolved: Resolved) -> Kernels:
    """The fastest kernels that this machine can run."""
    try:
        if resolved.device.type == "cpu":
            from paceline.attention.cpu import CpuKernels

            return CpuKernels(geometry, resolved.max_model_len, resolved.dtype)
        from paceline.attention.gpu import GpuKernels

        return GpuKernels(geometry, resolved.max_model_len, resolved.device)
    except (Unavailable, ImportError) as reason:
        logger.warning("the torch kernels serve, several times slower: %s", reason)
    return ReferenceKernels(geometry, resolved.max_model_len, resolved.device)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no GPU here; leave the flag out or use cpu")
    return torch.device(name)


def _resolve(
    config: EngineConfig,
    model: ModelConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    more_token_bytes: int = 0,
) -> Resolved:
    """more_token_bytes: memory beside the target's K/V that each token takes."""
    limit = min(model.max_position, model.sliding_window or model.max_position)
    wanted = config.max_model_len or limit
    if wanted > limit:
        raise ConfigError(
            f"--max-model-len {wanted} is more than the {limit} tokens this model was made for"
        )
    usual = CPU_BATCHED_TOKENS if device.type == "cpu" else GPU_BATCHED_TOKENS
    batched = config.max_batched_tokens or max(usual, config.max_running_requests)
    running = min(config.max_running_requests, batched)
    token_bytes = model.kv_width * dtype.itemsize * model.num_layers + more_token_bytes
    tokens = config.kv_tokens or _affordable_tokens(
        token_bytes, device, share=config.memory_fraction, most=running * wanted
    )
    pages = tokens // config.page_size
    if pages < 2:
        raise ConfigError(
            f"K/V for {tokens} tokens is less than two pages of {config.page_size}: "
            "raise --kv-tokens or --memory-fraction, lower --page-size, or free memory"
        )
    length = min(wanted, pages * config.page_size)
    if config.max_model_len is not None and length < config.max_model_len:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} does not fit into K/V for "
            f"{pages * config.page_size} tokens: lower it, or raise --kv-tokens"
        )
    return Resolved(
        device=device,
        dtype=dtype,
        max_running=running,
        max_batched_tokens=batched,
        max_model_len=length,
        page_size=config.page_size,
        pages=pages,
    )


def _affordable_tokens(
    token_bytes: int, device: torch.device, *, share: float | None, most: int
) -> int:
    """Tokens of K/V that memory allows, at most what all requests together could fill."""
    if device.type == "cuda":
        free = int(torch.cuda.mem_get_info(device)[0] * (share or GPU_KV_SHARE))
    else:
        free = int(available_host_bytes() * (share or CPU_SHARE))
    return min(free // token_bytes, most)
