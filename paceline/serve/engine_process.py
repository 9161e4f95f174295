"""The engine's process: the step loop between two sockets. The one module of `serve` with torch.

Started by `paceline.serve.engine_client` with an `EngineLaunch` as its argument. Speaks first
(Progress ..., then Ready or Failed), then steps while there is work and waits while there is none.
Never waits for a client: the HTTP process always reads, and holds what slow clients do not.
"""

from __future__ import annotations

import gc
import logging
import signal
import sys

from paceline.checkpoint import open_checkpoint
from paceline.engine import Engine
from paceline.errors import PacelineError
from paceline.serve.wire import EngineSide, decode_launch
from paceline.types import (
    AbortRequests,
    AddRequest,
    Delta,
    Failed,
    Shutdown,
    StepOutputs,
    ToEngine,
)

IDLE_WAIT_MS = 250  # also how often a vanished parent is noticed


def main() -> int:
    """Run until told to shut down, or until the HTTP process is gone. Returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the HTTP process decides when to end
    logging.basicConfig(level=logging.INFO, format="engine: %(message)s", stream=sys.stderr)
    launch = decode_launch(sys.argv[1])
    with EngineSide(launch) as side:
        try:
            checkpoint = open_checkpoint(launch.config.model, launch.config.load_format)
            engine = Engine.start(launch.config, checkpoint, side.send)
        except (PacelineError, MemoryError) as error:
            side.send(Failed(message=str(error) or "out of memory while loading the model"))
            return 1
        side.send(engine.ready())
        gc.collect()
        gc.freeze()  # the model's objects live for ever: the collector need not visit them
        try:
            serve(engine, side)
        finally:
            engine.close()
    return 0


def serve(engine: Engine, side: EngineSide) -> None:
    """The loop: take messages, step, send what the step brought."""
    while not side.parent_gone():
        messages = side.receive(wait_ms=IDLE_WAIT_MS if engine.idle else 0)
        refused: list[Delta] = []
        for message in messages:
            if isinstance(message, Shutdown):
                return
            refused += apply(engine, message)
        busy = not engine.idle
        deltas = refused + engine.step()
        if deltas or messages or busy:  # a step of prompts has no deltas, but figures
            side.send(StepOutputs(deltas=tuple(deltas), stats=engine.stats))


def apply(engine: Engine, message: ToEngine) -> list[Delta]:
    """One message to the engine; deltas only for a request that is refused."""
    if isinstance(message, AddRequest):
        delta = engine.add(message)
        return [] if delta is None else [delta]
    if isinstance(message, AbortRequests):
        engine.abort(message.ids)
    return []


if __name__ == "__main__":
    sys.exit(main())
