"""Chat messages to a prompt, by the checkpoint's own Jinja template. No torch.

Renders as transformers 5.24 does (its `utils.chat_template_utils`): same environment, helpers and
variables. Knows nothing of tokenizers or HTTP. The prompt already holds its special tokens: encode
it with `add_special_tokens=False`.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paceline.errors import CheckpointError, InvalidRequest


class ChatTemplate:
    """A compiled chat template.

    source: Jinja text, or None for a checkpoint without one: `render` then refuses. bos, eos: the
    special tokens' strings that the template may use. Raises CheckpointError for a syntax error.
    """

    def __init__(
        self, source: str | None, *, bos: str | None = None, eos: str | None = None
    ) -> None:
        tokens = {"bos_token": bos, "eos_token": eos}
        self._variables = {name: text for name, text in tokens.items() if text is not None}
        self._template = None if source is None else _compile(source)

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt that asks for the assistant's next message.

        Fields of a message that are None are left out. Raises InvalidRequest (param "messages") if
        the template refuses the messages, fails on them, or there is no template.
        """
        if self._template is None:
            raise InvalidRequest(
                "this model has no chat template: use /v1/completions with a prompt of your own",
                param="messages",
            )
        given = [
            {key: value for key, value in message.items() if value is not None}
            for message in messages
        ]
        try:
            return self._template.render(
                messages=given,
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._variables,
            )
        except Exception as error:  # whatever the template's expressions raise on these messages
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from None


def _compile(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except (jinja2.TemplateError, RecursionError) as error:
        raise CheckpointError(f"the checkpoint's chat template is broken: {error}") from None


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; here it is just its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without jinja2's HTML escapes; templates pass these by position, too."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
