"""Trains and fine-tunes transformers: runs, plans and models from Python.

    import flatout

    run = flatout.train("tiny", {"train.steps": 100}, lr=1e-3)
    run.losses[-1]
    flatout.plan("pretrain-226m", gpu="h200")["arena_bytes"]
    flatout.Model(run.path).generate("once", max_tokens=20)

Everything happens in this process, with the GIL released while it works.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, Union

from . import _native, track
from ._native import Error, UserError, __version__
from .model import Model, Tokenizer
from .progress import display
from .run import Event, Run
from .words import overrides

__all__ = [
    "Error",
    "Event",
    "Model",
    "Run",
    "Tokenizer",
    "UserError",
    "__version__",
    "plan",
    "recipes",
    "resume",
    "schema",
    "track",
    "train",
]

Path = Union[str, "os.PathLike[str]"]
Duration = Union[float, datetime.timedelta]
Settings = Mapping[str, Any]


def train(
    recipe: Path = "tiny",
    settings: Settings = MappingProxyType({}),
    *,
    run: Path | None = None,
    resume: Literal["never", "auto", "must"] = "never",
    presets: str | Sequence[str] = (),
    max_time: Duration | None = None,
    on_event: Callable[[Event], object] | None = None,
    progress: bool | None = None,
    track: str | track.Tracker | None = None,
    **keys: Any,
) -> Run:
    """Trains a recipe, embedded or a TOML file, and returns the run.

    Every key of ``flatout.schema()`` can be given as a keyword by its last part where that is unambiguous, as ``lr=1e-3``, or in
    settings by its full name, as ``{"train.steps": 100}`` or ``{"train": {"steps": 100}}``; ``**{"train.steps": 100}`` is the same.

    run: the directory; by default the next free one under ``runs``.
    resume: whether to continue a run that exists already.
    presets: names or files of presets that override the recipe, as with ``--with``.
    max_time: seconds, or a timedelta, before which the run saves and stops.
    on_event: called with each event of the run as it happens, a dictionary as in ``events.jsonl``. An exception in it ends the run,
        which saves as on Ctrl-C, and is raised unchanged; if the run could not be saved, that error is its ``__cause__``.
        Training waits for it, for the display and for the tracker at every event.
    progress: whether to show the progress of the run; by default in a notebook and on a terminal.
    track: ``"wandb"``, or a tracker of ``flatout.track``.

    Ctrl-C saves at the end of the update, then raises KeyboardInterrupt; ``flatout.resume`` continues. A second Ctrl-C does not wait.
    Bad input raises UserError before any work, and a machine that cannot continue raises Error.
    """
    listeners = _listeners(on_event, progress, track)
    words = overrides({**settings, **keys}, one_process="flatout train")
    directory = None if run is None else os.fspath(run)
    with listeners:
        path = _native.train_recipe(
            os.fspath(recipe),
            _several(presets),
            words,
            directory,
            resume,
            _seconds(max_time),
            listeners.begin,
            listeners.event,
        )
    return Run(path)


def resume(
    run: Path | Run,
    settings: Settings = MappingProxyType({}),
    *,
    max_time: Duration | None = None,
    on_event: Callable[[Event], object] | None = None,
    progress: bool | None = None,
    track: str | track.Tracker | None = None,
    **keys: Any,
) -> Run:
    """Continues a run exactly where it stopped: a Run, its directory, or its name under ``runs``.

    The keys that may change are those that ``flatout resume`` accepts, such as ``{"train.steps": 200}``; the other
    arguments are as in ``train``.
    """
    listeners = _listeners(on_event, progress, track)
    words = overrides({**settings, **keys}, one_process="flatout resume")
    with listeners:
        path = _native.resume(os.fspath(run), words, _seconds(max_time), listeners.begin, listeners.event)
    return Run(path)


def plan(
    recipe: Path = "tiny",
    settings: Settings = MappingProxyType({}),
    *,
    gpu: str | None = None,
    gpus: int | None = None,
    nodes: int | None = None,
    link: str | None = None,
    net: str | None = None,
    ranks: int | None = None,
    read_data: bool = False,
    presets: str | Sequence[str] = (),
    **keys: Any,
) -> dict[str, Any]:
    """Plans memory to the byte, arithmetic and time of a recipe without running it; the same as ``flatout plan --json``.

    gpu: plan for this GPU instead of this machine's, as ``"h200"`` or ``"rtx3090"``.
    gpus, nodes, link, net: the number of GPUs per node, the number of nodes, and the links between them.
    ranks: the number of processes on CPUs.
    read_data: read the data first, so that examples have their own lengths instead of the context's.
    """
    for name, count in (("gpus", gpus), ("nodes", nodes), ("ranks", ranks)):
        if count is not None and not 1 <= count <= 1024:
            raise UserError(f"{name} is {count} and must be from 1 to 1024")
    given = {"gpus": gpus, "nodes": nodes, "link": link, "net": net}
    for name, needs in (("nodes", "gpus"), ("link", "gpus"), ("net", "nodes")):
        if given[name] is not None and given[needs] is None:
            raise UserError(f"{name} is given without {needs}: give both")
    if gpus is not None and ranks is not None:
        raise UserError("gpus plans for GPUs and ranks for CPUs: give one of them")
    words = overrides({**settings, **keys})
    made = _native.plan_json(
        os.fspath(recipe), _several(presets), words, gpu, gpus, nodes, link, net, ranks, read_data
    )
    return json.loads(made)


def recipes() -> dict[str, str]:
    """The embedded recipes by name, each with its description."""
    return {row["name"]: row["description"] for row in json.loads(_native.recipes_json())["recipes"]}


def schema(word: str = "") -> list[dict[str, Any]]:
    """Every key that can be set, or those that have the word in their name or description."""
    name, words = word.lower(), word.lower().replace("_", " ")
    keys = json.loads(_native.schema_json())
    return [key for key in keys if name in key["path"] or words in key["doc"].lower()]


def _several(names: str | Sequence[str]) -> list[str]:
    return [names] if isinstance(names, str) else [os.fspath(name) for name in names]


def _seconds(time: Duration | None) -> float | None:
    return time.total_seconds() if isinstance(time, datetime.timedelta) else time


class _Listeners:
    """All listeners of a run: the caller's function, a display and a tracker."""

    def __init__(self, on_event, shown: track.Guarded, tracker: track.Guarded) -> None:
        self.on_event, self.shown, self.tracker = on_event, shown, tracker

    def begin(self, path: str) -> None:
        run = Run(path)
        self.shown.begin(run)
        self.tracker.begin(run)

    def event(self, event: Event) -> None:
        self.shown.event(event)
        self.tracker.event(event)
        if self.on_event is not None:
            self.on_event(event)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *raised: object) -> None:
        # Ctrl-C while the display ends must not keep the tracker from sending its data.
        try:
            self.shown.end()
        finally:
            self.tracker.end()


def _listeners(on_event, progress, tracker) -> _Listeners:
    shown = track.Guarded("display", display(progress))
    return _Listeners(on_event, shown, track.Guarded("tracker", track.named(tracker)))
