"""Tests the page of `flatout watch` in a real browser, with a line PASS or FAIL per check.

    cargo build
    apt-get install chromium                   # Debian's name
    pip install websockets
    python bench/watch_proof.py target/debug/flatout
    python bench/watch_proof.py target/debug/flatout --shots docs/images

A run trains while the page is open; it is killed and resumed. Names and texts that contain markup must be shown as text. Also tests light
and dark themes, a phone's width, the keyboard, a sweep, a confusion matrix, samples, zooming into a long log, a folder that disappears and
a server that is restarted. `--shots` keeps screenshots of the views. Without Chromium or `websockets` it prints a line and exits with 0.
Exit code 1 if something fails.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import browser
from browser import Browser, wait

SMALL = ["model.layers=1", "model.width=64", "train.batch=4", "eval.rows=8"]
RATES = "rates/lr={}e-3_layers=2"
EVIL = "<img src=x onerror=document.title='broken-in'>"


class Proof:
    def __init__(self, binary, folder, shots):
        self.binary, self.folder, self.shots, self.failed = binary, folder, shots, 0
        self.children = []

    def say(self, ok, what, numbers=""):
        print(f"{'PASS' if ok else 'FAIL'}  {what}{'  ' + str(numbers) if numbers else ''}", flush=True)
        self.failed += not ok

    def run(self, *words):
        """Starts a command in the folder, in its own process group."""
        child = subprocess.Popen([self.binary, *words], cwd=self.folder, stdout=subprocess.PIPE,
                                 stderr=subprocess.DEVNULL, text=True, start_new_session=True)
        self.children.append(child)
        return child

    def serve(self, *words):
        """A server, and its address."""
        return self.serve_folder("runs", *words)

    def serve_folder(self, folder, *words):
        child = self.run("watch", folder, "--json", *words)
        received = ""
        while "}" not in received:
            line = child.stdout.readline()
            if not line:
                sys.exit("flatout watch ended without an address")
            received += line
        return child, json.loads(received)["url"]

    def finish(self, *words):
        child = self.run(*words)
        child.communicate()
        return child.returncode

    def end(self):
        for child in self.children:
            if child.poll() is None:
                child.kill()
                child.wait()

    def shot(self, page, name):
        if self.shots:
            time.sleep(0.6)
            path = self.shots / f"watch-{name}.png"
            page.picture(path)
            small(path)


def small(path):
    """Reduces a picture to 256 colours, a third of its bytes, if Pillow is installed."""
    try:
        from PIL import Image
    except ImportError:
        return
    Image.open(path).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


def row(name):
    """A JavaScript expression: the text of a run's row in the list."""
    return f"[...document.querySelectorAll('.runs .name')].find((e) => e.title === {json.dumps(name)})?.textContent ?? ''"


def logs(folder):
    """Writes logs of two runs: one with a hostile name and hostile texts, one with classes."""
    evil = folder / "runs" / EVIL.replace("/", "")
    classes = folder / "runs" / "pets-1"
    for run in (evil, classes):
        run.mkdir(parents=True)
        (run / "config.toml").write_text('recipe = "tiny"\n')
    now = time.time() - 600
    start = {"event": "start", "recipe": EVIL, "steps": 40, "time": now, "switches": {EVIL: EVIL}, "auto": {EVIL: EVIL}, "arena_bytes": 1}

    def step(n, loss):
        return {"event": "step", "step": n, "loss": loss, "grad_norm": 1, "lr": 0.001, "tokens": 1000 * n, "samples": n, "step_ms": 10,
                "tokens_per_second": 5e4, "samples_per_second": 50, "time": now + n}

    samples = [{"event": "sample", "step": 40, "prompt": EVIL, "text": EVIL + "\x1b[2J"},
               {"event": "sample", "step": 40, "prompt": EVIL, "image": "../config.toml", "predicted": EVIL, "probability": 0.5, "truth": EVIL, "is_right": False}]
    lines = [start, *(step(n, 3 - n / 20) for n in range(1, 41)), {"event": "warning", "message": EVIL}, *samples]
    (evil / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (evil / "samples.jsonl").write_text(json.dumps({"step": 40, "prompt": EVIL, "text": EVIL}) + "\n")
    matrix = [[46, 3, 1], [4, 41, 5], [0, 6, 44]]
    evals = [{"event": "eval", "step": n, "loss": 1.2 - n / 60, "metrics": {"accuracy": 0.5 + n / 100, "mean": {"precision": 0.8, "recall": 0.8, "f1": 0.48 + n / 100},
              "confusion": matrix}} for n in (10, 20, 30, 40)]
    lines = [{**start, "recipe": "pets", "switches": {}, "auto": {}}, *(step(n, 1.5 - n / 40) for n in range(1, 41)), *evals,
             {"event": "end", "status": "done", "steps": 40, "loss": 0.5, "tokens_per_second": 5e4}]
    (classes / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return evil.name


def choose(page, *names):
    """Selects exactly these runs."""
    page.run("[...document.querySelectorAll('.tally button')].at(-1).click()")
    wait(lambda: page.run("document.querySelectorAll('.runs input:checked').length") == 0, "no run is drawn")
    for name in names:
        wait(lambda: page.run(f"""(() => {{
            const name = [...document.querySelectorAll('.runs .name')].find((e) => e.title === {json.dumps(name)});
            const box = name?.parentElement.querySelector('input');
            if (box && !box.checked) box.click();
            return Boolean(box);
        }})()"""), f"{name} is in the list")
    page.run(f"[...document.querySelectorAll('.runs .name')].find((e) => e.title === {json.dumps(names[0])})?.click()")


def texts(page):
    return page.run("document.getElementById('view').innerText")


def view(page, name):
    page.run(f"document.querySelector('#tabs a[href=\"#{name}\"]').click()")


def live(proof, page, name):
    """The page follows a run through a kill and its resumption."""
    step_of = lambda: int((page.run(row(name)).replace(",", "").split("/")[0].split() or ["0"])[-1].strip("abcdefghijklmnopqrstuvwxyz") or 0)
    trained = proof.run("train", "tiny", *SMALL, "train.steps=100000", "checkpoint.every=20", "eval.every=50", "--run", f"runs/{name}", "-q")
    wait(lambda: "running" in page.run(row(name)), "the run is in the list", 180)
    choose(page, name)
    first = wait(step_of, "it has a step", 180)
    then = wait(lambda: (now := step_of()) > first + 5 and now, "its steps go on", 180)
    proof.say(True, "a new run appears by itself and is followed", f"step {first}, then {then}")
    wait(lambda: page.run("document.querySelectorAll('.chart').length") >= 4, "charts are drawn")
    # A chart draws with the browser's next frame.
    ink = lambda: page.run("""(() => { const c = document.querySelector('.chart canvas'); const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
        let n = 0; for (let i = 3; i < d.length; i += 4) n += d[i] > 0; return n; })()""")
    inked = wait(lambda: (pixels := ink()) > 500 and pixels, "its loss is drawn")
    proof.say(True, "its loss is drawn", f"{inked} pixels")
    before = page.picture()
    wait(lambda: step_of() > then + 10, "more steps", 180)
    time.sleep(0.5)
    proof.say(page.picture() != before, "the picture changes with it")
    saved = proof.folder / "runs" / name / "checkpoints"
    wait(lambda: any(saved.glob("step-*/complete")), "a checkpoint", 180)
    os.killpg(trained.pid, signal.SIGKILL)
    trained.wait()
    wait(lambda: "crashed" in page.run(row(name)), "its crash is shown")
    proof.say(True, "its crash is shown", page.run(row(name)))
    died = step_of()
    again = proof.run("resume", f"runs/{name}", "-q")
    wait(lambda: "running" in page.run(row(name)) and step_of() > died + 3, "it is resumed", 180)
    proof.say(True, "it is followed after it is resumed", page.run(row(name)))
    again.send_signal(signal.SIGTERM)
    again.wait()
    wait(lambda: "stopped" in page.run(row(name)), "it was stopped")
    proof.say(True, "a stopped run is shown as stopped")


def looks(proof, page, name):
    """Tests views, themes, widths and keys."""
    choose(page, "tiny-1", RATES.format(3), RATES.format(1))
    wait(lambda: page.run("document.querySelectorAll('.legend span').length") >= 3, "three runs are drawn")
    proof.shot(page, "curves")
    page.run("[...document.querySelectorAll('.segments button')].find((b) => b.textContent === 'Tokens').click()")
    page.run("[...document.querySelectorAll('.segments button')].find((b) => b.textContent === 'Log').click()")
    pressed = page.run("[...document.querySelectorAll('.segments button[aria-pressed=true]')].map((b) => b.textContent).join()")
    proof.say(pressed == "Tokens,Log", "axes change", pressed)
    page.run("[...document.querySelectorAll('.segments button')].find((b) => b.textContent === 'Step').click()")
    page.run("[...document.querySelectorAll('.segments button')].find((b) => b.textContent === 'Linear').click()")

    view(page, "run")
    choose(page, "tiny-1")
    wait(lambda: "Memory over the step" in texts(page), "the memory of the plan")
    shown = texts(page)
    parts = ["Memory over the step", "Time by kernel", "Switches", "Samples", "Settings"]
    proof.say(all(part in shown for part in parts), "a run has its memory, kernels, switches, samples and settings")
    proof.shot(page, "run")
    view(page, "sweeps")
    wait(lambda: "Parallel coordinates" in texts(page), "the sweep")
    proof.say(texts(page).count("layers=") >= 6, "a sweep has its table and coordinates")
    proof.shot(page, "sweep")
    view(page, "curves")
    choose(page, "tiny-1", RATES.format(3), RATES.format(1))
    for scheme, wanted in (("dark", "rgb(15, 18, 22)"), ("light", "rgb(255, 255, 255)")):
        page.scheme(scheme)
        wait(lambda: page.run("getComputedStyle(document.body).backgroundColor") == wanted, f"the page is {scheme}")
        if scheme == "dark":
            proof.shot(page, "dark")
    page.run("document.getElementById('theme').click()")
    toggled = page.run("document.documentElement.dataset.theme")
    page.run("document.getElementById('theme').click()")
    proof.say(toggled == "dark", "its theme is the system's, or the chosen one")

    evil = logs(proof.folder)
    view(page, "run")
    choose(page, "pets-1")
    wait(lambda: "Confusion matrix" in texts(page), "the confusion matrix")
    proof.say("131 of 150 right" in texts(page), "classes have their confusion matrix")
    view(page, "compare")
    choose(page, "tiny-1", name)
    wait(lambda: "train.steps" in texts(page), "what differs")
    proof.say(True, "runs are compared by their differences")
    hostile(proof, page, evil)

    view(page, "curves")
    choose(page, "tiny-1", name)
    page.size(390, 844, 2, True)
    wait(lambda: page.run("getComputedStyle(document.getElementById('menu')).display") != "none", "a phone has a menu")
    page.run("document.getElementById('menu').click()")
    is_open = page.run("document.getElementById('side').offsetHeight > 0")
    page.run("document.getElementById('menu').click()")
    widths = {}
    for one in ("curves", "run", "compare", "sweeps"):
        view(page, one)
        time.sleep(0.5)
        widths[one] = page.run("document.documentElement.scrollWidth")
    view(page, "curves")
    proof.say(is_open and max(widths.values()) <= 390, "a phone shows every view without scrolling sideways", widths)
    proof.shot(page, "phone")
    page.size(1360, 860)

    page.run("document.activeElement.blur(); window.scrollTo(0, 0)")
    reached = set()
    for _ in range(40):
        page.key("Tab", 9)
        reached.add(page.run("(document.activeElement.tagName + '.' + (document.activeElement.type ?? '')).toLowerCase()"))
    wanted = {"a.", "input.search", "input.checkbox", "button.button", "input.range", "canvas."}
    proof.say(wanted <= reached, "everything can be reached by the keyboard", sorted(wanted - reached) or "")
    page.run("document.querySelector('.chart canvas').focus()")
    page.key("ArrowRight", 39)
    proof.say(page.run("!document.querySelector('.tip').hidden"), "arrow keys read a curve")
    page.run("document.activeElement.blur()")

    view(page, "run")
    choose(page, "tiny-1")
    wait(lambda: page.run("document.querySelector('main input[type=text]')?.value") == "tiny-1", "the field for its name")
    page.run("""(() => { const i = document.querySelector('main input[type=text]'); i.value = 'my <b>best</b>'; i.dispatchEvent(new Event('change')); })()""")
    wait(lambda: "my <b>best</b>" in page.run(row("tiny-1")), "the new name is in the list")
    page.call("Page.reload")
    wait(lambda: "my <b>best</b>" in page.run(row("tiny-1")), "the new name stays")
    proof.say(True, "a chosen name is stored in the browser, as text")


def hostile(proof, page, evil):
    """Tests a run whose name and texts contain markup, and whose picture has a path out of its folder."""
    view(page, "run")
    before = len(page.trouble)
    page.run("performance.clearResourceTimings()")
    choose(page, evil)
    wait(lambda: "Samples" in texts(page) and EVIL in texts(page), "the hostile texts are shown as texts")
    title = page.run("document.title")
    images = page.run("[...document.querySelectorAll('main img, aside img')].filter((e) => !e.src.includes('/api/sample') || e.naturalWidth > 0).length")
    proof.say("broken-in" != title and images == 0 and texts(page).count(EVIL) > 4, "names, texts and samples do not become markup")
    # The browser logs that the picture is missing without its address, which is in the page's list of resources.
    absent = "performance.getEntriesByType('resource').filter((e) => e.responseStatus === 404).map((e) => e.name)"
    page.run("document.querySelector('.examples img').scrollIntoView()")
    wait(lambda: page.run(absent) and any("404" in one for one in page.trouble[before:]), "the hostile picture is asked for")
    page.run("window.scrollTo(0, 0)")
    view(page, "curves")
    addresses = set(page.run(absent))
    is_alone = all("/api/sample?" in one and one.endswith("&image=..%2Fconfig.toml") for one in addresses)
    proof.say(is_alone, "a picture with a path out of its folder is missing, and nothing else", "" if is_alone else addresses)
    if is_alone:
        page.trouble[before:] = [one for one in page.trouble[before:] if "404" not in one]


def samples(proof, page):
    """Samples of evaluations: generated texts, and images with predictions."""
    view(page, "run")
    choose(page, "tiny-1")
    wait(lambda: "once at the theatre" in texts(page), "the prompt of a sample")
    newest = page.run("document.querySelector('.samples .tools span').textContent")
    written = page.run("document.querySelector('.samples .texts').innerText")
    slide = "(() => { const s = document.querySelector('.samples input[type=range]'); s.value = 0; s.dispatchEvent(new Event('input')); })()"
    page.run(slide)
    oldest = page.run("document.querySelector('.samples .tools span').textContent")
    proof.say("newest" in newest and oldest == "step 40" and written != page.run("document.querySelector('.samples .texts').innerText"),
              "texts of every evaluation are shown, the newest first", f"{newest}; {oldest}")
    choose(page, "shapes-1")
    loaded = "[...document.querySelectorAll('.examples img')].filter((e) => e.naturalWidth > 0).length"
    wait(lambda: page.run(loaded) == 12, "pictures of samples")
    marks = page.run("[document.querySelectorAll('.examples .right').length, document.querySelectorAll('.examples .wrong').length]")
    proof.say(sum(marks) == 12 and min(marks) > 0, "held-out images are shown with their predictions, right or wrong", f"{marks[0]} right, {marks[1]} wrong")
    page.run("document.querySelector('.samples').scrollIntoView()")
    proof.shot(page, "samples")
    page.run("window.scrollTo(0, 0)")
    view(page, "curves")


def closer(proof, page):
    """Zooming into a long log loads a finer curve."""
    run = proof.folder / "runs" / "long-1"
    run.mkdir()
    (run / "config.toml").write_text('recipe = "tiny"\n')
    with (run / "events.jsonl").open("w") as log:
        log.write(json.dumps({"event": "start", "recipe": "tiny", "steps": 90000, "time": 1}) + "\n")
        for step in range(1, 90001):
            log.write(json.dumps({"event": "step", "step": step, "loss": 2 + step % 5, "tokens": step, "time": 1 + step}) + "\n")
        log.write(json.dumps({"event": "end", "status": "done", "steps": 90000, "loss": 2}) + "\n")
    view(page, "curves")
    choose(page, "long-1")
    wait(lambda: page.run("document.querySelectorAll('.chart').length") >= 1 and "reading" not in texts(page), "the long log is read", 120)
    time.sleep(1)
    page.run("""(() => {
        const canvas = document.querySelector('.chart canvas'), box = canvas.getBoundingClientRect();
        const event = (kind, x) => canvas.dispatchEvent(new PointerEvent(kind, { pointerType: 'mouse', clientX: box.left + x, clientY: box.top + 50, bubbles: true }));
        event('pointerdown', 500); event('pointermove', 520); event('pointerup', 520);
    })()""")
    asked = "performance.getEntriesByType('resource').filter((e) => e.name.includes('/api/part')).map((e) => e.name).at(-1) ?? ''"
    wait(lambda: page.run(asked), "the part is asked for")
    address = page.run(asked)
    received = json.loads(urllib.request.urlopen(address).read())
    steps = received["steps"]["step"]
    proof.say(received["steps"]["stride"] < 8 and received["to"] - received["from"] < 9000 and steps[0] >= received["from"],
              "a zoomed part is loaded with more points", f"{len(steps)} points of steps {received['from']} to {received['to']}")
    page.run("document.querySelector('.chart canvas').dispatchEvent(new MouseEvent('dblclick'))")


def sweep_alone(proof, program):
    """The folder of a sweep opens with the view of sweeps."""
    server, url = proof.serve_folder("runs/rates", "--port", "0")
    page = Browser(program)
    try:
        page.open(url)
        wait(lambda: "Parallel coordinates" in texts(page), "the view of the sweep")
        shown = texts(page)
        proof.say("rates" in shown and shown.count("done") == 6, "the folder of a sweep shows the sweep with its runs")
    finally:
        page.close()
        server.kill()
        server.wait()


def crowded(proof, page, url):
    """The oldest of too many pages says why it was disconnected."""
    others = [urllib.request.urlopen(url.rstrip("/") + "/api/live") for _ in range(16)]
    wait(lambda: "disconnected" in page.run("document.getElementById('status').textContent"), "the sentence about many pages")
    proof.say(True, "the oldest of too many pages says why it was disconnected", page.run("document.getElementById('status').textContent"))
    for other in others:
        other.close()
    page.call("Page.reload")
    wait(lambda: page.run("document.getElementById('status')?.textContent") == "" and "shapes-1" in page.run("document.getElementById('side').innerText"), "it is loaded again")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", type=Path)
    parser.add_argument("--shots", type=Path, help="folder for screenshots of the views")
    args = parser.parse_args()
    try:
        import websockets.sync.client  # noqa: F401
    except ImportError:
        print("SKIP  the Python package websockets is not installed")
        return 0
    program = browser.found()
    if not program:
        print("SKIP  no Chromium was found")
        return 0
    if args.shots:
        args.shots.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="watch") as name:
        folder = Path(name)
        proof = Proof(args.binary.resolve(), folder, args.shots)
        page = None
        try:
            proof.finish("train", "tiny", *SMALL, "train.steps=240", "eval.every=40",
                         "samples.prompts=['once at the theatre', 'the']", "samples.max_tokens=24", "--run", "runs/tiny-1")
            proof.finish("train", "vision-tiny", "train.steps=120", "eval.every=40", "eval.rows=64", "data.synthetic_rows=1500", "samples.count=12",
                         "--run", "runs/shapes-1")
            proof.finish("sweep", "tiny", *SMALL, "train.steps=120", "eval.every=40", "lr=1e-3,3e-3,1e-2", "model.layers=1,2", "--run", "runs/rates", "-q")
            server, url = proof.serve("--port", "0")
            page = Browser(program)
            page.size(1360, 860)
            page.scheme("light")
            page.open(url)
            wait(lambda: "tiny-1" in page.run("document.getElementById('side').innerText"), "the list")
            proof.say(True, "the page loads and lists runs", url)
            live(proof, page, "tiny-2")
            samples(proof, page)
            looks(proof, page, "tiny-2")
            closer(proof, page)
            sweep_alone(proof, program)
            crowded(proof, page, url)
            shutil.rmtree(folder / "runs" / "tiny-2")
            wait(lambda: page.run(row("tiny-2")) == "", "the run leaves the list")
            proof.say(True, "a folder that disappears leaves the list")
            server.kill()
            server.wait()
            wait(lambda: "lost" in page.run("document.getElementById('status').textContent"), "the loss is shown")
            server, _ = proof.serve("--port", url.rstrip("/").rsplit(":", 1)[1])
            wait(lambda: page.run("document.getElementById('status').textContent") == "", "it is connected again")
            proof.say(True, "the page reconnects to a restarted server")
            trouble = [one for one in page.trouble if "ERR_" not in one]
            # The browser requests an icon once, which the server does not have.
            icon = next((one for one in trouble if "404" in one), None)
            if icon:
                trouble.remove(icon)
            proof.say(not trouble, "there were no exceptions and no violations of the content security policy", trouble or "")
        except TimeoutError as late:
            proof.say(False, str(late), page.trouble if page else "")
        finally:
            if page:
                page.close()
            proof.end()
    return 1 if proof.failed else 0


if __name__ == "__main__":
    sys.exit(main())
