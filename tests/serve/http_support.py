"""What the tests of the HTTP layer share: a byte tokenizer, a model, a live server in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tokenizers
import uvicorn
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from paceline.serve.app import create_app
from paceline.serve.chat import ChatTemplate
from paceline.serve.fake import FakeEngine, Reply
from paceline.serve.generation import ServedModel
from paceline.serve.routes import Front
from paceline.serve.server import listen
from paceline.serve.tokenizer import Tokenizer
from paceline.types import AddRequest, FinishReason

EOS = 256
VOCAB_SIZE = 257
MODEL = "tiny"
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """Token i is byte i; 256 is the end of sequence. So multi-byte characters span tokens."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    vocab = {chr(byte): byte for byte in printable}
    vocab |= {chr(256 + place): byte for place, byte in enumerate(others)}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    return Tokenizer(inner, eos="<|end|>", chat_template=TEMPLATE)


def served_model(*, max_model_len: int = 1000) -> ServedModel:
    return ServedModel(
        name=MODEL,
        tokenizer=byte_tokenizer(),
        template=ChatTemplate(TEMPLATE),
        vocab_size=VOCAB_SIZE,
        max_model_len=max_model_len,
        created=1,
    )


def says(text: str, finish: FinishReason | None = FinishReason.STOP) -> Callable[..., Reply]:
    """A reply of that text's bytes; one that stops does so by the end-of-sequence id."""
    ids = list(text.encode())
    if finish is FinishReason.STOP:
        ids.append(EOS)

    def reply(request: AddRequest) -> Reply:
        return Reply(tokens=ids, finish=finish)

    return reply


def silent(request: AddRequest) -> Reply:
    """Never a token, never an end: a request that waits."""
    return Reply(tokens=(), finish=None)


def make_front(engine: FakeEngine | None = None, **changes: Any) -> Front:
    settings: dict[str, Any] = {
        "engine": engine or FakeEngine(),
        "model": served_model(),
        "max_body": 100_000,
        "max_queued": 100,
        **changes,
    }
    return Front(**settings)


class Live:
    """A real server on a loopback port, in a thread with its own event loop."""

    def __init__(self, front: Front) -> None:
        self.front = front
        self._listener = listen("127.0.0.1", 0)
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    async def _run(self) -> None:
        self.loop = asyncio.get_running_loop()
        config = uvicorn.Config(
            create_app(self.front),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=1,
        )
        self.server = uvicorn.Server(config)
        self._started.set()
        await self.server.serve(sockets=[self._listener])

    def call(self, function: Callable[[], object]) -> None:
        """Run `function` on the server's event loop."""
        self.loop.call_soon_threadsafe(function)

    def __enter__(self) -> Live:
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(self, *exc: object) -> None:
        self.server.should_exit = True
        self._thread.join()


@contextlib.contextmanager
def live(engine: FakeEngine | None = None, **changes: Any) -> Iterator[Live]:
    with Live(make_front(engine, **changes)) as server:
        yield server
