"""Tests training in the process: the same runs as from the command line, events as they happen, Ctrl-C and exceptions."""

import enum
import os
import shutil
import signal
import threading
import time

import numpy
import pytest
from conftest import ROOT, SMALL, program, python, words

import flatout
from flatout.words import overrides


def test_the_run_is_the_command_lines(small, folder):
    program("train", "tiny", *words(SMALL), "--run", folder / "other", "--quiet")
    other = flatout.Run(folder / "other")
    assert small.status == other.status == "done"
    assert small.losses == other.losses
    assert small.config == other.config
    assert (small.path / "plan.json").exists() and (small.path / "report.md").exists()


def test_events_arrive_as_they_are_logged(small, heard):
    assert heard == list(small.events())
    assert [event["event"] for event in heard][0] == "start" and heard[-1]["event"] == "end"
    assert len(small.losses) == 20


def test_every_run_gets_its_own_directory(here):
    for number in (1, 2):
        run = flatout.train("tiny", progress=False, steps=2, **{k: v for k, v in SMALL.items() if k != "train.steps"})
        assert run.path.name == f"tiny-{number}" and run.path.parent.name == "runs"
    assert flatout.Run("tiny-2").path == run.path
    with pytest.raises(flatout.UserError, match="holds a run already"):
        flatout.train("tiny", run=run, progress=False, **SMALL)


def test_values_of_python_are_settings(here):
    keys = {**SMALL, "train.steps": 1, "betas": (0.8, 0.9), "lr": 2e-3, "fuse.qkv": "off", "train.freeze": ["embed"]}
    config = flatout.train("tiny", {"train": {"seed": 7}}, progress=False, presets="quick-test", **keys).config
    assert config["train"]["seed"] == 7
    assert config["optimizer"]["betas"] == [0.8, 0.9] and config["optimizer"]["lr"] == 2e-3
    assert config["train"]["freeze"] == ["embed"] and config["train"]["steps"] == 1


def test_numbers_of_numpy_are_numbers():
    class Size(enum.IntEnum):
        SMALL = 7

    for value, word in [
        (numpy.float64(1e-3), "0.001"),
        (numpy.float32(0.5), "0.5"),
        (numpy.int64(3), "3"),
        (numpy.array(4), "4"),
        (numpy.bool_(True), "true"),
        (Size.SMALL, "7"),
        ([numpy.float64(0.9), numpy.float32(0.5)], "[0.9, 0.5]"),
    ]:
        assert overrides({"key": value}) == [f"key={word}"]
    plans = [flatout.plan("tiny", backend="cpu", layers=layers, lr=lr) for layers, lr in [(1, 1e-3), (numpy.int64(1), numpy.float64(1e-3))]]
    assert plans[0]["arena_bytes"] == plans[1]["arena_bytes"]
    with pytest.raises(flatout.UserError, match="lr is a longdouble"):
        overrides({"lr": numpy.longdouble(1)})


def test_any_text_arrives_in_a_list(here):
    # A character outside the 16-bit range, and all characters that TOML requires to be escaped.
    text = 'once \U0001f600 \u00e9 "quoted" \\ \n\t\x00\x1f\x7f'
    groups = [{"paths": ["embed"], "lr": numpy.float64(1e-4), "name": text}]
    config = flatout.train("tiny", {**SMALL, "train.steps": 1, "train.groups": groups}, progress=False).config
    (group,) = config["train"]["groups"]
    assert (group["name"], group["lr"]) == (text, 1e-4)
    with pytest.raises(flatout.UserError, match='The word "\U0001f600" is not one of'):
        flatout.train("tiny", {**SMALL, "samples.prompts": ["\U0001f600"], "samples.max_tokens": 1}, progress=False)
    with pytest.raises(flatout.UserError, match="no = key"):
        flatout.plan("tiny", {"train.groups": [{"no = key": 1}]}, backend="cpu")


@pytest.mark.parametrize(
    "recipe, keys",
    [
        ("tiny", {"lrr": 1e-3}),
        ("tiny", {"lr": -1}),
        ("tiny", {"model.layers": "many"}),
        ("tinny", {}),
        ("tiny", {"data.path": "nowhere.txt"}),
        ("tiny", {"backend": "cuda"}),
    ],
)
def test_bad_input_is_the_command_lines_sentence(here, recipe, keys):
    sentence = program("train", recipe, *words(keys), cwd=here, code=2)
    with pytest.raises(flatout.UserError) as raised:
        flatout.train(recipe, progress=False, **keys)
    assert str(raised.value) == sentence
    assert isinstance(raised.value, ValueError) and not (here / "runs").exists()


def test_other_bad_input_is_a_sentence(here):
    for wrong, match in [
        ({"ranks": 2}, "flatout train --ranks"),
        ({"gpus": 8}, "flatout train --gpus"),
        ({"max_time": 0}, "max_time is 0"),
        ({"resume": "often"}, "resume="),
        ({"resume": "must", "run": "nothing"}, "nothing to resume"),
        ({"lr": object()}, "lr is a object"),
        ({"track": "notebook"}, "no tracker 'notebook'"),
    ]:
        with pytest.raises(flatout.UserError, match=match):
            flatout.train("tiny", progress=False, **wrong)
    with pytest.raises(flatout.UserError, match="no run in nowhere"):
        flatout.resume("nowhere", progress=False)
    assert list(here.iterdir()) == []


def test_folds_are_several_runs(here):
    shutil.copytree(ROOT / "examples/classes", here / "classes")
    os.chdir(here / "classes")
    with pytest.raises(flatout.UserError, match="one run at a time"):
        flatout.train("classes.toml", {"train.folds": 3}, backend="cpu", progress=False)
    assert not (here / "classes/runs").exists()


def test_an_exception_ends_the_run_cleanly_and_is_raised_unchanged(small, here):
    class Enough(Exception):
        pass

    mine = Enough("at five")

    def stop(event):
        if event["event"] == "step" and event["step"] == 5:
            raise mine

    with pytest.raises(Enough) as raised:
        flatout.train("tiny", run="broken", on_event=stop, progress=False, **SMALL)
    assert raised.value is mine
    run = flatout.Run("broken")
    assert run.status == "stopped" and 5 <= run.summary["step"] <= 7
    assert list(run.checkpoints) == [run.summary["step"]]
    assert flatout.resume(run, progress=False).status == "done"
    assert run.losses == small.losses, "it continued as if it had not been interrupted"


LONG = """
import json, os, sys, flatout
keys = {**json.loads(os.environ["SMALL"]), "train.steps": 1000000}
def said(event):
    if event["event"] == "step" and event["step"] == 3:
        print("three", flush=True)
try:
    flatout.train("tiny", run="run", progress=False, on_event=said, **keys)
except KeyboardInterrupt:
    run = flatout.Run("run")
    print(run.status, list(run.checkpoints)[-1] == run.summary["step"], flush=True)
    sys.exit(7)
"""


def test_ctrl_c_saves_and_raises(here):
    process = python(LONG, here)
    assert process.stdout.readline() == "three\n"
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (7, "stopped True\n"), err
    assert time.monotonic() - began < 10
    run = flatout.Run("run")
    step = run.summary["step"]
    assert flatout.resume(run, progress=False, **{"train.steps": step + 2}).summary["step"] == step + 2


def test_ctrl_c_in_a_callback_that_waits(here):
    process = python(LONG.replace('print("three", flush=True)', 'print("three", flush=True); import time; time.sleep(60)'), here)
    assert process.stdout.readline() == "three\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (7, "stopped True\n"), err


def test_a_second_ctrl_c_does_not_wait(here):
    script = """
import json, os, sys, flatout
keys = {**json.loads(os.environ["SMALL"]), "train.batch": 400000, "train.micro_batch": 50}
try:
    flatout.train("tiny", keys, run="run", progress=False, on_event=lambda event: print(event["event"], flush=True))
except KeyboardInterrupt:
    print("left", flush=True)
    os._exit(7)
"""
    process = python(script, here)
    assert process.stdout.readline() == "start\n"
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert process.poll() is None, "the first one waits for the end of a long update"
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (7, "left\n"), err
    assert time.monotonic() - began < 5


def test_a_time_limit_stops_the_run(here):
    began = time.monotonic()
    run = flatout.train("tiny", run="run", max_time=4, progress=False, **{**SMALL, "train.steps": 1000000})
    assert run.status == "stopped" and time.monotonic() - began < 10
    assert list(run.checkpoints)[-1] == run.summary["step"]


def test_other_threads_run_meanwhile(here):
    ticks = []
    done = threading.Event()

    def tick():
        while not done.wait(0.01):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    flatout.train("tiny", progress=False, **{**SMALL, "train.steps": 150})
    done.set()
    thread.join()
    gaps = [after - before for before, after in zip(ticks, ticks[1:])]
    assert len(gaps) > 10 and max(gaps) < 0.5


def test_runs_in_several_threads(here):
    runs = {}

    def one(seed):
        runs[seed] = flatout.train("tiny", run=f"run-{seed}", progress=False, **{**SMALL, "train.seed": seed})

    threads = [threading.Thread(target=one, args=(seed,)) for seed in (1, 2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert [runs[seed].status for seed in (1, 2)] == ["done", "done"] and runs[1].losses != runs[2].losses


@pytest.mark.parametrize(
    "environment",
    [
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
    ],
)
def test_a_launchers_process_is_refused(here, environment):
    process = python("import flatout; flatout.train('tiny', progress=False)", here, **environment)
    _, err = process.communicate(timeout=60)
    assert "one of 2 ranks" in err and "flatout.UserError" in err, err
    assert list(here.iterdir()) == []


def test_a_forked_process_is_refused(here):
    script = """
import os, flatout
flatout.plan("tiny", backend="cpu")
if os.fork() == 0:
    try:
        flatout.plan("tiny", backend="cpu")
    except flatout.UserError as error:
        print(error, flush=True)
    os._exit(0)
os.wait()
"""
    out, err = python(script, here).communicate(timeout=60)
    assert "forked" in out and "spawn" in out, err


def test_variables_that_change_numbers_are_refused_or_cleared(here):
    script = "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start(); import flatout; flatout.plan('tiny')"
    _, err = python(script, here, NVIDIA_TF32_OVERRIDE="1").communicate(timeout=60)
    assert "flatout.UserError: NVIDIA_TF32_OVERRIDE changes what" in err, err


def test_a_machine_that_cannot_continue_raises_an_error(here):
    process = python(
        "import resource, json, os, flatout\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "try:\n    flatout.train('tiny', json.loads(os.environ['SMALL']), progress=False)\n"
        "except flatout.Error as error:\n    print(isinstance(error, RuntimeError), error)",
        here,
    )
    out, err = process.communicate(timeout=60)
    assert out.startswith("True step 20 could not be saved") and "File too large" in out, err


def test_a_save_that_fails_after_a_stop_is_reported(here):
    script = """
import json, os, resource, signal, flatout
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

def bare():
    raise LookupError("mine")
def interrupted():
    signal.raise_signal(signal.SIGINT)
def explained():
    raise LookupError("mine") from KeyError("its cause")
def in_a_handler():
    try:
        raise KeyError("its context")
    except KeyError:
        raise LookupError("mine")
def alone():
    try:
        raise KeyError("hidden")
    except KeyError:
        raise LookupError("mine") from None
def in_a_circle():
    first, second = LookupError("mine"), KeyError("other")
    first.__cause__, second.__cause__ = second, first
    raise first

for stop in (bare, interrupted, explained, in_a_handler, alone, in_a_circle):
    def heard(event):
        if event["event"] == "step" and event["step"] == 3:
            stop()
    try:
        flatout.train("tiny", json.loads(os.environ["SMALL"]), progress=False, on_event=heard)
    except (LookupError, KeyboardInterrupt) as error:
        chain = [error]
        while chain[-1] is not None and len(chain) < 5:
            last = chain[-1]
            chain.append(last.__cause__ or (None if last.__suppress_context__ else last.__context__))
        print(stop.__name__, *(type(one).__name__ for one in chain if one is not None), "could not be saved" in str(chain[-2]))
"""
    out, err = python(script, here).communicate(timeout=120)
    *rows, circle = out.splitlines()
    assert rows == [
        "bare LookupError Error True",
        "interrupted KeyboardInterrupt Error True",
        "explained LookupError KeyError Error True",
        "in_a_handler LookupError KeyError Error True",
        "alone LookupError Error True",
    ], out + err
    assert circle.startswith("in_a_circle LookupError") and "Error" in circle.split(), out + err
