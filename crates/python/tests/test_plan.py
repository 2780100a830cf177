"""Tests that plans, recipes and keys equal the command line's JSON."""

import json

import pytest
from conftest import program

import flatout


@pytest.mark.parametrize(
    "keywords, arguments",
    [
        ({"backend": "cpu"}, ["backend=cpu"]),
        ({"gpu": "h200", "train.micro_batch": 4}, ["--gpu", "h200", "train.micro_batch=4"]),
        ({"gpu": "h100", "gpus": 2, "nodes": 2}, ["--gpu", "h100", "--gpus", "2", "--nodes", "2"]),
        ({"presets": ["rtx3090"]}, ["--with", "rtx3090"]),
        ({"ranks": 2, "backend": "cpu"}, ["--ranks", "2", "backend=cpu"]),
    ],
)
def test_plans_are_the_command_lines(keywords, arguments):
    made, printed = flatout.plan("tiny", **keywords), json.loads(program("plan", "tiny", *arguments, "--json"))
    if made["backend"] == "cpu":
        # This depends on the free memory of the machine at the moment.
        del made["largest_micro_batch"], printed["largest_micro_batch"]
    assert made == printed and made["arena_bytes"] > 0


def test_plans_read_data_where_they_are_asked_to(tmp_path):
    rows = [{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "lamp " * (1 + n % 7)}]} for n in range(60)]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {"data.task": "chat", "data.path": str(tmp_path / "chat.jsonl"), "backend": "cpu"}
    read, unread = (flatout.plan("tiny", keys, read_data=reads) for reads in (True, False))
    assert read["arena_bytes"] < unread["arena_bytes"] and read["layout"] is not None


def test_bad_plans_are_sentences():
    for wrong, match in [
        ({"gpu": "h2000"}, "h2000"),
        ({"nodes": 2}, "nodes is given without gpus"),
        ({"gpu": "h100", "gpus": 0}, "from 1 to 1024"),
        ({"gpu": "h100", "gpus": 2, "ranks": 2}, "one of them"),
        ({"layerz": 2}, "layerz"),
    ]:
        with pytest.raises(flatout.UserError, match=match):
            flatout.plan("tiny", **wrong)


def test_recipes_and_keys_are_listed():
    printed = json.loads(program("recipes", "--json"))["recipes"]
    assert flatout.recipes() == {row["name"]: row["description"] for row in printed}
    assert flatout.schema() == json.loads(program("schema", "--json"))
    assert flatout.schema("warmup") == json.loads(program("schema", "warmup", "--json"))
    assert flatout.schema("no such word") == []


def test_the_version_is_the_programs():
    assert program("--version") == f"flatout {flatout.__version__}\n"
