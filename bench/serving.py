"""Shared by scripts that test `flatout serve`: a small chat model, its server, and lines PASS or FAIL."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

# A run that takes seconds on two cores and has a chat template.
SMALL = ["model.width=64", "model.layers=2", "model.ffn=96", "model.heads=4", "model.kv_heads=2", "model.context=256", "train.batch=8",
         "schedule.warmup_steps=10", "eval.rows=0", "backend=cpu", "precision=fp32"]


def train(binary, run, *words):
    """Trains a small run; ends the script if that fails."""
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
        output = ""
        while not output.rstrip().endswith("}"):
            line = self.process.stdout.readline()
            if not line:
                self.log.seek(0)
                sys.exit(f"the server ended: {self.log.read()}")
            output += line
        self.info = json.loads(output)
        self.base_url, self.model = self.info["base_url"], self.info["model"]
        self.port = int(self.info["url"].rstrip("/").rsplit(":", 1)[1])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def resident(self):
        """Resident memory of the process in bytes."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def stop(self):
        """Stops the server and returns its exit code."""
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
