"""What clients of a server get, whatever others do beside them."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from megatron.inference import load
from megatron.inference.model_args import ModelSource
from megatron.inference.request import Request, Sampling
from mpu import groups
from tests.megatron.serve.server import Server, served

FOREVER = {"prompt": "x", "max_tokens": 2000, "temperature": 0}  # the likeliest never ends the document here


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served(folder, tmp_path_factory.mktemp("server"), "--batch-size", 3, "--max-waiting", 40) as found:
        yield found


def alone(folder: Path, prompt: str, most: int, sampling: Sampling, stream: str) -> str:
    """By the inference core, one text and nothing beside it."""
    loaded = load.load_model(ModelSource(str(folder), None, dtype="fp32"), groups.build(1), torch.device("cpu"))
    ids = tuple(int(token) for token in loaded.tokenizer.encode(prompt))
    (text,) = loaded.generator(1).generate([Request(0, ids, most, sampling, stream)])
    return text.answer()


def test_eight_clients_at_once_get_what_they_would_get_alone(folder: Path, server: Server) -> None:
    asked = [(f"client {number} " * (number + 1), 40 + 7 * number, number) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda one: server.text(prompt=one[0], max_tokens=one[1], seed=one[2], temperature=0.9,
                                                      top_k=50), asked))
    assert len(set(texts)) == 8
    for (prompt, most, seed), text in zip(asked, texts, strict=True):
        assert text == alone(folder, prompt, most, Sampling(temperature=0.9, top_k=50), f"{seed}/0")


def test_prompts_and_samples_of_a_request_have_streams_of_their_own(folder: Path, server: Server) -> None:
    found = server.complete(prompt=["one", [116, 119, 111]], n=2, max_tokens=9, seed=5)
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
    for place, choice in enumerate(found["choices"]):
        assert choice["text"] == alone(folder, ("one", "two")[place // 2], 9, Sampling(), f"5/{place}")
    assert found["usage"] == {"prompt_tokens": 6, "completion_tokens": 36, "total_tokens": 42}


def test_a_seed_that_is_not_given_is_told(server: Server) -> None:
    found = server.complete(prompt="x", max_tokens=9)
    assert server.text(prompt="x", max_tokens=9, seed=found["seed"]) == found["choices"][0]["text"]
    assert found["seed"] != server.complete(prompt="x", max_tokens=9)["seed"]


@pytest.mark.parametrize("more", [{}, {"n": 3}, {"logprobs": 0}, {"echo": True}, {"prompt": ["a", "b"], "stop": "e"}])
def test_the_parts_of_a_stream_make_the_whole_answer(server: Server, more: dict[str, object]) -> None:
    asked = {"prompt": "a few words", "max_tokens": 60, "seed": 3, **more}
    whole = server.complete(**asked)
    parts = list(server.events(**asked, stream_options={"include_usage": True}))
    assert parts.pop()["usage"] == whole["usage"]
    for choice in whole["choices"]:
        mine = [part["choices"][0] for part in parts if part["choices"][0]["index"] == choice["index"]]
        assert len(mine) > 1 or more.get("stop")
        assert "".join(part["text"] for part in mine) == choice["text"]
        assert [part["finish_reason"] for part in mine] == [None] * (len(mine) - 1) + [choice["finish_reason"]]
        if choice["logprobs"]:
            for name in ("tokens", "token_logprobs", "text_offset"):
                together = [value for part in mine for value in part["logprobs"][name]]
                assert together == pytest.approx(choice["logprobs"][name], abs=1e-4) if name == "token_logprobs" else (
                    together == choice["logprobs"][name])


def test_a_client_that_leaves_frees_its_rows(server: Server) -> None:
    server.wait_for("texts_running", 0)
    dropped, made = server.metric("texts_dropped_total"), server.metric("generated_tokens_total")
    events = server.events(**FOREVER, n=8)
    next(events)
    server.wait_for("texts_waiting", 5)
    events.close()  # type: ignore[attr-defined]
    server.wait_for("texts_running", 0)
    waits = socket.create_connection((server.host, server.port))
    body = json.dumps({**FOREVER, "n": 2}).encode()
    waits.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                  b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
    server.wait_for("texts_running", 2)
    waits.close()
    server.wait_for("texts_running", 0)
    assert server.metric("texts_dropped_total") == dropped + 10
    assert server.metric("generated_tokens_total") - made < 3 * 2000  # not one of ten was finished


def test_beyond_what_may_wait_a_request_is_told_to_come_again(server: Server) -> None:
    server.wait_for("texts_running", 0)
    events = server.events(**FOREVER, n=43)
    next(events)
    status, found = server.ask("/v1/completions", {"prompt": "x", "n": 43, "max_tokens": 2})
    assert (status, found["error"]["code"]) == (503, "queue_full")
    events.close()  # type: ignore[attr-defined]
    server.wait_for("texts_running", 0)
    assert server.ask("/v1/completions", {"prompt": "x", "n": 43, "max_tokens": 2})[0] == 200


def test_a_client_that_does_not_read_holds_nobody_up(server: Server) -> None:
    body = json.dumps({**FOREVER, "n": 2, "stream": True, "logprobs": 0}).encode()
    deaf = socket.socket()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    deaf.connect((server.host, server.port))
    deaf.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                 b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
    server.wait_for("texts_running", 2)
    began = time.monotonic()
    assert len(server.complete(prompt="x", max_tokens=50)["choices"]) == 1
    assert time.monotonic() - began < 20
    deaf.close()
    server.wait_for("texts_running", 0)


def test_megatrons_clients_get_prompt_and_text(folder: Path, server: Server) -> None:
    status, found = server.ask("/api", {"prompts": ["one", "two"], "tokens_to_generate": 7, "random_seed": 4,
                                        "logprobs": True, "no_log": True, "top_k": 9}, "PUT")
    assert status == 200 and set(found) == {"text", "segments", "logprobs", "random_seed"}
    for place, prompt in enumerate(("one", "two")):
        text = alone(folder, prompt, 7, Sampling(top_k=9), f"4/{place}")
        assert found["text"][place] == prompt + text
        assert found["segments"][place][:3] == list(prompt) and len(found["segments"][place]) == 10
        assert len(found["logprobs"][place]) == 9
    again = server.ask("/api", {"prompts": ["one"], "top_k": 1, "tokens_to_generate": 7})[1]["text"]
    assert again == ["one" + alone(folder, "one", 7, Sampling(greedy=True), "")]


def test_what_is_there_is_said(server: Server) -> None:
    assert server.ask("/health") == (200, {"status": "ok"})
    status, models = server.ask("/v1/models")
    (model,) = models["data"]
    assert status == 200 and model["max_model_len"] == 2048
    assert server.ask(f"/v1/models/{model['id']}") == (200, model)
    assert server.ask("/v1/completions", {"model": model["id"], "max_tokens": 1})[0] == 200
    assert server.ask("/v1/completions", {"model": "gpt-5"})[0] == 404
    status, page = server.ask("/")
    assert status == 200 and "<textarea" in page


def whole_model(folder: Path, ids: list[int]) -> torch.Tensor:
    """Log-probabilities after each token, by a forward of its own."""
    loaded = load.load_model(ModelSource(str(folder), None, dtype="fp32"), groups.build(1), torch.device("cpu"))
    with torch.no_grad():
        return torch.stack([loaded.model(torch.tensor([ids[:end]]))[0, : loaded.tokenizer.vocab_size].log_softmax(-1)
                            for end in range(1, len(ids) + 1)])


@pytest.mark.parametrize(("echo", "most"), [(True, 0), (True, 6), (False, 6)])
def test_log_probabilities_are_those_of_the_whole_model(folder: Path, server: Server, echo: bool, most: int) -> None:
    found = server.complete(prompt=["some words", "y"], max_tokens=most, echo=echo, logprobs=3, temperature=0)
    for prompt, choice in zip(("some words", "y"), found["choices"], strict=True):
        text = alone(folder, prompt, most, Sampling(greedy=True), "") if most else ""
        assert choice["text"] == (prompt if echo else "") + text and choice["finish_reason"] == "length"
        scores, ids = choice["logprobs"], [*f"{prompt}{text}".encode()]
        logprobs, first = whole_model(folder, ids), 0 if echo else len(prompt)
        assert scores["tokens"] == [chr(token) for token in ids[first:]]
        assert scores["text_offset"] == list(range(len(ids) - first))
        for place, (given, top) in enumerate(zip(scores["token_logprobs"], scores["top_logprobs"], strict=True), first):
            if place == 0:
                assert given is None and top is None
                continue
            # The same sums in another order: some fp32 roundings of numbers of about 6.
            assert given == pytest.approx(float(logprobs[place - 1, ids[place]]), abs=1e-4)
            best = logprobs[place - 1].topk(3).values.tolist()
            assert sorted(top.values(), reverse=True) == pytest.approx(best[: len(top)], abs=1e-4) or len(top) < 3
    assert found["usage"]["completion_tokens"] == 2 * most
