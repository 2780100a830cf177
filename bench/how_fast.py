#!/usr/bin/env python3
"""Draws the pictures of docs/results/how-fast.md and writes its table from bench/how_fast.toml, which has the README's figures.

    python bench/how_fast.py             writes them
    python bench/how_fast.py --check     fails if they are not up to date, or if the README has other figures

Bars of speed show flatout's rate over the peer's on a logarithmic axis; bars of memory show flatout's memory over the peer's. Colours follow
the reader's light or dark setting. Needs Python 3.11.
"""

import math
import re
import sys
import tomllib
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "bench/how_fast.toml"
PAGE = ROOT / "docs/results/how-fast.md"
PICTURES = ROOT / "docs/images"

# Labels end and bars begin at LABELS, and the text of a bar begins at SAID.
WIDTH, LABELS, BARS, SAID = 960, 262, 380, 664
TOP, ROW, BOTTOM = 66, 30, 44

STYLE = """\
  <style>
    text { font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #24292f; }
    .back { fill: #ffffff; }
    .title { font-size: 15px; font-weight: 600; }
    .faint { fill: #57606a; }
    .grid { stroke: #d0d7de; }
    .peer { stroke: #57606a; stroke-width: 1.5; }
    .bar { fill: #0969da; }
    @media (prefers-color-scheme: dark) {
      text { fill: #e6edf3; }
      .back { fill: #0d1117; }
      .faint { fill: #9198a1; }
      .grid { stroke: #3d444d; }
      .peer { stroke: #9198a1; }
      .bar { fill: #4493f8; }
    }
  </style>"""


def number(written):
    return float(written.replace(",", ""))


def picture(title, rows, place, ticks, peer_at):
    """An SVG of bars from `place(None)`, the axis's beginning, to `place(value)`; rows are (label, value, text)."""
    height = TOP + ROW * len(rows) + BOTTOM
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">',
        STYLE,
        f'  <rect class="back" width="{WIDTH}" height="{height}" rx="6"/>',
        f'  <text class="title" x="16" y="28">{escape(title)}</text>',
    ]
    foot = TOP + ROW * len(rows)
    for tick, words in ticks:
        x = LABELS + place(tick)
        out.append(f'  <line class="grid" x1="{x:.1f}" y1="{TOP - 8}" x2="{x:.1f}" y2="{foot}"/>')
        out.append(f'  <text class="faint" x="{x:.1f}" y="{foot + 20}" text-anchor="middle">{words}</text>')
    begin = LABELS + place(None)
    for at, (label, value, text) in enumerate(rows):
        y = TOP + ROW * at
        end = LABELS + place(value)
        out.append(f'  <text x="{LABELS - 10}" y="{y + 16}" text-anchor="end">{escape(label)}</text>')
        out.append(f'  <rect class="bar" x="{begin:.1f}" y="{y + 3}" width="{end - begin:.1f}" height="18" rx="2"/>')
        out.append(f'  <text x="{SAID}" y="{y + 16}">{escape(text[0])}</text>')
        out.append(f'  <text class="faint" x="{SAID + 56}" y="{y + 16}">{escape(text[1])}</text>')
    x = LABELS + place(peer_at)
    out.append(f'  <line class="peer" x1="{x:.1f}" y1="{TOP - 8}" x2="{x:.1f}" y2="{foot}"/>')
    out.append(f'  <text class="faint" x="{x:.1f}" y="{TOP - 14}" text-anchor="middle">the peer</text>')
    return "\n".join([*out, "</svg>", ""])


def speed(rows):
    """Rates over the peers' rates, with bars that begin at 1."""
    scale = BARS / math.log(16)
    bars = [(r["trains"], number(r["ratio"]), (f"{r['ratio']} x", f"{r['speed'][0]} against {r['speed'][1]} {r['unit']}")) for r in rows]
    ticks = [(tick, f"{tick} x") for tick in (1, 2, 4, 8, 16)]
    return picture("Speed beside the peer's", bars, lambda value: 0 if value is None else math.log(value) * scale, ticks, 1)


def memory(rows):
    """Memory over the peers' memory."""
    bars = []
    for row in rows:
        ours, theirs = row["memory"]
        share = number(ours) / number(theirs)
        bars.append((row["trains"], share, (f"{share:.2f}", f"{ours} of {theirs} {row.get('memory_unit', 'GiB')}")))
    ticks = [(tick / 4, f"{tick / 4:g}") for tick in range(5)]
    return picture("Memory as a share of the peer's", bars, lambda value: 0 if value is None else value * BARS, ticks, 1)


def table(data):
    lines = ["| what trains | flatout | peer | ratio | memory | command |", "|---|---|---|---|---|---|"]
    for row in data["row"]:
        unit = row.get("memory_unit", "GiB")
        lines.append(
            f"| {row['trains']} | {row['speed'][0]} {row['unit']} | {row['peer']}: {row['speed'][1]} | {row['ratio']} "
            f"| {row['memory'][0]} {unit} against {row['memory'][1]} | {', '.join(map(str, row['commands']))} |"
        )
    commands = "\n".join(f"{name}  {command}" for name, command in data["commands"].items())
    return "\n".join(lines) + f"\n\n```\n{commands}\n```\n"


def missing_in_readme(data):
    """Figures and commands that have no row in the README's table."""
    readme = (ROOT / "README.md").read_text()
    rows = [line for line in readme.splitlines() if line.startswith("| ") and " against " in line]
    for row in data["row"]:
        figures = [row["speed"][0], row["speed"][1], row["ratio"], *row["memory"]]
        has = [line for line in rows if all(re.search(rf"(?<![\d.,]){re.escape(figure)}(?![\d,]|\.\d)", line) for figure in figures)]
        if len(has) != 1:
            yield f"README.md has {len(has)} rows with {', '.join(figures)} of {row['trains']}"
    if len(rows) != len(data["row"]):
        yield f"README.md has {len(rows)} rows of figures, and bench/how_fast.toml {len(data['row'])}"
    for name, command in data["commands"].items():
        if f"\n{name}  {command}\n" not in readme:
            yield f"README.md lacks command {name}: {command}"


def main():
    data = tomllib.loads(DATA.read_text())
    page = PAGE.read_text()
    before, after = page.split("<!-- figures -->\n")[0], page.split("<!-- end of figures -->\n")[1]
    written = {
        PAGE: f"{before}<!-- figures -->\n{table(data)}<!-- end of figures -->\n{after}",
        PICTURES / "how-fast-speed.svg": speed(data["row"]),
        PICTURES / "how-fast-memory.svg": memory(data["row"]),
    }
    wrong = list(missing_in_readme(data))
    for path, text in written.items():
        if "--check" not in sys.argv:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            wrong.append(f"{path.relative_to(ROOT)} is not what bench/how_fast.py writes")
    if wrong:
        sys.exit("\n".join(wrong))
    print(f"{len(data['row'])} figures, as in the README")


if __name__ == "__main__":
    main()
