from __future__ import annotations

import io

from paceline.bench.progress import BarDisplay, PlainDisplay, make_display


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_only_a_terminal_gets_a_bar() -> None:
    assert isinstance(make_display(Terminal()), BarDisplay)
    assert isinstance(make_display(io.StringIO()), PlainDisplay)


def test_plain_lines_come_now_and_then() -> None:
    now = 0.0
    out = io.StringIO()
    display = PlainDisplay(out, clock=lambda: now)
    display.begin("C=2", 4)
    display.tick()
    display.chunk()
    display.request(None)
    display.request("broke")
    now = 9.9
    display.tick()
    assert out.getvalue() == ""
    now = 10.0
    display.tick()
    display.tick()
    assert out.getvalue() == "C=2: 2/4 requests, 1 failed, 1 chunks\n"
    display.end()
    display.begin("C=3", 1)
    now = 20.0
    display.tick()
    assert out.getvalue().endswith("C=3: 0/1 requests, 0 chunks\n")


def test_a_bar_shows_counts_and_notes_as_they_are() -> None:
    out = Terminal()
    display = BarDisplay(out)
    display.note("[not] markup")
    display.tick()  # nothing to draw yet
    display.begin("C=2", 4)
    display.request(None)
    display.tick()
    display.end()
    display.end()
    assert "[not] markup\n" in out.getvalue()
    assert "1/4 requests" in out.getvalue()
