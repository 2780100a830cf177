"""Tests types: the package and code that uses it with mypy, and the stub of the native module against the library."""

import ast
import inspect
import re
import subprocess
import sys

from conftest import ROOT

from flatout import _native

USE = """
import flatout
run = flatout.train("tiny", lr=1e-3, on_event=lambda event: print(event["event"]), settings={"train.steps": 10})
text: str = flatout.Model(run).generate("once")
texts: list[str] = flatout.Model(run).generate(["once"])
losses: list[float] = run.losses
flatout.Model(run).generate("once", warmth=0)
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
    output = mypy(str(here / "use.py")).stdout
    assert 'Revealed type is "' in output and "dict[" in output, output
    assert set(re.findall(r"use.py:(\d+): error", output)) == {"7", "9"} and "'often'" in output and "warmth" in output, output


def test_the_stub_is_the_librarys():
    stub = ast.parse((ROOT / "crates/python/flatout/_native.pyi").read_text())
    nodes = {node.name: node for node in stub.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    assert {name for name in dir(_native) if not name.startswith("__")} == set(nodes)
    functions = [(_native, node) for node in nodes.values() if isinstance(node, ast.FunctionDef)]
    for owner in (_native.Model, _native.Tokenizer):
        methods = [node for node in nodes[owner.__name__].body if isinstance(node, ast.FunctionDef) and node.name != "__new__"]
        assert {name for name in vars(owner) if not name.startswith("__")} == {node.name for node in methods}
        functions += [(owner, node) for node in methods if not node.decorator_list]
    for owner, node in functions:
        names = list(inspect.signature(getattr(owner, node.name)).parameters)
        assert names == [argument.arg for argument in node.args.args], node.name
