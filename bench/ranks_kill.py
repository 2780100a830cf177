"""Kills one random rank of four at random moments, again and again, and resumes with a random number of ranks, with a line per kill.

    cargo build
    python bench/ranks_kill.py target/debug/flatout
    python bench/ranks_kill.py target/debug/flatout --kills 50 --seed 7

Every kill is a `kill -9` of a living process, while a run starts, trains or saves. All processes must then end within five seconds,
with one sentence that names the rank, and exit code 1. The run resumes with 1, 2 or 4 ranks up to some step, then with four that are
killed again. After `--each` kills a run may end, and must have the state of one uninterrupted process, to the bit; then the next run
begins. `--seed` repeats the same moments, ranks and numbers.

Needs Linux and only the standard library. Exit code 0 if all checks hold, 1 at the first that does not.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ranks_runs import SMALL, saved, state

GONE_WITHIN = 5.0


def children(parent):
    """The living child processes of a process."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except (OSError, IndexError):
                continue
            if fields[1] == str(parent) and fields[0] != "Z":
                found.append(int(entry.name))
    return sorted(found)


class Kills:
    def __init__(self, binary, folder, seed):
        self.binary, self.folder, self.draw = binary, folder, random.Random(seed)
        self.slowest, self.before_steps, self.ranks = 0.0, 0, {1: 0, 2: 0, 4: 0}

    def command(self, run, ranks, total, until=None):
        own = [f"train.steps={until or total}", f"schedule.horizon_steps={total}", "checkpoint.every=1", "--run", run]
        return [str(self.binary), "train", *SMALL, *own, "--resume", "auto", "-q", "--ranks", str(ranks)]

    def finish(self, run, ranks, total, until=None):
        done = subprocess.run(self.command(run, ranks, total, until), cwd=self.folder, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{run} does not resume with {ranks} ranks: code {done.returncode}, {done.stderr}")

    def kill(self, run, total, furthest):
        """Runs four ranks up to at most a step, kills one, and checks how they end."""
        parent = subprocess.Popen(self.command(run, 4, total), cwd=self.folder, stdout=subprocess.DEVNULL,
                                  stderr=subprocess.PIPE, text=True)
        began, before = time.monotonic(), saved(self.folder / run)
        while len(ranks := children(parent.pid)) < 4:
            if parent.poll() is not None or time.monotonic() - began > 60:
                sys.exit(f"four ranks do not start: {parent.communicate()[1]}")
            time.sleep(0.002)
        # A third of the kills may come before the first step.
        after = self.draw.uniform(0, 2.0) if self.draw.random() < 1 / 3 else 1e9
        while time.monotonic() - began < after and saved(self.folder / run) < furthest:
            if parent.poll() is not None:
                sys.exit(f"{run} ended by itself with code {parent.returncode}: {parent.communicate()[1]}")
            if time.monotonic() - began > 120:
                sys.exit(f"{run} makes no progress")
            time.sleep(self.draw.uniform(0, 0.004))
        victim = self.draw.randrange(4)
        os.kill(ranks[victim], signal.SIGKILL)
        killed = time.monotonic()
        message = parent.communicate(timeout=60)[1]
        seconds = time.monotonic() - killed
        left = [rank for rank in ranks if Path(f"/proc/{rank}").exists()]
        is_reported = message.count("\n") == 1 and f"rank {victim} (" in message and "was killed by signal 9 (SIGKILL)" in message
        if parent.returncode != 1 or left or seconds > GONE_WITHIN or not is_reported:
            sys.exit(f"rank {victim} of {run} was killed: code {parent.returncode}, {seconds:.1f} s, left {left}, said:\n{message}")
        self.slowest = max(self.slowest, seconds)
        self.before_steps += saved(self.folder / run) == before
        return victim, seconds, message.strip()


def main():
    p = argparse.ArgumentParser(description="Kill ranks at random and compare the runs with one that was not killed.")
    p.add_argument("flatout", type=Path, help="the flatout binary, for example target/debug/flatout")
    p.add_argument("--kills", type=int, default=200)
    p.add_argument("--each", type=int, default=20, help="kills per run, after which it may end and is compared")
    p.add_argument("--seed", type=int, default=None)
    p.add_argument("-v", "--verbose", action="store_true", help="show every sentence")
    a = p.parse_args()
    if not a.flatout.is_file():
        p.error(f"there is no file {a.flatout}; build it with: cargo build")
    seed = a.seed if a.seed is not None else random.SystemRandom().randrange(1 << 32)
    total, began = 8 * a.each, time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="flatout-"))
    kills = Kills(a.flatout.resolve(), folder, seed)
    try:
        kills.finish("unbroken", 1, total)
        expected = state(folder / "unbroken", total)
        for kill in range(a.kills):
            run, place = f"run-{kill // a.each}", kill % a.each
            # A process gets no further than its share of the steps, so that every kill hits a living process.
            share = max(0, total - 10 - saved(folder / run)) // (a.each - place)
            victim, seconds, message = kills.kill(run, total, saved(folder / run) + 1 + kills.draw.randrange(share // 2 + 1))
            ranks = kills.draw.choice([1, 2, 4])
            kills.ranks[ranks] += 1
            is_last = place == a.each - 1 or kill == a.kills - 1
            kills.finish(run, ranks, total, None if is_last else min(total - 10, saved(folder / run) + 1))
            line = f"kill {kill + 1}: rank {victim}, all gone after {seconds:.2f} s, on with {ranks} to step {saved(folder / run)}"
            print(line + (f"\n  {message}" if a.verbose else ""), flush=True)
            if is_last:
                found = state(folder / run, total)
                if found != expected:
                    sys.exit(f"FAIL  {run} (seed {seed}) ended in another state: {found[:12]} and not {expected[:12]}")
                print(f"PASS  {run} ended in the state of one process, {found[:12]}", flush=True)
                shutil.rmtree(folder / run)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    on = ", ".join(f"{count} on {ranks}" for ranks, count in kills.ranks.items())
    print(f"{a.kills} kills (seed {seed}), {kills.before_steps} of them before their life had saved a step; the slowest end took "
          f"{kills.slowest:.2f} s; resumed with: {on} ranks; {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
