#!/usr/bin/env python3
"""Tests the progress display in a terminal under tmux that is resized while a bar or a waiting line is shown.

python3 .ci/terminal.py target/debug/flatout

Prints a line PASS or FAIL per check. Without tmux it prints SKIP."""

import os
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import time

SMALL = ["model.width=64", "model.layers=2", "train.steps=400", "eval.every=0", "eval.rows=0", "checkpoint.every=0"]
BAR = "\u2501"
BRAILLE = [chr(code) for code in range(0x2801, 0x2900)]


def main():
    if shutil.which("tmux") is None:
        print("SKIP tmux is not installed")
        return
    program = pathlib.Path(sys.argv[1]).resolve()
    tmux = []
    failed = False

    def claim(good, words, shown):
        nonlocal failed
        failed |= not good
        print(f"{'PASS' if good else 'FAIL'} {words}" + ("" if good else "\n" + shown))

    def begin(name, columns, command, scratch):
        """Starts a session on its own server, because a server that is ending accepts no new session."""
        tmux[:] = ["tmux", "-L", f"flatout-{os.getpid()}-{name}"]
        env = {**os.environ, "TERM": "xterm-256color"}
        typed = [*tmux, "-f", "/dev/null", "new-session", "-d", "-x", str(columns), "-y", "50", command]
        subprocess.run(typed, cwd=scratch, env=env, check=True)

    def screen(history=0):
        return subprocess.run([*tmux, "capture-pane", "-p", "-S", f"-{history}"], check=True, capture_output=True, text=True).stdout

    def wait(until, seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end and not until():
            time.sleep(0.2)

    def waits(scratch):
        """Reading text from a pipe takes as long as this test keeps the pipe open: a line says so, and is removed afterwards."""
        words = random.Random(1)
        vocabulary = ["".join(words.choices("abcdefghijklmnopqrstuvwxyz", k=words.randint(2, 9))) for _ in range(2000)]
        text = "\n\n".join(" ".join(words.choices(vocabulary, k=150)) for _ in range(2000))
        pipe = pathlib.Path(scratch, "pipe")
        os.mkfifo(pipe)
        # There is a line above, as with a prompt: otherwise half of a line that tmux wraps would be in its history, out of reach.
        command = f"echo above; LC_ALL=C.UTF-8 {program} data prepare - --out shards --vocab 600 < pipe; echo finished-here; sleep 600"
        begin("waits", 90, command, scratch)
        line = "reading text for a tokeniser"
        with pipe.open("w") as writer:
            writer.write(text)
            writer.flush()
            wait(lambda: line in screen(), 60)
            claim(line in screen(), "a wait of more than a second is shown", screen())
            subprocess.run([*tmux, "resize-window", "-x", "30", "-y", "50"], check=True)
            time.sleep(1)
            claim(screen(300).count(line) <= 1, "one such line is left after the terminal became narrower", screen(300))
            subprocess.run([*tmux, "resize-window", "-x", "90", "-y", "50"], check=True)
        wait(lambda: "finished-here" in screen(300), 180)
        claim("finished-here" in screen(300) and line not in screen(300), "it is gone when the work is done", screen(300))
        subprocess.run([*tmux, "kill-server"], check=False)

    with tempfile.TemporaryDirectory() as scratch:
        waits(scratch)
        command = f"LC_ALL=C.UTF-8 {program} train tiny {' '.join(SMALL)} --run run; echo finished-here; sleep 600"
        begin("bar", 120, command, scratch)
        try:
            wait(lambda: BAR in screen(), 60)
            claim(BAR in screen(), "a bar is drawn", screen())
            painted = subprocess.run([*tmux, "capture-pane", "-p", "-e"], check=True, capture_output=True, text=True).stdout
            claim("\x1b[36mdata" in painted and "\x1b[36m" + BAR in painted, "lines and the bar have colours", painted)
            for width in ("80", "61", "100"):
                subprocess.run([*tmux, "resize-window", "-x", width, "-y", "50"], check=True)
                time.sleep(2)
            bars = [line for line in screen(300).splitlines() if BAR in line or "tok/s" in line]
            claim(len(bars) <= 1 or "finished-here" in screen(300), "one bar is left after the terminal became narrower and wider", "\n".join(bars))
            wait(lambda: "finished-here" in screen(300), 120)
            shown = screen(300)
            left = [line for line in shown.splitlines() if BAR in line or "tok/s" in line]
            claim(not left, "no bar is left at the end", "\n".join(left))
            claim(sum(any(dot in line for dot in BRAILLE) for line in shown.splitlines()) >= 3, "the loss is drawn at the end", shown)
        finally:
            subprocess.run([*tmux, "kill-server"], check=False)
    sys.exit(failed)


if __name__ == "__main__":
    main()
