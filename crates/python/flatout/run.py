"""Reads runs during and after training: their events, settings, losses and checkpoints."""

from __future__ import annotations

import base64
import html
import json
import os
import pathlib
import re
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from . import _native
from ._native import UserError

if TYPE_CHECKING:
    import pandas

Event = dict[str, Any]

# Seconds between two polls of a log that is followed.
FOLLOW_EVERY = 0.2


class Run(os.PathLike):
    """A run, given by its directory or its name under ``runs``. It is only read, without a lock."""

    path: pathlib.Path

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = pathlib.Path(_native.named(os.fspath(path)))

    def __fspath__(self) -> str:
        return os.fspath(self.path)

    def __repr__(self) -> str:
        return f"flatout.Run({os.fspath(self.path)!r})"

    def events(self, kind: str | None = None, *, follow: bool = False) -> Iterator[Event]:
        """The events of the log, or those of a kind, as dictionaries, in the order they were written.

        The log is read during the iteration. With ``follow=True`` it waits for more as long as a process trains the run. A partially
        written line is not an event yet. The kinds are ``start``, ``step``, ``eval``, ``sample``, ``saved``, ``resume``, ``warning``,
        ``spike`` and ``end``. Steps that a resumed run repeated have several events; ``steps`` has the valid ones.
        """
        log = self.path / "events.jsonl"
        waiting = b""
        number = 0
        position = 0
        while True:
            # This is checked before reading, so that everything written until the end of the run is read.
            is_over = not (follow and _native.is_running(os.fspath(self.path)))
            if log.exists():
                with open(log, "rb") as file:
                    file.seek(position)
                    for line in file:
                        position += len(line)
                        waiting += line
                        if not waiting.endswith(b"\n"):
                            break
                        number += 1
                        event = _event(waiting, log, number)
                        waiting = b""
                        if kind is None or event.get("event") == kind:
                            yield event
            if is_over:
                return
            time.sleep(FOLLOW_EVERY)

    @property
    def steps(self) -> list[Event]:
        """The valid step events in order: for a step that was repeated after a stop, the last."""
        return json.loads(_native.run_steps(os.fspath(self.path)))

    @property
    def losses(self) -> list[float]:
        """The loss of every step that was logged, in order; NaN where it was not finite."""
        return [float("nan") if step["loss"] is None else step["loss"] for step in self.steps]

    def frame(self, kind: str = "step") -> pandas.DataFrame:
        """The events of a kind as a pandas data frame, a row each; nested values have names such as ``gpu.power_watts``."""
        try:
            import pandas
        except ImportError as error:
            raise ImportError("Run.frame needs pandas: pip install pandas; Run.events gives dictionaries without it") from error
        events = self.steps if kind == "step" else self.events(kind)
        rows = [flat({name: value for name, value in event.items() if name != "event"}) for event in events]
        return pandas.DataFrame.from_records(rows)

    @property
    def config(self) -> dict[str, Any]:
        """All settings of the run by section, with resolved values."""
        return json.loads(_native.run_config(os.fspath(self.path)))

    @property
    def summary(self) -> dict[str, Any]:
        """A summary of the run, as in ``flatout runs --json``: state, step, losses, speed."""
        return json.loads(_native.run_summary(os.fspath(self.path)))

    @property
    def status(self) -> str:
        """``done``, ``stopped`` (after saving), ``failed``, ``running`` or ``crashed`` (its process ended without an ``end`` event)."""
        return self.summary["state"]

    @property
    def checkpoints(self) -> dict[int, pathlib.Path]:
        """The folders of the checkpoints that are kept, by step, in order. ``Model(f"{run.path}@{step}")`` opens one."""
        folder = self.path / "checkpoints"
        names = os.listdir(folder) if folder.is_dir() else []
        steps = sorted(int(found[1]) for name in names if (found := re.fullmatch(r"step-(\d+)", name)))
        return {step: folder / f"step-{step}" for step in steps}

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Samples in the order of their steps: those of valid evaluations, and the text that ``flatout train`` generates at the end of a
        run. Texts have ``step``, ``prompt`` and ``text``; predictions of classes have ``predicted``, ``probability``, ``truth`` and
        ``is_right``, and ``image`` where the input is an image.
        """
        found: list[dict[str, Any]] = []
        for event in self.events():
            kind = event["event"]
            if kind == "sample":
                found.append({name: value for name, value in event.items() if name != "event"})
            elif kind in ("resume", "step"):
                # The run is before this step, or after the one it resumed from: samples of later steps are void.
                counts = event["step"] if kind == "resume" else event["step"] - 1
                while found and found[-1]["step"] > counts:
                    found.pop()
        file = self.path / "samples.jsonl"
        if file.exists():
            found += [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]
        return sorted(found, key=lambda sample: sample["step"])

    def plot(self, name: str = "loss") -> str:
        """A plot of the run as SVG: ``loss``, ``lr``, ``grad_norm``, ``throughput``, or another plot of ``report.md``."""
        return _native.run_plot(os.fspath(self.path), name)

    def _repr_html_(self) -> str:
        return card(self)


def card(run: Run) -> str:
    """A run as a small block of HTML: its state and its loss curve. Texts from the run are escaped, and the plot is embedded as an
    image, so that its styles and ids do not affect the page."""
    summary = run.summary
    number = lambda value, how: "" if value is None else format(value, how)
    of = f" / {summary['steps']:,}" if summary["steps"] is not None else ""
    cells = [
        ("state", summary["state"]),
        ("step", f"{summary['step']:,}{of}"),
        ("loss", number(summary["loss"], ".4f")),
        ("held-out", number(summary["eval_loss"], ".4f")),
        ("tokens/s", number(summary["tokens_per_second"], ",.0f")),
    ]
    row = "".join(
        f"<span style='margin-right:1.5em'><span style='opacity:.6'>{html.escape(name)}</span> {html.escape(str(value))}</span>"
        for name, value in cells
        if value != ""
    )
    image = base64.b64encode(run.plot().encode()).decode()
    return (
        f"<div style='max-width:760px'><div><b>{html.escape(summary['recipe'])}</b> "
        f"<code>{html.escape(os.fspath(run.path))}</code></div><div>{row}</div>"
        f"<img alt='loss' style='width:100%' src='data:image/svg+xml;base64,{image}'></div>"
    )


def flat(event: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """An event with nested values under joined names."""
    found: dict[str, Any] = {}
    for name, value in event.items():
        if isinstance(value, dict):
            found.update(flat(value, f"{prefix}{name}."))
        else:
            found[prefix + name] = value
    return found


def _event(line: bytes, log: pathlib.Path, number: int) -> Event:
    try:
        event = json.loads(line)
    except ValueError as error:
        raise UserError(f"{log} line {number} is not an event: {error}") from error
    if not isinstance(event, dict):
        raise UserError(f"{log} line {number} is not an event: it is not an object")
    return event
