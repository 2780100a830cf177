"""Trackers, which receive the events of a run: Weights & Biases, through its own package.

A tracker has ``begin(run)``, ``event(event)`` and ``end()``. If it fails, there is a warning, and the run continues without it.
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from typing import Any, Protocol

from ._native import UserError
from .run import Event, Run, flat


# Fields of samples, in the order of the columns of a table.
COLUMNS = ("step", "prompt", "text", "image", "predicted", "probability", "truth", "is_right")


class Tracker(Protocol):
    """A receiver of the events of a run."""

    def begin(self, run: Run) -> None:
        """The run has its settings and is about to start or to resume."""

    def event(self, event: Event) -> None:
        """An event, as from ``Run.events``."""

    def end(self) -> None:
        """The run has ended, and no more events follow."""


class Wandb:
    """A run at Weights & Biases: its settings, the numbers of steps and evaluations over ``step``, and samples.

    Keywords are those of ``wandb.init``, such as project, name, mode and dir.
    """

    def __init__(self, **init: Any) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ImportError("tracking with W&B needs its package: pip install wandb") from error
        self._wandb = wandb
        self._init = init
        self._run: Any = None
        self._ours: Run | None = None
        self._samples: list[Event] = []
        self._warnings: list[str] = []

    def begin(self, run: Run) -> None:
        self._ours = run
        init = {"project": "flatout", "name": run.path.name, **self._init}
        config = {**flat(run.config), "run_dir": os.fspath(run.path), **init.pop("config", {})}
        self._run = self._wandb.init(config=config, **init)
        # A run that went back to a checkpoint repeats steps: the axis is the step, and not the number of calls.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def event(self, event: Event) -> None:
        kind = event["event"]
        if kind == "sample":
            self._samples.append(event)
            return
        self._log_samples()
        if kind in ("step", "eval"):
            prefix = "train" if kind == "step" else "eval"
            self._run.log(numbers(event, prefix))
        elif kind == "start":
            self._run.summary.update({f"start/{name}": event[name] for name in ("device", "parameters", "arena_bytes")})
        elif kind == "warning":
            self._warnings.append(event["message"])
            self._run.summary.update({"warnings": self._warnings})
        elif kind == "end":
            self._run.summary.update({"status": event["status"], "final_loss": event["loss"]})

    def end(self) -> None:
        if self._run is None:
            return
        self._log_samples()
        samples = self._ours.samples if self._ours is not None else []
        if samples:
            self._run.log({"samples": self._table(samples)})
        self._run.finish()
        self._run = None

    def _log_samples(self) -> None:
        """Sends the samples of an evaluation, which follow each other, as a table."""
        samples, self._samples = self._samples, []
        if samples:
            self._run.log({"step": samples[0]["step"], "eval/samples": self._table(samples)})

    def _table(self, samples: list[dict[str, Any]]) -> Any:
        names = [name for name in COLUMNS if any(name in sample for sample in samples)]
        rows = [[sample.get(name) for name in names] for sample in samples]
        return self._wandb.Table(columns=list(names), data=rows)


def wandb(run: Run | str | os.PathLike[str], *, follow: bool = False, **init: Any) -> None:
    """Sends a trained run to Weights & Biases; with ``follow=True`` one that is being trained, until its end.

    Keywords are those of ``wandb.init``: ``flatout.track.wandb(run, project="words", mode="offline")``.
    """
    run = run if isinstance(run, Run) else Run(run)
    tracker = Wandb(**init)
    tracker.begin(run)
    try:
        for event in run.events(follow=follow):
            tracker.event(event)
    finally:
        tracker.end()


def numbers(event: Event, prefix: str) -> dict[str, float]:
    """The numbers of an event by name, with the step they belong to."""
    found: dict[str, float] = {"step": event["step"]}
    for name, value in flat(event).items():
        if name != "step" and isinstance(value, (int, float)) and math.isfinite(value):
            found[f"{prefix}/{name.replace('.', '/')}"] = value
    return found


def named(wanted: str | Tracker | None) -> Tracker | None:
    """The requested tracker, given by name or as an object."""
    if wanted == "wandb":
        return Wandb()
    if isinstance(wanted, str):
        raise UserError(f"there is no tracker {wanted!r}: give \"wandb\", or an object with begin, event and end")
    return wanted


class Guarded:
    """Wraps a tracker or a display, if there is one, and turns its first failure into a warning; it is not called again."""

    def __init__(self, name: str, tracker: Tracker | None) -> None:
        self._name = name
        self._tracker = tracker

    def begin(self, run: Run) -> None:
        self._call("begin", run)

    def event(self, event: Event) -> None:
        self._call("event", event)

    def end(self) -> None:
        self._call("end")

    def _call(self, what: str, *given: Any) -> None:
        if self._tracker is None:
            return
        try:
            getattr(self._tracker, what)(*given)
        except Exception as error:
            self._tracker = None
            message = f"the {self._name} failed, and the run continues without it: {error!r}"
            try:
                warnings.warn(message, stacklevel=2)
            except Exception:
                # Warnings may be errors in this process, and a warning must not end the run.
                logging.getLogger("flatout").warning(message)
