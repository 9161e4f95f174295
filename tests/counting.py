"""A target that counts and an EAGLE-3 drafter that knows it: high acceptance without training.

The target's residual stream is L + 1 blocks of V numbers. The embedding of token t is a one at t of
block 0; layer i copies block i to block i + 1, the last one moved by one, and the head reads the
last block. Attention writes nothing. So greedy decoding counts, t + 1 after t modulo V; and block b
is empty before layer b, so that what the stream holds tells where it was read.

The drafter reads block 2 of what it takes for the stream before layer 2, less twice block 3, which
is empty there. Its state stands for a number, its MLP turns it into the next one's.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

V, L = 24, 7
H = V * (L + 1)
WIDTH = 32  # of the drafter
STATE = 2.0  # size of its states; fed back normed they would be sqrt(WIDTH) long

FOLLOWING = torch.roll(torch.eye(V), 1, dims=0)  # maps the one at t to that at t + 1


def _silu_square(x: float) -> float:
    return x * x / (1 + math.exp(-x))


def target_tensors() -> dict[str, torch.Tensor]:
    def block(index: int) -> slice:
        return slice(index * V, (index + 1) * V)

    embedding, head = torch.zeros(V, H), torch.zeros(V, H)
    embedding[:, block(0)] = torch.eye(V)
    head[:, block(L)] = torch.eye(V)
    tensors = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": torch.ones(H),
        "lm_head.weight": head,
    }
    for i in range(L):
        gate, down = torch.zeros(V, H), torch.zeros(H, V)
        gate[:, block(i)] = torch.eye(V)
        moved = FOLLOWING if i == L - 1 else torch.eye(V)
        down[block(i + 1)] = moved / _silu_square(math.sqrt(H / (i + 1)))
        layer = f"model.layers.{i}"
        tensors |= {
            f"{layer}.input_layernorm.weight": torch.ones(H),
            f"{layer}.post_attention_layernorm.weight": torch.ones(H),
            f"{layer}.self_attn.q_proj.weight": torch.zeros(64, H),
            f"{layer}.self_attn.k_proj.weight": torch.zeros(32, H),
            f"{layer}.self_attn.v_proj.weight": torch.zeros(32, H),
            f"{layer}.self_attn.o_proj.weight": torch.zeros(H, 64),
            f"{layer}.mlp.gate_proj.weight": gate,
            f"{layer}.mlp.up_proj.weight": gate.clone(),
            f"{layer}.mlp.down_proj.weight": down,
        }
    return tensors


def write_target(directory: Path) -> Path:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": V,
        "hidden_size": H, "intermediate_size": V, "num_hidden_layers": L,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512, "tie_word_embeddings": False, "eos_token_id": None,
    }  # fmt: skip
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(target_tensors(), directory / "model.safetensors")
    return directory


def drafter_tensors() -> dict[str, torch.Tensor]:
    fc = torch.zeros(WIDTH, 3 * H)
    fc[:V, 2 * V : 3 * V] = STATE * FOLLOWING
    fc[:V, 3 * V : 4 * V] = -2 * STATE * FOLLOWING
    gate, down, head = torch.zeros(V, WIDTH), torch.zeros(WIDTH, V), torch.zeros(V, WIDTH)
    gate[:, :V] = head[:, :V] = torch.eye(V)
    down[:V] = (FOLLOWING - torch.eye(V)) * STATE / _silu_square(math.sqrt(WIDTH))
    embedding = torch.zeros(V, WIDTH)
    embedding[:, :V] = torch.eye(V)
    return {
        "fc.weight": fc,
        "midlayer.self_attn.q_proj.weight": torch.zeros(WIDTH, 2 * WIDTH),
        "midlayer.self_attn.k_proj.weight": torch.zeros(16, 2 * WIDTH),
        "midlayer.self_attn.v_proj.weight": torch.zeros(16, 2 * WIDTH),
        "midlayer.self_attn.o_proj.weight": torch.zeros(WIDTH, WIDTH),
        "midlayer.input_layernorm.weight": torch.ones(WIDTH),
        "midlayer.hidden_norm.weight": torch.ones(WIDTH),
        "midlayer.post_attention_layernorm.weight": torch.ones(WIDTH),
        "midlayer.mlp.gate_proj.weight": gate,
        "midlayer.mlp.up_proj.weight": gate.clone(),
        "midlayer.mlp.down_proj.weight": down,
        "norm.weight": torch.ones(WIDTH),
        "lm_head.weight": head,
        "embed_tokens.weight": embedding,
    }


def write_drafter(directory: Path, **changes: Any) -> Path:
    """In SpecForge's layout: layer ids are those whose output is read; `changes` to config.json."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "vocab_size": V,
        "draft_vocab_size": V, "hidden_size": WIDTH, "target_hidden_size": H,
        "intermediate_size": V, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]},
    }  # fmt: skip
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config | changes))
    save_file(drafter_tensors(), directory / "model.safetensors")
    return directory
