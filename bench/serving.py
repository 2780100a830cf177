"""A server of `flatout serve` for scripts that prove something of it: a small run that chats, the server over it, and lines PASS or FAIL."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

# A run that takes seconds on two cores and knows a chat template.
SMALL = ["model.width=64", "model.layers=2", "model.ffn=96", "model.heads=4", "model.kv_heads=2", "model.context=256", "train.batch=8",
         "schedule.warmup_steps=10", "eval.rows=0", "backend=cpu", "precision=fp32"]


def train(binary, run, *words):
    """Trains a small run; ends the script where that fails."""
    done = subprocess.run([binary, "train", "tiny", *SMALL, *words, "--run", str(run), "-q"], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(done.stderr)
    return run


def train_chat(binary, run):
    return train(binary, run, "data.task=chat", "data.synthetic_rows=400", "train.steps=150")


class Server:
    """`flatout serve` while the block runs."""

    def __init__(self, binary, model, *words, key=None):
        environment = {name: value for name, value in os.environ.items() if name != "FLATOUT_API_KEY"}
        if key is not None:
            environment["FLATOUT_API_KEY"] = key
        command = [binary, "serve", str(model), "--port", "0", "--json", "backend=cpu", "precision=fp32", *words]
        self.log = open(Path(model).parent / "serve.log", "w+")
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.log, text=True, env=environment)
        said = ""
        while not said.rstrip().endswith("}"):
            line = self.process.stdout.readline()
            if not line:
                self.log.seek(0)
                sys.exit(f"the server ended: {self.log.read()}")
            said += line
        self.told = json.loads(said)
        self.base_url, self.model = self.told["base_url"], self.told["model"]
        self.port = int(self.told["url"].rstrip("/").rsplit(":", 1)[1])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def resident(self):
        """Bytes of memory that the process has now."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def stop(self):
        """Asks it to end and gives its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=30)


class Claims:
    """Lines PASS or FAIL."""

    def __init__(self):
        self.failed = 0

    def __call__(self, claim, holds, shown=""):
        self.failed += not holds
        print(f"{'PASS' if holds else 'FAIL'}  {claim}{f': {shown}' if shown != '' else ''}", flush=True)

    def end(self):
        print("all hold" if not self.failed else f"{self.failed} do not hold")
        return bool(self.failed)
