"""What an EAGLE-3 drafter's config.json says, whoever wrote it. No torch.

Reads the layouts of EAGLE, SpecForge and ModelOpt, which are flat, and that of speculators, which
nests the decoder layer's description. Two keys mean different things to different programs: the
layer ids and `norm_output`. Where a file does not settle the meaning the reader asks instead of
guessing: a drafter read wrongly runs, but few of its drafts are accepted. Knows nothing of files;
`paceline.model.eagle_config` puts the answers together.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.checkpoint import hf_rope
from paceline.errors import CheckpointError
from paceline.model.config import Fields, ModelConfig, RopeConfig

Shapes = Mapping[str, tuple[int, ...]]

EAGLE, SPECFORGE, NESTED, MODELOPT = "EAGLE", "SpecForge", "speculators", "ModelOpt"
IDS = "eagle_aux_hidden_state_layer_ids"
# Keys of our own, which leave nothing to interpretation: they come before all others.
OWN_BOUNDARIES = "paceline_boundaries"
OWN_NORM_HEAD = "paceline_norm_head"
OWN_FEED_NORMED = "paceline_feed_normed"

_KIND = "speculators_model_type"
_LAYER = "transformer_layer_config"
_MODELOPT_KEYS = {
    "use_input_layernorm_in_first_layer",
    "use_last_layernorm",
    "use_mtp_layernorm",
    "next_layer_regular",
    "parallel_draft_step",
    "parallel_draft_heads_num_layers",
}
_ESSENTIAL = (
    "fc.weight",
    "midlayer.self_attn.q_proj.weight",
    "midlayer.self_attn.k_proj.weight",
    "midlayer.mlp.gate_proj.weight",
)
_MOST_SHOWN = 12  # names in a message
logger = logging.getLogger("paceline")


@dataclass(frozen=True, kw_only=True)
class Source:
    """A checkpoint as found.

    where: its directory. top, aux, layer: config.json itself, its `eagle_config`, and what
    describes the decoder layer (the same as top in a flat layout). tensors: canonical name ->
    shape.
    """

    where: str
    layout: str
    top: Fields
    aux: Fields
    layer: Fields
    tensors: Shapes
    target: ModelConfig

    @property
    def nested(self) -> bool:
        return self.layout == NESTED

    def stated(self, *keys: str) -> bool | None:
        """A flag of config.json or its eagle_config, by the first name found; None: silent."""
        for key in keys:
            for fields in (self.top, self.aux):
                if fields.values.get(key) is not None:
                    return fields.flag(key, False)
        return None

    def error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {what}")


def read_source(
    values: Mapping[str, Any], tensors: Shapes, target: ModelConfig, where: str
) -> Source:
    """Recognise the layout. Raises CheckpointError if this is no EAGLE-3 drafter we can run."""
    path = f"{where}/config.json"
    top = Fields(values, path)
    aux = Fields(top.table("eagle_config"), f"{path}: eagle_config")
    layer, layout = layer_fields(top), EAGLE
    if layer is not top:
        layout = NESTED
    elif _MODELOPT_KEYS & aux.values.keys():
        layout = MODELOPT
    elif aux.values or any("Eagle3" in name for name in top.texts("architectures", [])):
        layout = SPECFORGE
    source = Source(
        where=where, layout=layout, top=top, aux=aux, layer=layer, tensors=tensors, target=target
    )
    for found, what in _other_designs(source):
        if found:
            raise source.error(what)
    if any(len(tensors.get(name, ())) != 2 for name in _ESSENTIAL):
        raise source.error(
            "this is no EAGLE-3 drafter of a known layout; "
            f"{compared(tensors, [*_ESSENTIAL, 'midlayer.hidden_norm.weight', 'norm.weight'])}"
        )
    return source


def layer_fields(top: Fields) -> Fields:
    """The fields that describe the drafter's layer: a table of their own, or all of them."""
    if _KIND in top.values or _LAYER in top.values:
        return Fields(top.table(_LAYER), f"{top.where}: {_LAYER}")
    return top


def _other_designs(source: Source) -> Iterable[tuple[bool, str]]:
    """What is no plain EAGLE-3 drafter: (is it this one?, what to say)."""
    top, layer, names = source.top, source.layer, source.tensors
    kind = top.text(_KIND, "eagle3")
    yield (
        "mask_hidden" in names or kind == "peagle",
        "P-EAGLE drafters (mask_hidden) are not supported: use an EAGLE-3 drafter",
    )
    yield kind != "eagle3", f"{_KIND} {shown(kind)} is not supported: use an EAGLE-3 drafter"
    said = " ".join([*top.texts("architectures", []), layer.text("model_type", "")]).lower()
    yield (
        any(part in said for part in ("deepseek", "kimi"))
        or any(part in name for name in names for part in ("kv_a_proj", "q_a_proj")),
        "drafters with latent attention (MLA) are not supported: use a Llama-style drafter",
    )
    yield (
        source.stated("use_aux_hidden_state") is False,
        "use_aux_hidden_state is false: drafters that read only the final hidden state are not "
        "supported; use one that reads several layers",
    )
    fc, q = (names.get(name, ()) for name in _ESSENTIAL[:2])
    yield (
        len(fc) == len(q) == 2 and fc[1] == 2 * fc[0] != q[1],
        "this is an EAGLE-1 or EAGLE-2 drafter: use an EAGLE-3 drafter",
    )
    layers = {name.split(".")[1] for name in names if name.startswith("layers.")}
    yield (
        bool(layers),
        f"the drafter has {len(layers) + 1} decoder layers: use a drafter of one layer",
    )
    yield (
        bool(top.values.get("quantization_config") or top.values.get("compression_config")),
        "quantised drafters are not supported: use the original weights",
    )
    act = layer.text("hidden_act", "silu")
    yield act != "silu", f"hidden_act {shown(act)} is not supported: use a drafter with silu"


def draft_vocabulary(source: Source) -> int:
    """Rows of the drafter's head: what its tensors have, else config.json, else the target's."""
    names, whole = source.tensors, source.target.vocab_size
    vocabulary = source.layer.integer("vocab_size", whole)
    if vocabulary != whole:
        raise source.error(
            f"made for a vocabulary of {vocabulary} tokens, the target has {whole}: use the "
            "drafter of this target"
        )
    said = source.top.optional_integer("draft_vocab_size")
    head, table = names.get("lm_head.weight"), names.get("d2t")
    rows = next((shape[0] for shape in (head, table) if shape), said or whole)
    if rows > whole or (said is not None and said != rows):
        raise source.error(
            f"the head has {rows} rows, but draft_vocab_size is {said} and the target has {whole} "
            "tokens: fetch the files again"
        )
    if rows == whole:
        return rows
    for tensor, name in ((head, "lm_head.weight"), (table, "d2t")):
        if tensor is None:
            raise source.error(
                f"{name} is missing, which a draft vocabulary of {rows} out of {whole} tokens "
                "needs: fetch the files again"
            )
    return rows


# --- layer ids ---------------------------------------------------------------------------------


def layer_ids(source: Source) -> tuple[tuple[int, ...], str]:
    """(ids, what they are): "fixed" boundaries, "boundary" or "output" by all appearances, or
    "unclear". Without ids in the file: the usual boundaries, fixed."""
    layers = source.target.num_layers
    own = _ids(source, source.top, OWN_BOUNDARIES)
    if own:
        return own, "fixed"
    lists = [_ids(source, fields, IDS) for fields in (source.top, source.aux)]
    if source.nested and lists[0]:
        return lists[0], "boundary"
    if all(lists) and lists[0] != lists[1]:
        if lists[0] == tuple(number + 1 for number in lists[1]):
            return lists[0], "fixed"  # each program finds the list that it understands
        raise source.error(
            f"{IDS} of config.json and of its eagle_config disagree: keep the right list only"
        )
    ids = lists[0] or lists[1]
    if not ids:
        return _usual_boundaries(source), "fixed"
    if ids[-1] == layers:
        return ids, "boundary"
    usual = sorted({1, layers // 2 - 1, layers - 4})
    if list(ids) == usual or (ids[0] == 1 and ids[-1] <= layers - 3):
        return ids, "output"
    return ids, "unclear"


def _ids(source: Source, fields: Fields, key: str) -> tuple[int, ...]:
    """A list of layer ids in ascending order, in which every program reads them; () if absent."""
    ids, layers = sorted(fields.integers(key, [])), source.target.num_layers
    if len(set(ids)) < len(ids):
        raise source.error(f"{key} names a layer twice: correct it in config.json")
    if ids and ids[-1] > layers:
        raise source.error(
            f"{key} names layer {shown(str(ids[-1]))}, the target has {layers} layers: use the "
            "drafter of this target"
        )
    return tuple(ids)


def _usual_boundaries(source: Source) -> tuple[int, ...]:
    layers = source.target.num_layers
    low, middle, high = 2, layers // 2, layers - 3
    if not low < middle < high:
        raise source.error(
            f"no layer ids, and the target's {layers} layers are too few for the usual three: name "
            f"the layers to read as {OWN_BOUNDARIES} in config.json"
        )
    return low, middle, high


def _settled(source: Source, meaning: str, option: str, name: str) -> str:
    """The meaning, or what an option makes of it; an option that nothing hangs on is an error."""
    if option == "auto":
        return meaning
    if meaning == "fixed":
        raise source.error(
            f"--speculative-draft-{name} {option} is not read: this checkpoint leaves nothing "
            "open there; leave the option out"
        )
    return option


def boundaries(source: Source, option: str) -> tuple[int, ...]:
    """Where the target's residual stream is read, one place for each feature that fc takes."""
    ids, meaning = layer_ids(source)
    meaning = _settled(source, meaning, option, "layer-ids")
    if meaning == "unclear":
        raise source.error(
            f"layer ids {shown(str(list(ids)))} have two meanings, the layer before which or after "
            "which the state is read: say --speculative-draft-layer-ids boundary|output "
            "(`paceline check-drafter` tells which)"
        )
    found = tuple(number + 1 for number in ids) if meaning == "output" else ids
    if found[-1] > source.target.num_layers:
        raise source.error(
            f"layer {ids[-1]} has no output, the target has {source.target.num_layers} layers: "
            "say --speculative-draft-layer-ids boundary"
        )
    width, hidden = source.tensors["fc.weight"][1], source.target.hidden_size
    stated = source.top.optional_integer("target_hidden_size")
    if width != len(found) * hidden or stated not in (None, hidden):
        raise source.error(
            f"fc.weight takes {width} inputs (target_hidden_size {stated}), but {len(found)} "
            f"states of this target are {len(found) * hidden} (hidden size {hidden}): use the "
            "drafter of this target, with its own config.json"
        )
    return found


# --- norms -------------------------------------------------------------------------------------


def norm_meaning(source: Source) -> str:
    """How `norm_output` is meant: "fixed" if nothing hangs on it, "feedback", or "unclear"."""
    own = (OWN_NORM_HEAD, OWN_FEED_NORMED)
    if any(source.top.values.get(key) is not None for key in own):
        return "fixed"
    if source.top.values.get("norm_output") is None:
        return "fixed"
    return "feedback" if source.nested else "unclear"


def output_norm(source: Source, option: str) -> tuple[bool, bool]:
    """(the norm comes before the head, the normed state goes on to the next level)."""
    top, meaning = source.top, norm_meaning(source)
    if meaning == "fixed":
        _settled(source, meaning, option, "norm-output")
        return top.flag(OWN_NORM_HEAD, True), top.flag(OWN_FEED_NORMED, False)
    meaning = _settled(source, meaning, option, "norm-output")
    if meaning == "unclear":
        raise source.error(
            "norm_output has two meanings, whether the norm comes before the head or whether the "
            "normed state is fed back: say --speculative-draft-norm-output head|feedback "
            "(`paceline check-drafter` tells which)"
        )
    value = top.flag("norm_output", False)
    return (value, False) if meaning == "head" else (True, value)


def feature_norms(source: Source) -> tuple[bool, bool]:
    """(one norm over all features, a norm for each). By the tensors, which no flag may deny."""
    found = (
        "input_norm.weight" in source.tensors,
        any(name.startswith("fc_norm.") for name in source.tensors),
    )
    keys = ("norm_before_fc", "fc_norm")
    stated = (source.stated("norm_before_fc"), source.stated("fc_norm", "use_aux_norm"))
    if all(found) or all(stated):
        raise source.error("norm_before_fc and fc_norm exclude each other: fetch the files again")
    for key, flag, there in zip(keys, stated, found, strict=True):
        if flag is not None and flag != there:
            raise source.error(
                f"config.json says {key} {str(flag).lower()}, but its tensors are "
                f"{'there' if there else 'missing'}: fetch the files again"
            )
    return found


def qk_norm(source: Source) -> bool:
    """Are heads of q and k normed? By the tensors, with which a nested model type must agree."""
    found = "midlayer.self_attn.q_norm.weight" in source.tensors
    kind = source.layer.text("model_type", "")
    if source.nested and kind and (kind == "qwen3") != found:
        raise source.error(
            f"model_type {shown(kind)}, but the norms of q and k are "
            f"{'there' if found else 'missing'}: fetch the files again"
        )
    return found


def norm_before_residual(source: Source) -> bool:
    stated = source.stated("norm_before_residual")
    if stated is None and source.nested:
        logger.warning(
            "%s does not say norm_before_residual, which programs complete differently: taken as "
            "false; if few drafts are accepted, set it to true in config.json",
            source.where,
        )
    return bool(stated)


# --- positions ---------------------------------------------------------------------------------


def rope_and_reach(source: Source) -> tuple[RopeConfig, int]:
    """(rotary embedding, longest context in tokens), the latter within the layer's window."""
    layer = source.layer
    usual = 32768 if source.nested and layer.text("model_type", "qwen3") == "qwen3" else 2048
    try:
        rope, reach = hf_rope(layer, layer.integer("max_position_embeddings", usual, minimum=1))
    except OverflowError:
        raise source.error("rope parameters beyond any model: fetch config.json again") from None
    if source.layout == EAGLE and rope.kind == "linear":
        # EAGLE's network passes rope_theta on without scaling only.
        rope = dataclasses.replace(rope, theta=RopeConfig.theta)
    window = _window(source)
    return rope, reach if window is None else min(reach, window)


def _window(source: Source) -> int | None:
    layer = source.layer
    kinds = layer.texts("layer_types", [])
    slides = "sliding_attention" in kinds
    if not kinds:
        slides = source.nested and layer.flag("use_sliding_window", True)
    window = layer.optional_integer("sliding_window", 4096 if kinds else None)
    if window is None or not slides:
        return None
    return layer.integer("sliding_window", window, minimum=1)


# --- messages ----------------------------------------------------------------------------------


def compared(found: Iterable[str], expected: Iterable[str]) -> str:
    """Names of the tensors found and expected, as many as fit a line."""
    return f"found: {_listed(found)}; expected: {_listed(expected)}"


def _listed(names: Iterable[str]) -> str:
    items = sorted(shown(name) for name in names)
    more = f" and {len(items) - _MOST_SHOWN} more" if len(items) > _MOST_SHOWN else ""
    return (", ".join(items[:_MOST_SHOWN]) or "none") + more


def shown(text: str) -> str:
    """A file's text, fit for a message of one line."""
    return (text if text.isprintable() else ascii(text))[:80]
