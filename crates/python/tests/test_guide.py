"""Runs every snippet of the guide, in order and in one folder."""

import re

from conftest import ROOT

GUIDE = (ROOT / "docs/guides/python.md").read_text()
SNIPPETS = re.findall(r"^```python\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)


def test_every_snippet_runs(here, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    assert len(SNIPPETS) >= 6
    names = {}
    for number, snippet in enumerate(SNIPPETS, 1):
        exec(compile(snippet, f"python.md, snippet {number}", "exec"), names)
