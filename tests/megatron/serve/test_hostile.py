"""Whatever bytes come: a status of 4xx, no traceback, no wait, and the next good request is answered."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from select import select
from typing import Any

import pytest

from tests.megatron.serve.server import Server, served

GOOD = {"prompt": "x", "max_tokens": 2, "seed": 1}
BODY = json.dumps(GOOD).encode()
TYPE = b"Content-Type: application/json\r\n"
DEEP = 100_000
MOST = 64
"""Connections."""


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with in_good_order(folder, tmp_path_factory.mktemp("server"), "--max-prompt-tokens", 300,
                       "--max-new-tokens", 50, "--request-seconds", 3) as found:
        yield found


@contextmanager
def in_good_order(folder: Path, place: Path, *flags: object) -> Iterator[Server]:
    """A server that is still that at its end."""
    with served(folder, place, "--max-connections", MOST, *flags) as found:
        yield found
        assert found.ask("/v1/completions", GOOD)[0] == 200
        assert found.stop() == 0
        assert "Traceback" not in found.said() and "internal error" not in found.said()


def post(body: bytes = BODY, *, path: bytes = b"/v1/completions", more: bytes = b"", length: bytes | None = None,
         start: bytes | None = None) -> bytes:
    """A request, with what is wrong in it."""
    length = b"Content-Length: %d\r\n" % len(body) if length is None else length
    return (start or b"POST %b HTTP/1.1\r\n" % path) + b"Host: localhost\r\n" + TYPE + length + more + b"\r\n" + body


def chunks(body: bytes) -> bytes:
    return post(body, length=b"Transfer-Encoding: chunked\r\n")


GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
WIRE: list[tuple[int, bytes]] = [  # some of what h11 refuses, and all that is ours
    *((400, line + b"\r\nHost: localhost\r\n\r\n") for line in (
        b"", b"GET", b"GET /\x00 HTTP/1.1", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"{\"prompt\": 1}")),
    *((404, line + b"\r\nHost: localhost\r\n\r\n") for line in (
        b"GET http://localhost/health HTTP/1.1", b"CONNECT localhost:80 HTTP/1.1", b"PRI * HTTP/2.0")),
    *((405, b"%b %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n" % pair) for pair in (
        (b"GET", b"/v1/completions"), (b"post", b"/v1/completions"), (b"POST", b"/"), (b"DELETE", b"/metrics"),
        (b"GET", b"/api"))),
    *((404, b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % path) for path in (
        b"/../../etc/passwd", b"/%2e%2e/%2e%2e/etc/passwd", b"//health", b"/health/", b"/health%00", b"/page.html",
        b"/v1/models/other", b"/" + b"a" * 5000)),
    # headers
    (400, b"GET /health HTTP/1.1\r\n\r\n"), (400, GET + b"Host: localhost\r\n\r\n"), (400, GET + b"no colon\r\n\r\n"),
    (403, GET + b" folded: x\r\n\r\n"), (400, GET + b"A: " + b"b" * 200000), (400, GET + b"A: b\r\n" * 50000),
    *((403, b"GET /v1/models HTTP/1.1\r\nHost: " + host + b"\r\n\r\n") for host in (
        b"evil.example", b"localhost.evil.example", b"127.0.0.1.evil.example", b"", b"10.0.0.1", b"[::2]",
        b"localhost@evil.example", b"evil.example:5000", b"localhost:x", b"[", b"a:b:c", b"\xff",
        b"localhost, evil.example", b"0.0.0.0")),
    # the length of a body, and chunks
    *((400, post(length=b"Content-Length: %b\r\n" % size)) for size in (b"-1", b"0x10", b"", b"10, 10", b"9" * 500)),
    (400, post(length=b"")), (400, post(more=b"Content-Length: 1\r\n")),
    (413, post(length=b"Content-Length: 999999999999\r\n")), (413, post(length=b"Content-Length: 1048577\r\n")),
    (413, post(length=b"Content-Length: 99999999\r\n", more=b"Expect: 100-continue\r\n")),
    (400, post(length=b"Transfer-Encoding: gzip\r\n")), (400, post(length=b"Transfer-Encoding : chunked\r\n")),
    (400, post(b"0\r\n\r\n", length=b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n")),
    (400, post(chunks(BODY), start=b"POST /v1/completions HTTP/1.0\r\n", length=b"Transfer-Encoding: chunked\r\n")),
    *((400, chunks(body)) for body in (b"x\r\nab\r\n0\r\n\r\n", b"-1\r\na\r\n0\r\n\r\n", b"1\r\nab\r\n0\r\n\r\n")),
    *((408, chunks(body)) for body in (b"123456789\r\n", b"fffffff\r\n", b"1;" + b"a" * 20000 + b"\r\n")),
    (413, chunks(b"80000\r\n" + b"a" * 0x80000 + b"\r\n80001\r\n" + b"a" * 0x80001 + b"\r\n")),
    # kinds
    *((415, post(b"{}").replace(TYPE, kind)) for kind in (
        b"", b"Content-Type: text/plain\r\n", b"Content-Type: application/jsonx\r\n", b"Content-Type: \xff\r\n")),
    (415, post(more=b"Content-Encoding: gzip\r\n"))]


def status_of(answer: bytes) -> int:
    assert answer.startswith(b"HTTP/1.1 ") and answer[12:13] == b" ", answer[:100]
    return int(answer[9:12])


def test_bytes_that_are_no_good_request_are_refused_and_the_next_one_is_answered(server: Server) -> None:
    for number, (expected, data) in enumerate(WIRE):
        began = time.monotonic()
        assert status_of(server.raw(data)) == expected, data[:200]
        assert time.monotonic() - began < 20, data[:200]
        if number % 10 == 0:
            assert server.complete(**GOOD)["usage"]["completion_tokens"] == 2
    assert server.text(**GOOD) == server.text(**GOOD)


ANY = ["", "x", 0, 1, -1, 1.5, True, [], {}, [[]], [None], {"a": 1}, [1, "x"], "\udc00", "9" * 400]
BAD = {  # of each key, what it cannot be
    "prompt": [5, {}, [], [[]], [None], [1, "x"], [-1], [257], [10 ** 30], [1.0], [[1], []], [["x"]], [True], "\ud800",
               "x" * 301, ["x"] * 129, [1] * 301],
    "max_tokens": [0, 51, 1.5, "5", True, 10 ** 40], "n": [0, 129, 1.5, "1", True],
    "temperature": [-0.1, 101, "1", True, 1e-9, 1e308], "top_p": [0, 1.01, "1", True], "top_k": [-1, 1.5, "1", 1 << 40],
    "min_p": [-1, 2, "0"], "repetition_penalty": [0, 1e9, "1"], "seed": ["1", 1.5, True, 10 ** 30],
    "stop": [5, [5], "", [""], ["x"] * 17, "x" * 257, True, "\ud800"], "stream": [1, "true", {}], "echo": [1, "yes"],
    "logprobs": [6, -1, True, "1", 1 << 50], "stream_options": [{}, {"include_usage": True}, 5],
    "model": ["gpt-4", 5, "\ud800"], "user": [5], "suffix": ["x", 5], "best_of": [2, "1"], "logit_bias": [{"5": 1}, []],
    "frequency_penalty": [0.5, "0", False], "presence_penalty": [-1, True],
    "messages": [[{"role": "user", "content": "x"}]], "": [1], "x" * 1000: [1], "\ud800": [1], "__class__": [1],
}
BAD_API = {
    "prompts": ["x", [], [5], [""], ["x"] * 129, {"a": 1}, ["\ud800"], [["x"]], ["x" * 301]],
    "tokens_to_generate": [-1, 51, "5", True], "logprobs": [1, "x"], "temperature": [0, 101, "1"],
    "top_k": [-1, 1001, 1.5], "top_p": [-0.1, 1.1, "x"], "top_p_decay": [0.5], "top_p_bound": [0.5, -1],
    "add_BOS": [1], "stop_on_eol": [1], "stop_on_double_eol": ["x"], "prevent_newline_after_colon": [True, 1],
    "random_seed": [-1, "x"], "stop_token": [5, "x"], "length_penalty": [2.0], "beam_width": [1, 4], "unknown": [1],
}
TEXTS = [b"", b"{", b"[]", b"5", b"null", b"NaN", b"{}{}", b'{"a"}', b'{"prompt": NaN}', b'{"temperature": Infinity}',
         b'{"temperature": 1e999}', b'{"seed": ' + b"9" * 100_000 + b"}", b'{"prompt": "x", "prompt": "y"}',
         b"[" * DEEP, b'{"a":' * DEEP, b'{"prompt": ' + b"[" * DEEP + b"]" * DEEP + b"}", b'{"prompt": "\xff"}',
         b'{"prompt": "\xed\xa0\x80"}', b"\xef\xbb\xbf{}", b'{"prompt": "\\u12"}', b"\x00" * 1000, b"a" * (1 << 20)]


def test_json_that_cannot_be_meant_is_refused_by_name(server: Server) -> None:
    for key, values in BAD.items():
        for value in values:
            status, found = server.ask("/v1/completions", {"max_tokens": 1, key: value})
            assert status == (404 if key == "model" and isinstance(value, str) and value.isascii() else 400), (
                key, value, found)
            assert set(found["error"]) == {"message", "type", "param", "code"} and len(found["error"]["message"]) < 400
            assert key[:20].encode("ascii", "backslashreplace").decode() in str(found["error"]["param"]), found
    for path, key, hint in (("/v1/completions", "max_token", "max_tokens"), ("/api", "promtps", "prompts")):
        assert f"unknown key '{key}': did you mean {hint}?" in str(server.ask(path, {key: 1})[1])
    for key, values in BAD_API.items():
        for value in values:
            status, found = server.ask("/api", {"prompts": ["x"], "tokens_to_generate": 1, key: value}, "PUT")
            assert status == 400 and set(found) == {"message"} and key in found["message"], (key, value, found)
    for body in TEXTS:
        for path in ("/v1/completions", "/api"):
            assert server.ask(path, body, "POST")[0] == 400, body[:100]
    assert server.complete(**GOOD)["usage"]["completion_tokens"] == 2


def test_any_value_under_any_key_is_answered(server: Server) -> None:
    def ask(one: tuple[str, str, Any]) -> int:
        path, key, value = one
        basis: dict[str, Any] = {"prompts": ["x"], "tokens_to_generate": 1} if path == "/api" else {"max_tokens": 1}
        return server.ask(path, {**basis, key: value})[0] if key != "stream" or value is not True else 200

    asked = [(path, key, value) for path, keys in (("/api", BAD_API), ("/v1/completions", BAD)) for key in keys
             for value in ANY]
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(ask, asked)) <= {200, 400, 404}
    assert server.complete(**GOOD)["usage"]["completion_tokens"] == 2


def test_a_request_that_is_cut_off_is_not_answered(server: Server) -> None:
    whole = post()
    for end in range(1, len(whole), 7):
        assert server.raw(whole[:end], half_closed=True) == b"", whole[:end]  # it has left


def slow_ones(server: Server, closing: ExitStack) -> list[socket.socket]:
    """Connections whose request has not come whole."""
    whole, wires = post(), []
    for end in (0, 1, 20, len(whole) - 1, len(whole) - len(BODY) - 1):
        wires.append(closing.enter_context(socket.create_connection((server.host, server.port), timeout=20)))
        wires[-1].sendall(whole[:end])
    return wires


def test_a_request_that_is_slow_holds_up_nobody_and_is_given_up(folder: Path, tmp_path: Path) -> None:
    whole = post(BODY + b" " * 1000)
    with in_good_order(folder, tmp_path, "--request-seconds", 1.5) as server, ExitStack() as closing:
        wires = slow_ones(server, closing)
        assert server.complete(**GOOD)["usage"]["completion_tokens"] == 2
        trickle = closing.enter_context(socket.create_connection((server.host, server.port), timeout=20))
        for byte in whole:  # one at a time: for longer than a request may take
            if select([trickle], [], [], 0.05)[0]:
                break
            trickle.sendall(bytes([byte]))
        in_body = wires.pop(3)
        assert status_of(in_body.recv(1000)) == 408
        assert [one.recv(1000) for one in [*wires, trickle]] == [b""] * 5, "closed, as no head has come"


def test_what_follows_a_request_is_never_one(server: Server) -> None:
    hidden = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for data in (GET + b"\r\n" + hidden, post(more=b"Connection: keep-alive\r\n") + hidden, post(BODY + hidden,
                 length=b"Content-Length: %d\r\n" % len(BODY)), GET + b"Content-Length: 5\r\n\r\n" + hidden):
        answer = server.raw(data)
        assert answer.count(b"HTTP/1.1 ") == 1 and status_of(answer) == 200


def test_good_requests_in_unusual_clothes_are_answered(server: Server) -> None:
    half, rest = BODY[: len(BODY) // 2], BODY[len(BODY) // 2:]
    chunked = b"%x\r\n%b\r\n%X;ext=1\r\n%b\r\n000\r\nTrailer: x\r\n\r\n" % (len(half), half, len(rest), rest)
    for data in (chunks(chunked), post(more=b"expect: 100-Continue\r\n"),
                 post(BODY, start=b"POST /v1/completions HTTP/1.0\r\n"),
                 post().replace(b"application/json", b"Application/JSON; charset=UTF-8"),
                 post(path=b"/v1/completions?a=b"), post().replace(b"localhost", b"LOCALHOST:1"),
                 post().replace(b"localhost", b"[::1]:5000"), post().replace(b"localhost", b"127.0.0.2")):
        answer = server.raw(data).removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
        assert status_of(answer) == 200 and b'"text"' in answer, data
    assert server.raw(b"HEAD /health HTTP/1.1\r\nHost: localhost\r\n\r\n").endswith(b"\r\n\r\n")
    assert status_of(server.raw(b"GET /health HTTP/1.0\r\n\r\n")) == 200
    null = server.complete(prompt="a\x00b", max_tokens=1, echo=True, stop=None)
    assert null["choices"][0]["text"].startswith("a\x00b")


def test_more_connections_than_allowed_are_turned_away_and_come_in_later(server: Server) -> None:
    with ExitStack() as closing:
        for _ in range(MOST):
            closing.enter_context(socket.create_connection((server.host, server.port), timeout=10))
        time.sleep(0.3)  # until they are accepted
        assert status_of(server.raw(post())) == 503
    deadline = time.monotonic() + 10
    while server.ask("/v1/completions", GOOD)[0] != 200:
        assert time.monotonic() < deadline


def test_a_client_that_reads_nothing_is_given_up(folder: Path, tmp_path: Path) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 1900, "n": 48, "temperature": 0, "stream": True}).encode()
    with in_good_order(folder, tmp_path, "--write-seconds", 1, "--batch-size", 48) as server, socket.socket() as wire:
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        wire.connect((server.host, server.port))
        wire.sendall(post(body))
        server.wait_for("texts_dropped_total", 48)
