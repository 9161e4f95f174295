"""What `hf_config` makes of config.json, against the classes of transformers that read the same."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from paceline.checkpoint import hf_config
from paceline.errors import CheckpointError
from paceline.model.config import Fields, ModelConfig, RopeConfig

CLASSES: dict[str, type[PreTrainedConfig]] = {
    "LlamaForCausalLM": LlamaConfig,
    "MistralForCausalLM": MistralConfig,
    "Qwen2ForCausalLM": Qwen2Config,
    "Qwen3ForCausalLM": Qwen3Config,
}
SIZES = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 32,
}


def raw(architecture: str, **values: Any) -> dict[str, Any]:
    return {"architectures": [architecture], **SIZES, **values}


def read(architecture: str, **values: Any) -> ModelConfig:
    return hf_config(raw(architecture, **values))


CASES: list[dict[str, Any]] = [
    {},
    {"num_key_value_heads": 32, "head_dim": 4},
    {"num_key_value_heads": 4, "head_dim": 16, "rms_norm_eps": 1e-5},
    {"max_position_embeddings": 77, "tie_word_embeddings": True, "bos_token_id": 9},
    {"eos_token_id": [5, 6]},
    {"eos_token_id": None, "bos_token_id": None},
    {"sliding_window": 12},
    {"sliding_window": None},
    {"sliding_window": 12, "use_sliding_window": True, "max_window_layers": 2},
    {"sliding_window": 12, "use_sliding_window": True, "max_window_layers": 3},
    {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"] * 2},
    {"use_sliding_window": True, "layer_types": ["full_attention"] * 3, "max_window_layers": 0},
    {"rope_theta": 5000.0},
    {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 5000.0},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 7000.0}, "rope_theta": 5000.0},
    {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}, "max_position_embeddings": 64},
]


@pytest.mark.parametrize("values", CASES, ids=str)
@pytest.mark.parametrize("architecture", CLASSES)
def test_reads_as_transformers_does(architecture: str, values: dict[str, Any]) -> None:
    if "layer_types" in values:
        values = values | {"layer_types": values["layer_types"][:3]}
        if not architecture.startswith("Qwen"):
            return
    ours = read(architecture, **values)
    theirs = CLASSES[architecture](**SIZES, **copy.deepcopy(values)).to_dict()  # it edits them
    head_dim = theirs.get("head_dim") or theirs["hidden_size"] // theirs["num_attention_heads"]
    ends = theirs["eos_token_id"]
    assert (ours.num_kv_heads, ours.head_dim) == (theirs["num_key_value_heads"], head_dim)
    assert ours.rms_norm_eps == theirs["rms_norm_eps"]
    assert ours.max_position == theirs["max_position_embeddings"]
    assert ours.tie_embeddings == theirs["tie_word_embeddings"]
    assert ours.bos_token_id == theirs["bos_token_id"]
    assert list(ours.eos_token_ids) == (
        [] if ends is None else ends if isinstance(ends, list) else [ends]
    )
    assert ours.rope.kind == theirs["rope_parameters"]["rope_type"]
    assert ours.rope.theta == theirs["rope_parameters"]["rope_theta"]
    assert ours.rope.factor == theirs["rope_parameters"].get("factor", 1.0)
    kinds = theirs.get("layer_types", ["sliding_attention"] * 3)
    window = theirs.get("sliding_window") if "sliding_attention" in kinds else None
    assert ours.sliding_window == (None if architecture.startswith("Llama") else window)


def test_null_heads_are_derived_as_transformers_does() -> None:
    nulls = {"num_key_value_heads": None, "head_dim": None}
    theirs = LlamaConfig(**SIZES, **nulls)
    ours = read("LlamaForCausalLM", **nulls)
    assert (ours.num_kv_heads, ours.head_dim) == (theirs.num_key_value_heads, theirs.head_dim)


def test_biases_and_norms_of_each_architecture() -> None:
    flags = {"attention_bias": True, "mlp_bias": True}
    found = {
        name: (config.qkv_bias, config.out_bias, config.mlp_bias, config.qk_norm)
        for name in CLASSES
        for config in [read(name, **flags)]
    }
    assert found == {
        "LlamaForCausalLM": (True, True, True, False),
        "MistralForCausalLM": (False, False, False, False),
        "Qwen2ForCausalLM": (True, False, False, False),
        "Qwen3ForCausalLM": (True, True, False, True),
    }
    plain = read("Qwen3ForCausalLM")
    assert (plain.qkv_bias, plain.out_bias, plain.qk_norm) == (False, False, True)
    assert read("Qwen2ForCausalLM").qkv_bias


def test_generation_configs_end_ids_are_united() -> None:
    config = read("LlamaForCausalLM", eos_token_id=2, generation_eos_token_id=[7, 2, 8])
    assert config.eos_token_ids == (2, 7, 8)
    assert read("Qwen2ForCausalLM", generation_eos_token_id=3).eos_token_ids == (3,)


def test_architecture_from_the_model_type() -> None:
    config = hf_config({**SIZES, "model_type": "qwen3"})
    assert config.architecture == "Qwen3ForCausalLM"


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind", ["type", "rope_type"])
def test_llama3_and_yarn_parameters(key: str, kind: str) -> None:
    llama3 = {
        kind: "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = read(
        "LlamaForCausalLM", **{key: llama3}, rope_theta=5e5, max_position_embeddings=131072
    )
    assert config.rope == RopeConfig(
        theta=5e5, kind="llama3", factor=8.0, original_max_position=8192
    )
    assert config.max_position == 131072
    yarn = {
        kind: "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
        "attention_factor": 1.5,
        "beta_fast": 16,
        "beta_slow": 2,
        "mscale": 0.5,
        "mscale_all_dim": 0.25,
        "truncate": False,
    }
    config = read("Qwen2ForCausalLM", **{key: yarn}, max_position_embeddings=32768)
    assert config.rope == RopeConfig(
        kind="yarn",
        factor=4.0,
        original_max_position=32768,
        beta_fast=16.0,
        beta_slow=2.0,
        attention_factor=1.5,
        mscale=0.5,
        mscale_all_dim=0.25,
        truncate=False,
    )
    assert config.max_position == 131072  # 4 * 32768, as the model cards promise


def test_yarn_without_a_factor_takes_the_ratio_of_the_lengths() -> None:
    yarn = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 16}
    config = read("LlamaForCausalLM", rope_parameters=yarn, max_position_embeddings=64)
    assert (config.rope.factor, config.rope.original_max_position) == (4.0, 16)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM is not supported"),
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "is not supported; supported: Llama"),
        ({"architectures": None, "model_type": "gpt2"}, "unknown is not supported"),
        ({"architectures": "LlamaForCausalLM"}, "architectures must be a list of strings"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": "320"}, "vocab_size must be a whole number"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers must be"),
        ({"num_attention_heads": 0}, "num_attention_heads must be"),
        ({"num_attention_heads": True}, "num_attention_heads must be"),
        ({"num_key_value_heads": -1}, "num_key_value_heads must be"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a positive number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false"),
        ({"eos_token_id": ["x"]}, "eos_token_id must be"),
        ({"eos_token_id": -1}, "eos_token_id must be"),
        ({"hidden_act": 3}, "hidden_act must be text"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope'"),
        ({"rope_scaling": {"type": "su"}}, "rope type 'su'"),
        ({"rope_scaling": {"type": "linear"}}, "rope parameters: factor is missing"),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0}}, "low_freq_factor is missing"),
        ({"rope_scaling": [1]}, "rope_scaling must be an object"),
        ({"rope_parameters": {"rope_type": 3}}, "rope_type must be text"),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "for each kind of layer"),
    ],
    ids=str,
)
def test_what_cannot_run_is_refused_in_one_line(values: dict[str, Any], says: str) -> None:
    with pytest.raises(CheckpointError, match=says) as caught:
        hf_config(raw("LlamaForCausalLM") | values, where="/models/x/config.json")
    assert str(caught.value).startswith("/models/x/config.json: ")
    assert "\n" not in str(caught.value)


def test_fields_tell_null_from_absent_where_it_matters() -> None:
    fields = Fields({"null": None, "ids": 3}, "f")
    assert fields.optional_integer("null", 7) is None
    assert fields.optional_integer("absent", 7) == 7
    assert fields.integer("null", 7) == 7
    assert fields.integers("ids") == [3]
    assert fields.table("absent") == {}
