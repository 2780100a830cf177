"""Tests `flatout serve` with misbehaving clients, with a line PASS or FAIL per check and the memory of the server.

    python bench/serve_bad.py target/release/flatout [--requests 10000]

Malformed bodies, bodies that are too large, slow clients, abandoned streams, wrong keys, hostile headers, and many requests: no request is
lost, memory is bounded, every refusal is a sentence. Needs only Python.
"""

import argparse
import http.client
import json
import random
import socket
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from serving import Claims, Server, train_chat

KEY = "secret"
# Growth of memory that is accepted over many requests, because caches fill up.
SLACK = 24 << 20


def ask(port, path, body=None, key=KEY, headers=()):
    """Status and JSON of one request, on its own connection."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    head = {"Authorization": f"Bearer {key}", "Content-Type": "application/json", **dict(headers)}
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    try:
        connection.request("GET" if body is None else "POST", path, body=data, headers=head)
        answer = connection.getresponse()
        response = answer.read()
        return answer.status, json.loads(response) if response else None
    finally:
        connection.close()


def raw(port, data, wait=60, pause=None):
    """Sends bytes, all at once or one by one with pauses; returns the response and the time."""
    began = time.time()
    with socket.create_connection(("127.0.0.1", port), timeout=wait) as connection:
        found = b""
        try:
            if pause is None:
                connection.sendall(data)
            else:
                for byte in data:
                    connection.sendall(bytes([byte]))
                    time.sleep(pause)
            while part := connection.recv(65536):
                found += part
        except OSError:
            pass
    return found, time.time() - began


def post(body, length=None, key=KEY):
    head = (f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body) if length is None else length}\r\n\r\n")
    return head.encode() + body


def refusals(port, claims):
    draw = random.Random(3)
    good = json.dumps({"prompt": "the feather", "max_tokens": 4, "stop": ["x"], "logit_bias": {"5": 1}}).encode()
    statuses = {}
    for _ in range(2000):
        body = bytearray(good)
        for _ in range(draw.randint(1, 6)):
            at = draw.randrange(len(body))
            body[at:at + draw.randint(0, 2)] = bytes(draw.randrange(256) for _ in range(draw.randint(0, 3)))
        status, response = ask(port, "/v1/completions", bytes(body))
        is_right = status == 200 or status == 400 and isinstance(response["error"]["message"], str)
        statuses[status if is_right else "wrong"] = statuses.get(status if is_right else "wrong", 0) + 1
    claims("2,000 damaged bodies get an answer or a sentence", "wrong" not in statuses, statuses)
    status, response = ask(port, "/v1/completions", b'{"prompt": "' + b"a" * (5 << 20) + b'"}')
    claims("a body that is too large is refused", status == 413, response["error"]["message"])
    found, _ = raw(port, post(b"", length=10 ** 15))
    claims("a body that only claims to be large is refused too", found.startswith(b"HTTP/1.1 413"))
    found, _ = raw(port, b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer secret\r\nContent-Type: application/json\r\n"
                   b"Transfer-Encoding: chunked\r\n\r\n" + b"10000\r\n" + b"a" * 65536 + b"\r\n" + b"10000\r\n" + b"a" * 65536)
    claims("an incomplete chunked body does no harm", ask(port, "/health")[0] == 200)
    for key in ["", "wrong", KEY + "x", KEY[:-1]]:
        status, response = ask(port, "/v1/completions", {"prompt": "a"}, key=key)
        claims(f"the key {key!r} is refused", status == 401 and response["error"]["code"] == "invalid_api_key")
    hostile = {
        "a header without end": b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * (1 << 20) + b"\r\n\r\n",
        "ten thousand headers": b"GET /health HTTP/1.1\r\n" + b"".join(b"X%d: y\r\n" % i for i in range(10000)) + b"\r\n",
        "bytes that are no text in a header": b"GET /health HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer \xff\xfe\r\n\r\n",
        "two lengths": post(b"{}").replace(b"\r\n\r\n", b"\r\nContent-Length: 3\r\n\r\n", 1),
        "a request inside a request": post(b"GET /health HTTP/1.1\r\n\r\n", length=0, key="wrong"),
        "no HTTP at all": b"\x16\x03\x01" + bytes(range(256)) * 40,
    }
    for name, data in hostile.items():
        found, _ = raw(port, data, wait=15)
        is_refused = not found.startswith(b"HTTP/1.1 200")
        claims(f"{name} is refused", is_refused and ask(port, "/health")[0] == 200, found.split(b"\r\n")[0].decode("latin1"))


def slow(port, claims):
    """Clients that send only a byte now and then are disconnected and do not delay others."""
    results = {}

    def headers():
        results["headers"] = raw(port, b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 100, pause=0.5)[1]

    def body():
        results["body"] = raw(port, post(b"", length=100) + b"{" * 99, wait=60)[1]

    threads = [threading.Thread(target=f) for f in [headers] * 20 + [body] * 20]
    [thread.start() for thread in threads]
    time.sleep(1)
    began = time.time()
    status, _ = ask(port, "/v1/completions", {"prompt": "the feather", "max_tokens": 4})
    waited = time.time() - began
    claims("others are answered while forty clients send slowly", status == 200 and waited < 5, f"{waited:.2f} s")
    [thread.join() for thread in threads]
    claims("clients with slow headers are disconnected", results["headers"] < 45, f"{results['headers']:.0f} s")
    claims("clients with slow bodies are disconnected", results["body"] < 45, f"{results['body']:.0f} s")


def leaving(server, claims):
    """Clients that disconnect during a stream or before the response."""
    body = json.dumps({"prompt": "the feather", "max_tokens": 10 ** 6, "stream": True, "n": 2, "logit_bias": {"1": -100, "3": -100}}).encode()
    whole = json.dumps({"prompt": "the feather", "max_tokens": 10 ** 6, "n": 8, "logit_bias": {"1": -100, "3": -100}}).encode()

    def leave(number):
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            connection.sendall(post(body if number % 2 else whole))
            if number % 2:
                connection.recv(400)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(leave, range(300)))
    began = time.time()
    status, _ = ask(server.port, "/v1/completions", {"prompt": "a", "max_tokens": 4})
    waited = time.time() - began
    claims("after 300 clients have disconnected the next one is answered", status == 200 and waited < 10, f"{waited:.2f} s")


def many(server, claims, count):
    """Many requests: all are answered, and memory does not grow with them."""
    lock, statuses, marks = threading.Lock(), {}, []

    def work(number):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
        head = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        for at in range(number, count, WORKERS):
            body = {"prompt": "the feather " * (at % 9 + 1), "max_tokens": at % 5, "seed": at, "stream": at % 4 == 0, "logprobs": at % 3 or None}
            if at % 11 == 0:
                body["temperature"] = "bad"
            connection.request("POST", "/v1/completions", body=json.dumps(body).encode(), headers=head)
            answer = connection.getresponse()
            response = answer.read()
            is_right = answer.status == (400 if at % 11 == 0 else 200) and (at % 4 != 0 or at % 11 == 0 or response.endswith(b"data: [DONE]\n\n"))
            with lock:
                statuses[answer.status if is_right else "wrong"] = statuses.get(answer.status if is_right else "wrong", 0) + 1
                if sum(statuses.values()) % (count // 10) == 0:
                    marks.append(server.resident())
        connection.close()

    began = time.time()
    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(work, range(WORKERS)))
    seconds = time.time() - began
    claims(f"{count:,} requests are all answered", sum(statuses.values()) == count and "wrong" not in statuses,
           f"{statuses} in {seconds:.0f} s")
    shown = ", ".join(f"{mark / 2 ** 20:.1f}" for mark in marks)
    claims("memory does not grow with them", marks[-1] - marks[0] < SLACK, f"{shown} MiB after each tenth")


WORKERS = 16


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("flatout", type=Path, help="the binary")
    parser.add_argument("--requests", type=int, default=10000)
    given = parser.parse_args()
    binary = given.flatout.resolve()
    claims = Claims()
    with tempfile.TemporaryDirectory() as scratch:
        run = train_chat(binary, Path(scratch) / "run")
        with Server(binary, run, "--tokens", "256", "--at-once", "8", key=KEY) as server:
            refusals(server.port, claims)
            many(server, claims, given.requests)
            leaving(server, claims)
            slow(server.port, claims)
            left = threading.Thread(target=raw, args=(server.port, post(json.dumps(
                {"prompt": "a", "max_tokens": 10 ** 6, "n": 64, "stream": True, "logit_bias": {"1": -100, "3": -100}}).encode())))
            left.start()
            time.sleep(0.3)
            began = time.time()
            code = server.stop()
            seconds = time.time() - began
            left.join()
            claims("it ends with code 0 within seconds while 64 texts are generated", code == 0 and seconds < 12, f"{seconds:.1f} s")
    return claims.end()


if __name__ == "__main__":
    sys.exit(main())
