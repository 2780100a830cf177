"""Tests trackers: offline runs of Weights & Biases, read back with its own messages, and trackers that fail."""

import json
import struct
import sys
import warnings

import pytest
import wandb
from conftest import SMALL, python
from wandb.proto import wandb_internal_pb2

import flatout


@pytest.fixture(autouse=True)
def offline(here, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(here))


def records(path):
    """The records of an offline run's file: W&B's own messages in the framing of LevelDB's log, blocks of 32 KiB in which a record is whole
    or has a first, middle and last part."""
    data, at, parts = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at < len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def read_back(folder):
    """The project, settings, history and summary of the offline run in a folder."""
    # W&B's own process may still write when a run is finished.
    wandb.teardown()
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    config, history, summary = {}, [], {}

    def named(item):
        return item.key or "/".join(item.nested_key)

    for record in records(path):
        if record.HasField("run"):
            config.update({named(item): json.loads(item.value_json) for item in record.run.config.update})
            project = record.run.project
        if record.HasField("history"):
            history.append({named(item): json.loads(item.value_json) for item in record.history.item})
        if record.HasField("summary"):
            summary.update({named(item): json.loads(item.value_json) for item in record.summary.update})
    return project, config, history, summary


def check(folder, run, project):
    found, config, history, summary = read_back(folder)
    assert found == project
    assert config["optimizer.lr"] == run.config["optimizer"]["lr"] and config["model.width"] == 32
    steps = [row for row in history if "train/loss" in row]
    assert [row["step"] for row in steps] == list(range(1, 21))
    assert [row["train/loss"] for row in steps] == run.losses
    assert steps[0]["train/lr"] == run.steps[0]["lr"]
    evals = {row["step"]: row["eval/loss"] for row in history if "eval/loss" in row}
    assert evals == {event["step"]: event["loss"] for event in run.events("eval")}
    assert summary["status"] == "done"


def test_a_run_is_tracked_during_training(here):
    script = """
import json, os, flatout
flatout.train("tiny", json.loads(os.environ["SMALL"]), run="run", progress=False, track="wandb")
"""
    out, err = python(script, here).communicate(timeout=120)
    assert (out, err) == ("", "")
    check(here, flatout.Run("run"), "flatout")


def test_a_run_is_sent_afterwards(small, here):
    flatout.track.wandb(small, project="words", mode="offline", dir=str(here))
    check(here, small, "words")


def table(folder, row, name):
    """A table of an offline run, as rows by the names of columns."""
    (path,) = folder.glob(f"wandb/offline-run-*/files/{row[f'{name}/path']}")
    held = json.loads(path.read_text())
    return [dict(zip(held["columns"], data)) for data in held["data"]]


def test_samples_are_sent_with_their_evaluation_and_all_at_the_end(here):
    keys = {**SMALL, "samples.prompts": ["once", "the actor"], "samples.max_tokens": 3}
    heard = []
    run = flatout.train("tiny", keys, run="run", progress=False, on_event=heard.append, track=flatout.track.Wandb(dir=str(here)))
    samples = [{name: value for name, value in event.items() if name != "event"} for event in heard if event["event"] == "sample"]
    assert [(sample["step"], sample["prompt"]) for sample in samples] == [(step, prompt) for step in (10, 20) for prompt in keys["samples.prompts"]]
    assert run.samples == samples and list(run.events("sample")) == [{"event": "sample", **sample} for sample in samples]
    _, _, history, _ = read_back(here)
    of_evaluations = {row["step"]: table(here, row, "eval/samples") for row in history if "eval/samples/path" in row}
    assert of_evaluations == {10: samples[:2], 20: samples[2:]}
    (everything,) = [table(here, row, "samples") for row in history if "samples/path" in row]
    assert everything == samples


def test_predictions_are_samples_with_their_own_columns(here):
    tracker = flatout.track.Wandb(dir=str(here))
    keys = {"train.steps": 2, "eval.every": 2, "eval.rows": 8, "data.synthetic_rows": 400, "samples.count": 3, "backend": "cpu"}
    run = flatout.train("vision-tiny", keys, run="run", progress=False, track=tracker)
    assert len(run.samples) == 3
    _, _, history, _ = read_back(here)
    (everything,) = [table(here, row, "samples") for row in history if "samples/path" in row]
    assert everything == run.samples and {"image", "predicted", "probability", "truth", "is_right"} < set(everything[0])


def test_a_tracker_that_fails_is_a_warning(here, small):
    class Dies:
        def __init__(self, at):
            self.at, self.calls = at, 0

        def begin(self, run):
            assert run.config["recipe"] == "tiny"
            self._count("begin")

        def event(self, event):
            self._count(event["event"])

        def end(self):
            self._count("leave")

        def _count(self, what):
            self.calls += 1
            if what == self.at:
                raise ConnectionError("the line is dead")

    for at in ("begin", "start", "step", "end", "leave"):
        tracker = Dies(at)
        with pytest.warns(UserWarning, match="the tracker failed.*the line is dead"):
            run = flatout.train("tiny", run=f"run-{at}", progress=False, track=tracker, **SMALL)
        assert run.status == "done" and run.losses == small.losses
        after = tracker.calls
        assert {"begin": 1, "start": 2}.get(at, after) == after, "it is not called again"


def test_a_warning_that_is_an_error_does_not_end_the_run(here, caplog):
    class Dies:
        def begin(self, run):
            raise ConnectionError("the line is dead")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert flatout.train("tiny", run="run", progress=False, track=Dies(), **SMALL).status == "done"
    assert "the tracker failed" in caplog.text and "the line is dead" in caplog.text


def test_a_missing_package_is_an_error_sentence(here, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match="pip install wandb"):
        flatout.train("tiny", progress=False, track="wandb", **SMALL)
    assert not (here / "runs").exists()
