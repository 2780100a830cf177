"""Tests the guarantees of the CUDA backend on this machine, with a line PASS or FAIL per check and its numbers.

    cargo build --profile ship
    python bench/gpu_proof.py target/ship/flatout
    python bench/gpu_proof.py target/ship/flatout --only resume --keep /tmp/proof

Needs a GPU that `flatout doctor` calls usable, and only Python's standard library. Exit code 0 if everything passes, 1 if something
fails, 2 if there is no usable GPU.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# A decoder small enough to be trained on the CPU for comparison, in the proportions of the recipe.
FOUR_LAYERS = ["pretrain-226m", "data.source=synthetic", "model.layers=4", "model.context=128", "train.batch=4",
               "train.micro_batch=2", "schedule.warmup_steps=25"]
TINY = ["tiny"]
SHORT = ["tiny", "schedule.warmup_steps=1", "eval.rows=0", "checkpoint.every=0"]
# Long enough to be killed during the run, saved often enough to be resumed.
STEPS = 6000
KILLED = ["tiny", f"train.steps={STEPS}", "train.batch=8", "checkpoint.every=50", "eval.every=2000"]


class Proof:
    def __init__(self, binary, folder, seed):
        self.binary, self.folder, self.failed, self.passed = binary, folder, 0, 0
        self.cache = folder / "cache"
        self.draw = random.Random(seed)

    def say(self, ok, what, numbers=""):
        print(f"{'PASS' if ok else 'FAIL'}  {what}{'  ' + numbers if numbers else ''}", flush=True)
        self.passed, self.failed = self.passed + bool(ok), self.failed + (not ok)

    def environment(self, **more):
        return {**os.environ, "FLATOUT_CACHE": str(self.cache), **more}

    def command(self, words, run=None, *rest):
        where = ["--run", str(self.folder / run)] if run else []
        return [str(self.binary), words[0], *words[1:], *where, *rest]

    def run(self, words, run=None, *rest, env=None, binary=None):
        command = self.command(words, run, *rest)
        if binary:
            command[0] = str(binary)
        return subprocess.run(command, env=env or self.environment(), capture_output=True, text=True)

    def train(self, recipe, run, *overrides, env=None, binary=None, form=("--json",)):
        words = ["train", *recipe, "log.every=1", *overrides]
        return self.run(words, run, *form, env=env, binary=binary)

    def events(self, run):
        log = self.folder / run / "events.jsonl"
        lines = log.read_text().splitlines() if log.exists() else []
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]

    def losses(self, run):
        """The losses by step; the last of several lines for one step counts."""
        steps = {e["step"]: e["loss"] for e in self.events(run) if e["event"] == "step"}
        return [steps[step] for step in sorted(steps)]

    def warnings(self, run):
        return [e["message"] for e in self.events(run) if e["event"] == "warning"]

    def start(self, run):
        return [e for e in self.events(run) if e["event"] == "start"][-1]

    def state(self, run):
        """The last checkpoint's weights, moments, counters and cursor."""
        folders = sorted((self.folder / run / "checkpoints").glob("step-*"), key=lambda p: int(p.name.split("-")[1]))
        files = [(folders[-1] / name).read_bytes() for name in ["state.safetensors", "state.json"]]
        return folders[-1].name, hashlib.sha256(b"".join(files)).hexdigest()

    def done(self, result, what):
        if result.returncode != 0:
            self.say(False, what, f"exit {result.returncode}: {result.stderr.strip().splitlines()[-1:]}")
        return result.returncode == 0


def worst(a, b):
    if len(a) != len(b) or not a:
        return float("inf")
    return max((abs(x - y) / abs(y) if x is not None and y else float("inf")) for x, y in zip(a, b))


def curves(p):
    """FP32 on the GPU follows FP32 on the CPU."""
    for name, recipe in [("tiny", TINY), ("pretrain-226m of four layers", FOUR_LAYERS)]:
        common = ["precision=fp32", "train.steps=50", "eval.rows=0", "checkpoint.every=0"]
        for backend in ["cuda", "cpu"]:
            run = f"curve-{recipe[0]}-{backend}"
            if not p.done(p.train(recipe, run, *common, f"backend={backend}"), f"{name}: 50 steps on {backend}"):
                break
        else:
            gpu, cpu = (p.losses(f"curve-{recipe[0]}-{backend}") for backend in ["cuda", "cpu"])
            off = worst(gpu, cpu)
            p.say(off < 1e-4 and len(gpu) == 50, f"{name}: 50 FP32 losses, GPU against CPU",
                  f"worst relative difference {off:.1e} (bound 1e-4), loss {cpu[0]:.4f} to {cpu[-1]:.4f}")


def killed(p, run, extra, kills):
    """Trains to the end through SIGKILLs at random moments; returns the number that hit a living process."""
    alive, tries = 0, 0
    while alive < kills and tries < 4 * kills:
        tries += 1
        command = p.command(["train", *KILLED, "log.every=1", *extra], run, "--resume", "auto", "--json")
        process = subprocess.Popen(command, env=p.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        # From the start of the process to some point in training, however fast the GPU is: half of the kills come
        # after this process has saved.
        saves = lambda: sum(e["event"] == "saved" for e in p.events(run))
        before = saves()
        time.sleep(p.draw.uniform(0.2, 1.5))
        while tries % 2 == 0 and process.poll() is None and saves() <= before:
            time.sleep(0.02)
        if process.poll() is None:
            process.kill()
            alive += 1
        process.wait()
        if any(e["event"] == "end" for e in p.events(run)):
            break
    result = p.run(["train", *KILLED, "log.every=1", *extra], run, "--resume", "auto", "--json")
    return alive, result


def resume(p):
    """With deterministic=on a killed run ends with the bits of an uninterrupted one; without, it resumes and says so."""
    exact = ["deterministic=on"]
    if not p.done(p.train(KILLED, "unbroken", *exact), "the unbroken run"):
        return
    kills, result = killed(p, "broken", exact, p.kills)
    if p.done(result, "the killed run's last life"):
        resumed = sum(e["event"] == "resume" for e in p.events("broken"))
        same = p.losses("broken") == p.losses("unbroken")
        p.say(same, "deterministic=on: losses after SIGKILL", f"{kills} kills, {resumed} resumes, {len(p.losses('broken'))} losses")
        a, b = p.state("broken"), p.state("unbroken")
        p.say(a == b, "deterministic=on: weights, moments and counters after SIGKILL", f"{a[0]} {a[1][:16]} and {b[0]} {b[1][:16]}")
        start = p.start("broken")
        p.say(start["not_deterministic"] == [] and start["switches"]["autotune"] == "off",
              "deterministic=on: every kernel is deterministic, and nothing is timed", str(start["switches"]["autotune"]))
    kills, result = killed(p, "loose", [], 2)
    if p.done(result, "a killed run without deterministic=on"):
        losses, reported = p.losses("loose"), [w for w in p.warnings("loose") if w.startswith("resumed;")]
        p.say(len(losses) == STEPS and all(x is not None for x in losses), "without it: all state resumes",
              f"last loss {losses[-1]:.4f}, unbroken {p.losses('unbroken')[-1]:.4f}")
        named = p.start("loose")["not_deterministic"]
        p.say(bool(reported) and bool(named) and all(kernel in reported[-1] for kernel in named),
              "without it: the warning names the kernels", str(reported[-1:] or "no warning"))


def environment(p):
    """Variables that change what NVIDIA's libraries compute are cleared, with a line for each."""
    hostile = {"NVIDIA_TF32_OVERRIDE": "1", "CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLAS_EMULATE_SINGLE_PRECISION": "1",
               "CUBLAS_EMULATION_STRATEGY": "eager"}
    common = ["precision=fp32", "deterministic=on", "train.steps=20"]
    # With --json, the lines for people are not printed.
    plain = p.train(SHORT, "plain", *common, form=())
    set_ = p.train(SHORT, "hostile", *common, env=p.environment(**hostile), form=())
    if p.done(plain, "20 steps") and p.done(set_, "20 steps with hostile variables"):
        p.say(p.losses("plain") == p.losses("hostile"), "hostile variables: equal losses", f"{len(p.losses('plain'))} losses")
        for name in hostile:
            line = [l for l in set_.stderr.splitlines() if l.startswith(name) and "cleared" in l]
            p.say(bool(line), f"hostile variables: {name} is cleared with a line")


def too_large(p):
    """A plan that does not fit is refused before anything runs."""
    words = ["data.source=synthetic", "train.batch=8192", "train.micro_batch=8192", "eval.rows=0"]
    began = time.perf_counter()
    result = p.train(["pretrain-226m"], "large", *words)
    last = (result.stderr.strip().splitlines() or [""])[-1]
    reported = "GiB:" in last and "activations" in last and "is the largest that fits" in last
    p.say(result.returncode == 2 and reported and not (p.folder / "large").exists(),
          "a plan too large: exit 2, the breakdown, the largest micro-batch",
          f"exit {result.returncode} after {time.perf_counter() - began:.1f} s: {last}")


def libraries(p):
    report = json.loads(p.run(["doctor"], None, "--json").stdout)
    return {l["library"]: Path(l["path"]) for l in report["libraries"] if l["verdict"].startswith("used")}


def attention(p):
    """Where cuDNN does not support the attention, flatout's kernel is used, and the run says so."""
    common = ["precision=bf16", "train.steps=10"]
    if p.done(p.train(SHORT, "odd-heads", *common, "model.head_size=20"), "heads of 20"):
        reported, losses = p.start("odd-heads").get("attention") or "", p.losses("odd-heads")
        p.say("cuDNN" not in reported.split(",")[0] and reported != "" and len(losses) == 10,
              "heads that cuDNN does not support: flatout's kernels run them, and the start says so", reported)
    found = libraries(p)
    bare = p.folder / "bare"
    (bare / "lib").mkdir(parents=True)
    for library, pattern in [("NVRTC", "libnvrtc*"), ("cuBLASLt", "libcublasLt*")]:
        for file in found[library].parent.glob(pattern):
            (bare / "lib" / file.name).symlink_to(file.resolve())
    (bare / "bin").mkdir()
    binary = Path(shutil.copy(p.binary, bare / "bin" / "flatout"))
    gone = ["VIRTUAL_ENV", "CONDA_PREFIX", "CUDA_HOME", "CUDA_PATH", "LD_LIBRARY_PATH"]
    env = {k: v for k, v in p.environment(FLATOUT_CUDA_PATH=str(bare / "lib")).items() if k not in gone}
    doctor = subprocess.run([binary, "doctor", "--json"], env=env, capture_output=True, text=True)
    here = [l for l in json.loads(doctor.stdout)["libraries"] if l["library"] == "cuDNN" and l["verdict"].startswith("used")]
    if here:
        print(f"SKIP  without cuDNN: the system's own cannot be hidden  {here[0]['path']}", flush=True)
    elif p.done(p.train(SHORT, "no-cudnn", *common, env=env, binary=binary), "without cuDNN: 10 steps"):
        reported = [w for w in p.warnings("no-cudnn") if "cuDNN is missing" in w]
        p.say(bool(reported) and len(p.losses("no-cudnn")) == 10, "without cuDNN: it trains, with a warning", str(reported[:1]))


def cache(p):
    """Two processes fill an empty cache concurrently; a damaged entry is rebuilt; a second start compiles and times nothing."""
    p.cache = p.folder / "shared-cache"
    common = ["train", *SHORT, "train.steps=5"]
    both = [subprocess.Popen(p.command(common, f"both-{i}", "--json"), env=p.environment(), stdout=subprocess.DEVNULL,
                             stderr=subprocess.PIPE, text=True) for i in range(2)]
    codes = [(process.communicate()[1].strip().splitlines()[-1:], process.returncode) for process in both]
    p.say(all(code == 0 for _, code in codes), "two processes with an empty cache", str([code for _, code in codes]))
    kept = sorted((p.cache / "kernels").glob("*.cubin"))
    left = [f.name for f in p.cache.rglob("*.part")]
    p.say(bool(kept) and not left, "the cache is whole", f"{len(kept)} kernels, {len(left)} half-written files")

    def start(run):
        result = p.run(common, run, "--json")
        return p.start(run)["prepared"] if p.done(result, run) else {}

    warm = start("warm")
    p.say(warm.get("kernels_compiled") == 0 and warm.get("products_timed") == 0 and warm.get("products_remembered", 0) > 0,
          "a second start compiles and times nothing", str(warm))
    if kept:
        damaged = kept[len(kept) // 2].read_bytes()
        kept[len(kept) // 2].write_bytes(damaged[:-7])
    products = sorted((p.cache / "products").glob("*.txt"))
    if products:
        content = bytearray(products[0].read_bytes())
        content[-2] ^= 1
        products[0].write_bytes(bytes(content))
    again = start("damaged")
    p.say(again.get("kernels_compiled") == 1 and again.get("products_timed") == 1, "damaged entries are made again", str(again))
    p.say(bool(kept) and kept[len(kept) // 2].read_bytes() == damaged, "and are whole on disk")


def first_step(p):
    """Seconds from the start of the process to the first reported step of pretrain-226m."""
    p.cache = p.folder / "first-cache"
    words = ["train", "pretrain-226m", "data.source=synthetic", "train.steps=3", "train.batch=16", "train.micro_batch=16",
             "schedule.warmup_steps=1", "eval.rows=0", "checkpoint.every=0", "log.every=1"]
    for name, bound in [("cold", 30.0), ("warm", 5.0)]:
        began, first = time.perf_counter(), None
        process = subprocess.Popen(p.command(words, f"first-{name}", "--json"), env=p.environment(), text=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for line in process.stdout:
            if first is None and '"event":"step"' in line:
                first = time.perf_counter() - began
        process.wait()
        first = float("inf") if first is None or process.returncode else first
        p.say(first < bound, f"first step with a {name} cache", f"{first:.1f} s (bound {bound:.0f} s)")


def times(p):
    """Steps are timed on the device: they add up to the run, none is faster than the device's peak, and the last takes as long as the
    others."""
    words = ["pretrain-226m", "data.source=synthetic", "train.batch=64", "train.micro_batch=8", "train.steps=30",
             "schedule.warmup_steps=1", "eval.rows=0", "checkpoint.every=0"]
    if not p.done(p.train(words, "times"), "30 steps of 8 micro-batches"):
        return
    events = p.events("times")
    steps = [e for e in events if e["event"] == "step"]
    ms = sorted(e["step_ms"] for e in steps[1:])
    middle = ms[len(ms) // 2]
    p.say(0.9 < ms[0] / middle and ms[-1] / middle < 1.2, "every step after the first takes about as long",
          f"{ms[0]:.1f} to {ms[-1]:.1f} ms, the last {steps[-1]['step_ms']:.1f}")
    wall = steps[-1]["time"] - steps[0]["time"]
    share = sum(e["step_ms"] for e in steps[1:]) / 1e3 / wall
    p.say(0.95 < share < 1.05, "steps add up to the run", f"{100 * share:.1f}% of {wall:.2f} s between the first and the last")
    end = [e for e in events if e["event"] == "end"][-1]
    took = end["time"] - p.start("times")["time"]
    p.say(0.95 < end["tokens_per_second"] * took / steps[-1]["tokens"] < 1.05, "tokens per second of the `end` event are tokens over time",
          f"{end['tokens_per_second']:.0f}, {steps[-1]['tokens']} in {took:.2f} s")
    p.say(all(e.get("mfu", 0) < 1 for e in steps), "no step is faster than the device's peak",
          f"MFU of at most {100 * max(e.get('mfu', 0) for e in steps):.1f}%")


PROOFS = {"curves": curves, "times": times, "resume": resume, "environment": environment, "too-large": too_large, "attention": attention,
          "cache": cache, "first-step": first_step}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", type=Path)
    parser.add_argument("--only", choices=PROOFS, help="only one part")
    parser.add_argument("--keep", type=Path, help="an empty folder for the runs, kept")
    parser.add_argument("--kills", type=int, default=8, help="kills of the deterministic run")
    parser.add_argument("--seed", type=int, default=1, help="seed of the moments of the kills")
    a = parser.parse_args()
    binary = a.binary.resolve()
    usable = json.loads(subprocess.run([binary, "doctor", "--json"], capture_output=True, text=True).stdout)["gpu"]
    if usable["usable"] is not True:
        print(f"there is no usable GPU: {usable['is']}", file=sys.stderr)
        return 2
    print(usable["is"], flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = a.keep.resolve() if a.keep else Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        proof = Proof(binary, folder, a.seed)
        proof.kills = a.kills
        for name, prove in PROOFS.items():
            if a.only in (None, name):
                began = time.perf_counter()
                try:
                    prove(proof)
                except Exception as why:  # If one check cannot be made, the others still are.
                    proof.say(False, f"{name} could not be made", f"{type(why).__name__}: {why}")
                print(f"      {name} took {time.perf_counter() - began:.0f} s", flush=True)
        print(f"{proof.passed} passed, {proof.failed} failed")
    return 1 if proof.failed else 0


if __name__ == "__main__":
    sys.exit(main())
