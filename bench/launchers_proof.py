"""Tests ranks that the launchers of clusters start, on this machine, with a line PASS or FAIL per check and its numbers.

    cargo build
    apt-get install openmpi-bin mpich slurmctld slurmd slurm-client munge      # Debian's names
    python bench/launchers_proof.py target/debug/flatout
    python bench/launchers_proof.py target/debug/flatout --only slurm --keep proof

`openmpi` and `mpich` run `mpirun -n 4`. `slurm` starts SLURM itself, with its own configuration, key and folders and this machine as
the only node: `srun --ntasks 4`; `mpirun` inside a job; and a batch script that is asked to stop by `--signal=USR1@..`, saves, ends
with code 3, requeues itself and resumes with half as many tasks each time. Every run must save the same state as one process, to the
bit. `torchrun` is tested if it is found.

Nothing is installed or changed outside of its folder. A missing launcher fails its check, unless `--only` excludes it. Needs only the
standard library. Exit code 0 if everything passes, 1 if something fails.
"""

import argparse
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ranks_runs import SMALL, ranks_of_lives, state, steps

STEPS = 30
# A job's time limit is a minute at least; the signal comes when fifty seconds are left, within half a minute of that.
LIFE_SECONDS = 10

JOB = """#!/bin/bash
#SBATCH --ntasks 4
#SBATCH --time=00:01:00
#SBATCH --signal=USR1@50
#SBATCH --requeue
#SBATCH --open-mode=append

tasks=$(( 4 >> ${SLURM_RESTART_COUNT:-0} ))
if [ $tasks -lt 1 ]; then tasks=1; fi
echo "life ${SLURM_RESTART_COUNT:-0} has $tasks tasks"
srun --ntasks $tasks %s
code=$?
echo "code $code"
if [ $code -eq 3 ]; then scontrol requeue $SLURM_JOB_ID; fi
"""


class Proof:
    def __init__(self, binary, folder):
        self.binary, self.folder, self.failed = binary, folder, 0

    def say(self, ok, what, numbers=""):
        print(f"{'PASS' if ok else 'FAIL'}  {what}{'  ' + numbers if numbers else ''}", flush=True)
        self.failed += not ok
        return ok

    def words(self, run, count, *more):
        """The command that starts or resumes a run."""
        own = [f"train.steps={count}", "checkpoint.every=0", "--run", str(self.folder / run), "--resume", "auto", "-q"]
        return [str(self.binary), "train", *SMALL, *own, *more]

    def has(self, what, *programs):
        missing = [program for program in programs if not shutil.which(program, path=PATH)]
        return not missing or self.say(False, what, f"not installed: {', '.join(missing)}")

    def one(self, run, count):
        """The state of one process after this number of steps."""
        done = subprocess.run(self.words(run, count), capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"one process fails: {done.stderr}")
        return state(self.folder / run, count)

    def same(self, what, launcher, run, ranks, expected, env=None):
        """Runs a launcher and compares the saved state."""
        began = time.monotonic()
        command = [*launcher, *self.words(run, STEPS)]
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=600, stdin=subprocess.DEVNULL)
        seconds = time.monotonic() - began
        if done.returncode != 0:
            return self.say(False, what, f"code {done.returncode}: {done.stderr.strip()[-500:]}")
        found, lives = state(self.folder / run, STEPS), ranks_of_lives(self.folder / run)
        self.say(found == expected and lives == [ranks], what, f"{ranks} ranks, {seconds:.1f} s, state {found[:12]}")


PATH = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


def openmpi(proof, expected):
    what = "mpirun -n 4, Open MPI"
    if proof.has(what, "mpirun.openmpi"):
        # More ranks than cores, and root in a container: both need an explicit option.
        root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        launcher = ["mpirun.openmpi", *root, "--oversubscribe", "-n", "4"]
        proof.same(what, launcher, "openmpi", 4, expected)


def mpich(proof, expected):
    what = "mpirun -n 4, MPICH"
    if proof.has(what, "mpirun.mpich"):
        proof.same(what, ["mpirun.mpich", "-n", "4"], "mpich", 4, expected)


def torchrun(proof, expected):
    if not shutil.which("torchrun"):
        print("NOTE torchrun is not on the path and was not tested", flush=True)
        return
    launcher = ["torchrun", "--no-python", "--nproc-per-node", "4", "--"]
    proof.same("torchrun --nproc-per-node 4", launcher, "torchrun", 4, expected)


class Slurm:
    """SLURM with this machine as the only node and all its files in one folder."""

    def __init__(self, folder):
        self.folder, self.processes = folder, []
        # The key's folder must be private, and the socket's accessible.
        folder.mkdir(mode=0o711)
        (folder / "private").mkdir(mode=0o700)
        for name in ("state", "spool"):
            (folder / name).mkdir()
        key = folder / "private/key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        host, user = socket.gethostname().split(".")[0], subprocess.check_output(["id", "-un"], text=True).strip()
        ports = [free_port(), free_port()]
        settings = {
            "ClusterName": "proof", "SlurmctldHost": f"{host}(127.0.0.1)", "SlurmUser": user, "SlurmdUser": user,
            "AuthType": "auth/munge",
            # A requeued job waits until its credential has expired.
            "AuthInfo": f"socket={folder}/socket,cred_expire=5",
            "SlurmctldPort": ports[0], "SlurmdPort": ports[1],
            "StateSaveLocation": folder / "state", "SlurmdSpoolDir": folder / "spool",
            "SlurmctldPidFile": folder / "controller.pid", "SlurmdPidFile": folder / "node.pid",
            "ProctrackType": "proctrack/pgid", "TaskPlugin": "task/none", "SchedulerType": "sched/builtin",
            "SelectType": "select/linear", "ReturnToService": 2, "KillWait": 10, "MpiDefault": "none",
            # The node may claim more cores than there are, so that four tasks run anywhere.
            "SlurmdParameters": "config_overrides",
        }
        lines = [f"{key}={value}" for key, value in settings.items()]
        lines += [f"NodeName=localhost NodeHostname={host} NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN",
                  "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP"]
        (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
        self.env = {**os.environ, "PATH": PATH, "SLURM_CONF": str(folder / "slurm.conf")}
        private = folder / "private"
        self.start("munged", "--foreground", f"--socket={folder}/socket", f"--key-file={key}", f"--log-file={private}/log",
                   f"--pid-file={private}/pid", f"--seed-file={private}/seed")
        wait(20, lambda: (folder / "socket").exists(), "munged opens its socket")
        self.start("slurmctld", "-D", "-f", folder / "slurm.conf")
        wait(20, lambda: self.ask("scontrol", "ping") and "UP" in self.ask("scontrol", "ping"), "slurmctld answers")
        self.start("slurmd", "-D", "-N", "localhost", "-f", folder / "slurm.conf")
        wait(30, lambda: "idle" in self.ask("sinfo", "--noheader", "--format=%t"), "the node is idle")

    def start(self, *words):
        log = (self.folder / f"{words[0]}.log").open("w")
        self.processes.append(subprocess.Popen([str(word) for word in words], env=self.env, stdout=log, stderr=log,
                                               stdin=subprocess.DEVNULL))

    def ask(self, *words):
        return subprocess.run(words, env=self.env, capture_output=True, text=True, timeout=20).stdout

    def end(self):
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def wait(seconds, is_so, what):
    until = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > until:
            sys.exit(f"timeout after {seconds} s: {what}")
        time.sleep(0.2)


def slurm(proof, expected):
    if not proof.has("SLURM", "munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol"):
        return
    cluster = Slurm(proof.folder / "slurm")
    try:
        proof.same("srun --ntasks 4", ["srun", "--ntasks", "4"], "srun", 4, expected, cluster.env)
        proof.same("srun --ntasks 2 --mpi=pmi2", ["srun", "--ntasks", "2", "--mpi=pmi2"], "pmi2", 2, expected, cluster.env)
        if shutil.which("mpirun.openmpi"):
            root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
            inside = ["salloc", "--ntasks", "4", "--quiet", "mpirun.openmpi", *root, "--oversubscribe", "-n", "4"]
            proof.same("salloc, and mpirun -n 4 of Open MPI in it", inside, "inside", 4, expected, cluster.env)
        requeued(proof, cluster)
    finally:
        cluster.end()


def requeued(proof, cluster):
    """A job that is asked to stop, is requeued and resumes with fewer tasks."""
    first = steps(proof.folder / "srun")
    seconds = sum(step["step_ms"] for step in first.values()) / 1e3
    # More steps than one allocation has time for.
    count = int(max(200, 5 * LIFE_SECONDS * len(first) / seconds))
    command = " ".join(f"'{word}'" for word in proof.words("requeued", count, f"log.every={max(1, count // 100)}"))
    job, output = proof.folder / "job.sh", proof.folder / "job.out"
    job.write_text(JOB % command)
    began = time.monotonic()
    submitted = subprocess.run(["sbatch", "--parsable", "--output", output, job], env=cluster.env, capture_output=True, text=True)
    number = submitted.stdout.strip()
    expected = proof.one("unbroken", count)

    def over():
        shown = cluster.ask("scontrol", "show", "job", number)
        return "JobState=COMPLETED" in shown or "JobState=FAILED" in shown or "JobState=TIMEOUT" in shown

    wait(900, over, "the job ends")
    lives, lines = ranks_of_lives(proof.folder / "requeued"), output.read_text()
    codes = [int(line.split()[1]) for line in lines.splitlines() if line.startswith("code ")]
    is_good = codes == [3] * (len(codes) - 1) + [0] and len(codes) > 1 and lives == [max(1, 4 >> life) for life in range(len(codes))]
    if not proof.say(is_good, "sbatch --signal=USR1 --requeue: code 3, requeued, fewer tasks",
                     f"{count} steps, ranks {lives}, codes {codes}, {time.monotonic() - began:.0f} s"):
        print(lines[-2000:], flush=True)
        return
    found = state(proof.folder / "requeued", count)
    proof.say(found == expected, "its last state is that of one process", f"state {found[:12]}")


CLAIMS = {"openmpi": openmpi, "mpich": mpich, "torchrun": torchrun, "slurm": slurm}


def main():
    p = argparse.ArgumentParser(description="Test that ranks train alike with every launcher.")
    p.add_argument("flatout", type=Path, help="the flatout binary, for example target/debug/flatout")
    p.add_argument("--only", nargs="+", choices=CLAIMS, default=list(CLAIMS), help="the launchers to test")
    p.add_argument("--keep", type=Path, help="a new folder to work in, which is kept")
    a = p.parse_args()
    if not a.flatout.is_file():
        p.error(f"there is no file {a.flatout}; build it with: cargo build")
    if a.keep:
        a.keep.mkdir(parents=True)
    folder = a.keep or Path(tempfile.mkdtemp(prefix="flatout-"))
    folder.chmod(0o711)
    # Variables of a launcher that runs this script must not reach its runs.
    for name in list(os.environ):
        if name.startswith(("SLURM", "PMI", "OMPI_", "MPI_", "FLATOUT_")) or name in ("RANK", "WORLD_SIZE"):
            del os.environ[name]
    proof = Proof(a.flatout.resolve(), folder.resolve())
    try:
        expected = proof.one("one", STEPS)
        for name in a.only:
            CLAIMS[name](proof, expected)
    finally:
        if not a.keep:
            shutil.rmtree(folder, ignore_errors=True)
    sys.exit(1 if proof.failed else 0)


if __name__ == "__main__":
    main()
