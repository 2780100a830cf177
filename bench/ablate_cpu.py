#!/usr/bin/env python3
"""Checks the repeatability of `flatout ablate`: runs the whole command several times and compares its rows.

    python bench/ablate_cpu.py target/release/flatout --calls 5

Each call measures `tiny` again. It must end within two minutes, report the base compared with itself as within noise, detect a row
whose times are scaled by 1.1, and give intervals that overlap those of every other call, row by row. Needs only Python, and an idle
machine: other load widens the intervals, which are printed.
"""

import argparse
import json
import os
import subprocess
import tempfile
import time


def call(flatout, words):
    began = time.time()
    with tempfile.TemporaryDirectory() as cache:
        env = dict(os.environ, FLATOUT_CACHE=cache)
        command = [flatout, "ablate", *words, "--control", "--json"]
        done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    return time.time() - began, json.loads(done.stdout)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("flatout")
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("words", nargs="*", default=["tiny"], help="arguments of `flatout ablate`")
    args = parser.parse_intermixed_args()
    calls, wrong = [], []
    for i in range(args.calls):
        seconds, report = call(args.flatout, args.words)
        calls.append(report)
        rows = {row["name"]: row.get("measured") for row in report["rows"]}
        same, slowed = rows["the base again"], rows["the base, its times 10% longer"]
        print(
            f"call {i + 1}: {seconds:.0f} s, base {report['base']['step_ms']:.2f} ms, noise {100 * report['noise']:.2f}%,"
            f" complete {report['is_complete']}; the base again {same['verdict']}, 10% longer {slowed['verdict']}"
            f" ({slowed['base_is_faster_by']['ratio']:.3f})",
            flush=True,
        )
        if seconds > 120:
            wrong.append(f"call {i + 1} took {seconds:.0f} s")
        if same["verdict"] != "within_noise":
            wrong.append(f"call {i + 1}: the base differs from itself")
        if slowed["verdict"] != "faster":
            wrong.append(f"call {i + 1}: 10% were not found")
    for name in [row["name"] for row in calls[0]["rows"]]:
        rows = [row for report in calls for row in report["rows"] if row["name"] == name and row.get("measured")]
        ranges = [row["measured"]["base_is_faster_by"] for row in rows]
        if not ranges:
            continue
        low, high = max(r["low"] for r in ranges), min(r["high"] for r in ranges)
        meet = "meet" if low <= high else "DO NOT MEET"
        ratios = " ".join(f"{r['ratio']:.3f}" for r in ranges)
        print(f"{name:36} {ratios}  ranges {meet}")
        if low > high:
            wrong.append(f"{name}: ranges of {len(ranges)} calls do not meet")
    print("\n".join(wrong) if wrong else "all agree")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
