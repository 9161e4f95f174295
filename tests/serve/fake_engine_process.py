"""An engine process that speaks the wire and has no model. Usage: MODE LAUNCH.

serve: the ids of the prompt again, one every few milliseconds, then the end-of-sequence id
silent: takes requests, never answers        stubborn: silent, and cannot be asked to end
stuck: never becomes ready
fail: says Failed                            exit: ends with status 3 without a word
"""

from __future__ import annotations

import signal
import sys
import time

from paceline.serve.wire import EngineSide, decode_launch
from paceline.types import (
    AbortRequests,
    AddRequest,
    Delta,
    EngineStats,
    Failed,
    FinishReason,
    Progress,
    Ready,
    Shutdown,
    StepOutputs,
)

EOS = 256


def main() -> int:
    mode, line = sys.argv[1:]
    if mode == "exit":
        return 3
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with EngineSide(decode_launch(line)) as side:
        side.send(Progress(stage="loading weights", done=1, total=2))
        if mode == "fail":
            side.send(Failed(message="no memory for the K/V cache"))
            return 1
        if mode != "stuck":
            side.send(Ready(max_model_len=512, kv_tokens=4096, description="fake, cpu"))
        step_until_over(side, mode)
    return 0


def step_until_over(side: EngineSide, mode: str) -> None:
    running: dict[str, list[int]] = {}
    steps = 0
    while not side.parent_gone():
        for message in side.receive(wait_ms=0 if running else 100):
            match message:
                case AddRequest():
                    running[message.id] = [*message.prompt, EOS]
                case AbortRequests():
                    for request_id in message.ids:
                        running.pop(request_id, None)
                case Shutdown():
                    if mode != "stubborn":
                        return
        if mode != "serve":
            running.clear()
        steps += 1
        step(side, running, steps)


def step(side: EngineSide, running: dict[str, list[int]], steps: int) -> None:
    deltas = []
    for request_id, tokens in list(running.items()):
        token = tokens.pop(0)
        finish = None if tokens else FinishReason.STOP
        deltas.append(Delta(id=request_id, tokens=(token,), finish=finish))
        if finish is not None:
            del running[request_id]
    stats = EngineStats(running=len(running), steps_total=steps)
    side.send(StepOutputs(deltas=tuple(deltas), stats=stats))
    if running:
        time.sleep(0.005)


if __name__ == "__main__":
    sys.exit(main())
