"""Shared fixtures: a small run, and the command line program."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import flatout

ROOT = Path(__file__).resolve().parents[3]
BINARY = Path(os.environ.get("FLATOUT_BINARY", ROOT / "target/debug/flatout"))

# A model that learns something in a second, on the CPU wherever tests run.
SMALL = {
    "model.layers": 1,
    "model.width": 32,
    "model.heads": 2,
    "model.context": 32,
    "train.steps": 20,
    "eval.every": 10,
    "checkpoint.every": 10,
    "backend": "cpu",
}


def words(keys):
    return [f"{key}={value}" for key, value in keys.items()]


def program(*arguments, cwd=None, code=0):
    """Runs the command line and returns its standard output, or its error sentence where a failure is expected."""
    done = subprocess.run([BINARY, *map(str, arguments)], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr.strip().removeprefix("flatout: ")


def python(script, cwd, **environment):
    """Runs a script in a separate Python process, for tests of signals and forks."""
    return subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "SMALL": json.dumps(SMALL), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="session")
def heard():
    """The events that were received while the small run was trained."""
    return []


@pytest.fixture(scope="session")
def small(folder, heard):
    """A small run, trained to its end."""
    return flatout.train("tiny", run=folder / "small", on_event=heard.append, progress=False, **SMALL)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder for the test, as its working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
