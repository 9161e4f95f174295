"""Small pieces of plain ASGI: reading a bounded body, sending a response, noticing a hang-up.

The routes use these instead of a framework's request and response objects because a stream's hot
path is one `send` a chunk. Knows nothing of OpenAI's formats.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

from starlette.types import Message, Receive, Scope, Send

from paceline.errors import BodyTooLarge, RequestError
from paceline.serve.responses import openai_error

JSON = "application/json"
# What is read and dropped of a body that is too large, before the connection is cut.
DROP_BYTES, DROP_SECONDS = 256 * 2**20, 5


class HungUp(Exception):
    """The client closed the connection while its request was still being read."""


async def read_body(scope: Scope, receive: Receive, *, limit: int) -> bytes:
    """The whole body. Raises BodyTooLarge before keeping more than `limit` bytes, HungUp."""
    declared = header(scope, b"content-length")
    if declared is not None and declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise HungUp
        body += message.get("body", b"")
        if len(body) > limit:
            raise _too_large(limit)
        if not message.get("more_body", False):
            return bytes(body)


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than this server's limit of {limit} bytes")


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first header of that (lower-case) name."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return None


async def until_hung_up(receive: Receive) -> None:
    """Returns when the client has closed the connection (or got its whole response)."""
    while (await receive())["type"] != "http.disconnect":
        pass


def response_start(status: int, headers: Mapping[str, str]) -> Message:
    return {
        "type": "http.response.start",
        "status": status,
        "headers": [
            (key.encode("latin-1"), value.encode("latin-1")) for key, value in headers.items()
        ],
    }


async def send_whole(
    send: Send,
    status: int,
    *,
    body: bytes,
    content_type: str = JSON,
    headers: Mapping[str, str] = {},
) -> None:
    await send(
        response_start(
            status, {"content-type": content_type, "content-length": str(len(body)), **headers}
        )
    )
    await send({"type": "http.response.body", "body": body})


async def refuse_body(receive: Receive, send: Send, error: BodyTooLarge) -> None:
    """Answer, then read and drop what the client is still sending, within bounds.

    A client that sends its whole body before it reads would otherwise see a reset connection
    instead of the answer.
    """
    status, body, headers = openai_error(error)
    length = {"content-type": JSON, "content-length": str(len(body)), "connection": "close"}
    await send(response_start(status, {**length, **headers}))
    await send({"type": "http.response.body", "body": body, "more_body": True})
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DROP_SECONDS):
            dropped, message = 0, await receive()
            while message.get("more_body", False) and dropped < DROP_BYTES:
                dropped += len(message.get("body", b""))
                message = await receive()
    await send({"type": "http.response.body", "body": b""})


async def send_error(send: Send, error: RequestError) -> None:
    """An error in OpenAI's form with its HTTP status."""
    status, body, headers = openai_error(error)
    await send_whole(send, status, body=body, headers=headers)
