"""What config.json and tensor shapes make of a drafter, and what is refused or asked."""

from __future__ import annotations

import copy
import dataclasses
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import CheckpointError, ConfigError
from paceline.model.config import RopeConfig
from paceline.model.eagle_config import (
    EagleConfig,
    check_tensors,
    draft_tensors,
    eagle_config,
    readings,
)
from tests.tiny_drafters import LAYOUTS, MORE, SHAPES, TARGET, Shapes, shapes_of, values_of

IDS = "eagle_aux_hidden_state_layer_ids"
ASK_IDS = "--speculative-draft-layer-ids boundary|output"
ASK_NORM = "--speculative-draft-norm-output head|feedback"


def found_in(layout: str, *more: str) -> Shapes:
    """Canonical shapes as the opener hands them on, that is without t2d."""
    shapes = shapes_of(layout) | {name: MORE[name] for name in more}
    return {name: shape for name, shape in shapes.items() if name != "t2d"}


def read(
    layout: str = "SpecForge",
    *more: str,
    shapes: Shapes | None = None,
    layers: int = 12,
    options: tuple[str, str] = ("auto", "auto"),
    **changes: Any,
) -> EagleConfig:
    return eagle_config(
        values_of(layout, **changes),
        found_in(layout, *more) if shapes is None else shapes,
        dataclasses.replace(TARGET, num_layers=layers),
        layer_ids=options[0],
        norm_output=options[1],
        where="/x",
    )


def refused(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        read(*args, **kwargs)
    message = str(caught.value)
    assert message.startswith("/x") and "\n" not in message
    return message


def nested(**changes: Any) -> dict[str, Any]:
    """transformer_layer_config with keys changed."""
    inner = values_of("speculators")["transformer_layer_config"] | changes
    return {key: value for key, value in inner.items() if value != "absent"}


def pairs(layout: str = "SpecForge", *more: str, **changes: Any) -> list[tuple[str, str]]:
    return readings(values_of(layout, **changes), found_in(layout, *more), TARGET, "/x")


# --- the four layouts --------------------------------------------------------------------------

PLAIN = EagleConfig(
    hidden_size=16,
    target_hidden_size=16,
    intermediate_size=24,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    rms_norm_eps=1e-5,
    max_position=2048,
    vocab_size=48,
    draft_vocab_size=20,
    boundaries=(2, 6, 9),
)
EXPECTED = {
    "EAGLE": PLAIN,
    "SpecForge": dataclasses.replace(PLAIN, max_position=256, rope=RopeConfig(theta=5e5)),
    "speculators": dataclasses.replace(
        PLAIN,
        max_position=64,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=1e6),
        norm_before_residual=True,
        norm_before_fc=True,
        feed_normed=True,
        qk_norm=True,
        own_embedding=True,
    ),
    "ModelOpt": dataclasses.replace(
        PLAIN,
        max_position=2048,
        rope=RopeConfig(kind="yarn", factor=32.0, original_max_position=64),
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_read(layout: str) -> None:
    config = read(layout)
    assert config == EXPECTED[layout]
    assert config.layout == layout
    assert draft_tensors(config) == found_in(layout)
    assert (config.kv_width, config.feature_width) == (16, 48)
    assert pairs(layout)[0] == ("auto", "auto")


def test_reading_needs_no_torch() -> None:
    code = "import sys, paceline.drafter_checkpoint; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_a_file_leaves_out_the_tensors_tell() -> None:
    absent = read(
        intermediate_size=None, num_key_value_heads=None, draft_vocab_size=None, head_dim=None
    )
    assert absent == EXPECTED["SpecForge"]
    wide = found_in("speculators") | {
        "midlayer.self_attn.q_proj.weight": (128, 32),
        "midlayer.self_attn.o_proj.weight": (16, 128),
    }
    config = read(
        "speculators",
        shapes=wide,
        transformer_layer_config=nested(num_attention_heads="absent", vocab_size="absent"),
    )
    assert (config.num_heads, config.head_dim, config.vocab_size) == (32, 4, 48)


def test_biases_are_those_of_the_file() -> None:
    biases = [name for name in MORE if name.endswith(".bias")]
    assert read("ModelOpt", *biases).qkv_bias and read("ModelOpt", *biases).fc_bias
    assert not read(attention_bias=True).qkv_bias
    assert "midlayer.self_attn.k_proj.bias" in refused("ModelOpt", "midlayer.self_attn.q_proj.bias")


def test_a_drafter_of_its_own_width_brings_embedding_and_head() -> None:
    narrow = {
        name: tuple({16: 8, 32: 16}.get(size, size) for size in shape)
        for name, shape in SHAPES.items()
    }
    narrow |= {
        "fc.weight": (8, 48),
        "midlayer.self_attn.q_proj.weight": (16, 16),
        "midlayer.self_attn.k_proj.weight": (8, 16),
        "midlayer.self_attn.v_proj.weight": (8, 16),
        "midlayer.self_attn.o_proj.weight": (8, 16),
        "embed_tokens.weight": (48, 8),
    }
    config = read("EAGLE", shapes=narrow, hidden_size=8, target_hidden_size=16, head_dim=4)
    assert (config.hidden_size, config.own_embedding) == (8, True)
    del narrow["embed_tokens.weight"]
    assert "embed_tokens.weight" in refused("EAGLE", shapes=narrow, hidden_size=8, head_dim=4)


def test_a_full_vocabulary_needs_neither_table_nor_head() -> None:
    whole = found_in("SpecForge") | {"lm_head.weight": (48, 16)}
    del whole["d2t"]
    assert read(shapes=whole, draft_vocab_size=48).draft_vocab_size == 48
    assert read(shapes=whole | {"d2t": (48,)}, draft_vocab_size=48).own_head
    assert "shape (20,)" in refused(shapes=whole | {"d2t": (20,)}, draft_vocab_size=48)
    del whole["lm_head.weight"]
    config = read(shapes=whole, draft_vocab_size=None)
    assert not config.own_head and config.draft_vocab_size == 48
    assert draft_tensors(config) == whole


# --- positions ---------------------------------------------------------------------------------


def test_rope_is_read_as_its_writer_ran_it() -> None:
    linear = {"type": "linear", "factor": 4.0}
    assert read("EAGLE", rope_theta=1e6).rope.theta == 1e6
    assert read("EAGLE", rope_theta=1e6, rope_scaling=linear).rope.theta == 1e4
    assert read("SpecForge", rope_theta=1e6, rope_scaling=linear).rope.theta == 1e6
    assert read("SpecForge", rope_theta=None).rope.theta == 1e4
    new = {"rope_type": "linear", "factor": 4.0, "rope_theta": 7e5}
    assert read("SpecForge", rope_parameters=new).rope.theta == 7e5
    assert "rope type 'dynamic'" in refused(rope_scaling={"type": "dynamic", "factor": 2.0})


def test_a_window_limits_the_context() -> None:
    def reach(layout: str = "speculators", **changes: Any) -> int:
        if layout == "speculators":
            return read(layout, transformer_layer_config=nested(**changes)).max_position
        return read(layout, **changes).max_position

    assert reach() == 64
    assert reach(layer_types="absent") == 64
    assert reach(layer_types=["full_attention"]) == 32768
    assert reach(layer_types="absent", use_sliding_window=False) == 32768
    assert reach(sliding_window="absent") == 4096
    assert reach(sliding_window=None, max_position_embeddings=100) == 100
    assert reach("SpecForge", sliding_window=64) == 256
    assert reach("SpecForge", sliding_window=64, layer_types=["sliding_attention"]) == 64
    assert "sliding_window" in refused(sliding_window=0, layer_types=["sliding_attention"])


# --- layer ids ---------------------------------------------------------------------------------


def aux(*ids: int) -> dict[str, Any]:
    return {"eagle_config": {IDS: list(ids)}}


@pytest.mark.parametrize(
    ("layers", "changes", "boundaries"),
    [
        (12, {"eagle_config": None}, (2, 6, 9)),
        (24, aux(1, 11, 21), (2, 12, 22)),
        (36, aux(1, 17, 33), (2, 18, 34)),
        (61, aux(57, 29, 1), (2, 30, 58)),
        (94, aux(1, 46, 90), (2, 47, 91)),
        (36, aux(24, 30, 36), (24, 30, 36)),
        (12, aux(0, 5, 12), (0, 5, 12)),
        (12, {IDS: [3, 6, 9], **aux(2, 5, 8)}, (3, 6, 9)),
        (12, {IDS: [1, 5, 8], **aux(1, 5, 8)}, (2, 6, 9)),
        (12, {"paceline_boundaries": [0, 7, 11], **aux(1, 5, 8)}, (0, 7, 11)),
        (12, {"paceline_boundaries": [], **aux(1, 5, 8)}, (2, 6, 9)),
        (3, {"paceline_boundaries": [0, 1, 3], "eagle_config": None}, (0, 1, 3)),
    ],
    ids=str,
)
def test_layer_ids_with_one_meaning(
    layers: int, changes: dict[str, Any], boundaries: tuple[int, ...]
) -> None:
    assert read(layers=layers, **changes).boundaries == boundaries


def test_the_usual_pattern_of_few_layers_is_recognised() -> None:
    two = found_in("SpecForge") | {"fc.weight": (16, 32)}
    assert read(layers=4, shapes=two, **aux(0, 1)).boundaries == (1, 2)


@pytest.mark.parametrize("ids", [(1, 5, 10), (2, 6, 9), (3, 5, 8), (0, 5, 8)])
def test_layer_ids_with_two_meanings_are_asked_for(ids: tuple[int, ...]) -> None:
    message = refused(**aux(*ids))
    assert ASK_IDS in message and "`paceline check-drafter`" in message
    assert read(options=("boundary", "auto"), **aux(*ids)).boundaries == ids
    above = tuple(number + 1 for number in ids)
    assert read(options=("output", "auto"), **aux(*ids)).boundaries == above
    assert pairs(**aux(*ids)) == [("boundary", "auto"), ("output", "auto")]


def test_an_option_overrules_what_is_only_likely() -> None:
    assert read(options=("boundary", "auto")).boundaries == (1, 5, 8)
    assert read("speculators", options=("output", "auto")).boundaries == (3, 7, 10)
    assert read(paceline_boundaries=[1, 2, 3]).boundaries == (1, 2, 3)
    message = refused(options=("output", "auto"), paceline_boundaries=[1, 2, 3])
    assert "--speculative-draft-layer-ids output is not read" in message
    message = refused(options=("output", "auto"), **aux(1, 2, 12))
    assert "--speculative-draft-layer-ids boundary" in message


@pytest.mark.parametrize(
    ("layers", "changes", "says"),
    [
        (12, aux(1, 5, 13), "names layer 13, the target has 12 layers"),
        (12, aux(1, 5, 10**4000), "the target has 12 layers"),
        (12, {"paceline_boundaries": [13]}, "paceline_boundaries names layer 13"),
        (12, aux(1, 5, 5), "names a layer twice"),
        (12, aux(1, 8), "2 states of this target are 32"),
        (12, {IDS: [2, 6, 8], **aux(2, 5, 8)}, "disagree"),
        (12, {"eagle_config": {IDS: ["1"]}}, "must be a list of whole numbers"),
        (6, {"eagle_config": None}, "6 layers are too few"),
        (1, {"eagle_config": None}, "paceline_boundaries in config.json"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_layer_ids_that_cannot_be(layers: int, changes: dict[str, Any], says: str) -> None:
    assert says in refused(layers=layers, **changes)


# --- norms -------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [True, False])
def test_a_flat_norm_output_is_asked_for(value: bool) -> None:
    for layout in ("EAGLE", "SpecForge", "ModelOpt"):
        message = refused(layout, norm_output=value)
        assert ASK_NORM in message and "`paceline check-drafter`" in message
    found = {
        option: (config.norm_head, config.feed_normed)
        for option in ("head", "feedback")
        for config in [read(options=("auto", option), norm_output=value)]
    }
    assert found == {"head": (value, False), "feedback": (True, value)}
    assert pairs(norm_output=value)[:2] == [("auto", "head"), ("auto", "feedback")]


def test_norm_output_with_one_meaning() -> None:
    plain = read()
    assert "norm-output feedback is not read" in refused(options=("auto", "feedback"))
    assert (plain.norm_head, plain.feed_normed) == (True, False)
    assert read("speculators").feed_normed
    assert not read("speculators", norm_output=False).feed_normed
    assert not read("speculators", norm_output="absent").feed_normed
    own = read(norm_output=True, paceline_norm_head=False)
    assert (own.norm_head, own.feed_normed) == (False, False)
    assert read(norm_output=False, paceline_feed_normed=True).feed_normed


def test_two_questions_are_four_readings() -> None:
    changes = {"norm_output": True, **aux(2, 6, 9)}
    found = pairs(**changes)
    assert len(found) == 4
    assert len({read(options=pair, **changes) for pair in found}) == 4


def test_norm_before_residual_is_never_silently_guessed(caplog: pytest.LogCaptureFixture) -> None:
    assert not read().norm_before_residual
    assert read(norm_before_residual=True).norm_before_residual
    assert not caplog.records
    assert not read("speculators", norm_before_residual="absent").norm_before_residual
    assert "norm_before_residual" in caplog.text


def test_norms_of_features() -> None:
    each = [name for name in MORE if name.startswith("fc_norm")]
    assert read(layout="SpecForge", fc_norm=False) == EXPECTED["SpecForge"]
    assert read("SpecForge", "input_norm.weight").norm_before_fc
    assert read("SpecForge", "input_norm.weight", norm_before_fc=True).norm_before_fc
    deep = {IDS: [1, 5, 8], "norm_before_fc": True}
    assert read("SpecForge", "input_norm.weight", eagle_config=deep).norm_before_fc
    assert read("SpecForge", *each, fc_norm=True).fc_norm
    assert read("SpecForge", *each, use_aux_norm=True).fc_norm


@pytest.mark.parametrize(
    ("more", "changes", "says"),
    [
        (("input_norm.weight",), {"norm_before_fc": False}, "norm_before_fc false"),
        ((), {"norm_before_fc": True}, "norm_before_fc true, but its tensors are missing"),
        ((), {"fc_norm": True}, "fc_norm true, but its tensors are missing"),
        (("fc_norm.0.weight",), {"fc_norm": False}, "fc_norm false, but its tensors are there"),
        (("fc_norm.0.weight",), {}, "fc_norm.1.weight of shape (16,) is missing"),
        (("input_norm.weight", "fc_norm.0.weight"), {}, "exclude each other"),
        ((), {"norm_before_fc": True, "fc_norm": True}, "exclude each other"),
        ((), {"norm_before_fc": "yes"}, "norm_before_fc must be true or false"),
    ],
    ids=str,
)
def test_norms_that_contradict_their_tensors(
    more: tuple[str, ...], changes: dict[str, Any], says: str
) -> None:
    assert says in refused("SpecForge", *more, **changes)


def test_norms_of_q_and_k() -> None:
    names = ("midlayer.self_attn.q_norm.weight", "midlayer.self_attn.k_norm.weight")
    assert read("SpecForge", *names).qk_norm
    llama = nested(model_type="llama")
    assert "model_type llama" in refused("speculators", transformer_layer_config=llama)
    bare = {k: v for k, v in found_in("speculators").items() if k not in names}
    assert not read("speculators", shapes=bare, transformer_layer_config=llama).qk_norm
    assert "model_type qwen3" in refused("speculators", shapes=bare)


# --- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "changes", "says"),
    [
        ("speculators", {"speculators_model_type": "eagle"}, "speculators_model_type eagle"),
        ("speculators", {"speculators_model_type": "peagle"}, "P-EAGLE"),
        ("ModelOpt", {"model_type": "kimi_k2"}, "latent attention"),
        ("ModelOpt", {"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "latent attention"),
        ("ModelOpt", {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        ("SpecForge", {"quantization_config": {"bits": 4}}, "quantised"),
        ("SpecForge", {"hidden_act": "gelu"}, "hidden_act gelu"),
        ("SpecForge", {"target_hidden_size": 32}, "target_hidden_size 32"),
        ("SpecForge", {"vocab_size": 50}, "vocabulary of 50 tokens, the target has 48"),
        ("SpecForge", {"draft_vocab_size": 30}, "draft_vocab_size is 30"),
        ("SpecForge", {"num_attention_heads": None}, "num_attention_heads is missing"),
        ("SpecForge", {"num_key_value_heads": 3}, "do not go together"),
        ("SpecForge", {"head_dim": 3}, "do not go together"),
        ("SpecForge", {"head_dim": 8}, "expected (32, 32)"),
        ("SpecForge", {"intermediate_size": 25}, "gate_proj"),
        ("SpecForge", {"hidden_size": 32}, "hidden size 32 is not the target's 16"),
        ("SpecForge", {"eagle_config": 3}, "eagle_config must be an object"),
        ("SpecForge", {"max_position_embeddings": 0}, "max_position_embeddings"),
        ("SpecForge", {"rope_scaling": {"type": "yarn", "factor": 1e299,
          "original_max_position_embeddings": 10**200}}, "rope"),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_configs_that_cannot_be_served(layout: str, changes: dict[str, Any], says: str) -> None:
    assert says in refused(layout, **changes)


@pytest.mark.parametrize(
    ("added", "says"),
    [
        ({"layers.1.mlp.up_proj.weight": (24, 16)}, "2 decoder layers"),
        ({"mask_hidden": (1, 16)}, "P-EAGLE"),
        ({"midlayer.self_attn.kv_a_proj_with_mqa.weight": (8, 32)}, "latent attention"),
        (
            {"fc.weight": (16, 32), "midlayer.self_attn.q_proj.weight": (16, 16)},
            "EAGLE-1 or EAGLE-2",
        ),
        ({"lm_head.weight": (49, 16)}, "49 rows"),
        ({"lm_head.weight": (0, 16)}, "draft_vocab_size is 20"),
        ({"fc.weight": (16, 64)}, "fc.weight takes 64 inputs"),
        ({"fc.weight": (16, 40)}, "3 states of this target are 48"),
        ({"midlayer.self_attn.o_proj.bias": (16,)}, "o_proj.bias is unknown"),
        ({"midlayer.mlp.gate_proj.bias": (24,)}, "gate_proj.bias is unknown"),
        ({"a\nb" * 100: (1,)}, "is unknown"),
        ({"norm.weight": (16, 1)}, "norm.weight has shape (16, 1), expected (16,)"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_tensors_that_cannot_be_served(added: Shapes, says: str) -> None:
    message = refused(shapes=SHAPES | added)
    assert says in message and len(message) < 2000


@pytest.mark.parametrize(
    ("gone", "says"),
    [
        ("d2t", "d2t is missing, which a draft vocabulary of 20 out of 48 tokens needs"),
        ("lm_head.weight", "lm_head.weight is missing, which a draft vocabulary of 20"),
        ("norm.weight", "norm.weight of shape (16,) is missing"),
        ("fc.weight", "no EAGLE-3 drafter of a known layout"),
    ],
)
def test_missing_tensors_are_named(gone: str, says: str) -> None:
    assert says in refused(shapes={k: v for k, v in SHAPES.items() if k != gone})


def test_a_head_that_only_config_json_knows_is_missing() -> None:
    bare = {k: v for k, v in SHAPES.items() if k not in ("d2t", "lm_head.weight")}
    assert "lm_head.weight is missing" in refused(shapes=bare)


def test_an_unknown_layout_lists_some_tensors() -> None:
    message = refused(shapes={f"medusa.{i:02}.weight": (16, 16) for i in range(40)})
    assert "medusa.11.weight and 28 more; expected: fc.weight, midlayer." in message
    assert "medusa.12" not in message
    assert "found: none" in refused(shapes={})


def test_options_that_do_not_exist() -> None:
    with pytest.raises(ConfigError, match="'input'"):
        read(options=("input", "auto"))
    with pytest.raises(ConfigError, match="boundary, output"):
        read(options=("auto", "none"))


def test_check_tensors_lists_both_sides() -> None:
    with pytest.raises(CheckpointError, match="found: none; expected: d2t, fc"):
        check_tensors(PLAIN, {}, "/x")


# --- anything ----------------------------------------------------------------------------------

KEYS = sorted({key for layout in LAYOUTS for key in values_of(layout)} | {
    "head_dim", "norm_output", "rope_theta", "rope_scaling", "rope_parameters", "fc_norm",
    "paceline_boundaries", "sliding_window", "layer_types", "use_sliding_window",
})  # fmt: skip
INNER = ["type", "rope_type", "factor", "original_max_position_embeddings", IDS, "rope_theta"]
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 60)
    | st.sampled_from([10**400, -1, 0, 1e308, float("inf"), float("nan"), 0.5])
    | st.sampled_from(["yarn", "linear", "llama3", "qwen3", "x\ny", "sliding_attention"])
)
ANYTHING = (
    SCALARS
    | st.lists(SCALARS, max_size=4)
    | st.dictionaries(st.sampled_from(INNER + KEYS), SCALARS, max_size=4)
)


@settings(deadline=None, max_examples=200)
@given(
    st.sampled_from(LAYOUTS),
    st.dictionaries(st.sampled_from(KEYS), ANYTHING, max_size=3),
    st.dictionaries(st.sampled_from(KEYS + INNER), ANYTHING, max_size=2),
)
def test_any_config_is_read_or_refused_in_one_line(
    layout: str, changes: dict[str, Any], inner: dict[str, Any]
) -> None:
    values = copy.deepcopy(values_of(layout)) | changes
    if isinstance(values.get("transformer_layer_config"), dict):
        values["transformer_layer_config"] |= inner
    try:
        for by_id, by_norm in readings(values, found_in(layout), TARGET, "/x"):
            eagle_config(
                values,
                found_in(layout),
                TARGET,
                layer_ids=by_id,
                norm_output=by_norm,
                where="/x",
            )
    except CheckpointError as error:
        assert "\n" not in str(error) and str(error).startswith("/x")
