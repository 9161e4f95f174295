from __future__ import annotations

import datetime
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from paceline.checkpoint import open_checkpoint
from paceline.errors import CheckpointError, InvalidRequest
from paceline.serve.chat import ChatTemplate
from paceline.serve.tokenizer import load_tokenizer

USER = {"role": "user", "content": "Hi"}
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <brief> & é."},
    USER,
    {"role": "assistant", "content": "Hello!\n"},
    {"role": "user", "content": "Bye {{ bos_token }}"},
]

TEMPLATES = {
    "blocks on their own lines": """
{%- for message in messages %}
    {% if loop.index0 == 2 %}
        {% continue %}
    {% endif %}
  <{{ message.role }}>{{ message['content'] | trim }}
{% endfor %}
{% if add_generation_prompt %}<assistant>{% endif %}""",
    "special tokens": "{{ bos_token }}{% for m in messages %}{{ m.role + eos_token }}{% endfor %}",
    "json": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}",
    "ascii json": "{{ messages[0] | tojson(true) }}{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}",
    "namespace and break": """{% set ns = namespace(n=0) %}
{% for m in messages %}{% set ns.n = ns.n + 1 %}{% if ns.n > 2 %}{% break %}{% endif %}
{% endfor %}{{ ns.n }}""",
    "no tools": "{% if tools is none %}none{% endif %}{% if documents %}documents{% endif %}",
    "generation": """{% for m in messages %}
{% generation %}{{ m.content }}
{% endgeneration %}{% endfor %}""",
    "undefined": "{{ missing }}|{{ messages[0].tool_calls is defined }}|{{ pad_token }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_renders_as_transformers_does(name: str) -> None:
    template = ChatTemplate(TEMPLATES[name], bos="<s>", eos="</s>")
    (expected,), _ = render_jinja_template(
        [CHAT],
        chat_template=TEMPLATES[name],
        add_generation_prompt=True,
        bos_token="<s>",
        eos_token="</s>",
    )
    assert template.render(CHAT) == expected


def test_the_demo_models_template_adds_its_system_prompt() -> None:
    tokenizer = load_tokenizer(open_checkpoint(None, "auto"))
    template = ChatTemplate(tokenizer.chat_template, bos=tokenizer.bos, eos=tokenizer.eos)
    user = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    default = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, "
        "trained by Hugging Face<|im_end|>\n"
    )
    assert template.render([USER]) == default + user
    own = template.render([{"role": "system", "content": "Rhyme."}, USER])
    assert own == "<|im_start|>system\nRhyme.<|im_end|>\n" + user
    ids = tokenizer.encode(own, add_special_tokens=False)
    assert (ids[0], ids.count(1), ids.count(2)) == (1, 3, 2)  # <|im_start|>, <|im_end|>
    assert tokenizer.decode(ids, skip_special_tokens=False) == own


def test_the_date_is_todays() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}").render([]) == str(datetime.date.today().year)


def test_fields_that_are_none_are_left_out() -> None:
    template = ChatTemplate("{{ messages[0] }}")
    assert template.render([USER | {"name": None}]) == str(USER)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[7].content }}",
        "{{ messages[0].content.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ 1 // 0 }}",
    ],
)
def test_what_a_template_raises_is_the_clients_error(source: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template") as caught:
        ChatTemplate(source).render([USER])
    assert caught.value.param == "messages"


def test_raise_exception_passes_its_words_on() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render([USER])


@pytest.mark.parametrize("source", ["{% for %}", "{{ a | nonsense }}", "{% if x %}", "{{ '"])
def test_a_syntax_error_is_the_checkpoints(source: str) -> None:
    with pytest.raises(CheckpointError, match="chat template"):
        ChatTemplate(source)


def test_without_a_template_chat_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="/v1/completions") as caught:
        ChatTemplate(None).render([USER])
    assert caught.value.param == "messages"
