"""Bytes of a `text/event-stream` to events. Pure; knows no HTTP and no JSON.

The format is the one of the HTML standard, chapter "Server-sent events": lines end in LF, CR LF or
CR, a blank line ends an event, several `data` lines of one event are joined by LF, a line that
begins with a colon is a comment.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_LINE_END = re.compile(rb"\r\n|\r|\n")
_BOM = "\ufeff"


@dataclass(frozen=True)
class Event:
    """One event. `name` is "message" when the server gave none."""

    name: str
    data: str


class EventDecoder:
    """Takes the bytes of one stream in pieces of any size and gives the events that are complete.

    What comes out depends on the bytes alone, not on where they were cut.
    """

    def __init__(self) -> None:
        self._tail = b""  # the last line so far; holds no line end
        self._skip_lf = False  # the last piece ended in CR: an LF to come belongs to it
        self._first_line = True
        self._name = ""
        self._data: list[str] = []

    def feed(self, piece: bytes) -> list[Event]:
        """The events that `piece` completes, in order."""
        if self._skip_lf and piece:
            piece = piece.removeprefix(b"\n")
            self._skip_lf = False
        if not piece:
            return []
        self._skip_lf = piece.endswith(b"\r")
        *lines, self._tail = _LINE_END.split(self._tail + piece)
        events = (self._line(line.decode("utf-8", "replace")) for line in lines)
        return [event for event in events if event is not None]

    def close(self) -> list[Event]:
        """The event that the stream's end cut short of its blank line, if there is one.

        The standard drops it; here it is kept, so that a last error or [DONE] is not lost.
        """
        event = self._line(self._tail.decode("utf-8", "replace")) if self._tail else None
        self._tail = b""
        events = (event, self._line(""))
        return [event for event in events if event is not None]

    def _line(self, line: str) -> Event | None:
        if self._first_line:
            line = line.removeprefix(_BOM)
            self._first_line = False
        if not line:
            return self._end_event()
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            self._data.append(value)
        elif field == "event":
            self._name = value
        elif field == "error":  # not in the standard, but some servers send errors like this
            self._name = "error"
            self._data.append(value)
        return None

    def _end_event(self) -> Event | None:
        name, data = self._name or "message", self._data
        self._name, self._data = "", []
        return Event(name, "\n".join(data)) if data else None
