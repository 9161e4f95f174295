"""Weight matrices packed once for the machine at hand, applied as plain functions.

On a CPU activations are float32 and the format of the weights decides what is read from memory:

    float32 weights          oneDNN, blocked once
    bfloat16, AVX-512 BF16   oneDNN, blocked once, bfloat16 products with float32 sums
    bfloat16, older x86      FBGEMM, kept in float16, float32 products
    anything else            torch's own linear

On an older x86 no other library has a fast bfloat16 product: oneDNN refuses (AVX2) or emulates it
(AVX-512 without BF16: three to four times as slow from 4 tokens on), and torch's own takes four
times as long at 8 tokens. A bfloat16 weight fits float16 exactly from 2^-14 up to 65,504, and to
within 3e-8 below.

On a GPU the weight stays as it is. Knows nothing of layers; `pack_linear` is the one entry.
"""

from __future__ import annotations

import platform
import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.nn import functional

Linear: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""(T, in) -> (T, out), in the activation format of the device."""

FLOAT16_MAX = 65504.0
X86 = ("x86_64", "AMD64", "i386", "i686")
ROWS_HINT = 16  # the token count oneDNN packs for; good from 1 to a few hundred


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """Pack one weight (out, in) with its bias (out,). The caller drops the original."""
    if weight.device.type != "cpu":
        return _Plain(weight, bias)
    wide_bias = None if bias is None else bias.float()
    if weight.dtype == torch.float32:
        return _OneDnn(weight, wide_bias) if _has_onednn() else _Plain(weight, wide_bias)
    if _multiplies_bfloat16():
        return _OneDnn(weight, wide_bias)
    if "fbgemm" in torch.backends.quantized.supported_engines and _fits_float16(weight):
        return _Fbgemm(weight, wide_bias)
    return _Plain(weight.float(), wide_bias)


def _has_onednn() -> bool:
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def _multiplies_bfloat16() -> bool:
    """Has the CPU instructions for it? oneDNN says yes on any AVX-512, and emulates."""
    if not _has_onednn() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    return platform.machine() not in X86 or torch.cpu._is_avx512_bf16_supported()


def _fits_float16(weight: torch.Tensor) -> bool:
    return float(weight.abs().amax()) <= FLOAT16_MAX  # as bfloat16 the bound would round up


class _Plain:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight, self.bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)


class _OneDnn:
    """oneDNN with the weight in its own blocked layout. Inputs and results are rounded to the
    weight's format; what is returned is float32 all the same."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.dtype = weight.dtype
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS_HINT)
        self.bias = None if bias is None else bias.to(weight.dtype)
        self.apply = torch.ops.mkldnn._linear_pointwise

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.apply(x.to(self.dtype), self.packed, self.bias, "none", [], "")
        return y.float()


class _Fbgemm:
    """FBGEMM with a float16 weight and float32 activations, on torch's own threads."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # tells at each call that values are kept in float16
            self.packed: Any = torch.ops.quantized.linear_prepack_fp16(weight.float(), bias)
        self.apply = torch.ops.quantized.linear_dynamic_fp16

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.apply(x, self.packed)
        return y
