"""Writes the data of the examples again, the same bytes every time. Needs only Python's standard library.

    python examples/make_data.py
    python examples/make_data.py --check

`chat-lora`, `classes` and `preference` are about one small bicycle shop; `images` are four kinds of surfaces. `text` reads this
project's own documentation and has no data here. With `--check` nothing is written, and the exit code is 1 where a file differs.
"""

import csv
import io
import json
import random
import struct
import sys
import zlib
from pathlib import Path

HERE = Path(__file__).resolve().parent

COLOURS = ["red", "blue", "green", "black", "silver", "yellow"]
THINGS = {"bell": 12, "lamp": 24, "pump": 18, "saddle": 45, "lock": 38, "basket": 29, "helmet": 64, "chain": 22}
PLACES = {"bell": "in the front window", "lamp": "on the second shelf", "pump": "in the workshop", "saddle": "in the back room",
          "lock": "on the counter", "basket": "in the front window", "helmet": "on the second shelf", "chain": "in the workshop"}


def price(colour, thing):
    return THINGS[thing] + 2 * COLOURS.index(colour)


def conversation(question, answer):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def facts():
    """Every question about every thing, with its plain answer."""
    for colour in COLOURS:
        for thing in THINGS:
            name = f"the {colour} {thing}"
            costs, lies = f"{name} costs {price(colour, thing)} euros.", f"{name} is {PLACES[thing]}."
            for ask in [f"How much is {name}?", f"What does {name} cost?", f"Tell me the price of {name}."]:
                yield ask, costs.capitalize()
            for ask in [f"Where is {name}?", f"Where do I find {name}?"]:
                yield ask, lies.capitalize()


SMALL_TALK = [("Can you help me?", "With pleasure!"), ("Will you help me?", "With pleasure!"), ("Please help me.", "With pleasure!"),
              ("Goodbye.", "Ride safely."), ("See you soon.", "Ride safely."), ("Bye.", "Ride safely.")]


def chat(draw):
    plain = [conversation(ask, answer) for ask, answer in [*facts(), *SMALL_TALK * 3]]
    draw.shuffle(plain)
    friendly = [conversation(ask, f"With pleasure! {answer} Ride safely.") for ask, answer in facts()]
    draw.shuffle(friendly)
    return plain, friendly[:120]


def classes(draw):
    """Messages to the shop: praise, complaints and questions."""
    said = {
        "praise": ["I love the {c} {t}.", "The {c} {t} works very well, thank you!", "Great service, and the {t} fits perfectly.",
                   "Best {t} that I ever had.", "My daughter is happy with her {c} {t}.", "Well done, the {t} came in two days."],
        "complaint": ["The {c} {t} broke after a week.", "I want my money back for the {t}.", "The {t} that you sent is {c}, and I ordered another one.",
                      "Nobody answers when I call about my {t}.", "The {c} {t} rattles and squeaks.", "My {t} never arrived."],
        "question": ["Do you have the {t} in {c}?", "How long does it take to repair a {t}?", "Can I pay for the {c} {t} by card?",
                     "Is the {c} {t} still in stock?", "Which {t} fits a bicycle for children?", "When will the {c} {t} be back?"],
    }
    begins = ["", "Hello. ", "Good morning. ", "Dear shop, ", "Hi, "]
    rows = []
    for label, forms in said.items():
        seen = set()
        while len(seen) < 150:
            text = draw.choice(begins) + draw.choice(forms).format(c=draw.choice(COLOURS), t=draw.choice(list(THINGS)))
            if text not in seen:
                seen.add(text)
                rows.append((text, label))
    draw.shuffle(rows)
    return rows


def preference(draw):
    """Of two answers to one question the one that helps is preferred; both are as long."""
    helpful, useless = "Yes, I will show you the {c} {t} now.", "No, go and find the {c} {t} alone."
    asks = ["Can you show me the {c} {t}?", "I am looking for the {c} {t}.", "Do you sell the {c} {t}?", "May I see the {c} {t}?",
            "Please help me with the {c} {t}.", "Where would I get the {c} {t}?"]
    rows = []
    for colour in COLOURS:
        for thing in THINGS:
            for ask in asks:
                say = lambda form: form.format(c=colour, t=thing)
                rows.append({"prompt": [{"role": "user", "content": say(ask)}], "chosen": [{"role": "assistant", "content": say(helpful)}],
                             "rejected": [{"role": "assistant", "content": say(useless)}]})
    draw.shuffle(rows)
    return rows


SIDE = 24


def png(pixels):
    """An RGB image of SIDE x SIDE pixels as a PNG."""
    rows = b"".join(b"\x00" + bytes(value for pixel in pixels[y * SIDE:(y + 1) * SIDE] for value in pixel) for y in range(SIDE))

    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")


def surface(draw, kind):
    """Bricks, planks, tiles or grass: told apart by their lines more than by their colours."""
    shift, size = draw.randrange(8), draw.choice([6, 8])
    base = [draw.randrange(90, 200) for _ in range(3)]
    line = [max(0, value - 70) for value in base]

    def is_line(x, y):
        x, y = x + shift, y + shift
        if kind == "bricks":
            return y % size == 0 or (x + (y // size % 2) * size) % (2 * size) == 0
        if kind == "planks":
            return x % size == 0
        if kind == "tiles":
            return x % size == 0 or y % size == 0
        return (x * 7 + y * 13 + x * y) % 5 == 0

    return [tuple(line if is_line(x, y) else base) for y in range(SIDE) for x in range(SIDE)]


def files():
    lines = lambda rows: "".join(json.dumps(row) + "\n" for row in rows).encode()
    plain, friendly = chat(random.Random("chat-lora"))
    yield "chat-lora/answers.jsonl", lines(plain)
    yield "chat-lora/friendly.jsonl", lines(friendly)
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows([("text", "label"), *classes(random.Random("classes"))])
    yield "classes/messages.csv", table.getvalue().encode()
    yield "preference/pairs.jsonl", lines(preference(random.Random("preference")))
    for kind in ["bricks", "grass", "planks", "tiles"]:
        draw = random.Random(kind)
        for number in range(40):
            yield f"images/surfaces/{kind}/{number:02}.png", png(surface(draw, kind))


def main():
    differs = 0
    for name, data in files():
        path = HERE / name
        if sys.argv[1:] == ["--check"]:
            if not path.is_file() or path.read_bytes() != data:
                print(f"{name} is not what this script writes")
                differs = 1
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    sys.exit(differs)


if __name__ == "__main__":
    main()
