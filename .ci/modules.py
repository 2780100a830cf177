#!/usr/bin/env python3
"""Checks that dependencies between crates and between modules of the training crate point down, and that folders stay small.

1. A crate depends only on crates below it: cli and python, measure, report, watch and serve, train, then models, runtime and data, then
   ir, settings, world, http and waits. Dev-dependencies are ignored.
2. The first-level modules of crates/train/src form no cycle. Every path `crate::...` in a module's files counts, also inside
   functions; test modules do not. A cycle is printed with the lines that cause it.
3. No folder at or below those of FOLDERS holds more than MOST files.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TRAIN = ROOT / "crates/train/src"
FOLDERS = ("crates/train/src", "crates/runtime/src/cuda", "crates/ir/src/passes")
MOST = 20
# Crates from the top down; those of one row do not depend on one another.
ROWS = (
    ("flatout", "flatout-python"),
    ("flatout-measure",),
    ("flatout-report", "flatout-watch", "flatout-serve"),
    ("flatout-train",),
    ("flatout-models", "flatout-runtime", "flatout-data"),
    ("flatout-ir", "flatout-settings", "flatout-world", "flatout-http", "flatout-waits"),
)


def crates():
    """Dependencies between crates that do not point down."""
    command = ["cargo", "metadata", "--no-deps", "--format-version", "1", "--offline"]
    metadata = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    row = {name: number for number, names in enumerate(ROWS) for name in names}
    wrong = []
    for package in json.loads(metadata)["packages"]:
        name = package["name"]
        for dependency in package["dependencies"]:
            other = dependency["name"]
            if dependency["kind"] == "dev" or not other.startswith("flatout"):
                continue
            manifest = Path(package["manifest_path"]).relative_to(ROOT)
            if other not in row:
                wrong.append(f"{manifest}: {name} depends on {other}, which has no place in the order of crates")
            elif name in row and row[name] >= row[other]:
                wrong.append(f"{manifest}: {name} depends on {other}, which is not below it")
            elif name not in row:
                wrong.append(f"{manifest}: {name} depends on {other}, and has no place in the order of crates")
    return wrong


def blank(text):
    """The text with comments, strings and characters blanked, so that braces and paths are those of the code."""
    pattern = re.compile(
        r"//[^\n]*|/\*.*?\*/|r(#*)\".*?\"\1|\"(?:\\.|[^\"\\])*\"|'(?:\\.[^']*|[^'\\])'",
        re.DOTALL,
    )
    return pattern.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), text)


def end_of_block(code, at):
    """The offset after the block whose brace opens at or after `at`, or after a semicolon that comes before it."""
    depth = 0
    for place in range(at, len(code)):
        if code[place] == "{":
            depth += 1
        elif code[place] == "}":
            depth -= 1
            if depth == 0:
                return place + 1
        elif code[place] == ";" and depth == 0:
            return place + 1
    return len(code)


def without_tests(code):
    """The code with every `#[cfg(test)]` item blanked, and the names of test modules that are files."""
    named = []
    while match := re.search(r"#\[cfg\(test\)\]", code):
        end = end_of_block(code, match.end())
        item = code[match.start() : end]
        if module := re.search(r"\bmod (\w+);", item):
            named.append(module.group(1))
        code = code[: match.start()] + re.sub(r"[^\n]", " ", item) + code[end:]
    return code, named


def group(code, at):
    """The top-level names inside the braces that open at `at`."""
    names, depth, expect = [], 0, False
    for match in re.compile(r"[{},]|\w+").finditer(code, at):
        word = match.group()
        if word == "{":
            depth += 1
            expect = depth == 1
        elif word == "}":
            depth -= 1
            if depth == 0:
                break
        elif word == ",":
            expect = depth == 1
        elif expect:
            names.append((word, match.start()))
            expect = False
    return names


def paths(code, level):
    """(first name after the crate's root, offset) of every path. `level` is the depth of the file's module."""
    root = r"(?<![\w:])(?:crate|" + "::".join(["super"] * level) + r")::"
    for match in re.finditer(root + r"(\w+|\{)", code):
        if match.group(1) == "{":
            yield from group(code, match.end() - 1)
        elif match.group(1) != "super":
            yield match.group(1), match.start()


def exported():
    """Names at the crate's root with the modules they come from: the exports of lib.rs, and macros."""
    code = blank((TRAIN / "lib.rs").read_text())
    found = {}
    for match in re.finditer(r"pub use (?:crate::)?(\w+)::([^;]+);", code):
        for name in re.findall(r"\w+", match.group(2)):
            found[name] = match.group(1)
    for file in TRAIN.rglob("*.rs"):
        for name in re.findall(r"#\[macro_export\]\s*macro_rules! (\w+)", file.read_text()):
            found[name] = file.relative_to(TRAIN).with_suffix("").parts[0]
    return found


def files_of(module):
    """(file, path of its module, code) of a first-level module, without files of tests."""
    tests = set()
    found = []
    own = [TRAIN / f"{module}.rs"] + sorted((TRAIN / module).rglob("*.rs"))
    for file in own:
        if not file.exists():
            continue
        relative = file.relative_to(TRAIN).with_suffix("").parts
        parts = relative[:-1] if relative[-1] == "mod" else relative
        code, named = without_tests(blank(file.read_text()))
        tests.update(parts + (name,) for name in named)
        found.append((file, parts, code))
    is_test = lambda parts: parts[-1] == "tests" or any(parts[: len(test)] == test for test in tests)
    return [(file, parts, code) for file, parts, code in found if not is_test(parts)]


def imports():
    """The lines that import from one module into another, and paths that lead nowhere."""
    modules = {path.stem for path in TRAIN.iterdir() if path.is_dir() or path.suffix == ".rs"} - {"lib"}
    exports = exported()
    arrows, lost = {}, []
    for module in sorted(modules):
        for file, parts, code in files_of(module):
            for name, place in paths(code, len(parts)):
                line = f"{file.relative_to(ROOT)}:{code.count(chr(10), 0, place) + 1}"
                other = name if name in modules else exports.get(name)
                if other is None:
                    lost.append(f"{line}: `{name}` is neither a module nor exported by lib.rs")
                elif other != module:
                    shown = file.read_text().splitlines()[int(line.rsplit(":", 1)[1]) - 1].strip()
                    arrows.setdefault(module, {}).setdefault(other, []).append(f"{line}: {shown}")
    return arrows, lost


def back(arrows, start, goal):
    """The shortest path of imports from one module to another."""
    queue = [[start]]
    seen = {start}
    while queue:
        path = queue.pop(0)
        if path[-1] == goal:
            return path
        for other in sorted(arrows.get(path[-1], {})):
            if other not in seen:
                seen.add(other)
                queue.append(path + [other])
    return None


def cycles(arrows):
    """The shortest cycle through every import that is part of one, each once."""
    found = {}
    for module in sorted(arrows):
        for other in sorted(arrows[module]):
            if path := back(arrows, other, module):
                first = path.index(min(path))
                cycle = tuple(path[first:] + path[:first])
                found[cycle] = None
    return sorted(found, key=lambda cycle: (len(cycle), cycle))


def large_folders():
    wrong = []
    for top in FOLDERS:
        for folder in [ROOT / top, *sorted(path for path in (ROOT / top).rglob("*") if path.is_dir())]:
            count = sum(path.is_file() for path in folder.iterdir())
            if count > MOST:
                wrong.append(f"{folder.relative_to(ROOT)} holds {count} files at one level, more than {MOST}")
    return wrong


def main():
    wrong = crates()
    arrows, lost = imports()
    wrong += lost
    printed = set()
    for cycle in cycles(arrows):
        wrong.append("cycle in crates/train/src: " + " -> ".join([*cycle, cycle[0]]))
        for arrow in zip(cycle, [*cycle[1:], cycle[0]]):
            wrong.append("  " + " -> ".join(arrow) + (", as above" if arrow in printed else ""))
            if arrow not in printed:
                wrong += [f"    {line}" for line in arrows[arrow[0]][arrow[1]]]
            printed.add(arrow)
    wrong += large_folders()
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
