"""Rotary tables of well-known checkpoints against transformers, out to their last position."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from paceline.checkpoint import hf_config
from paceline.model.rope import rope_table

LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
QWEN_YARN = dict(
    rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=32768
)
WIDE_YARN = dict(
    rope_type="yarn", rope_theta=150000.0, factor=32.0, original_max_position_embeddings=4096
)
# (head size, longest context, rope parameters)
CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "default, theta 1e4": (64, 8192, dict(rope_type="default", rope_theta=1e4)),
    "default, theta 1e6": (128, 32768, dict(rope_type="default", rope_theta=1e6)),
    "linear": (128, 16384, dict(rope_type="linear", rope_theta=1e4, factor=4.0)),
    "Llama 3.1": (128, 131072, LLAMA3),
    "Llama 3.2 1B": (64, 131072, LLAMA3 | dict(factor=32.0)),
    "Qwen YaRN": (128, 131072, QWEN_YARN),
    "YaRN, untruncated": (64, 131072, WIDE_YARN | dict(truncate=False)),
    "YaRN, betas": (64, 131072, WIDE_YARN | dict(beta_fast=16.0, beta_slow=2.0)),
    "YaRN, attention factor": (64, 131072, WIDE_YARN | dict(attention_factor=1.25)),
    "YaRN, mscale": (64, 131072, WIDE_YARN | dict(mscale=1.0, mscale_all_dim=0.5)),
    "YaRN, mscale alone": (64, 131072, WIDE_YARN | dict(mscale=0.7)),
    "YaRN, factor below 1": (64, 4096, WIDE_YARN | dict(factor=0.5)),
}


@pytest.mark.parametrize("name", CASES)
def test_tables_equal_transformers(name: str) -> None:
    head_dim, length, parameters = CASES[name]
    config = transformers.LlamaConfig(
        head_dim=head_dim,
        max_position_embeddings=length,
        rope_parameters=dict(parameters),
        architectures=["LlamaForCausalLM"],
    )
    ours = hf_config(config.to_dict())
    cos, sin = rope_table(ours.rope, ours.head_dim, length)
    assert cos.shape == sin.shape == (length, head_dim // 2)
    assert cos.dtype == sin.dtype == torch.float32
    positions = torch.cat([torch.arange(300), torch.arange(300, length, 97), torch.tensor([-1])])
    positions %= length
    theirs = LlamaRotaryEmbedding(config)
    wanted_cos, wanted_sin = theirs(torch.zeros(1), positions[None])
    # A frequency's last bits, multiplied by the position, turn the angle by some 1e-7 of it.
    bound = 1e-6 + 4e-7 * positions[:, None] * theirs.inv_freq[None, :]
    for got, wanted in ((cos, wanted_cos), (sin, wanted_sin)):
        wanted = wanted[0, :, : head_dim // 2]
        assert ((got[positions] - wanted).abs() <= bound).all()
