"""Types: the package by mypy, what a user writes with it, and the stub of the native half against the library."""

import subprocess
import sys

from conftest import ROOT

USE = """
import flatout
run = flatout.train("tiny", lr=1e-3, on_event=lambda event: print(event["event"]), **{"train.steps": 10})
text: str = flatout.Model(run).generate("once")
texts: list[str] = flatout.Model(run).generate(["once"])
losses: list[float] = run.losses
reveal_type(flatout.plan("tiny", gpu="h200"))
flatout.train(resume="often")
"""


def mypy(*arguments):
    return subprocess.run([sys.executable, "-m", "mypy", "--strict-optional", *arguments], cwd=ROOT, capture_output=True, text=True)


def test_the_package_is_typed():
    found = mypy("crates/python/flatout")
    assert found.returncode == 0, found.stdout


def test_what_users_write_is_checked(here):
    (here / "use.py").write_text(USE)
    said = mypy(str(here / "use.py")).stdout
    assert 'Revealed type is "' in said and "dict[" in said, said
    assert said.count("error:") == 1 and '"often"' in said, said


def test_the_stub_is_the_librarys():
    found = subprocess.run([sys.executable, "-m", "mypy.stubtest", "flatout._native", "--ignore-missing-stub"], cwd=ROOT / "crates/python", capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
