"""Tests inference: the same numbers as the command line, arrays without copies, exceptions and Ctrl-C."""

import gc
import json
import os
import shutil
import signal
import struct
import threading

import numpy as np
import pytest
from conftest import ROOT, program, python

import flatout


@pytest.fixture(scope="module")
def model(small):
    return flatout.Model(small, device="cpu")


def tensors(path):
    """The tensors of a safetensors file."""
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    head, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    return {
        name: np.frombuffer(body[slice(*entry["data_offsets"])], np.float32).reshape(entry["shape"])
        for name, entry in head.items()
        if name != "__metadata__"
    }


def test_logits_are_the_command_lines(model, small, here):
    rows = [[0, 1, 2, 3], [4, 5, 6, 7], [3, 2, 1, 0]]
    (here / "ids.json").write_text(json.dumps(rows))
    program("logits", small.path, "backend=cpu", "--ids", here / "ids.json", "--out", here / "out")
    logits = model.logits(rows)
    assert logits.dtype == np.float32 and logits.shape == (3, 4, model.vocab_size)
    assert np.array_equal(logits, tensors(here / "out")["logits"])
    assert np.array_equal(model.logits(np.array(rows)), logits)
    assert np.array_equal(model.logits(np.array(rows, np.uint16)), logits)
    assert np.allclose(model.logits(rows[1]), logits[1], atol=1e-5) and model.logits(rows[1]).shape == logits[1].shape
    ragged = model.logits([[0, 1], rows[1], [4, 5]])
    assert [found.shape for found in ragged] == [(n, model.vocab_size) for n in (2, 4, 2)]
    assert np.allclose(ragged[1], logits[1], atol=1e-5) and np.allclose(ragged[2], logits[1][:2], atol=1e-5)


def test_logits_are_not_copied(model):
    logits = model.logits([[1, 2, 3]])
    # The array is a view of memory that Rust allocated.
    assert not logits.flags.owndata and logits.flags.c_contiguous and logits.flags.writeable
    again = model.logits([[1, 2, 3]])
    logits -= logits.max(axis=-1, keepdims=True)
    gc.collect()
    assert np.allclose(logits, again - again.max(axis=-1, keepdims=True)), "the view keeps its memory"
    assert model.generate([[1, 2]], max_tokens=0)[0].shape == (0,)


def test_many_rows_are_computed_in_batches(model):
    rows = np.arange(300 * 32).reshape(300, 32) % model.vocab_size
    logits = model.logits(rows)
    assert logits.shape == (300, 32, model.vocab_size)
    assert np.allclose(logits[299], model.logits(rows[299]), atol=1e-5)


@pytest.mark.parametrize("how", [{"temperature": 0}, {"temperature": 1.0, "seed": 3, "top_k": 20, "top_p": 0.9}])
def test_texts_are_the_command_lines(model, small, how):
    prompts = ["once", "the actor", ""]
    flags = [word for name, value in how.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    asked = [word for prompt in prompts for word in ("--prompt", prompt)]
    printed = program("generate", small.path, "backend=cpu", *asked, "--max-tokens", "12", *flags, "--json")
    assert model.generate(prompts, max_tokens=12, **how) == json.loads(printed)["texts"]
    assert model.generate(prompts[1], max_tokens=12, **how) == json.loads(printed)["texts"][1]


def test_questions_are_answered_as_the_command_line_answers(here):
    shutil.copytree(ROOT / "examples/chat-lora", here / "shop")
    os.chdir(here / "shop")
    small = {"train.steps": 12, "model.layers": 1, "model.width": 32, "model.heads": 2, "eval.every": 6}
    run = flatout.train("base.toml", small, run="base", backend="cpu", progress=False)
    questions = ["How much is the red bell?", "Where are the bells?"]
    asked = [word for question in questions for word in ("--prompt", question)]
    printed = program("generate", run.path, "backend=cpu", "--chat", *asked, "--temperature", "0", "--max-tokens", "9", "--json")
    model = flatout.Model(run, device="cpu")
    assert model.generate(questions, chat=True, temperature=0, max_tokens=9) == json.loads(printed)["texts"]


def test_tokens_are_continued_as_texts_are(model):
    tokenizer = model.tokenizer
    rows = [[tokenizer.bos, *tokenizer.encode(prompt)] for prompt in ("once", "the actor")]
    made = model.generate(rows, max_tokens=8, temperature=0)
    texts = model.generate(["once", "the actor"], max_tokens=8, temperature=0)
    assert [tokenizer.decode([*row, *more.tolist()]) for row, more in zip(rows, made)] == texts
    assert made[0].dtype == np.uint32 and np.array_equal(model.generate(rows[0], max_tokens=8, temperature=0), made[0])
    greedy = model.logits(rows[0])[-1][: tokenizer.size].argmax()
    assert made[0][0] == greedy or greedy == tokenizer.eos


def test_pieces_arrive_as_they_are_generated(model):
    prompts, pieces = ["once", "the actor"], {0: "", 1: ""}

    def heard(prompt, piece):
        pieces[prompt] += piece

    texts = model.generate(prompts, max_tokens=10, temperature=0, on_text=heard)
    assert all(text == prompts[number] + pieces[number] and pieces[number] for number, text in enumerate(texts))


def test_an_exception_in_a_callback_is_raised(model):
    mine = KeyError("enough")

    def stop(prompt, piece):
        raise mine

    with pytest.raises(KeyError) as raised:
        model.generate(["once"] * 4, max_tokens=20, on_text=stop)
    assert raised.value is mine
    assert model.generate("once", max_tokens=3, temperature=0).startswith("once"), "the model still works"


def test_a_model_is_not_called_from_its_own_callback(model):
    with pytest.raises(flatout.UserError, match="from inside its own on_text"):
        model.generate("once", max_tokens=5, on_text=lambda *_: model.generate("the"))
    assert model.generate("once", max_tokens=3, temperature=0).startswith("once")


def test_several_threads_use_one_model(model):
    alone = {prompt: model.generate(prompt, max_tokens=8, temperature=0) for prompt in ("once", "the actor", "")}
    found = {}

    def ask(prompt):
        found[prompt] = model.generate(prompt, max_tokens=8, temperature=0)

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in alone]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert found == alone


def test_ctrl_c_ends_a_generation(small, here):
    script = f"""
import sys, flatout
model = flatout.Model({str(small.path)!r}, device="cpu")
def heard(prompt, piece):
    global heard
    print("writes", flush=True)
    heard = lambda *_: None
try:
    while True:
        model.generate(["once"] * 64, max_tokens=1000000, on_text=lambda *said: heard(*said))
except KeyboardInterrupt:
    print(model.generate("once", max_tokens=2, temperature=0).startswith("once"), flush=True)
    sys.exit(7)
"""
    process = python(script, here)
    assert process.stdout.readline() == "writes\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (7, "True\n"), err


def test_a_model_has_its_properties(model, small):
    assert (model.step, model.context, model.device) == (20, 32, "cpu")
    assert model.checkpoint == str(small.checkpoints[20])
    tokenizer = model.tokenizer
    assert tokenizer.decode(tokenizer.encode("the actor")) == "the actor" and tokenizer.size <= model.vocab_size


def test_a_checkpoint_is_named_by_its_step(small):
    first, last = list(small.checkpoints)[0], list(small.checkpoints)[-1]
    assert flatout.Model(f"{small.path}@{first}", device="cpu").step == first
    assert flatout.Model(small, device="cpu").step == last


def test_bad_input_is_an_error_sentence(model, small, here):
    for call, match in [
        (lambda: flatout.Model("nowhere"), "nowhere"),
        (lambda: flatout.Model(small, device="tpu"), "tpu"),
        (lambda: flatout.Model(small, lr=1), "cannot change when a model is used"),
        (lambda: model.logits([[100000]]), "row 0 has token 100000"),
        (lambda: model.logits([[1] * 33]), "made for 32"),
        (lambda: model.logits([[-1]]), "row 0 has -1"),
        (lambda: model.logits([[0.5]]), "row 0 has 0.5"),
        (lambda: model.logits([]), "no rows"),
        (lambda: model.logits([[1], []]), "row 1 has no tokens"),
        (lambda: model.generate("unheard-of"), "unheard-of"),
        (lambda: model.generate([[1]], chat=True), "give texts"),
        (lambda: model.generate("once", temperature=-1), "temperature is -1"),
        (lambda: model.generate("once", top_p=0), "top_p is 0"),
        (lambda: model.generate("once", at_once=0), "at_once is 0"),
        (lambda: model.generate([[1] * 33]), "made for 32"),
    ]:
        with pytest.raises(flatout.UserError, match=match):
            call()
