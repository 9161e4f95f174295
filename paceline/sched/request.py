"""One request as the scheduler sees it. Changed by `paceline.sched.scheduler` only."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from paceline.cache.prefix import Node
from paceline.types import AddRequest, FinishReason, SamplingParams


class Status(enum.IntEnum):
    """Ordered: everything from FINISHED on is over."""

    WAITING = 0
    RUNNING = 1
    FINISHED = 2


@dataclass(eq=False, slots=True)
class Request:
    """Token ids, limits and where its K/V lies.

        tokens    |<------ prompt ------>|<--- output --->|
        computed  |<- K/V in `pages` ->|  (at least one token short of all)

    node: deepest prefix-cache node that the request holds locked; its path covers a prefix of
        `pages`. slot, generation: its row of the device tables while running.
    on_device: the last token was sampled into the slot, so the host need not send it.
    cached_tokens: prompt tokens that the prefix cache held at the first admission.
    """

    id: str
    tokens: list[int]
    prompt_length: int
    params: SamplingParams
    max_tokens: int
    status: Status = Status.WAITING
    finish: FinishReason | None = None
    slot: int = -1
    generation: int = -1
    on_device: bool = False
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    node: Node | None = None
    cached_tokens: int = 0
    preemptions: int = 0

    @classmethod
    def of(cls, message: AddRequest, max_model_len: int) -> Request:
        """From the wire. `max_tokens` is cut to what the context length leaves."""
        room = max_model_len - len(message.prompt)
        wanted = message.params.max_tokens
        return cls(
            id=message.id,
            tokens=list(message.prompt),
            prompt_length=len(message.prompt),
            params=message.params,
            max_tokens=room if wanted is None else min(wanted, room),
        )

    @property
    def pending(self) -> int:
        """Known tokens whose K/V is not computed: 1 while decoding."""
        return len(self.tokens) - self.computed

    @property
    def output_length(self) -> int:
        return len(self.tokens) - self.prompt_length
