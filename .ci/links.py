#!/usr/bin/env python3
"""Checks links between pages: targets and headings exist, every page is linked to, and titles are unique.

    python3 .ci/links.py

Also checks that docs/ has the folders guides, reference, explanations and results, that its index lists every page in them, and that the README has at most 250 lines.
"""

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GROUPS = {"guides", "reference", "explanations", "results"}
# Entry points, which other pages need not link to.
ENTRANCES = {"README.md", ".github/PULL_REQUEST_TEMPLATE.md"}
README_LINES = 250


def without_code(text):
    """The lines of a page, with those of fenced blocks blanked."""
    lines, fenced = [], False
    for line in text.splitlines():
        if line.startswith("```"):
            fenced = not fenced
            lines.append("")
        else:
            lines.append("" if fenced else line)
    return lines


def anchor(heading):
    """The anchor that forges generate for a heading."""
    heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[^\w\- ]", "", heading).replace(" ", "-")


def main():
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    pages = {name: without_code((ROOT / name).read_text()) for name in names if (ROOT / name).is_file()}
    headings = {
        name: [anchor(line.lstrip("#").strip()) for line in lines if re.match(r"#{1,6} ", line)] for name, lines in pages.items()
    }
    wrong, linked, titles = [], defaultdict(set), defaultdict(list)

    for name, lines in pages.items():
        for number, line in enumerate(lines, 1):
            # The text of a link may be code, but a link inside code is not one.
            prose = re.sub(r"`[^`]*`", "code", line)
            for target in re.findall(r"\]\(([^)\s]+)\)", prose):
                if re.match(r"[a-z]+:", target):
                    continue
                path, _, part = target.partition("#")
                there = (ROOT / name).parent / path if path else ROOT / name
                if not there.exists():
                    wrong.append(f"{name}:{number}: there is no {target}")
                    continue
                key = there.resolve().relative_to(ROOT).as_posix()
                if key != name:
                    linked[key].add(name)
                if part and key in headings and part not in headings[key]:
                    wrong.append(f"{name}:{number}: {key} has no heading #{part}")
        title = next((line[2:].strip() for line in lines if line.startswith("# ")), None)
        if title:
            titles[title.lower()].append(name)
        elif not name.startswith(".github/"):
            wrong.append(f"{name}: the page has no title")

    for title, same in sorted(titles.items()):
        if len(same) > 1:
            wrong.append(f"{', '.join(same)}: {len(same)} pages have the title `{title}`")
    for name in sorted(pages):
        if name.startswith(".github/ISSUE_TEMPLATE/") or name in ENTRANCES:
            continue
        if not linked[name]:
            wrong.append(f"{name}: no page links to it")
        parts = Path(name).parts
        if parts[0] == "docs" and len(parts) == 3 and "docs/README.md" not in linked[name]:
            wrong.append(f"{name}: docs/README.md does not list it")
        if parts[0] == "docs" and len(parts) > 2 and parts[1] not in GROUPS:
            wrong.append(f"{name}: docs/ has the folders {', '.join(sorted(GROUPS))}")
    readme = len((ROOT / "README.md").read_text().splitlines())
    if readme > README_LINES:
        wrong.append(f"README.md: {readme} lines, and {README_LINES} are the most")

    print("\n".join(wrong + [f"{len(pages)} pages, {sum(map(len, linked.values()))} pairs of them linked, {len(wrong)} things wrong"]))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
