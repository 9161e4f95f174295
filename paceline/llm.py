"""`LLM`: the engine in this process, for scripts and notebooks.

from paceline import LLM, SamplingParams
llm = LLM()                                  # the demo model; or LLM("path/to/model")
for completion in llm.generate(["Once upon a time"], SamplingParams(max_tokens=64)):
    print(completion.text)
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.checkpoint import open_checkpoint
from paceline.config import EngineConfig
from paceline.engine import Engine
from paceline.errors import InvalidRequest, PacelineError
from paceline.serve.assembler import NoText, TextAssembler
from paceline.serve.chat import ChatTemplate
from paceline.serve.expand import expand
from paceline.serve.tokenizer import Tokenizer, load_tokenizer
from paceline.types import AddRequest, Delta, FinishReason, Progress, SamplingParams

Prompt = str | Sequence[int]
Message = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What came of one prompt. `tokens` includes the one that ended the text, if one did."""

    prompt: tuple[int, ...]
    text: str
    tokens: tuple[int, ...]
    finish: FinishReason
    cached_tokens: int


@dataclass(slots=True)
class _Open:
    request: AddRequest
    text: TextAssembler | NoText
    parts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    cached_tokens: int = 0


class LLM:
    """A model ready to generate. Keyword arguments are the fields of `EngineConfig`.

    skip_tokenizer_init: no tokenizer is looked for; prompts are token ids, texts are empty. Raises
    ConfigError and CheckpointError with one line that says what to do.
    """

    def __init__(
        self, model: str | None = None, *, skip_tokenizer_init: bool = False, **options: Any
    ) -> None:
        config = EngineConfig(model=model, **options)
        checkpoint = open_checkpoint(config.model, config.load_format)
        self._tokenizer = None if skip_tokenizer_init else load_tokenizer(checkpoint)
        self.engine = Engine.start(config, checkpoint, _ignore)
        self._checkpoint = checkpoint
        self._requests = 0
        self._seeds = random.Random(config.seed)

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise InvalidRequest(
                "there is no tokenizer (skip_tokenizer_init): prompts are token ids, without stop "
                "strings",
                param="prompt",
            )
        return self._tokenizer

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None
    ) -> list[Completion]:
        """One completion per prompt (text or token ids), in order."""
        one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        batch: Sequence[Any] = [prompts] if one else prompts
        requests = [self._request(self._encode(prompt), params) for prompt in batch]
        done: dict[str, Completion] = {}
        for _, completion in self._run(requests):
            if completion is not None:
                done[completion[0]] = completion[1]
        return [done[request.id] for request in requests]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[str]:
        """The text of one completion, piece by piece."""
        for text, _ in self._run([self._request(self._encode(prompt), params)]):
            if text:
                yield text

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's answer."""
        if self.tokenizer.chat_template is None:
            raise InvalidRequest("this model has no chat template: use generate", param="messages")
        template = ChatTemplate(
            self.tokenizer.chat_template, bos=self.tokenizer.bos, eos=self.tokenizer.eos
        )
        return self.tokenizer.encode(template.render(messages), add_special_tokens=False)

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, add_special_tokens=True)
        return list(prompt)

    def _request(self, prompt: list[int], params: SamplingParams | None) -> AddRequest:
        if not prompt:
            raise InvalidRequest("the prompt is empty", param="prompt")
        self._requests += 1
        return expand(
            [prompt],
            params or SamplingParams(),
            n=1,
            request_id=f"local-{self._requests}",
            max_model_len=self.engine.resolved.max_model_len,
            draw_seed=lambda: self._seeds.getrandbits(63),
        )[0]

    def _run(
        self, requests: Sequence[AddRequest]
    ) -> Iterator[tuple[str, tuple[str, Completion] | None]]:
        """Step until all are done: (new text, (id, completion) once one has ended)."""
        running: dict[str, _Open] = {}
        try:
            for request in requests:
                running[request.id] = _Open(request, self._assembler(request))
                _raise_if_failed(self.engine.add(request))
            while running:
                for delta in self.engine.step():
                    yield self._apply(delta, running)
        finally:
            self.engine.abort(tuple(running))
            self.engine.trace.flush()

    def _assembler(self, request: AddRequest) -> TextAssembler | NoText:
        if self._tokenizer is None and not request.params.stop:
            return NoText()
        return TextAssembler(self.tokenizer, stop=request.params.stop, after=request.prompt)

    def _apply(
        self, delta: Delta, running: dict[str, _Open]
    ) -> tuple[str, tuple[str, Completion] | None]:
        state = running.get(delta.id)
        if state is None:
            return "", None
        _raise_if_failed(delta)
        piece = state.text.feed(delta.tokens, delta.finish)
        state.parts.append(piece.text)
        state.tokens += delta.tokens
        state.cached_tokens = delta.cached_tokens
        if piece.finish is None:
            return piece.text, None
        if delta.finish is None:  # a stop string: the engine does not know yet
            self.engine.abort((delta.id,))
        del running[delta.id]
        completion = Completion(
            prompt=state.request.prompt,
            text="".join(state.parts),
            tokens=tuple(state.tokens[: state.text.completion_tokens]),
            finish=piece.finish,
            cached_tokens=state.cached_tokens,
        )
        return piece.text, (delta.id, completion)


def _raise_if_failed(delta: Delta | None) -> None:
    if delta is not None and delta.error is not None:
        raise PacelineError(delta.error)


def _ignore(_progress: Progress) -> None:
    pass
