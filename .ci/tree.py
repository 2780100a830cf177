#!/usr/bin/env python3
"""Writes docs/tree.md: every source file of the project with the first sentence of its documentation.

    .ci/tree.py             writes the page
    .ci/tree.py --check     fails if the page is not up to date, or if a page names a file that does not exist

A Rust file is described by its `//!`, a CUDA or JavaScript file by its first comment, a Python file by its docstring, a script by
the comment after `#!`. Files that differ only in their extension share a line, and a folder has the line of its `mod.rs`,
`lib.rs` or `main.rs`, or of its `mod` block in the parent's. A folder without source files has one line. Not listed are data
next to source files, folders of data next to the script that made them, unit tests in separate files (`tests.rs` under
`src`), and docs/, which has its own index.
"""

import re
import subprocess
import sys
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/tree.md"
COMMENT = {".rs": "//!", ".cu": "//", ".cuh": "//", ".js": "//", "": "#"}
SOURCES = {".rs", ".cu", ".cuh", ".js", ".py"}
SPEAKS_FOR_ITS_FOLDER = ("mod.rs", "lib.rs", "main.rs")
TOP = ("crates", "bench", "recipes", "examples", ".ci")
# The description of a file begins in this column, or after a longer name.
COLUMN = 38

HEAD = """\
# The tree

Each file with the first sentence of its own documentation. `.ci/tree.py` writes this page and CI compares the two.
[ARCHITECTURE.md](../ARCHITECTURE.md) says how the parts work together.

```
"""


def files():
    """Paths of files that are tracked or not ignored."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    return sorted({PurePosixPath(name) for name in names if (ROOT / name).is_file()})


def is_listed(path):
    return path.parts[0] in TOP and not (path.name == "tests.rs" and "src" in path.parts)


def is_source(path):
    return path.suffix in SOURCES or path.parts[0] == ".ci"


def documentation(path):
    """The lines of the comment or docstring at the beginning of a file."""
    lines = (ROOT / path).read_text().splitlines()
    if lines and lines[0].startswith("#!") and not lines[0].startswith("#!["):
        lines = lines[1:]
    if path.suffix == ".py":
        if not lines or not lines[0].startswith('"""'):
            return []
        text = "\n".join(lines)[3:]
        return text.split('"""')[0].split("\n")
    mark = COMMENT[path.suffix]
    found = []
    for line in lines:
        if not line.startswith(mark):
            break
        found.append(line[len(mark) :].strip())
    return found


def description(path):
    """The first sentence; if it continues in the next line, only its part up to a colon, semicolon or comma."""
    found = documentation(path)
    if not found or not found[0].strip():
        return None
    first = found[0].strip()
    if end := re.search(r"[.?](?=\s|$)", first):
        return first[: end.end()].rstrip(".")
    rest = found[1].strip() if len(found) > 1 else ""
    if not rest:
        return first.rstrip(":")
    for marks in (":;", ","):
        cuts = [at for at in (first.find(f"{mark} ") for mark in marks) if at > 0]
        if cuts:
            return first[: min(cuts)] if marks == ":;" else first[: first.rfind(", ")]
    sentence = " ".join(line.strip() for line in found)
    return re.split(r"[.:;](?=\s|$)", sentence)[0]


def block(folder):
    """The first line of a folder's `mod` block in the parent's `mod.rs`, where the modules of the folder are declared there."""
    parent = ROOT / folder.parent / "mod.rs"
    text = parent.read_text() if parent.exists() else ""
    found = re.search(rf"^pub mod {folder.name} {{\n    //! (.*)\.$", text, re.MULTILINE)
    return found[1] if found else ""


def tree():
    """The lines of the tree, and the files without documentation."""
    paths = [path for path in files() if is_listed(path)]
    sources = {path for path in paths if is_source(path)}
    silent = []
    lines = []

    def say(depth, name, text):
        begin = "  " * depth + name
        lines.append(f"{begin:<{COLUMN - 2}}  {text}".rstrip())

    def described(path):
        text = description(path)
        if text is None:
            silent.append(path)
        return text or ""

    def walk(folder, depth):
        inside = [path for path in paths if folder in path.parents]
        here = [path for path in inside if path.parent == folder]
        own = [path for path in inside if path in sources]
        if not own:
            if any(path.parent == folder.parent and path.suffix == ".py" for path in sources):
                return
            endings = sorted({path.suffix[1:] for path in inside if path.suffix})
            kind = "fixtures" if "tests" in folder.parts else "files"
            say(depth, f"{folder.name}/", f"{kind}: {', '.join(endings)}")
            return
        # A crate is described by its library or its program, any other folder by its `mod.rs`.
        candidates = [folder / name for name in SPEAKS_FOR_ITS_FOLDER]
        candidates += [folder / "src" / name for name in SPEAKS_FOR_ITS_FOLDER if (folder / "Cargo.toml") in here]
        speakers = [path for path in candidates if path in sources]
        is_crates_src = folder.name == "src" and depth == 1
        text = described(speakers[0]) if speakers and not is_crates_src else block(folder)
        say(depth, f"{folder if depth == 0 else folder.name}/", text)
        rows = {}
        for path in here:
            if path in sources and path not in speakers:
                rows.setdefault(path.stem, []).append(path)
        folders = sorted({path.relative_to(folder).parts[0] for path in inside if path.parent != folder})
        for name in sorted(set(rows) | set(folders)):
            if name in rows:
                group = sorted(rows[name], key=lambda path: (".rs", ".cu", ".cuh", ".js", ".py", "").index(path.suffix))
                others = [path.suffix for path in group[1:]]
                others += sorted(path.suffix for path in here if path.stem == name and path not in sources and path.suffix)
                say(depth + 1, ", ".join([group[0].name, *others]), described(group[0]))
            if name in folders:
                walk(folder / name, depth + 1)

    for top in TOP:
        if top == "crates":
            for crate in sorted({path.parts[1] for path in paths if path.parts[0] == "crates"}):
                walk(PurePosixPath("crates", crate), 0)
                lines.append("")
        else:
            walk(PurePosixPath(top), 0)
            lines.append("")
    return lines[:-1], silent


def missing():
    """References in pages to files that do not exist: links, and words in backticks that are paths of sources.

    A path may begin at the root, at crates/, or anywhere below, as the name of a neighbouring file does. `x.rs` stands for any file.
    """
    known = files()
    folders = {folder for path in known for folder in path.parents}
    ends = {"/".join(path.parts[at:]) for path in [*known, *folders] for at in range(len(path.parts))}
    ours = {path.parts[1] for path in known if path.parts[0] == "crates"} | {*TOP, "docs"}
    wrong = []
    for page in (path for path in known if path.suffix == ".md"):
        text = (ROOT / page).read_text()
        # Code blocks show commands and their output.
        text = re.sub(r"^```.*?^```", lambda block: re.sub(r"[^\n]", "", block.group()), text, flags=re.DOTALL | re.MULTILINE)
        for number, line in enumerate(text.splitlines(), 1):
            for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", line):
                if not link.startswith("http") and not (ROOT / page.parent / link).exists():
                    wrong.append(f"{page}:{number}: there is no {link}")
            for word in re.findall(r"`([\w./-]+)`", line):
                is_file = re.search(r"[^/.]{2,}\.(rs|cu|cuh|py)$", word)
                is_folder = re.fullmatch(r"(\w+)(/[\w.-]+)*/?", word) and "/" in word and word.split("/")[0] in ours
                if (is_file or is_folder) and word.rstrip("/") not in ends:
                    wrong.append(f"{page}:{number}: there is no {word}")
    return wrong


def main():
    lines, silent = tree()
    for path in silent:
        print(f"{path} does not begin with a line that says what is in it", file=sys.stderr)
    if silent:
        return 1
    page = HEAD + "\n".join(lines) + "\n```\n"
    if sys.argv[1:] != ["--check"]:
        PAGE.write_text(page)
        return 0
    if not PAGE.exists() or PAGE.read_text() != page:
        print("docs/tree.md is not the tree: run .ci/tree.py", file=sys.stderr)
        return 1
    wrong = missing()
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
