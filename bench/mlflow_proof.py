"""Tests that an MLflow server receives everything of a run, with a real server and a line PASS or FAIL per check.

    pip install mlflow
    python bench/mlflow_proof.py target/release/flatout

Trains `tiny` with track.mlflow on a server with a SQLite database, kills the server during the run, lets the run continue without it, stops
the run, starts the server again, resumes, and reads everything back with MLflow's own client: every metric of events.jsonl is there exactly
once, in the same run, with parameters, tags and the status. Also sends a finished run to a server, and deletes and restores a run.
Exits with 1 if a check fails.
"""

import argparse
import collections
import json
import math
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
from importlib.metadata import version
from pathlib import Path

TRAIN = [
    "backend=cpu", "model.width=64", "model.layers=2", "train.steps=400", "train.batch=4", "eval.every=50", "eval.rows=8", "checkpoint.every=50",
    "schedule.warmup_steps=10",
]
# Fields of a `step` line, and their names in MLflow.
STEP = {
    "loss": "train/loss", "grad_norm": "train/grad_norm", "lr": "train/lr", "epoch": "train/epoch", "tokens": "train/tokens",
    "skipped": "train/skipped", "tokens_per_second": "speed/tokens_per_second", "samples_per_second": "speed/samples_per_second",
    "step_ms": "speed/step_ms", "data_wait_ms": "speed/data_wait_ms", "mfu": "speed/mfu", "of_predicted": "speed/of_predicted",
    "of_roofline": "speed/of_roofline",
}
failed = 0


def line(holds, words):
    global failed
    failed += not holds
    print(f"{'PASS' if holds else 'FAIL'}  {words}", flush=True)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Server:
    """MLflow's own server with a database in a folder."""

    def __init__(self, folder, port, *more, **environment):
        self.folder, self.port, self.more, self.environment = folder, port, more, environment
        self.address = f"http://127.0.0.1:{port}"
        self.start()

    def start(self):
        self.process = subprocess.Popen(
            [
                sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{self.folder}/mlflow.db",
                "--artifacts-destination", str(self.folder / "artifacts"), "--host", "127.0.0.1", "--port", str(self.port), "--workers", "1",
                *self.more,
            ],
            stdout=open(self.folder / "server.log", "a"), stderr=subprocess.STDOUT, start_new_session=True,
            env=os.environ | {"MLFLOW_DISABLE_TELEMETRY": "true"} | self.environment,
        )
        for _ in range(1200):
            try:
                urllib.request.urlopen(f"{self.address}/health", timeout=1)
                return
            except OSError:
                time.sleep(0.1)
        sys.exit(f"MLflow's server does not start:\n{(self.folder / 'server.log').read_text()[-2000:]}")

    def kill(self):
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def events(run):
    return [json.loads(text) for text in (run / "events.jsonl").read_text().splitlines()]


def expected(run):
    """All metrics of a log as (name, step, value)."""
    points = collections.Counter()
    for event in events(run):
        if event["event"] == "step":
            for field, name in STEP.items():
                if field in event:
                    points[name, event["step"], event[field]] += 1
        elif event["event"] == "eval":
            points["eval/loss", event["step"], event["loss"]] += 1
            if "bits_per_byte" in (event.get("metrics") or {}):
                points["eval/bits_per_byte", event["step"], event["metrics"]["bits_per_byte"]] += 1
    return points


def known(client, run_id, names):
    """The metrics that MLflow has under these names, in the same form."""
    points = ((name, point.step, point.value) for name in names for point in client.get_metric_history(run_id, name))
    return collections.Counter(points)


def same(ours, theirs):
    """Whether two sets of points are equal, when rounded to the digits of 32-bit floats in which losses are written."""
    def rounded(points):
        total = collections.Counter()
        for (name, step, value), count in points.items():
            total[name, step, None if value is None or math.isnan(value) else struct.pack("f", value)] += count
        return total

    return rounded(ours) == rounded(theirs)


def run_of(client, name):
    found = [run for experiment in client.search_experiments() for run in client.search_runs([experiment.experiment_id])]
    return [run for run in found if run.info.run_name == name]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("flatout", type=Path, help="the binary")
    binary = str(parser.parse_args().flatout.resolve())
    from mlflow.tracking import MlflowClient

    print(f"mlflow {version('mlflow')}, {subprocess.run([binary, '--version'], capture_output=True, text=True).stdout.strip()}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        server = Server(folder, free_port())
        client = MlflowClient(server.address)
        run = folder / "followed"
        words = [*TRAIN, f"track.mlflow={server.address}", "track.experiment_name=a proof", "track.run_name=followed", "--run", str(run)]

        def steps():
            return sum(event["event"] == "step" for event in events(run)) if (run / "events.jsonl").exists() else 0

        training = subprocess.Popen([binary, "train", "tiny", *words], cwd=folder, stderr=subprocess.PIPE, text=True)
        while steps() < 60 and training.poll() is None:
            time.sleep(0.02)
        server.kill()
        killed_at = steps()
        while steps() < killed_at + 60 and training.poll() is None:
            time.sleep(0.02)
        line(steps() >= killed_at + 60, f"the server was killed at step {killed_at}, and the run continues: step {steps()}")
        training.send_signal(signal.SIGINT)
        errors = training.communicate()[1]
        line(training.returncode == 3, f"the run stops with code {training.returncode}")
        warnings = [event["message"] for event in events(run) if event["event"] == "warning" and "MLflow" in event["message"]]
        line(len(warnings) == 2 and "flatout runs track" in warnings[1], f"warnings: {warnings}")

        server.start()
        (found,) = run_of(client, "followed")
        line(found.info.status == "RUNNING", f"a server that was away knows a run that is {found.info.status}")
        resumed = subprocess.run([binary, "resume", str(run)], cwd=folder, capture_output=True, text=True)
        line(resumed.returncode == 0, f"the run is resumed to its end: {resumed.stderr.strip().splitlines()[-1]}")
        again = run_of(client, "followed")
        line(len(again) == 1 and again[0].info.run_id == found.info.run_id, "it is the same run of MLflow's")
        followed = again[0]
        line(followed.info.status == "FINISHED", f"its status is {followed.info.status}")
        ours = expected(run)
        theirs = known(client, followed.info.run_id, {name for name, _, _ in ours})
        line(same(ours, theirs), f"{sum(ours.values())} numbers of events.jsonl, {sum(theirs.values())} of MLflow: each is there once")
        line(set(followed.data.metrics) == {name for name, _, _ in ours}, f"{len(followed.data.metrics)} metrics and no other")
        line(followed.data.params["model.width"] == "64" and followed.data.params["recipe"] == "tiny", f"{len(followed.data.params)} parameters")
        line("flatout.device" in followed.data.tags, f"tags: {sorted(followed.data.tags)}")

        plain = folder / "plain"
        subprocess.run([binary, "train", "tiny", *TRAIN, "train.steps=30", "--run", str(plain), "-q"], cwd=folder, check=True, capture_output=True)
        sent = subprocess.run([binary, "runs", "track", str(plain), f"track.mlflow={server.address}", "--json"], cwd=folder, capture_output=True, text=True)
        sent = json.loads(sent.stdout)
        ours = expected(plain)
        line(sent["points"] == sum(ours.values()) and same(ours, known(client, sent["run_id"], {name for name, _, _ in ours})),
             f"a finished run is sent afterwards: {sent['points']} points")
        again = subprocess.run([binary, "runs", "track", str(plain), f"track.mlflow={server.address}", "--json"], cwd=folder, capture_output=True, text=True)
        line(json.loads(again.stdout)["lines"] == 0, "and not twice")
        began = next(event["time"] for event in events(plain) if event["event"] == "start")
        theirs = client.get_run(sent["run_id"]).info.start_time
        line(theirs == round(1e3 * began), f"it began there at {theirs}, and at {1e3 * began:.0f} by its log")
        slash = subprocess.run([binary, "runs", "track", str(plain), f"track.mlflow={server.address}/", "--json"], cwd=folder, capture_output=True, text=True)
        line(json.loads(slash.stdout)["lines"] == 0, "nor where the address ends with a slash")

        client.delete_run(sent["run_id"])
        more = [binary, "resume", str(plain), "train.steps=120", f"track.mlflow={server.address}"]
        resumed = subprocess.run(more, cwd=folder, capture_output=True, text=True)
        warnings = [event["message"] for event in events(plain) if event["event"] == "warning" and "MLflow" in event["message"]]
        line(resumed.returncode == 0 and len(warnings) == 1 and "deleted" in warnings[0], f"a run that was deleted there: {warnings}")
        client.restore_run(sent["run_id"])
        later = subprocess.run([binary, "runs", "track", str(plain), f"track.mlflow={server.address}", "--json"], cwd=folder, capture_output=True, text=True)
        ours = expected(plain)
        line(same(ours, known(client, json.loads(later.stdout)["run_id"], {name for name, _, _ in ours})),
             f"once it is restored, it gets the rest: {json.loads(later.stdout)['points']} points")
        server.kill()
        away = subprocess.run([binary, "runs", "track", str(run), f"track.mlflow={server.address}", "track.experiment_name=other"], cwd=folder, capture_output=True, text=True)
        line(away.returncode == 2 and len(away.stderr.strip().splitlines()) == 1, f"code {away.returncode}: {away.stderr.strip()}")
    print(f"{failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
