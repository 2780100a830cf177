"""Tests reading runs: complete, while they are written, truncated and damaged."""

import base64
import json
import shutil
import sys

import pytest
from conftest import python

import flatout


def test_a_run_has_its_state_and_results(small):
    assert (small.status, small.summary["step"], small.summary["recipe"]) == ("done", 20, "tiny")
    assert small.config["model"]["width"] == 32 and small.config["switches"]["backend"] == "cpu"
    assert list(small.checkpoints) and all(path.is_dir() for path in small.checkpoints.values())
    assert small.losses[-1] < small.losses[0]
    assert [event["step"] for event in small.events("eval")] == [10, 20]
    assert repr(small) == f"flatout.Run({str(small.path)!r})"


def test_a_frame_has_a_row_per_step(small):
    frame = small.frame()
    assert list(frame["step"]) == list(range(1, 21)) and list(frame["loss"]) == small.losses
    assert "event" not in frame and list(small.frame("eval")["step"]) == [10, 20]
    assert small.frame("start")["memory.parameters"][0] > 0


def test_a_frame_without_pandas_is_a_sentence(small, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        small.frame()


def test_a_partial_line_is_not_an_event(small, here):
    shutil.copytree(small.path, here / "copy")
    log = here / "copy/events.jsonl"
    whole = log.read_bytes()
    all_events = list(small.events())
    for cut in (1, 20, len(whole.splitlines()[-1])):
        log.write_bytes(whole[:-cut])
        assert list(flatout.Run("copy").events()) == all_events[:-1]
    log.write_bytes(b"nonsense\n" + whole)
    with pytest.raises(flatout.UserError, match="line 1 is not an event"):
        list(flatout.Run("copy").events())
    log.unlink()
    assert list(flatout.Run("copy").events()) == [] and flatout.Run("copy").losses == []


def test_a_run_is_followed_while_it_is_trained(here):
    script = """
import json, os, flatout
flatout.train("tiny", run="run", progress=False, on_event=lambda event: print(event["event"], flush=True), **json.loads(os.environ["SMALL"]))
"""
    process = python(script, here)
    assert process.stdout.readline() == "start\n"
    followed = [event["event"] for event in flatout.Run("run").events(follow=True)]
    out, err = process.communicate(timeout=60)
    assert followed == ["start", *out.split()], err
    assert followed[-1] == "end"


def test_samples_of_undone_steps_are_left_out(small, here):
    assert small.samples == []
    shutil.copytree(small.path, here / "copy")
    sample = lambda step, text: {"event": "sample", "step": step, "prompt": "once", "text": text}
    step = lambda step: {"event": "step", "step": step}
    events = [
        *(step(1), sample(1, "of a run that began again")),
        *(step(1), sample(1, "first"), step(2), sample(2, "second"), step(3), sample(3, "void"), {"event": "resume", "step": 2}),
        *(step(3), sample(3, "third"), sample(3, "beside it"), {"event": "resume", "step": 3}),
    ]
    (here / "copy/events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (here / "copy/samples.jsonl").write_text(json.dumps({"step": 2, "prompt": "", "text": "end\u2028"}, ensure_ascii=False) + "\n", encoding="utf-8")
    samples = flatout.Run("copy").samples
    assert [sample["text"] for sample in samples] == ["first", "second", "end\u2028", "third", "beside it"]
    assert samples[0] == {"step": 1, "prompt": "once", "text": "first"}


def test_the_block_of_a_notebook_is_escaped(small, here):
    evil = here / "<script>alert(1)</script>&'x'"
    shutil.copytree(small.path, evil)
    block = flatout.Run(evil)._repr_html_()
    assert "<script>" not in block and "&lt;script&gt;" in block
    picture = base64.b64decode(block.split("base64,")[1].split("'")[0]).decode()
    assert picture.startswith("<svg") and "<script>" not in picture and "held-out" in picture
    with pytest.raises(flatout.UserError, match="it has loss, lr"):
        small.plot("nothing")


def test_a_missing_run_is_an_error_sentence(here):
    for wrong in ("nowhere", here):
        with pytest.raises(flatout.UserError, match="there is no run in"):
            flatout.Run(wrong)
