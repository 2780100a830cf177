"""Progress of a run: a line on a terminal, a block with the loss curve in a notebook."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO

from .run import Event, Run, card

# Seconds between two updates of the display.
LINE_EVERY = 0.1
BLOCK_EVERY = 1.0
# A block is drawn from the whole log: at most this share of the time is spent on drawing.
BLOCK_SHARE = 0.05


class Line:
    """A line on a terminal that is overwritten, with warnings and evaluations above it."""

    def __init__(self, out: TextIO) -> None:
        self.out = out
        self.steps = 0
        self.drawn = 0.0
        self.width = 0

    def begin(self, run: Run) -> None:
        self._say(f"run      {printable(str(run.path))}")

    def event(self, event: Event) -> None:
        kind = event["event"]
        if kind == "start":
            self.steps = event["steps"]
            self._say(f"train    {event['recipe']} on {event['device']}, {self.steps:,} steps")
        elif kind == "step":
            now = time.monotonic()
            if now - self.drawn >= LINE_EVERY or event["step"] == self.steps:
                self.drawn = now
                self._draw(status(event, self.steps))
        elif kind == "eval":
            self._say(f"step {event['step']:,}  held-out loss {number(event['loss'])}")
        elif kind == "warning":
            self._say(f"warning: {printable(event['message'])}")
        elif kind == "end":
            self._say(f"{event['status']:8} after {event['steps']:,} steps, loss {number(event['loss'])}")

    def end(self) -> None:
        if self.width:
            self.out.write("\n")
            self.width = 0

    def _draw(self, text: str) -> None:
        self.out.write("\r" + text.ljust(self.width))
        self.out.flush()
        self.width = len(text)

    def _say(self, text: str) -> None:
        if self.width:
            self.out.write("\r" + " " * self.width + "\r")
            self.width = 0
        self.out.write(text + "\n")
        self.out.flush()


class Block:
    """A block of HTML in a notebook that is updated during the run."""

    def __init__(self) -> None:
        self.run: Run | None = None
        self.handle: Any = None
        self.next = 0.0

    def begin(self, run: Run) -> None:
        self.run = run

    def event(self, event: Event) -> None:
        if time.monotonic() >= self.next:
            self._draw()

    def end(self) -> None:
        self._draw()

    def _draw(self) -> None:
        if self.run is None:
            return
        now = time.monotonic()
        block = card(self.run)
        if self.handle is None:
            from IPython.display import HTML, display

            self.handle = display(HTML(block), display_id=True)
        else:
            from IPython.display import HTML

            self.handle.update(HTML(block))
        took = time.monotonic() - now
        self.next = now + max(BLOCK_EVERY, took / BLOCK_SHARE)


def display(wanted: bool | None) -> Line | Block | None:
    """The display for this process: a block in a notebook, a line on a terminal, and elsewhere a line if it is requested."""
    if wanted is False:
        return None
    if in_notebook():
        return Block()
    if wanted or (sys.stderr is not None and sys.stderr.isatty()):
        return Line(sys.stderr)
    return None


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and shell.__class__.__name__ == "ZMQInteractiveShell"


def status(event: Event, steps: int) -> str:
    """A step on one line."""
    speed = f"{event['tokens_per_second']:,.0f} tok/s" if event.get("tokens_per_second") else ""
    left = (steps - event["step"]) * event["step_ms"] / 1000
    return f"step {event['step']:,}/{steps:,}  loss {number(event['loss'])}  {speed}  {left:.0f} s left"


def number(loss: float | None) -> str:
    return "not finite" if loss is None else f"{loss:.4f}"


def printable(text: str) -> str:
    """Escapes control characters, so that a text cannot control the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
