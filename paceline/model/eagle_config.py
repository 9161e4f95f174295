"""The shape of an EAGLE-3 drafter as one frozen value, from config.json and back. No torch.

`paceline.model.eagle_layout` knows what the keys mean; here stand what the network needs to know,
the tensors that it reads, and the config.json that most programs read. Knows nothing of files;
every failure is a CheckpointError of one line.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.config import LAYER_IDS, NORM_OUTPUT
from paceline.errors import CheckpointError, ConfigError
from paceline.model import eagle_layout as layout_of
from paceline.model.config import Fields, ModelConfig, RopeConfig
from paceline.model.eagle_layout import SPECFORGE, Shapes, Source, compared, read_source, shown


@dataclass(frozen=True, kw_only=True)
class EagleConfig:
    """One drafter's shape. Sizes are in elements, `max_position` in tokens.

    vocab_size: the target's. draft_vocab_size: rows of the drafter's head.
    boundaries: where the target's residual stream is read, ascending: before layer b; its number
        of layers means after the last one, before the final norm.
    norm_before_residual: the layer's first residual is the normed state, not the state itself.
    norm_before_fc: one norm over all features. fc_norm: a norm for each feature.
    norm_head: the final norm comes before the head. feed_normed: what goes on to the next level of
        drafting is the normed state.
    own_embedding, own_head: the checkpoint has them; else they are the target's.
    layout: whose config.json it was, for people; it says nothing about the drafter.
    """

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position: int
    rope: RopeConfig = field(default_factory=RopeConfig)
    vocab_size: int
    draft_vocab_size: int
    boundaries: tuple[int, ...]
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_head: bool = True
    feed_normed: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    fc_bias: bool = False
    own_embedding: bool = False
    own_head: bool = True
    layout: str = field(default=SPECFORGE, compare=False)

    @classmethod
    def usual(cls, target: ModelConfig, *, draft_vocab_size: int) -> EagleConfig:
        """A new drafter of the usual shape: one layer like the target's, three usual boundaries.

        Raises ConfigError for a target of too few layers.
        """
        layers = target.num_layers
        boundaries = (2, layers // 2, layers - 3)
        if len(set(boundaries)) < 3 or tuple(sorted(boundaries)) != boundaries:
            raise ConfigError(f"a target of {layers} layers is too shallow for an EAGLE-3 drafter")
        return cls(
            hidden_size=target.hidden_size,
            target_hidden_size=target.hidden_size,
            intermediate_size=target.intermediate_size,
            num_heads=target.num_heads,
            num_kv_heads=target.num_kv_heads,
            head_dim=target.head_dim,
            rms_norm_eps=target.rms_norm_eps,
            max_position=target.max_position,
            rope=target.rope,
            vocab_size=target.vocab_size,
            draft_vocab_size=min(draft_vocab_size, target.vocab_size),
            boundaries=boundaries,
        )

    @property
    def kv_width(self) -> int:
        """Elements of K and V together that one token keeps."""
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def feature_width(self) -> int:
        """Elements of all features of one token together: what `fc` takes."""
        return len(self.boundaries) * self.target_hidden_size


def draft_tensors(config: EagleConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the drafter, in the order of the forward pass.

    Matrices are (outputs, inputs). q, k and v read the embedding and the hidden state side by side.
    d2t, whole numbers, is there if the head has fewer rows than the target's vocabulary: row i
    stands for token i + d2t[i].
    """
    hidden, inner, size = config.hidden_size, config.intermediate_size, config.head_dim
    layer, attention = "midlayer", "midlayer.self_attn"
    shapes: dict[str, tuple[int, ...]] = {}

    def linear(name: str, rows: int, columns: int, *, bias: bool = False) -> None:
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)

    if config.own_embedding:
        linear("embed_tokens", config.vocab_size, hidden)
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (config.feature_width,)
    if config.fc_norm:
        for index in range(len(config.boundaries)):
            shapes[f"fc_norm.{index}.weight"] = (config.target_hidden_size,)
    linear("fc", hidden, config.feature_width, bias=config.fc_bias)
    shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
    shapes[f"{layer}.hidden_norm.weight"] = (hidden,)
    linear(f"{attention}.q_proj", config.num_heads * size, 2 * hidden, bias=config.qkv_bias)
    linear(f"{attention}.k_proj", config.num_kv_heads * size, 2 * hidden, bias=config.qkv_bias)
    linear(f"{attention}.v_proj", config.num_kv_heads * size, 2 * hidden, bias=config.qkv_bias)
    if config.qk_norm:
        shapes[f"{attention}.q_norm.weight"] = (size,)
        shapes[f"{attention}.k_norm.weight"] = (size,)
    linear(f"{attention}.o_proj", hidden, config.num_heads * size)
    shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
    linear(f"{layer}.mlp.gate_proj", inner, hidden)
    linear(f"{layer}.mlp.up_proj", inner, hidden)
    linear(f"{layer}.mlp.down_proj", hidden, inner)
    shapes["norm.weight"] = (hidden,)
    if config.own_head:
        linear("lm_head", config.draft_vocab_size, hidden)
    if config.draft_vocab_size < config.vocab_size:
        shapes["d2t"] = (config.draft_vocab_size,)
    return shapes


def check_tensors(config: EagleConfig, found: Shapes, where: str) -> None:
    """Compare names and shapes with `draft_tensors`. Raises CheckpointError.

    With a full vocabulary a d2t may be there: it has to be the identity.
    """
    expected = draft_tensors(config)
    if "d2t" in found:
        expected["d2t"] = (config.draft_vocab_size,)
    for name, shape in expected.items():
        if name not in found:
            raise CheckpointError(
                f"{where}: tensor {name} of shape {shape} is missing; {compared(found, expected)}"
            )
        if found[name] != shape:
            raise CheckpointError(
                f"{where}: tensor {name} has shape {shown(str(found[name]))}, expected {shape} "
                "by config.json and the target: is this the drafter of this target?"
            )
    for name in found:
        if name not in expected:
            raise CheckpointError(
                f"{where}: tensor {shown(name)} is unknown, drafters with it are not supported; "
                f"{compared(found, expected)}"
            )


# --- reading -----------------------------------------------------------------------------------


def eagle_config(
    values: Mapping[str, Any],
    tensors: Shapes,
    target: ModelConfig,
    *,
    layer_ids: str = "auto",
    norm_output: str = "auto",
    where: str,
) -> EagleConfig:
    """The drafter's shape from its config.json and its tensors.

    tensors: canonical name -> shape. layer_ids, norm_output: one of LAYER_IDS and of NORM_OUTPUT,
    how to read those keys; a file that leaves no choice is read by what it says. where: the
    drafter's directory, for messages. Raises CheckpointError for what is unknown, unsupported,
    contradictory or ambiguous, and ConfigError for options that do not exist.
    """
    if layer_ids not in LAYER_IDS or norm_output not in NORM_OUTPUT:
        raise ConfigError(
            f"cannot read a drafter by {layer_ids!r} and {norm_output!r}: layer ids are one of "
            f"{', '.join(LAYER_IDS)}; the output norm one of {', '.join(NORM_OUTPUT)}"
        )
    source = read_source(values, tensors, target, where)
    return _checked_config(source, layer_ids, norm_output)


def readings(
    values: Mapping[str, Any], tensors: Shapes, target: ModelConfig, where: str
) -> list[tuple[str, str]]:
    """The pairs (layer_ids, norm_output) that read this checkpoint as different drafters.

    What "auto" takes comes first, where it can decide; the others are what an explicit option
    would give, likely or not. Raises as `eagle_config`, if there is no reading at all.
    """
    source = read_source(values, tensors, target, where)
    found: dict[EagleConfig, tuple[str, str]] = {}
    errors = []
    for pair in itertools.product(LAYER_IDS, NORM_OUTPUT):
        try:
            found.setdefault(_checked_config(source, *pair), pair)
        except CheckpointError as error:
            errors.append(error)
    if not found:
        raise errors[-1]  # the first ones only ask for an option
    return list(found.values())


def _checked_config(source: Source, layer_ids: str, norm_output: str) -> EagleConfig:
    target, names = source.target, source.tensors
    heads, kv_heads, size = _heads(source)
    # What a file leaves out (speculators: all that equals a default) the tensors tell.
    hidden = source.layer.integer("hidden_size", names["fc.weight"][0], minimum=1)
    inner = names["midlayer.mlp.gate_proj.weight"][0]
    own_embedding, own_head = "embed_tokens.weight" in names, "lm_head.weight" in names
    boundaries = layout_of.boundaries(source, layer_ids)
    vocabulary = layout_of.draft_vocabulary(source)
    if hidden != target.hidden_size and not (own_embedding and own_head):
        raise source.error(
            f"hidden size {hidden} is not the target's {target.hidden_size}, so the checkpoint "
            "must hold embed_tokens.weight and lm_head.weight: use the drafter of this target"
        )
    rope, max_position = layout_of.rope_and_reach(source)
    before_fc, each = layout_of.feature_norms(source)
    norm_head, feed_normed = layout_of.output_norm(source, norm_output)
    config = EagleConfig(
        hidden_size=hidden,
        target_hidden_size=target.hidden_size,
        intermediate_size=source.layer.integer("intermediate_size", inner, minimum=1),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=size,
        rms_norm_eps=source.layer.number("rms_norm_eps", 1e-6),
        max_position=max_position,
        rope=rope,
        vocab_size=target.vocab_size,
        draft_vocab_size=vocabulary,
        boundaries=boundaries,
        norm_before_residual=layout_of.norm_before_residual(source),
        norm_before_fc=before_fc,
        fc_norm=each,
        norm_head=norm_head,
        feed_normed=feed_normed,
        qk_norm=layout_of.qk_norm(source),
        qkv_bias="midlayer.self_attn.q_proj.bias" in names,
        fc_bias="fc.bias" in names,
        own_embedding=own_embedding,
        own_head=own_head,
        layout=source.layout,
    )
    check_tensors(config, names, source.where)
    return config


def shapes_of(values: Mapping[str, Any], target: ModelConfig, where: str) -> Shapes:
    """The tensors that a config.json speaks of: canonical name -> shape. Raises CheckpointError.

    Of what only tensors tell (an embedding of its own, a norm over all features) it has the usual.
    """
    top = Fields(values, f"{where}/config.json")
    layer = layout_of.layer_fields(top)
    hidden = layer.integer("hidden_size", target.hidden_size, minimum=1)
    heads = layer.integer("num_attention_heads", target.num_heads, minimum=1)
    config = EagleConfig(
        hidden_size=hidden,
        target_hidden_size=target.hidden_size,
        intermediate_size=layer.integer("intermediate_size", target.intermediate_size, minimum=1),
        num_heads=heads,
        num_kv_heads=layer.integer("num_key_value_heads", target.num_kv_heads, minimum=1),
        head_dim=layer.integer("head_dim", max(hidden // heads, 1), minimum=1),
        rms_norm_eps=target.rms_norm_eps,
        max_position=target.max_position,
        vocab_size=target.vocab_size,
        draft_vocab_size=top.integer("draft_vocab_size", target.vocab_size, minimum=1),
        boundaries=(0, 1, 2),
        norm_before_fc=top.flag("norm_before_fc", False),
        fc_norm=top.flag("fc_norm", False),
        qk_norm=layer.text("model_type", "") == "qwen3",
        qkv_bias=layer.flag("attention_bias", False),
        fc_bias=top.flag("bias", False),
        own_embedding=hidden != target.hidden_size,
    )
    ids, _ = layout_of.layer_ids(read_source(values, draft_tensors(config), target, where))
    return draft_tensors(dataclasses.replace(config, boundaries=tuple(range(len(ids)))))


def _heads(source: Source) -> tuple[int, int, int]:
    """(attention heads, key-value heads, head size)."""
    layer, names = source.layer, source.tensors
    q, k = (names[f"midlayer.self_attn.{part}_proj.weight"][0] for part in "qk")
    heads = layer.integer("num_attention_heads", 32 if source.nested else None, minimum=1)
    size = layer.integer("head_dim", q // heads, minimum=1)
    kv_heads = layer.integer("num_key_value_heads", k // size, minimum=1)
    if heads % kv_heads or size % 2:
        raise source.error(
            f"{heads} attention heads of size {size} and {kv_heads} key-value heads do not go "
            "together; fetch config.json again"
        )
    return heads, kv_heads, size


# --- writing -----------------------------------------------------------------------------------


def config_values(config: EagleConfig, *, dtype: str) -> dict[str, Any]:
    """config.json for this drafter, in the layout that most programs read.

    Where programs differ each finds the keys that it reads in its own sense, and ours come on top,
    so that `eagle_config` gives the same value back. dtype: "bfloat16", ...
    """
    ids = list(config.boundaries)
    values: dict[str, Any] = {
        "architectures": ["Eagle3Qwen3ForCausalLM" if config.qk_norm else "LlamaForCausalLMEagle3"],
        "model_type": "qwen3" if config.qk_norm else "llama",
        "dtype": dtype,
        "torch_dtype": dtype,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position,
        "attention_bias": config.qkv_bias,
        "mlp_bias": False,
        "bias": config.fc_bias,
        "tie_word_embeddings": False,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "num_aux_hidden_states": len(ids),
        layout_of.IDS: ids,
        "eagle_config": {"use_aux_hidden_state": True},
        layout_of.OWN_BOUNDARIES: ids,
        layout_of.OWN_NORM_HEAD: config.norm_head,
        layout_of.OWN_FEED_NORMED: config.feed_normed,
        **_rope_values(config),
    }
    if ids[0] >= 1:  # these programs name the layer whose output it is: the embedding is none's
        values["eagle_config"][layout_of.IDS] = [number - 1 for number in ids]
    if config.target_hidden_size != config.hidden_size:
        values["target_hidden_size"] = config.target_hidden_size
    if config.feed_normed or not config.norm_head:
        values["norm_output"] = config.feed_normed
    return values


def _rope_values(config: EagleConfig) -> dict[str, Any]:
    """The rotary embedding in the keys of transformers 4 and of 5."""
    rope = config.rope
    if rope.kind == "default":
        parameters: dict[str, Any] = {"rope_type": "default"}
    else:
        plain = dataclasses.asdict(RopeConfig(factor=0.0))  # always written
        parameters = {
            name: value
            for name, value in dataclasses.asdict(rope).items()
            if value != plain[name] or (rope.kind == "llama3" and name.endswith("freq_factor"))
        }
        parameters |= {"type": rope.kind, "rope_type": parameters.pop("kind")}
        parameters.pop("theta", None)
        original = parameters.pop("original_max_position", 0)
        # YaRN without it stretches max_position_embeddings, which already are.
        if original != config.max_position or rope.kind == "llama3":
            parameters["original_max_position_embeddings"] = original
    values: dict[str, Any] = {
        "rope_theta": rope.theta,
        "rope_scaling": None if rope.kind == "default" else parameters,
        "rope_parameters": {**parameters, "rope_theta": rope.theta},
    }
    reach = int(parameters.get("original_max_position_embeddings", 0) * rope.factor)
    if rope.kind == "yarn" and reach > config.max_position:
        values["sliding_window"] = config.max_position
        values["layer_types"] = ["sliding_attention"]
    return values
