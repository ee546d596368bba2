"""How a server begins, whom it lets in, and how it ends; a model that is split over ranks."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron.errors import ConfigError
from megatron.inference import load
from megatron.inference.decoder import Decoder
from megatron.inference.generation import Generator
from megatron.inference.model_args import ModelSource
from megatron.model.gpt2 import GPT2
from megatron.serve import scheduler
from megatron.serve.app import AuthPolicy, run_server
from megatron.serve.cli import ServerLimits, bind_listener, main
from megatron.serve.scheduler import RequestQueue, run_leader, run_worker
from mpu import groups
from tests.distributed import run_ranks
from tests.megatron.helpers import tiny_model
from tests.megatron.launch.processes import python
from tests.megatron.serve.server import JSON, Server, served

LONG = {"prompt": "x", "max_tokens": 1500, "temperature": 0}  # the likeliest never ends the document here


def under_way(server: Server, pool: ThreadPoolExecutor, count: int, **asked: Any) -> list[Future[tuple[int, Any]]]:
    found = [pool.submit(server.ask, "/v1/completions", {**LONG, **asked}) for _ in range(count)]
    deadline = time.monotonic() + 20
    while server.metric("texts_running") + server.metric("texts_waiting") < count:
        assert time.monotonic() < deadline
    return found


def test_a_request_to_stop_lets_what_is_under_way_finish(folder: Path, tmp_path: Path) -> None:
    with served(folder, tmp_path, "--batch-size", 2) as server, ThreadPoolExecutor(4) as pool:
        answers = under_way(server, pool, 3)  # one of them waits
        server.process.send_signal(signal.SIGTERM)
        for answer in answers:
            status, found = answer.result()
            assert status == 200 and found["usage"]["completion_tokens"] == 1500
        assert server.process.wait(10) == 0
        with pytest.raises(ConnectionRefusedError):
            server.ask("/health")


def test_what_is_not_finished_in_time_is_told_so(folder: Path, tmp_path: Path) -> None:
    with served(folder, tmp_path, "--batch-size", 1, "--grace", 0.3) as server, ThreadPoolExecutor(9) as pool:
        answers = under_way(server, pool, 8, n=2)
        events = server.events(**LONG)
        server.process.send_signal(signal.SIGINT)
        results = [answer.result() for answer in answers]
        assert {status for status, _ in results} <= {200, 503} and results[-1][0] == 503
        refused = next(found for status, found in results if status == 503)
        assert refused["error"]["code"] == "stopping"
        with pytest.raises((ConnectionError, AssertionError)):
            list(events)
        assert server.process.wait(10) == 0


def test_a_second_interrupt_leaves_at_once(folder: Path, tmp_path: Path) -> None:
    with served(folder, tmp_path, "--grace", 60) as server, ThreadPoolExecutor(9) as pool:
        answers = under_way(server, pool, 8, n=8)
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert server.process.poll() is None
        began = time.monotonic()
        assert server.stop(signal.SIGINT) == 130
        assert time.monotonic() - began < 30
        for answer in answers:
            with pytest.raises(Exception):  # noqa: B017 - cut off, or an end of the connection
                assert answer.result()[0] == 200
        assert server.said().splitlines()[-1] == "error: interrupted"


def test_without_its_libraries_it_says_what_to_install() -> None:
    with patch("megatron.serve.cli.find_spec", lambda name: None), pytest.raises(ConfigError, match="install uvicorn"):
        main(["--load", "a"])


def test_a_port_that_is_taken_is_one_error_before_the_model_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = python("-m", "megatron.serve", "--load", tmp_path, "--port", port)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == (f"error: cannot listen on 127.0.0.1, port {port}: Address already in use; choose another "
                           "with --host and --port (0: any that is free)\n")


def test_an_address_may_be_of_either_family() -> None:
    for host in ("localhost", "127.0.0.1"):
        bind_listener(host, 0).close()
    for host in ("no such host", "256.1.1.1", "1.2.3.4", "a" * 300):
        with pytest.raises(ConfigError, match="cannot listen on"):
            bind_listener(host, 0)


def test_what_cannot_be_is_refused_in_words() -> None:
    for argv, words in (
            ("--port 65536", "--port is 65536"), ("--batch-size 0", "--batch-size is 0"),
            ("--max-waiting -1", "--max-waiting is -1"), ("--request-seconds nan", "--request-seconds is nan"),
            ("--max-texts 300", "could never be taken"), ("--api-key-file /no/file", "--api-key-file /no/file"),
            ("--model-name a\x1bb", "--model-name")):
        with pytest.raises(ConfigError, match=words):
            main(["--load", "a", *argv.split(" ")])


def test_only_who_has_the_key_is_let_in(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("s3cret-of-many\nsomething else\n")
    with served(folder, tmp_path, "--api-key-file", tmp_path / "key") as server:
        for path, body in (("/v1/completions", {"max_tokens": 1}), ("/api", {"prompts": ["x"]}), ("/v1/models", None),
                           ("/metrics", None), ("/nowhere", None)):
            for sent in (None, "", "Bearer", "Bearer ", "Bearer s3cret", "Bearer s3cret-of-manyx", "s3cret-of-many",
                         "Basic s3cret-of-many", "Bearer s3cret-of-many x", "Bearer \xff"):
                status, found = server.ask(path, body, headers=JSON | ({} if sent is None else {"Authorization": sent}))
                assert status == 401, (path, sent)
        with_key = {**JSON, "Authorization": "Bearer s3cret-of-many"}
        assert server.ask("/v1/completions", {"max_tokens": 1}, headers=with_key)[0] == 200
        assert server.ask("/health")[0] == server.ask("/")[0] == 200
        assert "s3cret" not in server.said()


def test_who_listens_to_all_without_a_key_is_told(folder: Path, tmp_path: Path) -> None:
    with served(folder, tmp_path, "--allowed-host", "proxy.example", "--quiet") as server:
        assert "without a key" not in server.said()
        for host, status in (("proxy.example", 200), ("PROXY.example:80", 200), ("other.example", 403)):
            assert server.ask("/v1/models", headers={"Host": host})[0] == status
        assert len(server.said().splitlines()) == 1  # which model


class Served:
    """A server of this process, in a thread."""

    def __init__(self, folder: Path) -> None:
        world = groups.build(1)
        loaded = load.load_model(ModelSource(str(folder), None), world, torch.device("cpu"))
        listener, ready = bind_listener("127.0.0.1", 0), threading.Event()
        self.host, self.port = listener.getsockname()
        self.ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self.stop = threading.Event()

        def work() -> None:
            try:
                run_server(loaded, world, rows=2, name="x", listener=listener, auth=AuthPolicy("127.0.0.1", None),
                           limits=ServerLimits(), log=lambda line: None, on_ready=ready.set,
                           stop_requested=self.stop.is_set)
                self.ended.put(None)
            except BaseException as error:
                self.ended.put(error)

        threading.Thread(target=work, daemon=True).start()
        assert ready.wait(10)

    ask = Server.ask


def test_a_model_that_fails_ends_the_server_and_everyone_is_told(folder: Path) -> None:
    server, follow, count = Served(folder), Decoder.decode_step, [0]

    def failing(self: Decoder, tokens: Any) -> torch.Tensor:
        count[0] += 1
        if count[0] > 50:
            raise RuntimeError("planted")
        return follow(self, tokens)

    with patch.object(Decoder, "decode_step", failing), ThreadPoolExecutor(5) as pool:
        answers = [pool.submit(server.ask, path, body) for path, body in [
            *[("/v1/completions", LONG)] * 3, ("/api", {"prompts": ["x"], "tokens_to_generate": 1500, "top_k": 1})]]
        stream = pool.submit(server.ask, "/v1/completions", {**LONG, "stream": True})
        for answer in answers:
            status, found = answer.result(30)
            assert status == 500 and "the model has failed" in json.dumps(found)
        status, text = stream.result(30)
        assert status == 500 or ("the model has failed" in text and "[DONE]" not in text)
        error = server.ended.get(timeout=30)
    assert isinstance(error, RuntimeError) and str(error) == "planted"


@pytest.mark.parametrize("fails_at", ["start", "work"])
def test_an_interrupted_server_gives_back_its_port_and_its_thread(folder: Path, fails_at: str) -> None:
    world = groups.build(1)
    loaded = load.load_model(ModelSource(str(folder), None), world, torch.device("cpu"))

    def interrupt() -> bool:
        raise KeyboardInterrupt

    with bind_listener("127.0.0.1", 0) as listener, pytest.raises(KeyboardInterrupt):
        run_server(loaded, world, rows=1, name="x", listener=listener, auth=AuthPolicy("127.0.0.1", None),
                   limits=ServerLimits(), log=lambda line: None, stop_requested=interrupt,
                   on_ready=interrupt if fails_at == "start" else lambda: None)  # type: ignore[arg-type, return-value]
    assert "clients" not in {thread.name for thread in threading.enumerate()}


def test_a_text_without_numbers_is_an_error_of_that_request_alone(folder: Path) -> None:
    server, read = Served(folder), Decoder.prefill

    def overflowing(self: Decoder, rows: Any, texts: Any) -> torch.Tensor:
        found = read(self, rows, texts).clone()
        for row, text in enumerate(texts):
            if list(text) == [*b"bad"]:
                found[row] = torch.nan
        return found

    good = {"prompt": "good", "max_tokens": 5, "temperature": 0}
    expected = server.ask("/v1/completions", good)
    with patch.object(Decoder, "prefill", overflowing):
        for prompt in ("bad", ["good", "bad", "good"]):
            status, found = server.ask("/v1/completions", {**good, "prompt": prompt})
            assert status == 500 and "non-finite logits" in json.dumps(found)
        again = server.ask("/v1/completions", good)
    assert again[0] == expected[0] == 200 and again[1]["choices"] == expected[1]["choices"]
    server.stop.set()
    assert server.ended.get(timeout=30) is None


# ---- a model that is split over ranks, behind one address ---------------------------------------------------------


def idle_plans(rank: int, world: int) -> int:
    """How many plans a leader without requests broadcasts, or its worker follows, until the leader ends both."""
    made, plans, broadcast = groups.build(world), 0, scheduler.broadcast_json
    generator = Generator(Decoder(GPT2(tiny_model(), made.tp), 2), vocabulary=257, eod=None)

    def counted(*arguments: Any) -> object:
        nonlocal plans
        plans += 1
        return broadcast(*arguments)

    with patch.object(scheduler, "HEARTBEAT_SECONDS", 0.1), patch.object(scheduler, "POLL_SECONDS", 0.02), \
            patch.object(scheduler, "broadcast_json", counted):
        if rank > 0:
            run_worker(generator, made.world)
            return plans
        began = time.monotonic()
        assert run_leader(generator, made.world, RequestQueue(2, 9), lambda events: None,
                          lambda: plans >= 3 or time.monotonic() - began > 30, lambda: None, 5)
        assert 0.2 <= time.monotonic() - began < 30
        return plans


def test_idle_ranks_follow_a_plan_every_few_seconds() -> None:
    leader, worker = run_ranks(idle_plans, 2)
    assert leader == worker >= 4, "the last one ends them"


def test_two_ranks_serve_the_text_of_one(folder: Path, tmp_path: Path) -> None:
    asked = [{"prompt": f"prompt {number}", "max_tokens": 15 + number, "seed": number, "n": 2} for number in range(6)]
    texts: list[object] = []
    scores: list[list[float]] = []
    for ranks in (1, 2):
        place = tmp_path / str(ranks)
        place.mkdir()
        with served(folder, place, "--batch-size", 3, ranks=ranks) as server, ThreadPoolExecutor(6) as pool:
            found = list(pool.map(lambda one: server.complete(**one)["choices"], asked))
            texts.append([[(choice["text"], choice["finish_reason"]) for choice in choices] for choices in found])
            scores.append(server.complete(prompt="some words", max_tokens=5, temperature=0, echo=True, logprobs=2)
                          ["choices"][0]["logprobs"]["token_logprobs"][1:])
            events = server.events(**LONG)
            next(events)
            events.close()  # type: ignore[attr-defined]
            server.wait_for("texts_running", 0)
            # With nothing to do, ranks hear that they go on.
            time.sleep(1.2 * scheduler.HEARTBEAT_SECONDS * (ranks - 1))
            assert server.complete(prompt="x", max_tokens=1)
            assert server.stop() == 0
    assert texts[0] == texts[1]
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)  # sums over two halves


def test_a_rank_that_dies_ends_the_server(folder: Path, tmp_path: Path) -> None:
    with served(folder, tmp_path, ranks=2) as server, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.ask, "/v1/completions", {**LONG, "n": 8})
        server.wait_for("texts_running", 8)
        children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
        second = next(child for child in children if b"\0RANK=1\0" in Path(f"/proc/{child}/environ").read_bytes())
        os.kill(int(second), signal.SIGKILL)
        assert server.process.wait(30) == 5
        try:
            assert answer.result(10)[0] == 500
        except OSError:
            pass  # the launcher was faster
        assert "rank 1" in server.said().splitlines()[-1]
