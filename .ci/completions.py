#!/usr/bin/env python3
"""Tests shell completions by typing into real shells and pressing Tab: commands, options, recipes, keys, values and files must be completed.

    python3 .ci/completions.py target/debug/flatout

Every installed shell is tested on its own terminal; bash is required. Prints a line PASS or FAIL per case."""

import fcntl
import os
import pathlib
import pty
import re
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import time

# The typed text before Tab, and the text that the line must have afterwards.
CASES = [
    ("flatout tra", "flatout train "),
    ("flatout doctor --veri", "flatout doctor --verify "),
    ("flatout recipes sh", "flatout recipes show "),
    ("flatout train vision-t", "flatout train vision-tiny "),
    ("flatout train tiny schedule.warmup_st", "flatout train tiny schedule.warmup_steps="),
    ("flatout train tiny data.filter=bicu", "flatout train tiny data.filter=bicubic "),
    ("flatout plan tiny precision=bf", "flatout plan tiny precision=bf16 "),
    ("flatout completions fi", "flatout completions fish "),
    ("flatout resume runs/mi", "flatout resume runs/mine-1 "),
    ("flatout eval --data boo", "flatout eval --data book.txt "),
]
START = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config", "-i"],
}
LOAD = {
    "bash": "bind 'set enable-bracketed-paste off'; PS1='> '; source ./script",
    "zsh": "PROMPT='> '; unsetopt zle_bracketed_paste; autoload -U compinit; compinit -u -D; source ./script",
    "fish": "function fish_prompt; echo '> '; end; source ./script",
}
# Clears a line without running it.
CTRL_U = b"\x15"


class Terminal:
    """A shell on a terminal of 200 columns."""

    def __init__(self, words, folder, env):
        self.pid, self.file = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.execvpe(words[0], words, env)
        fcntl.ioctl(self.file, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))

    def type(self, keys):
        os.write(self.file, keys if isinstance(keys, bytes) else keys.encode())

    def read(self, until, seconds):
        """Reads output until it contains a text or the time is up."""
        shown, end = b"", time.monotonic() + seconds
        while time.monotonic() < end:
            if select.select([self.file], [], [], 0.05)[0]:
                try:
                    shown += os.read(self.file, 65536)
                except OSError:
                    break
            if until in plain(shown):
                break
        return shown

    def close(self):
        os.close(self.file)
        os.waitpid(self.pid, 0)


def plain(shown):
    """Output as text, without escape sequences and with backspaces applied."""
    text = re.sub(rb"\x1b(\[[0-9;?<=>]*[a-zA-Z]|\][^\x07\x1b]*(\x07|\x1b\\)|[()][A-Z0-9]|[=>])", b"", shown)
    text = text.decode(errors="replace").replace("\r", "").replace("\a", "")
    while "\b" in text:
        text = re.sub("[^\b]\b", "", text, count=1) if re.search("[^\b]\b", text) else text.replace("\b", "")
    return text


def settled(terminal, folder):
    """Waits until the shell has processed its input."""
    mark = folder / "ready"
    terminal.type("echo x > ready\n")
    end = time.monotonic() + 20
    while not mark.exists() and time.monotonic() < end:
        terminal.read("\0", 0.1)
    mark.unlink(missing_ok=True)


def main():
    program = pathlib.Path(sys.argv[1]).resolve()
    failed = False
    for shell, words in START.items():
        if shutil.which(shell) is None:
            print(f"SKIP {shell}: it is not installed")
            failed |= shell == "bash"
            continue
        with tempfile.TemporaryDirectory() as scratch:
            folder = pathlib.Path(scratch)
            (folder / "book.txt").write_text("once")
            (folder / "runs/mine-1").mkdir(parents=True)
            (folder / "runs/mine-1/config.toml").write_text("")
            bin_ = folder / "bin"
            bin_.mkdir()
            (bin_ / "flatout").symlink_to(program)
            script = subprocess.run([program, "completions", shell], check=True, capture_output=True, text=True).stdout
            (folder / "script").write_text(script)
            env = {**os.environ, "PATH": f"{bin_}:{os.environ['PATH']}", "TERM": "xterm", "HOME": scratch, "LC_ALL": "C.UTF-8"}
            terminal = Terminal(words, folder, env)
            terminal.read("\0", 1.0)
            terminal.type(LOAD[shell] + "\n")
            settled(terminal, folder)
            terminal.read("\0", 0.5)
            for typed, wanted in CASES:
                terminal.type(typed + "\t")
                # A shell echoes the typed words, followed by the letters that Tab adds. A character typed after that shows where the word ends.
                shown = terminal.read(wanted.rstrip() if wanted.endswith(" ") else wanted, 6.0)
                terminal.type("~")
                shown = plain(shown + terminal.read("~", 3.0))
                good = wanted + "~" in shown.replace("\n", "")
                print(f"{'PASS' if good else 'FAIL'} {shell}: {typed!r} + Tab is {wanted!r}" + ("" if good else f", shown {shown[-200:]!r}"))
                failed |= not good
                terminal.type(CTRL_U)
                terminal.read("\0", 0.3)
            terminal.type("exit\n")
            terminal.close()
    sys.exit(failed)


if __name__ == "__main__":
    main()
