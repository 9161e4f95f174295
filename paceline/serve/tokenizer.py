"""Text to token ids and back, for every checkpoint layout. No torch.

Knows `tokenizers`, Hugging Face's tokenizer files and GGUF's vocabulary keys. Knows nothing of
chat messages (`paceline.serve.chat`) or of requests.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from paceline.checkpoint import Checkpoint, read_json
from paceline.errors import CheckpointError
from paceline.model.config import Fields
from paceline.model.gguf import GGUFFile, gguf_fields


class Tokenizer:
    """A checkpoint's tokenizer.

    vocab_size: ids known to the tokenizer, added tokens included (the model's may be larger).
    special_ids: control tokens, which `decode` skips. bos, eos: their strings, where defined.
    chat_template: the checkpoint's Jinja source, if it has one.
    """

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        *,
        bos: str | None = None,
        eos: str | None = None,
        chat_template: str | None = None,
    ) -> None:
        self._inner = inner
        self.bos = bos
        self.eos = eos
        self.chat_template = chat_template
        self.vocab_size: int = inner.get_vocab_size(with_added_tokens=True)
        self.special_ids = frozenset(
            number for number, token in inner.get_added_tokens_decoder().items() if token.special
        )

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`; special tokens written in the text are recognised as such."""
        return list(self._inner.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 come out as U+FFFD, unknown ids as nothing."""
        text: str = self._inner.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token(self, number: int) -> str | None:
        """The vocabulary's own spelling of an id; None if the id is unknown."""
        return self._inner.id_to_token(number)

    def decoder(self) -> list[dict[str, Any]]:
        """The steps that turn token spellings into text, as in tokenizer.json; [] joins by spaces.

        Raises CheckpointError if a step has no JSON form (a decoder written in Python).
        """
        if self._inner.decoder is None:
            return []
        try:
            step = json.loads(self._inner.decoder.__getstate__())
        except Exception as error:
            raise CheckpointError(f"tokenizer decoder is not supported: {error}") from None
        return list(step["decoders"]) if step["type"] == "Sequence" else [step]


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer of a checkpoint: GGUF metadata or tokenizer.json. Raises CheckpointError."""
    if checkpoint.gguf is not None:
        return _from_gguf(checkpoint.gguf)
    return _from_directory(checkpoint.path)


# --- Hugging Face directories ------------------------------------------------------------------

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


def _from_directory(directory: Path) -> Tokenizer:
    """tokenizer.json, completed by tokenizer_config.json as transformers 5.24 does."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(
            f"{directory} has no tokenizer.json: fetch it, or save the tokenizer in the fast format"
        )
    try:
        inner = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{path} is unreadable ({error}); fetch it again") from None
    inner.no_truncation()
    inner.no_padding()
    config_path = directory / "tokenizer_config.json"
    values = read_json(config_path) if config_path.is_file() else {}
    config = Fields(values, str(config_path))
    _add_declared_tokens(inner, config)
    named = {key: _token_text(values.get(key)) for key in _NAMED}
    added = {token.content for token in inner.get_added_tokens_decoder().values()}
    inner.add_special_tokens(
        [
            AddedToken(text, special=True, normalized=False)
            for text in named.values()
            if text is not None and text not in added and inner.token_to_id(text) is not None
        ]
    )
    return Tokenizer(
        inner,
        bos=named["bos_token"],
        eos=named["eos_token"],
        chat_template=_chat_template(directory, config),
    )


def _add_declared_tokens(inner: tokenizers.Tokenizer, config: Fields) -> None:
    """Tokens of tokenizer_config.json's added_tokens_decoder that tokenizer.json lacks."""
    known = {token.content for token in inner.get_added_tokens_decoder().values()}
    declared = Fields(config.table("added_tokens_decoder"), config.where)
    for number in sorted(declared.values, key=lambda text: (len(text), text)):
        token = Fields(declared.table(number), f"{config.where}: added token {number}")
        content = token.text("content")
        if content in known:
            continue
        inner.add_tokens(
            [
                AddedToken(
                    content,
                    single_word=token.flag("single_word", False),
                    lstrip=token.flag("lstrip", False),
                    rstrip=token.flag("rstrip", False),
                    normalized=token.flag("normalized", False),
                    special=token.flag("special", False),
                )
            ]
        )
        if str(inner.token_to_id(content)) != number:
            raise CheckpointError(
                f"{config.where}: token {content!r} has id {number} here and "
                f"{inner.token_to_id(content)} in tokenizer.json; fetch both again"
            )


def _token_text(value: Any) -> str | None:
    """A special token is written as its text or as an object that holds it."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _add_at_ends(inner: tokenizers.Tokenizer, *, bos: str | None, eos: str | None) -> None:
    """Make `inner` put these tokens around a text, where they are given and known."""
    ends = [(text, inner.token_to_id(text)) for text in (bos, eos) if text is not None]
    known = {text: number for text, number in ends if number is not None}
    around = [[text] if text in known else [] for text in (bos, eos)]
    inner.post_processor = processors.TemplateProcessing(
        single=[*around[0], "$A", *around[1]], special_tokens=list(known.items())
    )


def _chat_template(directory: Path, config: Fields) -> str | None:
    """chat_template.jinja, else the one in tokenizer_config.json (of a list, the default)."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot read {path} ({error}); fetch it again") from None
    value = config.values.get("chat_template")
    if value is None or isinstance(value, str):
        return value
    try:
        by_name = {str(entry["name"]): str(entry["template"]) for entry in value}
    except (TypeError, KeyError):
        raise CheckpointError(
            f"{config.where}: chat_template must be text or a list of names and templates"
        ) from None
    return by_name.get("default")


# --- GGUF --------------------------------------------------------------------------------------

_CONTROL, _USER_DEFINED = 3, 4
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace("{1,3}", "")
_WHOLE = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
# llama.cpp's name of a pre-tokenizer -> the same in `tokenizers`.
_PRE_TOKENIZERS: dict[str, list[pre_tokenizers.PreTokenizer]] = {
    "gpt-2": [_GPT2],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), _GPT2],
    "llama-bpe": [pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), "isolated"), _WHOLE],
    "qwen2": [pre_tokenizers.Split(Regex(_QWEN2_SPLIT), "isolated"), _WHOLE],
}


def _from_gguf(file: GGUFFile) -> Tokenizer:
    """Byte-level BPE from GGUF's vocabulary, merges and the name of its pre-tokenizer."""
    keys = gguf_fields(file, "tokenizer.ggml")
    kind, pre = keys.text("model"), keys.text("pre", "")
    if kind != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise CheckpointError(
            f"{file.path}: tokenizer {kind!r} with pre-tokenizer {pre!r} is not supported in GGUF "
            f"(gpt2 with {', '.join(_PRE_TOKENIZERS)} is); use the Hugging Face directory"
        )
    tokens = keys.texts("tokens")
    inner = tokenizers.Tokenizer(_bpe(file, tokens, ignore_merges=pre == "llama-bpe"))
    inner.pre_tokenizer = pre_tokenizers.Sequence(_PRE_TOKENIZERS[pre])
    inner.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        inner.normalizer = normalizers.NFC()
    types = keys.integers("token_type")
    for kind_number, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        chosen = [token for token, its in zip(tokens, types, strict=False) if its == kind_number]
        inner.add_tokens([AddedToken(token, special=special, normalized=False) for token in chosen])
    bos, eos = (_token(keys, f"{name}_token_id", tokens=tokens) for name in ("bos", "eos"))
    _add_at_ends(
        inner,
        bos=bos if keys.flag("add_bos_token", pre == "llama-bpe") else None,
        eos=eos if keys.flag("add_eos_token", False) else None,
    )
    template = gguf_fields(file, "tokenizer").text("chat_template", "")
    return Tokenizer(inner, bos=bos, eos=eos, chat_template=template or None)


def _bpe(file: GGUFFile, tokens: list[str], *, ignore_merges: bool) -> models.BPE:
    merges = gguf_fields(file, "tokenizer.ggml").texts("merges")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    try:
        if len(vocabulary) != len(tokens):
            raise ValueError("a token occurs twice")
        pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
        return models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=ignore_merges)
    except Exception as error:  # the library raises bare Exception
        reason = str(error).replace("\n", "\\n")
        raise CheckpointError(f"{file.path}: bad vocabulary or merges ({reason})") from None


def _token(keys: Fields, key: str, *, tokens: list[str]) -> str | None:
    number = keys.optional_integer(key)
    return None if number is None or number >= len(tokens) else tokens[number]
