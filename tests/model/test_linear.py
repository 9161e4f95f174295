"""Packed weights against float64 products of the same weights."""

from __future__ import annotations

import pytest
import torch

from paceline.model.linear import pack_linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 2, 7, 16, 64, 130])
@pytest.mark.parametrize("bias", [False, True])
def test_products_equal_float64(dtype: torch.dtype, tokens: int, bias: bool) -> None:
    torch.manual_seed(tokens)
    weight = (torch.randn(97, 160) * 0.05).to(dtype)
    offset = torch.randn(97).to(dtype) if bias else None
    x = torch.randn(tokens, 160)
    y = pack_linear(weight.clone(), offset)(x)
    assert y.dtype == torch.float32
    wanted = x.double() @ weight.double().T + (0 if offset is None else offset.double())
    # bfloat16 products (where the CPU has them) round the activations too.
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(y.double(), wanted, atol=tolerance, rtol=tolerance)


def test_weights_beyond_float16_keep_their_value() -> None:
    weight = torch.full((4, 32), 1e5).bfloat16()
    y = pack_linear(weight)(torch.ones(2, 32))
    torch.testing.assert_close(y, torch.full((2, 4), float(weight[0, 0]) * 32), rtol=1e-2, atol=0)


def test_tiny_bfloat16_weights_survive() -> None:
    weight = torch.full((4, 32), 3e-7).bfloat16()
    y = pack_linear(weight)(torch.ones(2, 32))
    torch.testing.assert_close(y, torch.full((2, 4), float(weight[0, 0]) * 32), rtol=0, atol=1e-6)
