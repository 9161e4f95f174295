"""From prompts and sampling parameters to engine requests: n choices, seeds, token limits. Pure.

Shared by the HTTP routes and by `LLM.generate`. Knows how a request's seed gives its choices'
seeds. Knows nothing of text, JSON or asyncio.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence

import msgspec

from paceline.errors import InvalidRequest
from paceline.types import AddRequest, SamplingParams


def derive_seed(seed: int, choice: int) -> int:
    """Seed of choice `choice` of a request: the seed itself for the first, then hashes of both.

    seed: within int64. Returns a value within int64, the same on every machine.
    """
    if choice == 0:
        return seed
    digest = hashlib.blake2b(struct.pack("<qq", seed, choice), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def allowed_tokens(
    wanted: int | None, prompt_tokens: int, *, max_model_len: int, param: str
) -> int:
    """Tokens that a request may generate: what it wants, as far as the context has room.

    Raises InvalidRequest naming `param` when the prompt leaves room for none.
    """
    room = max_model_len - prompt_tokens
    if room < 1:
        raise InvalidRequest(
            f"the prompt has {prompt_tokens} tokens, and the context of {max_model_len} tokens "
            "must also hold at least one generated token",
            param=param,
            code="context_length_exceeded",
        )
    return room if wanted is None else min(wanted, room)


def expand(
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    n: int,
    request_id: str,
    max_model_len: int,
    draw_seed: Callable[[], int],
    param: str = "prompt",
) -> list[AddRequest]:
    """One engine request a choice: the n of the first prompt, then those of the next.

    Their ids are `request_id`-0, -1, ... A request without a seed draws one for each prompt. Raises
    InvalidRequest naming `param` when a prompt does not fit the context.
    """
    requests: list[AddRequest] = []
    for prompt in prompts:
        limit = allowed_tokens(
            params.max_tokens, len(prompt), max_model_len=max_model_len, param=param
        )
        seed = draw_seed() if params.seed is None else params.seed
        for choice in range(n):
            requests.append(
                AddRequest(
                    id=f"{request_id}-{len(requests)}",
                    prompt=tuple(prompt),
                    params=msgspec.structs.replace(
                        params, max_tokens=limit, seed=derive_seed(seed, choice)
                    ),
                )
            )
    return requests
