"""Tests ranks on GPUs on a machine with one GPU, with a line PASS or FAIL per check and a table of all at the end.

    cargo build --profile ship
    python bench/nccl_proof.py target/ship/flatout
    python bench/nccl_proof.py target/ship/flatout --only alone speed
    python bench/nccl_proof.py target/ship/flatout --only ranks --kinds bf16 --ranks 2 --steps 10 --levels gradients

Ranks share the GPU (`--share-gpu`): NCCL then carries their tensors over loopback, which shows that a run is correct, but nothing
about speed.

    alone     one rank that exchanges with itself by NCCL has the losses and the state of the plain run, to the bit
    speed     and at least 99.5% of its speed, in interleaved runs
    ranks     two and four ranks have the bits of as many lanes on one rank, for each level of sharding and kind of training
    groups    four ranks in groups of two (mesh.shards=2) have the bits of four lanes on one rank, for each level
    free      without deterministic=on two ranks have the losses of one, within rounding
    resume    four ranks, then two, then one: the bits of one rank
    kill      one rank of four is killed: all end within ten seconds, with one sentence that says so
    window    with the arena registered as a window of NCCL (wire_window=on), one rank and two have the same bits as without; if NCCL
              makes no window, one rank and two say so in a sentence
    torchrun  ranks that torchrun starts; skipped with a line if it is not installed

    Needs a GPU that `flatout doctor` calls usable, NCCL, and only Python's standard library. Exit code 0 if everything passes, 1 if
    something fails.
"""

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ranks_kill import children
from ranks_runs import events, saved, state, steps

SMALL = ["tiny", "model.layers=2", "model.context=64", "train.batch=16", "schedule.warmup_steps=2", "eval.rows=16", "eval.every=0",
         "checkpoint.every=0", "deterministic=on", "log.every=1"]
KINDS = {
    "bf16": ["precision=bf16", "model.dropout=0.1", "optimizer.clip=0.5", "train.ema=0.9"],
    "fp8": ["precision=fp8", "train.fp8_layers=all"],
    "lora": ["model.from=base", "adapter.kind=lora", "adapter.dropout=0.1"],
}
LEVELS = ["none", "optimizer", "gradients", "parameters"]
# The decoder of `pretrain-226m` with an eighth of its layers: it starts in seconds, and has the same ratio of gradient bytes to
# arithmetic.
LARGE = ["pretrain-226m", "data.source=synthetic", "model.layers=4", "train.batch=32", "schedule.warmup_steps=5", "eval.rows=0",
         "checkpoint.every=0", "log.every=1", "autotune=off"]
GONE_WITHIN = 10.0
# Without the first updates, in which clocks and caches settle.
SETTLED = 10


class Proof:
    def __init__(self, binary, folder, patience):
        self.binary, self.folder, self.patience, self.rows = binary, folder, patience, []

    def say(self, ok, what, numbers=""):
        print(f"{'PASS' if ok else 'FAIL'}  {what}{'  ' + numbers if numbers else ''}", flush=True)
        self.rows.append((ok, what, numbers))
        return ok

    def command(self, words, run, *rest):
        return [str(self.binary), "train", *words, "--run", run, "-q", *rest]

    def run(self, command, env=None):
        """Runs a command; returns the sentence of a failure, or an empty string."""
        try:
            done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=self.patience,
                                  env={**os.environ, **(env or {})}, stdin=subprocess.DEVNULL)
        except subprocess.TimeoutExpired as ended:
            message = (ended.stderr or b"").decode(errors="replace").strip().splitlines()[-3:]
            return f"still running after {self.patience} s: {message}"
        message = done.stderr.strip().splitlines()
        return "" if done.returncode == 0 else f"code {done.returncode}: {' | '.join(message[-4:])}"

    def train(self, words, run, *rest, env=None):
        return self.run(self.command(words, run, *rest), env)

    def path(self, run):
        return self.folder / run

    def losses(self, run):
        return {step: (event["loss"], event["grad_norm"]) for step, event in steps(self.path(run)).items()}

    def differs(self, run, other, count):
        """The difference of two runs with equal numbers of steps; empty if they are equal."""
        ours, theirs = self.losses(run), self.losses(other)
        if len(ours) != count:
            return f"{len(ours)} of {count} steps"
        for step, message in theirs.items():
            if ours.get(step) != message:
                return f"step {step}: {ours.get(step)} and not {message}"
        if state(self.path(run), count) != state(self.path(other), count):
            return "the same losses, and another state"
        return ""

    def start(self, run):
        starts = [event for event in events(self.path(run)) if event["event"] == "start"]
        return starts[-1] if starts else {}

    def world(self, run):
        return self.start(run).get("world", {})


def shared(ranks):
    return ["--gpus", str(ranks), "--share-gpu"] if ranks > 1 else []


def alone(p, a):
    for kind in ["bf16", "fp8"]:
        words = [*SMALL, *KINDS[kind], "train.steps=50"]
        failed = p.train(words, f"plain-{kind}") or p.train([*words, "wire=nccl"], f"alone-{kind}")
        differs = failed or p.differs(f"alone-{kind}", f"plain-{kind}", 50)
        wire = p.world(f"alone-{kind}").get("wire")
        if not differs and not str(wire).startswith("nccl "):
            differs = f"the wire is {wire}"
        p.say(not differs, f"one rank through NCCL, {kind}, 50 updates", differs or f"{wire}, the bits of the plain run")


def speed(p, a):
    words = [*LARGE, f"train.steps={a.speed_steps}", *a.speed_words]
    took = {"auto": [], "nccl": []}
    for turn in range(a.turns):
        for wire in (list(took) if turn % 2 == 0 else list(took)[::-1]):
            run = f"speed-{wire}-{turn}"
            failed = p.train([*words, f"wire={wire}"], run)
            if failed:
                return p.say(False, f"speed through NCCL, wire={wire}", failed)
            times = [event["step_ms"] for step, event in steps(p.path(run)).items() if step > SETTLED]
            took[wire].append(statistics.median(times))
            shutil.rmtree(p.path(run))
    plain, through = (statistics.median(took[wire]) for wire in took)
    share = plain / through
    each = ", ".join(f"{wire} {' '.join(f'{ms:.2f}' for ms in times)}" for wire, times in took.items())
    p.say(share >= 0.995, "speed of one rank through NCCL", f"{100 * share:.2f}% of the plain run's; ms a step: {each}")


def base(p):
    """Trains a base model for adapters."""
    if not p.path("base").exists():
        failed = p.train(["tiny", "model.layers=2", "train.steps=5", "eval.rows=0"], "base")
        if failed:
            sys.exit(f"the base does not train: {failed}")


def ranks(p, a):
    for kind in a.kinds:
        if kind == "lora":
            base(p)
        for count in a.ranks:
            words = [*SMALL, *KINDS[kind], f"train.steps={a.steps}", f"train.lanes={count}"]
            one = f"{kind}-lanes-{count}"
            failed = p.train(words, one)
            if failed:
                p.say(False, f"{kind}: {count} lanes on one rank", failed)
                continue
            for shard in a.levels:
                run = f"{kind}-{count}-{shard}"
                began = time.monotonic()
                differs = p.train([*words, f"shard={shard}"], run, *shared(count)) or p.differs(run, one, a.steps)
                world, seconds = p.world(run), time.monotonic() - began
                message = f"{world.get('wire')}, divides {world.get('shard')}, NCCL took {world.get('wire_bytes', 0) >> 20} MiB, {seconds:.0f} s"
                p.say(not differs, f"{kind}: {count} ranks, shard={shard}, {a.steps} updates", differs or message)


def groups(p, a):
    words = [*SMALL, *KINDS["bf16"], f"train.steps={a.steps}", "train.lanes=4"]
    failed = p.train(words, "groups-lanes")
    for shard in [level for level in a.levels if level != "none"]:
        run = f"groups-{shard}"
        differs = failed or p.train([*words, f"shard={shard}", "mesh.shards=2"], run, *shared(4)) or p.differs(run, "groups-lanes", a.steps)
        p.say(not differs, f"four ranks in groups of two, shard={shard}, {a.steps} updates", differs or f"{p.world(run).get('wire')}, the bits of one rank")


def free(p, a):
    words = [word for word in SMALL if word != "deterministic=on"]
    words = [*words, *KINDS["bf16"], f"train.steps={a.steps}", "train.lanes=2"]
    failed = p.train(words, "free-1") or p.train(words, "free-2", *shared(2))
    if failed:
        return p.say(False, "two ranks, order free", failed)
    pairs = [(p.losses("free-2")[step][0], loss) for step, (loss, _) in p.losses("free-1").items()]
    worst = max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)
    p.say(worst < 1e-3, f"two ranks, order free, {a.steps} updates", f"worst relative difference of a loss {worst:.1e} (bound 1e-3)")


def resume(p, a):
    total = 30
    words = [*SMALL, *KINDS["bf16"], "train.lanes=4", f"schedule.horizon_steps={total}"]
    failed = p.train([*words, f"train.steps={total}"], "unbroken") or p.train([*words, "train.steps=10"], "chain", *shared(4))
    for count, until in [(2, 20), (1, total)]:
        more = [str(p.binary), "resume", "chain", f"train.steps={until}", "-q", *shared(count)]
        failed = failed or p.run(more)
    differs = failed or p.differs("chain", "unbroken", total)
    p.say(not differs, "resumed with 4, 2 and 1 ranks", differs or f"the bits of one rank after {total} updates")


def kill(p, a):
    run, count, victim = "killed", 4, 2
    words = [*SMALL, *KINDS["bf16"], "train.lanes=4", "train.steps=100000", "checkpoint.every=20"]
    parent = subprocess.Popen(p.command(words, run, *shared(count)), cwd=p.folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                              text=True, stdin=subprocess.DEVNULL)
    began = time.monotonic()
    while saved(p.path(run)) < 20 and parent.poll() is None and time.monotonic() - began < p.patience:
        time.sleep(0.05)
    processes = children(parent.pid)
    if parent.poll() is not None or len(processes) != count or saved(p.path(run)) < 20:
        parent.kill()
        return p.say(False, "a killed rank", f"the run does not start: {parent.communicate()[1].strip()}")
    os.kill(processes[victim], signal.SIGKILL)
    killed = time.monotonic()
    try:
        message = parent.communicate(timeout=60)[1]
    except subprocess.TimeoutExpired:
        parent.kill()
        return p.say(False, "a killed rank", "the others are still running after 60 s")
    seconds = time.monotonic() - killed
    left = [process for process in processes if Path(f"/proc/{process}").exists()]
    is_reported = message.count("\n") == 1 and f"rank {victim} (" in message and "was killed by signal 9 (SIGKILL)" in message
    ok = parent.returncode == 1 and not left and seconds <= GONE_WITHIN and is_reported and "--gpus 4 --share-gpu" in message
    p.say(ok, "one rank of four is killed", f"code {parent.returncode}, all gone after {seconds:.1f} s, left {left}: {message.strip()}")


def window(p, a):
    words = [*SMALL, *KINDS["bf16"], f"train.steps={a.steps}", "wire=nccl"]
    for count in [1, 2]:
        lanes, [plain, windowed] = f"train.lanes={count}", [f"window-{count}-{state}" for state in ("off", "on")]
        failed = p.train([*words, lanes], plain, *shared(count)) or p.train([*words, lanes, "wire_window=on"], windowed, *shared(count))
        differs = failed or p.differs(windowed, plain, a.steps)
        active = [p.start(run).get("switches", {}).get("wire_window") for run in (plain, windowed)]
        if not differs and active != ["off", "on"]:
            differs = f"the runs report wire_window={active}"
        taken = [p.world(run).get("wire_bytes", 0) >> 20 for run in (plain, windowed)]
        message = f"the bits of the run without; NCCL took {taken[0]} MiB without and {taken[1]} with"
        p.say(not differs, f"a window, {count} rank{'s' if count > 1 else ''}, {a.steps} updates", differs or message)
        without = {"NCCL_WIN_ENABLE": "0", "NCCL_LOCAL_REGISTER": "0"}
        refused = p.train([*words, lanes, "wire_window=on"], f"refused-{count}", *shared(count), env=without)
        p.say("NCCL made no window of the arena" in refused, f"no window, {count} rank{'s' if count > 1 else ''}", refused or "it trained")


def torchrun(p, a):
    found = a.torchrun or shutil.which("torchrun")
    if not found:
        print("torchrun is not installed: skipped", flush=True)
        return
    words = [*SMALL, *KINDS["bf16"], f"train.steps={a.steps}", "train.lanes=2"]
    line = " ".join([str(p.binary), "train", *words, "--run", "torchrun", "--share-gpu", "-q"])
    apart = "NCCL_HOSTID=rank-$RANK NCCL_SOCKET_IFNAME=lo exec "
    command = [*found.split(), "--no-python", "--nproc-per-node", "2", "--master-port", "29611", "--", "sh", "-c", apart + line]
    failed = p.train(words, "torchrun-lanes") or p.run(command)
    differs = failed or p.differs("torchrun", "torchrun-lanes", a.steps)
    world = p.world("torchrun")
    p.say(not differs, "two ranks of torchrun", differs or f"{world.get('wire')}, {world.get('environment')}")


PARTS = {"alone": alone, "ranks": ranks, "groups": groups, "free": free, "resume": resume, "kill": kill, "window": window, "torchrun": torchrun, "speed": speed}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", type=Path)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--levels", nargs="+", choices=LEVELS, default=LEVELS, help="levels of sharding")
    parser.add_argument("--steps", type=int, default=20, help="updates of each compared run")
    parser.add_argument("--turns", type=int, default=4, help="interleaved runs of each kind for the comparison of speed")
    parser.add_argument("--speed-steps", type=int, default=60)
    parser.add_argument("--speed-words", nargs="*", default=[], help="further overrides of these runs")
    parser.add_argument("--patience", type=int, default=300, help="timeout of a run in seconds")
    parser.add_argument("--torchrun", help="the torchrun command; by default the one on the path")
    parser.add_argument("--keep", type=Path, help="a folder to keep the runs in; otherwise they are removed")
    args = parser.parse_args()
    if not args.binary.is_file():
        parser.error(f"there is no file {args.binary}; build it with: cargo build --profile ship")
    with tempfile.TemporaryDirectory(prefix="flatout-") as scratch:
        folder = (args.keep or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        proof = Proof(args.binary.resolve(), folder, args.patience)
        for part in args.only:
            began = time.monotonic()
            PARTS[part](proof, args)
            print(f"      {part} took {time.monotonic() - began:.0f} s", flush=True)
    print("\n| check | holds | |\n|---|---|---|")
    for ok, what, numbers in proof.rows:
        print(f"| {what} | {'yes' if ok else 'NO'} | {numbers} |")
    sys.exit(0 if all(ok for ok, _, _ in proof.rows) else 1)


if __name__ == "__main__":
    main()
