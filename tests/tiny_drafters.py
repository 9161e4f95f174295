"""Tiny EAGLE-3 drafters for tests: one config.json and one set of names for each layout in use."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from paceline.model.config import ModelConfig

Shapes = dict[str, tuple[int, ...]]

TARGET = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=48,
    hidden_size=16,
    intermediate_size=40,
    num_layers=12,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    rms_norm_eps=1e-5,
    max_position=512,
)
# By canonical name; 16 wide, 4 heads and 2 key-value heads of 4, three features of the target.
SHAPES: Shapes = {
    "fc.weight": (16, 48),
    "midlayer.input_layernorm.weight": (16,),
    "midlayer.hidden_norm.weight": (16,),
    "midlayer.self_attn.q_proj.weight": (16, 32),
    "midlayer.self_attn.k_proj.weight": (8, 32),
    "midlayer.self_attn.v_proj.weight": (8, 32),
    "midlayer.self_attn.o_proj.weight": (16, 16),
    "midlayer.post_attention_layernorm.weight": (16,),
    "midlayer.mlp.gate_proj.weight": (24, 16),
    "midlayer.mlp.up_proj.weight": (24, 16),
    "midlayer.mlp.down_proj.weight": (16, 24),
    "norm.weight": (16,),
    "lm_head.weight": (20, 16),
    "d2t": (20,),
}
MORE: Shapes = {
    "embed_tokens.weight": (48, 16),
    "t2d": (48,),
    "input_norm.weight": (48,),
    "fc_norm.0.weight": (16,),
    "fc_norm.1.weight": (16,),
    "fc_norm.2.weight": (16,),
    "fc.bias": (16,),
    "midlayer.self_attn.q_norm.weight": (4,),
    "midlayer.self_attn.k_norm.weight": (4,),
    "midlayer.self_attn.q_proj.bias": (16,),
    "midlayer.self_attn.k_proj.bias": (8,),
    "midlayer.self_attn.v_proj.bias": (8,),
}
_FLAT: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 48,
    "draft_vocab_size": 20,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
_SPECFORGE = {"architectures": ["LlamaForCausalLMEagle3"], "max_position_embeddings": 256}
VALUES: dict[str, dict[str, Any]] = {
    "EAGLE": _FLAT | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 40, "bias": True},
    "SpecForge": _FLAT
    | _SPECFORGE
    | {
        "rope_theta": 5e5,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [1, 5, 8],
            "use_aux_hidden_state": True,
        },
    },
    "speculators": {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": 20,
        "norm_before_residual": True,
        "norm_before_fc": True,
        "norm_output": True,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [2, 6, 9],
        "speculators_config": {"algorithm": "eagle3"},
        "transformer_layer_config": {
            "model_type": "qwen3",
            "hidden_size": 16,
            "num_attention_heads": 4,
            "vocab_size": 48,
            "sliding_window": 64,
            "layer_types": ["sliding_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    },
    "ModelOpt": _FLAT
    | _SPECFORGE
    | {
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 64,
        },
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [1, 5, 8],
            "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "use_mtp_layernorm": False,
            "next_layer_regular": True,
            "parallel_draft_step": 1,
        },
    },
}
_EXTRA = {
    "speculators": (
        "embed_tokens.weight",
        "t2d",
        "input_norm.weight",
        "midlayer.self_attn.q_norm.weight",
        "midlayer.self_attn.k_norm.weight",
    )
}
LAYOUTS = tuple(VALUES)


def values_of(layout: str, **changes: Any) -> dict[str, Any]:
    """config.json of a layout with top-level keys changed; "absent" takes a key away."""
    values = copy.deepcopy(VALUES[layout]) | changes
    return {key: value for key, value in values.items() if value != "absent"}


def shapes_of(layout: str) -> Shapes:
    """Shapes by canonical name, t2d included where the layout has it."""
    return SHAPES | {name: MORE[name] for name in _EXTRA.get(layout, ())}


def name_in(layout: str, name: str) -> str:
    """What the layout calls a tensor."""
    return name if layout in ("EAGLE", "SpecForge") else name.replace("midlayer.", "layers.0.")


def tensors_of(shapes: Shapes) -> dict[str, torch.Tensor]:
    """Small random tensors by the same names; draft id i stands for token 2 i."""
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.rand(shape, generator=generator) for name, shape in shapes.items()}
    if "d2t" in tensors:
        tensors["d2t"] = torch.arange(len(tensors["d2t"]))
    if "t2d" in tensors:
        tensors["t2d"] = tensors["t2d"] > 0.5
    return tensors


def write_drafter(
    directory: Path,
    layout: str,
    *,
    values: dict[str, Any] | None = None,
    tensors: dict[str, torch.Tensor] | None = None,
    pickled: bool = False,
) -> Path:
    """Write a drafter of a layout. tensors: by canonical name."""
    directory.mkdir(exist_ok=True)
    tensors = tensors_of(shapes_of(layout)) if tensors is None else tensors
    named = {name_in(layout, name): tensor for name, tensor in tensors.items()}
    text = json.dumps(values_of(layout) if values is None else values)
    (directory / "config.json").write_text(text)
    if pickled:
        torch.save(named, directory / "pytorch_model.bin")
    else:
        save_file(named, directory / "model.safetensors")
    return directory
