"""Packed weights against float64 products of the same weights, by every library that is here."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.model import linear
from paceline.model.linear import FLOAT16_MAX, pack_linear

BFLOAT16_PRODUCTS = linear._multiplies_bfloat16()
FBGEMM = "fbgemm" in torch.backends.quantized.supported_engines
TOKENS = st.one_of(st.integers(1, 20), st.integers(1, 130))


def exact(weight: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    return x.double() @ weight.double().T + (0 if bias is None else bias.double())


def check(
    weight: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor, *, rounds: float = 0.0
) -> None:
    """Pack and compare.

    rounds: relative error where the products are bfloat16: half for activations, half for results,
    which hold the bias as well.
    """
    wanted, before = exact(weight, bias, x), x.clone()
    y = pack_linear(weight.clone(), None if bias is None else bias.clone())(x)
    assert y.dtype == torch.float32 and y.shape == wanted.shape
    assert torch.equal(x, before)
    sizes = None if bias is None else bias.abs()
    terms = exact(weight.abs(), sizes, x.abs()) + 1  # what rounding is relative to
    assert ((y - wanted).abs() <= (2e-6 + rounds) * terms).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(deadline=None, max_examples=60)
@given(
    tokens=TOKENS,
    inputs=st.integers(1, 300),
    outputs=st.integers(1, 200),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_products_equal_float64(
    tokens: int, inputs: int, outputs: int, bias: bool, seed: int, *, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(outputs, inputs, generator=generator) * 0.05).to(dtype)
    offset = torch.randn(outputs, generator=generator).to(dtype) if bias else None
    x = torch.randn(tokens, inputs, generator=generator)
    rounds = 2**-8 if dtype == torch.bfloat16 and BFLOAT16_PRODUCTS else 0.0
    check(weight, offset, x, rounds=rounds)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 8, 16, 130])
def test_products_of_a_models_size_equal_float64(dtype: torch.dtype, tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    weight = (torch.randn(1536, 576, generator=generator) * 0.05).to(dtype)
    x = torch.randn(tokens, 576, generator=generator) * 10
    check(weight, None, x, rounds=2**-8 if dtype == torch.bfloat16 and BFLOAT16_PRODUCTS else 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_any_library_torch_itself_multiplies(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "_has_onednn", lambda: False)
    monkeypatch.setattr(linear, "_fits_float16", lambda weight: False)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(97, 160, generator=generator).to(dtype)
    check(weight, torch.randn(97, generator=generator), torch.randn(7, 160, generator=generator))


@pytest.mark.parametrize(
    ("machine", "onednn", "avx512_bf16", "products"),
    [
        ("x86_64", True, True, True),
        ("x86_64", True, False, False),  # AVX-512 alone: oneDNN says yes, and emulates
        ("AMD64", True, False, False),
        ("x86_64", False, False, False),
        ("aarch64", True, False, True),
        ("arm64", False, False, False),
    ],
)
def test_onednn_multiplies_bfloat16_only_where_the_cpu_does(
    machine: str, onednn: bool, avx512_bf16: bool, products: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "_has_onednn", lambda: True)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: onednn)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert linear._multiplies_bfloat16() is products


@pytest.mark.skipif(not FBGEMM, reason="torch was built without FBGEMM")
def test_older_machines_multiply_bfloat16_weights_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every bfloat16 weight that float16 holds: activations and products stay float32."""
    monkeypatch.setattr(linear, "_has_onednn", lambda: False)
    bits = torch.arange(0x3880, 0x477F + 1)  # 2^-14 .. 65,280
    positive = bits.to(torch.int16).view(torch.bfloat16)
    weight = torch.cat([positive, -positive])[:, None].contiguous()  # (outputs, 1)
    assert weight.max() == 65280 and weight[weight > 0].min() == 2.0**-14
    packed = pack_linear(weight.clone())
    assert isinstance(packed, linear._Fbgemm)
    assert torch.equal(packed(torch.ones(1, 1))[0], weight[:, 0].float())


@pytest.mark.parametrize("largest", [65280.0, 65792.0, -66048.0, 1e5, -3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_weight_around_the_end_of_float16_keeps_its_value(
    dtype: torch.dtype, largest: float
) -> None:
    weight = torch.full((4, 32), 0.5, dtype=dtype)
    weight[2, 5] = largest
    value = weight[2, 5].item()
    assert (abs(value) > FLOAT16_MAX) == (largest != 65280.0)
    x = torch.zeros(2, 32)
    x[:, 5] = torch.tensor([1.0, -0.25])
    y = pack_linear(weight)(x)
    torch.testing.assert_close(y[:, 2], torch.tensor([value, -0.25 * value]), rtol=1e-6, atol=0)
    torch.testing.assert_close(y[:, 0], torch.tensor([0.5, -0.125]), rtol=1e-6, atol=0)


def test_tiny_bfloat16_weights_survive() -> None:
    weight = torch.tensor([[3e-7], [-1e-6], [5e-5], [0.0]]).bfloat16()
    y = pack_linear(weight.clone())(torch.ones(1, 1))
    torch.testing.assert_close(y[0], weight[:, 0].float(), rtol=0, atol=3.1e-8)
