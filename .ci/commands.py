#!/usr/bin/env python3
"""Checks every `flatout` command in the pages with the program: commands, options, recipes, presets, GPUs, keys and values must exist.

    python3 .ci/commands.py target/debug/flatout
        python3 .ci/commands.py target/debug/flatout --list      prints every command and how it was checked

    A command is a line of a fenced block that begins with `flatout`, or such a code span. Nothing is trained, opened or downloaded:

- `flatout WORDS --help` parses options and their values, and fails at the first that does not exist;
- `flatout recipes show RECIPE KEY=VALUE ...` checks the recipe, the keys and the values of commands that take them;
- a line after which the page shows an error must fail with exactly that error.

Words in capitals (RUN, FILE, N) are placeholders: they are replaced where a number is expected, and of a key with such a value only the name is checked.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "bench/README.md", "docs/**/*.md", "examples/**/*.md"]

# Commands that take a recipe and overrides before the first option.
TAKE_A_RECIPE = {"train", "plan", "sweep", "ablate", "profile", "tune"}
# Commands that take a run or a model, followed by overrides.
TAKE_A_RUN = {"resume", "generate", "eval", "chat", "serve", "logits"}
# Resolving a recipe opens the values of these keys, and models and data are not available: only the names are checked.
OPENED = {"model.from", "model.vision.from", "adapter.from", "data.path", "data.held_out_path"}
# Replaces RECIPE, and recipe files that a page tells the reader to write.
ANY_RECIPE = "qwen3-0.6b-sft"
# A placeholder.
STANDS_FOR = re.compile(r"^[A-Z][A-Z_]*$|^N$|^HOST:PORT$")

# Commands that are not checked, each with the reason.
EXCEPTIONS = {
    "flatout COMMAND --help": "it stands for every command",
    "flatout train lora.toml --run runs/lora": "the recipe begins from the run that the page makes before; the test of examples/ runs it",
    "flatout train tiny backend=cuda": "whether it is refused depends on the machine",
    "flatout plan --gpu": "a page names the option alone",
    "flatout train qwen3-0.6b-sft model.from=Qwen/Qwen3-0.6B data.path=chats.jsonl data.new_tokens=\"['<tool>','</tool>']\" "
    "adapter.kind=lora adapter.also_train=embed": "tokens are added to the tokeniser of a model that is downloaded",
}


class Wrong(Exception):
    """The reason why a command is wrong."""


def found_in(page):
    """The commands of a page: line number, text, and the error that the page shows after it."""
    lines = (ROOT / page).read_text().splitlines()
    fence, number = None, 0
    while number < len(lines):
        line = lines[number]
        number += 1
        if line.startswith("```"):
            fence = None if fence is not None else line[3:]
            continue
        if fence is None:
            for span in re.finditer(r"`(?:\$ )?(flatout(?: [^`]*)?)`", line):
                yield number, span[1], None
            continue
        begins = re.match(r"\s*(?:\$ |srun |docker run .* )?(flatout .*)", line)
        if fence not in ("", "sh", "bash", "text") or not begins or re.match(r"\s+flatout ", line) and fence == "text":
            continue
        text, at = begins[1], number
        while text.endswith("\\"):
            text = text[:-1] + lines[number].strip()
            number += 1
        following = lines[number] if number < len(lines) else ""
        refused = following if line.startswith("$ ") and following.startswith("flatout: ") else None
        yield at, text, refused


def words_of(text):
    """The arguments as a shell would pass them, without annotations of the page after and between them."""
    text = re.sub(r" \\\| [A-Z]+", "", text).replace("\\|", "|")
    text = re.sub(r"\[@STEP\]|(?<= )\[[^\]]*\]", "", text)
    text = re.split(r"\s{2,}[^\s-]|\s+#\s|\s[|>;&]+\s|\s>\S", text)[0]
    words = shlex.split(text)[1:]
    words = [re.sub(r"^([a-z]+)(\|[a-z]+)+$", r"\1", word) for word in words]
    return [word for word in words if word not in ("...", "KEY=VALUE", "key=value", "key=value,value")]


def first_value(word):
    """The first value of a swept key: `lr=1e-3,3e-3` gives `lr=1e-3`, and `train.seed=1..3` gives `train.seed=1`."""
    key, value = word.split("=", 1)
    if "|" in value:
        return f"{key}={value.split('|')[0]}"
    return f"{key}={re.split(r',|[.][.]', value)[0]}"


class Program:
    def __init__(self, path):
        self.path = str(Path(path).resolve())
        embedded = json.loads(self.run("recipes", "--json")[1])
        self.recipes = {row["name"] for row in embedded["recipes"]}
        self.presets = {row["name"] for row in embedded["presets"]}

    def run(self, *words, folder=ROOT):
        ran = subprocess.run([self.path, *words], cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        return ran.returncode, ran.stdout, ran.stderr.strip()

    def parse_options(self, words):
        code, _, why = self.run(*words, "--help")
        if code != 0:
            raise Wrong(why.splitlines()[0])

    def has_key(self, key):
        """Whether the key exists, by its full path or its last part: an invalid value of a key that exists gives another error."""
        return "there is no key" not in self.run("recipes", "show", "tiny", f"{key}=?")[2]

    def resolve(self, recipe, overrides, folder):
        """Checks a recipe with its overrides, and only the names of those whose values are placeholders or would be opened."""
        checked = []
        for word in overrides:
            key, value = word.split("=", 1)
            if STANDS_FOR.match(value) or value == "..." or key in OPENED:
                if not self.has_key(key):
                    raise Wrong(f"there is no key `{key}`")
            else:
                checked.append(word)
        code, _, why = self.run("recipes", "show", recipe, *checked, folder=folder)
        if code != 0:
            raise Wrong(why)


def split(words):
    """Positional arguments, and options with their values; None for an option without a value."""
    alone, options = [], []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word.startswith("--") and "=" in word:
            options.append(tuple(word.split("=", 1)))
        elif word.startswith("-") and word != "-":
            takes = rest and not rest[0].startswith("-") and word not in FLAGS
            options.append((word, rest.pop(0) if takes else None))
        else:
            alone.append(word)
    return alone, options


# Options without a value, so that the word after them is a positional argument.
FLAGS = {
    "--watch", "--share-gpu", "--dry-run", "--launches", "--model", "--control", "--fresh", "--all", "--chat", "--json", "--quiet", "--verbose",
    "-q", "-v", "--open", "--force", "--adapter", "--verify", "--calibrate", "--restart", "--log", "--help",
}  # fmt: skip


def check(program, page, text, refused):
    """Checks a command and says how it was checked; raises Wrong with the reason."""
    if text in EXCEPTIONS:
        return f"not parsed: {EXCEPTIONS[text]}"
    words = words_of(text)
    if not words:
        return "the program's name"
    folder = (ROOT / page).parent
    if refused:
        code, _, why = program.run("plan", *words[1:]) if words[0] == "train" else program.run(*words)
        if code == 0 or why.splitlines()[0] != refused:
            raise Wrong(f"the page shows `{refused}`, and it says `{why}`")
        return "refused as the page shows"
    if "ends with code 2" in text:
        return "refused, in the test of the page"

    # Any number will do where an option expects one.
    typed = [re.sub(r"^(N|M|I)$", "1", word) for word in words]
    # Overrides are checked below; one that is the value of an option stays with it.
    is_option = [i > 0 and typed[i - 1] == "--try" for i in range(len(typed))]
    program.parse_options([word for word, its in zip(typed, is_option) if "=" not in word or word.startswith("-") or its])
    alone, options = split(words)
    for option, value in options:
        if option == "--with" and value and not value.endswith(".toml") and value not in program.presets | {"PRESET", "NAME", "FILE"}:
            raise Wrong(f"there is no preset `{value}`")
        if option == "--gpu" and value and value not in program.presets and not STANDS_FOR.match(value) and value != "x":
            raise Wrong(f"there is no GPU `{value}`")

    if not alone:
        return "options alone"
    command, rest = alone[0], alone[1:]
    if command in ("data", "recipes", "runs"):
        command, rest = " ".join([command, *rest[:1]]), rest[1:]
    given = [word for word in rest if re.match(r"^[a-z][\w.]*=", word)]
    named = [word for word in rest if word not in given]
    if command == "sweep":
        given = [first_value(word) for word in given]
    if command in TAKE_A_RECIPE or command == "recipes show" or command == "data inspect" and (given or named[:1] and named[0] in program.recipes):
        if len(named) > 1:
            raise Wrong(f"`{named[1]}` is neither a recipe nor key=value")
        recipe = named[0] if named else "tiny"
        if STANDS_FOR.match(recipe) or recipe.endswith(".toml") and not (folder / recipe).exists():
            recipe = ANY_RECIPE
        program.resolve(recipe, given, folder)
        return "recipe, keys and options"
    if command in TAKE_A_RUN or command == "runs track":
        for word in given:
            if not program.has_key(word.split("=", 1)[0]):
                raise Wrong(f"there is no key `{word.split('=', 1)[0]}`")
        return "keys and options"
    if given:
        raise Wrong(f"`{command}` takes no keys, and `{given[0]}` is one")
    return "options"


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("program")
    arguments.add_argument("--list", action="store_true")
    args = arguments.parse_args()
    program = Program(args.program)
    pages = sorted({path.relative_to(ROOT).as_posix() for pattern in PAGES for path in ROOT.glob(pattern)})
    commands = [(page, *command) for page in pages for command in found_in(page)]

    def judge(command):
        page, number, text, refused = command
        try:
            return f"{page}:{number}: {text}", check(program, page, text, refused), None
        except Wrong as why:
            return f"{page}:{number}: {text}", None, str(why)

    with ThreadPoolExecutor() as pool:
        judged = list(pool.map(judge, commands))
    for where, how, why in judged:
        if args.list and how:
            print(f"{where}\n    {how}")
        if why:
            print(f"{where}\n    {why}")
    wrong = sum(why is not None for _, _, why in judged)
    unused = set(EXCEPTIONS) - {text for _, _, text, _ in commands}
    for text in sorted(unused):
        print(f".ci/commands.py: no page has the exception `{text}`")
    print(f"{len(judged)} commands in {len(pages)} pages, {wrong} of them wrong")
    sys.exit(1 if wrong or unused else 0)


if __name__ == "__main__":
    main()
