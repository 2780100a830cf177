"""Runs that are read back: their events, settings, losses and checkpoints, while they are trained or afterwards."""

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

# Seconds between looks at a log that is followed.
FOLLOW_EVERY = 0.2


class Run(os.PathLike):
    """A run by its directory, or by its name under ``runs``. Reading needs no lock, and nothing is changed."""

    path: pathlib.Path

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = pathlib.Path(_native.named(os.fspath(path)))

    def __fspath__(self) -> str:
        return os.fspath(self.path)

    def __repr__(self) -> str:
        return f"flatout.Run({os.fspath(self.path)!r})"

    def events(self, kind: str | None = None, *, follow: bool = False) -> Iterator[Event]:
        """The events of the log, or those of a kind, as dictionaries, in the order they were written.

        The log is read as the iteration goes. With ``follow=True`` it waits for more as long as a process trains the run. A line that is
        only half written yet is not an event. ``start``, ``step``, ``eval``, ``sample``, ``saved``, ``resume``, ``warning``, ``spike`` and
        ``end`` are the kinds; events of steps that a resumed run made again are there twice, and ``steps`` has the ones that count.
        """
        log = self.path / "events.jsonl"
        waiting = b""
        number = 0
        position = 0
        while True:
            # Whether the run is over is asked first: what it wrote until then is still read.
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
        """The step events that count, in order: of a step that was made again after a stop, the last."""
        return json.loads(_native.run_steps(os.fspath(self.path)))

    @property
    def losses(self) -> list[float]:
        """The loss of every step that was logged, in order; NaN where it was not finite."""
        return [float("nan") if step["loss"] is None else step["loss"] for step in self.steps]

    def frame(self, kind: str = "step") -> pandas.DataFrame:
        """The events of a kind as a pandas data frame, a row each; what lies deeper has names such as ``gpu.power_watts``."""
        try:
            import pandas
        except ImportError as error:
            raise ImportError("Run.frame needs pandas: pip install pandas; Run.events gives dictionaries without it") from error
        events = self.steps if kind == "step" else self.events(kind)
        rows = [flat({name: value for name, value in event.items() if name != "event"}) for event in events]
        return pandas.DataFrame.from_records(rows)

    @property
    def config(self) -> dict[str, Any]:
        """Every setting of the run by section, with everything that was resolved."""
        return json.loads(_native.run_config(os.fspath(self.path)))

    @property
    def summary(self) -> dict[str, Any]:
        """The run on one line, as ``flatout runs --json`` has it: state, step, losses, speed."""
        return json.loads(_native.run_summary(os.fspath(self.path)))

    @property
    def status(self) -> str:
        """``done``, ``stopped`` (after saving), ``failed``, ``running`` or ``crashed`` (its process ended without a word)."""
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
        """Samples in the order of their steps: those of evaluations that count, and the text that the command line has the model write
        at the end. Texts have ``step``, ``prompt`` and ``text``; predictions of classes have ``predicted``, ``probability``, ``truth`` and
        ``is_right``, and ``image`` where the model saw one.
        """
        found: list[dict[str, Any]] = []
        for event in self.events():
            kind = event["event"]
            if kind == "sample":
                found.append({name: value for name, value in event.items() if name != "event"})
            elif kind in ("resume", "step"):
                # The run stands before this step, or after the one it resumed from: samples of later steps will be made again.
                counts = event["step"] if kind == "resume" else event["step"] - 1
                while found and found[-1]["step"] > counts:
                    found.pop()
        file = self.path / "samples.jsonl"
        if file.exists():
            found += [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]
        return sorted(found, key=lambda sample: sample["step"])

    def plot(self, name: str = "loss") -> str:
        """A plot of the run as SVG: ``loss``, ``lr``, ``grad_norm``, ``throughput``, or what else ``report.md`` has."""
        return _native.run_plot(os.fspath(self.path), name)

    def _repr_html_(self) -> str:
        return card(self)


def card(run: Run) -> str:
    """A run as a small block of HTML: where it stands, and its loss. What comes from the run is escaped, and the picture is an image,
    whose style and names stay its own."""
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
    """An event with the values of tables in it under joined names."""
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
        raise UserError(f"{log} line {number} is no event: {error}") from error
    if not isinstance(event, dict):
        raise UserError(f"{log} line {number} is no event: it is no table")
    return event
