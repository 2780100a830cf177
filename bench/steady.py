"""Shared by benchmarks: runs flatout up to a step and returns the figures that are compared with the JSON line of a peer."""

import json
import subprocess
import sys
import time

WARM = 4


def run(command, steps):
    """Starts `flatout train ... --json` and ends it after a number of steps, of which the first four are warm-up. Returns the events of
    the others, the `start` event and the seconds from the start of the process to the end of the warm-up."""
    began = time.perf_counter()
    process = subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, text=True)
    events, first, start = [], None, {}
    for line in process.stdout:
        event = json.loads(line)
        if event["event"] == "start":
            start = event
        if event["event"] == "step":
            if event["step"] == WARM:
                first = time.perf_counter() - began
            if event["step"] >= WARM:
                events.append(event)
            if event["step"] == steps:
                break
    process.kill()
    process.wait()
    if len(events) < 4:
        sys.exit(f"flatout made {max(len(events) - 1, 0)} steady steps: {' '.join(command)}")
    return dict(warm=events[0], steps=events[1:], start=start, first_steady_seconds=first,
                memory=dict(peak_bytes=start["arena_bytes"], card_bytes=start["arena_bytes"] + start["driver_bytes"]))


def memory(results):
    """Peak memory of tensors (flatout: the arena; PyTorch: max_memory_allocated) and device memory of the process (flatout: the arena
    and the driver's share; PyTorch: everything that is not free at the end), of the first run."""
    return results[0]["peak_bytes"], results[0]["card_bytes"]


def memory_ratio(ours, theirs):
    """The ratios of both numbers, flatout's over the peer's."""
    if not all(theirs):
        return "memory not measured"
    return f"memory {ours[0] / theirs[0]:.2f}, of the card {ours[1] / theirs[1]:.2f}"


def gpu():
    """The GPU's name, driver and clock."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm", "--format=csv,noheader"]
    try:
        return subprocess.run(query, stdout=subprocess.PIPE, text=True).stdout.strip()
    except FileNotFoundError:
        return "no GPU"
