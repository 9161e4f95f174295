"""Servers to compare: those that run already, and Paceline's own, started and ended here.

A child serves one arm. All are up at the same time and idle but for the one that is asked: an idle
server takes memory and no processor time. Knows how to start `paceline serve`; nothing of figures.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO

from paceline.errors import ConfigError

START_SECONDS = 600.0  # loading a large model takes minutes
STOP_SECONDS = 10.0
_POLL_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A server to measure: its name; the flags of one to start, or the address of one that runs."""

    name: str
    flags: tuple[str, ...] = ()
    url: str | None = None

    @property
    def repeats(self) -> bool:
        """A second server of the same kind: what it differs from the first is the noise."""
        return "#" in self.name


def arms_of(text: str, servers: Sequence[str]) -> list[Arm]:
    """From `plain,static:3,plain` and `name=URL` pairs. Raises ConfigError."""
    names = [name.strip() for name in text.split(",")] if text else []
    arms = [Arm(name=name, flags=_flags(name)) for name in names]
    for pair in servers:
        name, equals, url = pair.partition("=")
        if not equals or not name or not url.startswith(("http://", "https://")):
            raise ConfigError(
                f"--server {pair!r} must be NAME=URL, as sglang=http://127.0.0.1:8000"
            )
        arms.append(Arm(name=name, url=url))
    if not arms:
        raise ConfigError("nothing to compare: give --arms or --server NAME=URL")
    seen: dict[str, int] = {}
    numbered = []
    for arm in arms:
        count = seen[arm.name] = seen.get(arm.name, 0) + 1
        name = arm.name if count == 1 else f"{arm.name}#{count}"
        numbered.append(Arm(name=name, flags=arm.flags, url=arm.url))
    return numbered


def _flags(name: str) -> tuple[str, ...]:
    """Of `paceline serve`, for an arm's name."""
    policy = "--speculative-policy"
    match name.split(":"):
        case ["plain"]:
            return (policy, "off")
        case ["adaptive"]:
            return (policy, "adaptive", "--speculative-num-steps", "5")
        case ["static", depth] if depth.isdigit():
            return (policy, "static", "--speculative-num-steps", depth)
        case ["tree", tokens] if tokens.isdigit():
            steps = str(min(4, max(int(tokens), 1)))
            return (policy, "static", "--speculative-num-steps", steps,
                    "--speculative-eagle-topk", "4",
                    "--speculative-num-draft-tokens", tokens)  # fmt: skip
        case ["threshold", most, depth] if most.isdigit() and depth.isdigit():
            return (policy, "threshold", "--speculative-disable-batch-threshold", most,
                    "--speculative-num-steps", depth)  # fmt: skip
    raise ConfigError(
        f"there is no arm {name!r}: give plain, static:DEPTH, tree:TOKENS, "
        "threshold:REQUESTS:DEPTH or adaptive"
    )


@contextlib.contextmanager
def running(
    arms: Sequence[Arm], common: Sequence[str], say: Callable[[str], None]
) -> Iterator[dict[str, str]]:
    """Addresses of all arms by name; the servers that were started end with the context.

    common: flags of every server that is started. One that does not come up has an address at
    which nobody answers, and `say` is told why.
    """
    with contextlib.ExitStack() as stack:
        found = {}
        for arm in arms:
            if arm.url is not None:
                found[arm.name] = arm.url
                continue
            log = stack.enter_context(tempfile.TemporaryFile())
            child = _Child([*common, *arm.flags], log)
            stack.callback(child.stop)
            say(f"starting {arm.name}")
            problem = child.wait()
            if problem:
                say(f"{arm.name} did not start: {problem}")
            found[arm.name] = child.url
        yield found


class _Child:
    """One `paceline serve` on a port of its own."""

    def __init__(self, flags: Sequence[str], log: IO[bytes]) -> None:
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        command = [sys.executable, "-m", "paceline.cli", "serve", *flags, "--port", str(port)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log
        )

    def wait(self) -> str | None:
        """Until it serves; the reason if it never will."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                return self._last_words()
            if _ready(self.url):
                return None
            time.sleep(_POLL_S)
        return f"not ready within {START_SECONDS:.0f} s"

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"it ended with status {self._process.returncode}"

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
