#!/usr/bin/env python3
"""Builds a text data set of about a hundred megabytes of prose and code from the documentation of Debian packages.

    python bench/package_text.py --out docs.jsonl.zst
    python bench/package_text.py --out docs.jsonl.zst git-doc perl-doc

Every HTML page, without its markup, and every text file becomes a document; paragraphs that occurred on an earlier page (menus, licences)
are left out, and so are pages with less than 500 remaining characters. Documents are ordered by package and path. Needs Debian's `apt-get`
and `dpkg-deb`, and `zstd`; nothing is installed and nothing needs root.
"""

import argparse
import gzip
import hashlib
import json
import subprocess
import sys
import tempfile
from html.parser import HTMLParser
from pathlib import Path

# Documentation of languages, libraries, tools and systems by different authors.
PACKAGES = """python3.11-doc python-django-doc python-sqlalchemy-doc python-pandas-doc python-scipy-doc python-sympy-doc postgresql-doc-15
    git-doc rust-doc perl-doc linux-doc-6.1 erlang-doc ghc-doc sqlite3-doc nodejs-doc debian-policy debian-reference-en octave-doc maxima-doc
    zsh-doc cmake-doc bash-doc gnuplot-doc""".split()
TEXT = {".txt", ".rst", ".md", ".texi", ".tex", ".py", ".c", ".h", ".rs", ".pod", ".pl"}
HTML = {".html", ".htm", ".xhtml"}
LEAST = 500
MOST_BYTES = 4 << 20

BREAKS = {"p", "div", "br", "li", "tr", "h1", "h2", "h3", "h4", "h5", "h6", "dt", "dd", "pre", "table", "section", "blockquote"}
HIDDEN = {"script", "style", "nav", "header", "footer", "svg", "head", "button", "noscript"}


class Text(HTMLParser):
    """Extracts the text of a page; preformatted text keeps its lines."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.pieces, self.hidden, self.pre = [], 0, 0

    def handle_starttag(self, tag, attrs):
        if tag in HIDDEN:
            self.hidden += 1
        elif tag == "pre":
            self.pre += 1
        if tag in BREAKS:
            self.pieces.append("\n\n" if tag in ("p", "pre", "h1", "h2", "h3", "div", "section") else "\n")

    def handle_endtag(self, tag):
        if tag in HIDDEN:
            self.hidden = max(0, self.hidden - 1)
        elif tag == "pre":
            self.pre = max(0, self.pre - 1)
        if tag in BREAKS:
            self.pieces.append("\n\n" if tag in ("p", "pre") else "\n")

    def handle_data(self, data):
        if not self.hidden:
            self.pieces.append(data if self.pre else " ".join(data.split()).join([" " * data[:1].isspace(), " " * data[-1:].isspace()]))


def of_html(page):
    parser = Text()
    parser.feed(page)
    return "".join(parser.pieces)


def paragraphs(text):
    """Paragraphs between empty lines, without trailing blanks."""
    block = []
    for line in text.split("\n"):
        line = line.rstrip()
        if line.strip():
            block.append(line)
        elif block:
            yield "\n".join(block)
            block = []
    if block:
        yield "\n".join(block)


def documents(package, folder):
    """The texts of a package's files, by path."""
    with tempfile.TemporaryDirectory() as scratch:
        done = subprocess.run(["apt-get", "download", "--quiet", package], cwd=scratch, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{package} cannot be downloaded: {done.stderr.strip()}\nIf its version is no longer on the server, run `apt-get update` first")
        (archive,) = Path(scratch).glob("*.deb")
        subprocess.run(["dpkg-deb", "--extract", archive, folder], check=True)
    for path in sorted(Path(folder).rglob("*")):
        if path.is_symlink() or not path.is_file() or path.stat().st_size > MOST_BYTES:
            continue
        kinds = [suffix.lower() for suffix in path.suffixes]
        is_packed = kinds[-1:] == [".gz"]
        kind = (kinds[:-1] if is_packed else kinds)[-1:]
        if not kind or kind[0] not in HTML | TEXT or path.name.startswith(("genindex", "searchindex", "changelog", "NEWS")):
            continue
        try:
            text = (gzip.open(path).read() if is_packed else path.read_bytes()).decode("utf-8")
        except (UnicodeDecodeError, OSError, EOFError):
            continue
        yield path.relative_to(folder), of_html(text) if kind[0] in HTML else text


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("packages", nargs="*", default=PACKAGES, help="documentation packages; by default those in the script")
    parser.add_argument("--out", type=Path, required=True, help="the file to write, JSONL compressed with zstd")
    parser.add_argument("--megabytes", type=float, default=120, help="stop after the package with which there is so much text")
    args = parser.parse_args()
    seen, total, count = set(), 0, 0
    writer = subprocess.Popen(["zstd", "--quiet", "--force", "-15", "-T0", "-", "-o", args.out], stdin=subprocess.PIPE)
    for package in args.packages:
        own, before = 0, count
        with tempfile.TemporaryDirectory() as folder:
            for path, text in documents(package, folder):
                kept = []
                for paragraph in paragraphs(text):
                    key = hashlib.blake2b(" ".join(paragraph.split()).encode(), digest_size=10).digest()
                    if key not in seen:
                        seen.add(key)
                        kept.append(paragraph)
                text = "\n\n".join(kept)
                if len(text) < LEAST:
                    continue
                writer.stdin.write(json.dumps({"text": text, "from": f"{package}/{path.name}"}, ensure_ascii=False).encode() + b"\n")
                own, count = own + len(text.encode()), count + 1
        total += own
        print(f"{package:24} {count - before:6,} documents {own / 1e6:7.1f} MB", flush=True)
        if total >= args.megabytes * 1e6:
            break
    writer.stdin.close()
    if writer.wait() != 0:
        sys.exit("zstd failed")
    print(f"{'together':24} {count:6,} documents {total / 1e6:7.1f} MB in {args.out} ({args.out.stat().st_size / 1e6:.1f} MB)")


if __name__ == "__main__":
    main()
