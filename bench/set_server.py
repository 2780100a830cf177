"""Shared by scripts about streaming: serves a data set in the hub's protocol, with a rate limit.

`write_set` writes a set of parquet or JSONL files of random words, with only the standard library. `Server` serves a folder as
`hf://bench/set`: card, paginated listing, redirects to a store on another port, range requests. The rate limit applies to all
connections together.
"""

import http.server
import json
import random
import struct
import threading
import time
import urllib.parse
import zlib

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PAGE = 100
CHUNK = 1 << 18


def texts(megabytes, seed=7):
    """Generates documents of invented words with frequencies as in language (Zipf), of about 1 to 8 KB."""
    draw = random.Random(seed)
    syllables = [a + b for a in "bdfgklmnprstvz" for b in ("a", "e", "i", "o", "u", "an", "el", "ir", "os", "un")]
    words = ["".join(draw.choices(syllables, k=draw.randint(1, 4))) for _ in range(60_000)]
    weights = [1 / (rank + 3) for rank in range(len(words))]
    # Random numbers are slow in Python: documents are slices of a long sequence of words at random positions.
    series = draw.choices(words, weights=weights, k=2_000_000)
    written = 0
    while written < megabytes * 1_000_000:
        count, at = draw.randint(150, 1200), draw.randrange(len(series) - 1200)
        text = f"{draw.randrange(10**9)} " + " ".join(series[at:at + count])
        written += len(text)
        yield text


def write_set(folder, form, files, megabytes, rows=1000):
    """Writes `files` files of `megabytes` in all into `folder`; row groups of parquet have `rows` rows."""
    folder.mkdir(parents=True)
    for number in range(files):
        documents = texts(megabytes / files, seed=number)
        path = folder / f"train-{number:05}-of-{files:05}.{form}"
        if form == "parquet":
            write_parquet(path, list(documents), rows)
        else:
            path.write_text("".join(json.dumps({"text": text, "n": number}) + "\n" for text in documents))


def write_parquet(path, documents, rows):
    """Writes a column `text` of required strings, plain and uncompressed, one page per row group, and a column `n` of integers."""
    with open(path, "wb") as out:
        out.write(b"PAR1")
        groups = []
        for first in range(0, len(documents), rows):
            some = documents[first:first + rows]
            encoded = [text.encode() for text in some]
            columns = []
            for name, kind, data in (
                ("n", 1, b"".join(struct.pack("<i", first + at) for at in range(len(some)))),
                ("text", 6, b"".join(struct.pack("<I", len(text)) + text for text in encoded)),
            ):
                page = Thrift().i32(1, 0).i32(2, len(data)).i32(3, len(data)).struct(
                    5, Thrift().i32(1, len(some)).i32(2, 0).i32(3, 3).i32(4, 3)).end() + data
                columns.append((name, kind, out.tell(), len(page)))
                out.write(page)
            groups.append((columns, len(some)))
        schema = [Thrift().binary(4, b"schema").i32(5, 2), Thrift().i32(1, 1).i32(3, 0).binary(4, b"n"),
                  Thrift().i32(1, 6).i32(3, 0).binary(4, b"text").i32(6, 0)]

        def chunk(name, kind, at, size, count):
            meta = Thrift().i32(1, kind).list(2, 5, [zigzag(0)]).list(3, 8, [sized(name.encode())]).i32(4, 0)
            meta.i64(5, count).i64(6, size).i64(7, size).i64(9, at)
            return Thrift().i64(2, at).struct(3, meta).end()

        described = [Thrift().list(1, 12, [chunk(*column, count) for column in columns])
                     .i64(2, sum(column[3] for column in columns)).i64(3, count).end() for columns, count in groups]
        footer = Thrift().i32(1, 1).list(2, 12, [element.end() for element in schema]).i64(3, len(documents))
        footer = footer.list(4, 12, described).end()
        out.write(footer + struct.pack("<I", len(footer)) + b"PAR1")


def varint(number):
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes(out + bytes([number]))


def zigzag(number):
    return varint(number << 1 if number >= 0 else (-number << 1) - 1)


def sized(binary):
    return varint(len(binary)) + binary


class Thrift:
    """A struct in Thrift's compact protocol, with fields in ascending order of their ids."""

    def __init__(self):
        self.bytes, self.last = b"", 0

    def field(self, number, kind, payload):
        self.bytes += bytes([(number - self.last) << 4 | kind]) + payload
        self.last = number
        return self

    def i32(self, number, value):
        return self.field(number, 5, zigzag(value))

    def i64(self, number, value):
        return self.field(number, 6, zigzag(value))

    def binary(self, number, value):
        return self.field(number, 8, sized(value))

    def struct(self, number, inner):
        return self.field(number, 12, inner.end())

    def list(self, number, kind, elements):
        head = bytes([len(elements) << 4 | kind]) if len(elements) < 15 else bytes([240 | kind]) + varint(len(elements))
        return self.field(number, 9, head + b"".join(elements))

    def end(self):
        return self.bytes + b"\0"


class Bucket:
    """A token bucket: a rate limit in bytes per second for all connections together, with bursts of at most a fifth of a second."""

    def __init__(self, bytes_per_second):
        self.rate, self.free_at, self.lock, self.sent = bytes_per_second, 0.0, threading.Lock(), 0

    def take(self, count):
        with self.lock:
            self.sent += count
            now = time.monotonic()
            self.free_at = max(self.free_at, now - 0.2) + (count / self.rate if self.rate else 0.0)
            wait = self.free_at - now
        if wait > 0:
            time.sleep(wait)


class Server:
    """Serves the files below `folder` as `hf://bench/set` until it is closed."""

    def __init__(self, folder, megabytes_per_second, latency_ms=0.0):
        self.folder, self.bucket, self.latency = folder, Bucket(megabytes_per_second * 1e6), latency_ms / 1e3
        self.requests = 0
        self.store = self.listen(self.of_store)
        self.hub = self.listen(self.of_hub)
        self.endpoint = f"http://127.0.0.1:{self.hub.server_port}"

    def listen(self, answer):
        owner = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                owner.requests += 1
                time.sleep(owner.latency)
                answer(self)

            def log_message(self, *_):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server

    def close(self):
        self.hub.shutdown()
        self.store.shutdown()

    def files(self):
        return sorted(path for path in self.folder.rglob("*") if path.is_file())

    def of_hub(self, request):
        url = urllib.parse.urlsplit(request.path)
        if url.path == "/api/datasets/bench/set/revision/main" or url.path.endswith(f"/revision/{COMMIT}"):
            return reply(request, 200, json.dumps({"sha": COMMIT, "cardData": {}}).encode())
        if url.path.startswith(f"/api/datasets/bench/set/tree/{COMMIT}"):
            start = int(urllib.parse.parse_qs(url.query).get("cursor", ["0"])[0])
            entries = [dict(type="file", path=str(path.relative_to(self.folder)), size=path.stat().st_size,
                            oid="git", lfs=dict(oid=tag(path), size=path.stat().st_size)) for path in self.files()]
            next_page = f"<{self.endpoint}{url.path}?recursive=true&cursor={start + PAGE}>; rel=\"next\""
            headers = {"Link": next_page} if start + PAGE < len(entries) else {}
            return reply(request, 200, json.dumps(entries[start:start + PAGE]).encode(), headers)
        prefix = f"/datasets/bench/set/resolve/{COMMIT}/"
        path = self.folder / urllib.parse.unquote(url.path[len(prefix):])
        if url.path.startswith(prefix) and path in self.files():
            place = f"http://127.0.0.1:{self.store.server_port}/{urllib.parse.quote(str(path.relative_to(self.folder)))}"
            return reply(request, 302, b"", {"Location": place, "X-Linked-Etag": f'"{tag(path)}"',
                                             "X-Linked-Size": str(path.stat().st_size)})
        return reply(request, 404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def of_store(self, request):
        path = self.folder / urllib.parse.unquote(request.path.split("?")[0].lstrip("/"))
        if path not in self.files():
            return reply(request, 404, b"")
        size = path.stat().st_size
        first, last = request.headers["Range"].removeprefix("bytes=").split("-")
        first, last = int(first), min(int(last), size - 1)
        with open(path, "rb") as file:
            file.seek(first)
            headers = {"Content-Range": f"bytes {first}-{last}/{size}", "ETag": f'"{tag(path)}"'}
            reply(request, 206, file.read(last - first + 1), headers, self.bucket)


def tag(path):
    return f"{zlib.crc32(str(path).encode()):08x}{path.stat().st_size:x}"


def reply(request, status, body, headers=None, bucket=None):
    try:
        request.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            request.send_header(name, value)
        request.end_headers()
        for at in range(0, len(body), CHUNK):
            if bucket:
                bucket.take(len(body[at:at + CHUNK]))
            request.wfile.write(body[at:at + CHUNK])
    except (BrokenPipeError, ConnectionResetError):
        pass
