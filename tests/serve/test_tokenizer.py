from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from paceline.checkpoint import Checkpoint, open_checkpoint
from paceline.errors import CheckpointError
from paceline.model.config import ModelConfig
from paceline.serve.tokenizer import load_tokenizer
from tests.tiny_models import SPECIAL, TEXTS, tiny_tokenizer, tokenizer_fields, write_gguf

REFERENCE = json.loads(
    Path(__file__).parents[1].joinpath("data/smollm2_reference.json").read_text()
)
CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=400,
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    rms_norm_eps=1e-5,
    max_position=8,
)
HARD_TEXTS = (
    *TEXTS,
    "",
    "<|im_start|>user\nx<|im_end|>",
    "½ Ⅳ ٣٤ 1,000.5",
    "I'LL DON'T",
    "\r\n \n ",
)


def directory(path: Path, inner: Tokenizer, config: dict[str, Any] | None = None) -> Checkpoint:
    inner.save(str(path / "tokenizer.json"))
    if config is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(config))
    return Checkpoint(path=path, format="safetensors", config=CONFIG, name="tiny")


def gguf(path: Path, **changes: Any) -> Checkpoint:
    """A GGUF of the tiny tokenizer with some keys changed; None drops one."""
    template = changes.pop("chat_template", None)
    fields = {**tokenizer_fields(tiny_tokenizer()), **changes}
    file = write_gguf(
        path / "tiny.gguf",
        tokenizer={key: value for key, value in fields.items() if value is not None},
        more={} if template is None else {"tokenizer.chat_template": template},
    )
    return open_checkpoint(str(file), "auto")


# --- the demo model ----------------------------------------------------------------------------


@pytest.mark.parametrize("case", REFERENCE["cases"], ids=lambda case: case["text"][:20])
def test_demo_ids_equal_llama_cpp(case: dict[str, Any]) -> None:
    tokenizer = load_tokenizer(open_checkpoint(None, "auto"))
    assert tokenizer.encode(case["text"], add_special_tokens=True) == case["ids"]
    assert tokenizer.decode(case["ids"], skip_special_tokens=False) == case["text"]
    assert tokenizer.decode(case["greedy"], skip_special_tokens=False) == case["greedy_text"]


def test_demo_tokenizer_facts() -> None:
    tokenizer = load_tokenizer(open_checkpoint(None, "auto"))
    assert tokenizer.vocab_size == 49152
    assert tokenizer.special_ids == frozenset(range(17))
    assert (tokenizer.bos, tokenizer.eos) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.decode([1, 504, 2]) == "The"


# --- GGUF --------------------------------------------------------------------------------------


@given(text=st.text(max_size=40))
@settings(deadline=None, max_examples=50)
def test_gguf_encodes_as_the_tokenizer_it_was_made_from(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    made_from = tiny_tokenizer()
    tokenizer = load_tokenizer(gguf(tmp_path_factory.mktemp("gguf")))
    for sample in (text, *HARD_TEXTS):
        ids = tokenizer.encode(sample, add_special_tokens=True)
        assert ids == made_from.encode(sample).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == sample


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["he", "'ll", " pay", " 12345", "\n\n", " x", "!?"]),
        ("smollm", ["he", "'ll", " pay", " ", "1", "2", "3", "4", "5", "\n\n", " x", "!?"]),
        ("llama-bpe", ["he", "'ll", " pay", " ", "123", "45", "\n\n", " x", "!?"]),
        ("qwen2", ["he", "'ll", " pay", " ", "1", "2", "3", "4", "5", "\n\n", " x", "!?"]),
    ],
)
def test_gguf_pre_tokenizers_split_as_named(tmp_path: Path, pre: str, pieces: list[str]) -> None:
    tokenizer = load_tokenizer(gguf(tmp_path, pre=pre, bos_token_id=None))
    inner = tokenizer._inner
    text = "he'll pay 12345\n\n x!?"
    spans = [span for _, span in inner.pre_tokenizer.pre_tokenize_str(text)]
    assert [text[a:b] for a, b in spans] == pieces
    assert "".join(pieces) == text


def test_gguf_bos_and_eos_are_added_when_the_file_says_so(tmp_path: Path) -> None:
    plain = load_tokenizer(gguf(tmp_path)).encode("Rome", add_special_tokens=True)
    both = load_tokenizer(gguf(tmp_path, add_bos_token=True, add_eos_token=True))
    assert both.encode("Rome", add_special_tokens=True) == [1, *plain, 2]
    assert both.encode("Rome", add_special_tokens=False) == plain
    llama3 = load_tokenizer(gguf(tmp_path, pre="llama-bpe"))
    assert llama3.encode("Rome", add_special_tokens=True)[0] == 1


def test_gguf_user_defined_tokens_are_whole_but_not_special(tmp_path: Path) -> None:
    fields = tokenizer_fields(tiny_tokenizer())
    types = fields["token_type"]
    types[-1] = 4
    tokenizer = load_tokenizer(
        gguf(
            tmp_path,
            tokens=[*fields["tokens"][:-1], "<think>"],
            token_type=types,
            merges=fields["merges"][:-1],
        )
    )
    assert tokenizer.encode("<think>", add_special_tokens=False) == [len(types) - 1]
    assert tokenizer.decode([len(types) - 1]) == "<think>"
    assert tokenizer.special_ids == {0, 1, 2}


def test_gguf_chat_template(tmp_path: Path) -> None:
    assert load_tokenizer(gguf(tmp_path)).chat_template is None
    assert load_tokenizer(gguf(tmp_path, chat_template="{{ 1 }}")).chat_template == "{{ 1 }}"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": "llama"}, "'llama'"),
        ({"pre": "deepseek-llm"}, "'deepseek-llm'"),
        ({"pre": None}, "pre-tokenizer ''"),
        ({"merges": None}, "merges"),
        ({"merges": ["a"]}, "merges"),
        ({"merges": ["nowhere nothing"]}, "merges"),
        ({"tokens": ["a", "a"]}, "twice"),
        ({"tokens": [1, 2]}, "strings"),
    ],
)
def test_gguf_vocabularies_that_cannot_be_used(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(CheckpointError, match=says):
        load_tokenizer(gguf(tmp_path, **changes))


# --- Hugging Face directories ------------------------------------------------------------------

CONFIGS: dict[str, dict[str, Any]] = {
    "empty": {},
    "named": {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2]},
    # transformers 5.24 reads these from tokenizer.json alone.
    "ends": {"bos_token": SPECIAL[1], "add_bos_token": False, "add_eos_token": True},
    "a word made special": {"eos_token": "ĠParis"},
    "more tokens": {
        "added_tokens_decoder": {
            "0": {"content": SPECIAL[0], "special": True},
            "363": {"content": "<tool>", "special": False},
            "364": {"content": "<hidden>", "special": True, "lstrip": True},
        }
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_directory_encodes_as_transformers_does(tmp_path: Path, name: str) -> None:
    inner = tiny_tokenizer()
    inner.post_processor = processors.TemplateProcessing(
        single=[SPECIAL[1], "$A"], special_tokens=[(SPECIAL[1], 1)]
    )
    inner.enable_truncation(4)
    inner.enable_padding(length=64)
    tokenizer = load_tokenizer(directory(tmp_path, inner, CONFIGS[name]))
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text in (*HARD_TEXTS, "a <tool>b <hidden> c ĠParis Paris"):
        for special in (True, False):
            ids = tokenizer.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special, truncation=False)
            assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert (tokenizer.bos, tokenizer.eos) == (theirs.bos_token, theirs.eos_token)


def test_chat_template_file_wins_and_a_list_has_a_default(tmp_path: Path) -> None:
    inner = tiny_tokenizer()
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    for value, expected in (("S", "S"), (named, "D"), (named[:1], None), (None, None)):
        checkpoint = directory(tmp_path, inner, {"chat_template": value})
        assert load_tokenizer(checkpoint).chat_template == expected
    (tmp_path / "chat_template.jinja").write_text("é file\n", encoding="utf-8")
    assert load_tokenizer(checkpoint).chat_template == "é file\n"


def test_directory_tokenizers_that_cannot_be_used(tmp_path: Path) -> None:
    checkpoint = Checkpoint(path=tmp_path, format="safetensors", config=CONFIG, name="tiny")
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        load_tokenizer(checkpoint)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is unreadable"):
        load_tokenizer(checkpoint)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"chat_template": 3}, "chat_template"),
        ({"chat_template": [{"name": "x"}]}, "chat_template"),
        ({"added_tokens_decoder": {"7": {"content": "<new>"}}}, "<new>"),
        ({"added_tokens_decoder": {"7": 7}}, "must be an object"),
        ({"added_tokens_decoder": {"7": {}}}, "content is missing"),
    ],
)
def test_tokenizer_configs_that_cannot_be_used(
    tmp_path: Path, config: dict[str, Any], says: str
) -> None:
    with pytest.raises(CheckpointError, match=says):
        load_tokenizer(directory(tmp_path, tiny_tokenizer(), config))
    (tmp_path / "tokenizer_config.json").write_text("[")
    with pytest.raises(CheckpointError, match="JSON"):
        load_tokenizer(directory(tmp_path, tiny_tokenizer()))
