"""Tests the progress display on a terminal and in an executed notebook."""

import io
import json
import os
import pty
import subprocess
import sys

import nbformat
import pytest
from conftest import ROOT, SMALL
from nbclient import NotebookClient

import flatout
from flatout import progress


def test_lines_of_a_terminal(small):
    out = io.StringIO()
    line = progress.Line(out)
    line.begin(small)
    for event in small.events():
        line.event(event)
    line.event({"event": "warning", "message": "a \x1b[2J file"})
    line.event({"event": "step", "step": 21, "loss": None, "step_ms": 1.0, "tokens_per_second": 5.0})
    line.end()
    shown = out.getvalue()
    assert "20 steps" in shown and "step 10  held-out loss" in shown and "done     after 20 steps" in shown
    assert "\x1b" not in shown and "\\x1b[2J" in shown


def test_a_terminal_shows_a_line_and_a_pipe_nothing(here):
    script = "import os, json, flatout; flatout.train('tiny', run='run-' + os.environ['WHERE'], **json.loads(os.environ['SMALL']))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "SMALL": json.dumps(SMALL)}
    piped = subprocess.run([sys.executable, "-c", script], env={**environment, "WHERE": "pipe"}, capture_output=True, text=True)
    assert (piped.returncode, piped.stdout, piped.stderr) == (0, "", "")
    ours, theirs = pty.openpty()
    shown = subprocess.Popen([sys.executable, "-c", script], env={**environment, "WHERE": "terminal"}, stderr=theirs)
    os.close(theirs)
    seen = b""
    while True:
        try:
            piece = os.read(ours, 4096)
        except OSError:
            break
        if not piece:
            break
        seen += piece
    assert shown.wait() == 0
    assert b"\rstep 20/20  loss " in seen and b"done     after 20 steps" in seen


class Screen(io.StringIO):
    """A standard error that fails when a word is written."""

    def __init__(self, word):
        super().__init__()
        self.word = word

    def write(self, text):
        if self.word in text:
            raise BrokenPipeError("nobody reads")
        return super().write(text)


class Ends:
    """A tracker that counts the calls of `end`."""

    ends = 0

    def begin(self, run):
        pass

    def event(self, event):
        pass

    def end(self):
        self.ends += 1


@pytest.mark.parametrize("word", ["run  ", "loss", "held-out", "done", "\n"])
def test_a_display_that_fails_is_a_warning(here, small, monkeypatch, word):
    monkeypatch.setattr(sys, "stderr", Screen(word))
    tracker = Ends()
    with pytest.warns(UserWarning, match="the display failed.*nobody reads"):
        run = flatout.train("tiny", run="run", progress=True, track=tracker, **SMALL)
    assert run.status == "done" and run.losses == small.losses and tracker.ends == 1


def test_the_exception_of_the_run_is_raised_whatever_the_display_does(here, monkeypatch):
    class Bad(progress.Line):
        how = OSError

        def end(self):
            raise self.how("at the end")

    def stop(event):
        raise LookupError("mine")

    monkeypatch.setattr(flatout, "display", lambda wanted: Bad(io.StringIO()))
    tracker = Ends()
    with pytest.warns(UserWarning, match="the display failed.*at the end"), pytest.raises(LookupError, match="mine"):
        flatout.train("tiny", run="one", on_event=stop, track=tracker, **SMALL)
    assert tracker.ends == 1
    monkeypatch.setattr(Bad, "how", KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt) as raised:
        flatout.train("tiny", run="two", on_event=stop, track=tracker, **SMALL)
    assert tracker.ends == 2 and isinstance(raised.value.__context__, LookupError)


def test_the_notebook_of_the_examples_runs(here):
    notebook = nbformat.read(ROOT / "examples/notebook/first-run.ipynb", as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "outputs are stripped"
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(here)}})
    client.execute()
    blocks = [
        output["data"]["text/html"]
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "text/html" in output.get("data", {})
    ]
    live = [block for block in blocks if "data:image/svg+xml" in block]
    assert live and "done" in live[0], "the block was drawn again to the end"
    assert not [output for cell in notebook.cells for output in cell.get("outputs", []) if output["output_type"] == "error"]
