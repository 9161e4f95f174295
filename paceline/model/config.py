"""The shape of a decoder of the Llama family, as one frozen value. No torch.

Read from a Hugging Face `config.json` or from GGUF metadata by `paceline.checkpoint`; consumed by
`paceline.model.llama`. `Fields` is how both readers get at typed values. Knows nothing of files or
tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from paceline.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding.

    kind: "default", "linear", "llama3" or "yarn". The other fields matter where their kind reads
    them, with the names and meanings of Hugging Face's `rope_scaling`. YaRN's `attention_factor`
    None means 0.1 ln(factor) + 1.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One checkpoint's shape. Sizes are in elements; `max_position` in tokens.

    qkv_bias, out_bias, mlp_bias: which projections carry biases (Qwen2: q, k and v only).
    qk_norm: RMSNorm over each head of q and k before the rotation (Qwen3).
    sliding_window: None, or the window beyond which attention would have to forget; contexts are
        limited to it, within which full attention is exact.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position: int
    rope: RopeConfig = field(default_factory=RopeConfig)
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    sliding_window: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @property
    def kv_width(self) -> int:
        """Elements of K and V together that one token keeps in one layer."""
        return 2 * self.num_kv_heads * self.head_dim


class Fields:
    """Typed reading of a checkpoint's key-value configuration.

    A key that is absent or null takes the default; without a default, or of a wrong type, it is a
    CheckpointError of one line. where: the file, for that line. prefix: put before every key.
    """

    def __init__(self, values: Mapping[str, Any], where: str, *, prefix: str = "") -> None:
        self.values = values
        self.where = where
        self._prefix = prefix

    def integer(self, key: str, default: int | None = None, *, minimum: int = 0) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self._wrong(key, f"a whole number of at least {minimum}", value)
        return value

    def optional_integer(self, key: str, default: int | None = None) -> int | None:
        """As `integer`, but an explicit null is None and only an absent key takes the default."""
        value = self.values.get(self._prefix + key, default)
        return None if value is None else self.integer(key, default)

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e300:
            raise self._wrong(key, "a positive number", value)
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return None if self.values.get(self._prefix + key) is None else self.number(key)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "text", value)
        return value

    def texts(self, key: str, default: list[str] | None = None) -> list[str]:
        value = self._get(key, default)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, "a list of strings", value)
        return cast("list[str]", value)

    def integers(self, key: str, default: list[int] | None = None) -> list[int]:
        """A list of whole numbers of at least 0; one number alone counts as a list of one."""
        value = self._get(key, default)
        items = value if isinstance(value, list) else [value]
        if not all(type(item) is int and item >= 0 for item in items):
            raise self._wrong(key, "a list of whole numbers", value)
        return cast("list[int]", items)

    def table(self, key: str) -> dict[str, Any]:
        """A nested object; empty if absent."""
        value = self._get(key, {})
        if not isinstance(value, dict):
            raise self._wrong(key, "an object", value)
        return cast("dict[str, Any]", value)

    def _get(self, key: str, default: object) -> Any:
        value = self.values.get(self._prefix + key)
        if value is None and default is None:
            raise CheckpointError(f"{self.where}: {self._prefix}{key} is missing")
        return default if value is None else value

    def _wrong(self, key: str, wanted: str, value: object) -> CheckpointError:
        shown = f"a list of {len(value)}" if isinstance(value, list) else repr(value)[:60]
        return CheckpointError(f"{self.where}: {self._prefix}{key} must be {wanted}, not {shown}")
