"""A model that is split over ranks, behind one address."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from megatron.inference.decoder import Decoder
from megatron.inference.generation import Generator
from megatron.inference.request import Request, Sampling
from megatron.model.gpt2 import GPT2
from megatron.serve import scheduler
from megatron.serve.scheduler import RequestQueue, ServerMetrics, StepExecutor, TokenEvent, run_leader, run_worker
from mpu import groups
from tests.distributed import run_ranks
from tests.megatron.helpers import tiny_model
from tests.megatron.serve.server import served, trained

LONG = {"prompt": "x", "max_tokens": 1500, "temperature": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("run"))


TURNS, BEATS = 4, 3


def lead(rank: int, world: int) -> tuple[int, list[object]]:
    """(plans that were broadcast, events) of a leader that has a few requests, and then none for a few heartbeats."""
    made = groups.build(world)
    model = GPT2(tiny_model(), made.tp)
    executor = StepExecutor(Generator(Decoder(model, 2), vocabulary=257, eod=None), model, 257)
    events, plans, broadcast = [], 0, scheduler.broadcast_json

    def counted(*arguments: object) -> object:
        nonlocal plans
        plans += 1
        return broadcast(*arguments)  # type: ignore[arg-type]

    with patch.object(scheduler, "HEARTBEAT_SECONDS", 0.1), patch.object(scheduler, "POLL_SECONDS", 0.02), \
            patch.object(scheduler, "broadcast_json", counted):
        if rank > 0:
            run_worker(executor, made.world)
            return plans, []
        queue = RequestQueue(2, 9, ServerMetrics())
        queue.submit([Request(0, (5, 6), 4, Sampling(greedy=True)) for _ in range(2)])
        queue.cancel(queue.submit([Request(0, (5, 6), 4)]), ConnectionResetError())  # before it began
        queue.submit([Request(0, (5, 6, 7), 0, top_logprobs=2)])

        def publish(new: list[Any]) -> None:
            events.extend(new)
            queue.handle_events(new)

        began = time.monotonic()
        finished = run_leader(executor, made.world, queue, publish, lambda: plans >= TURNS + BEATS or
                              time.monotonic() - began > 30, lambda: None, 5)
        assert finished and 0.1 * (plans - TURNS - 1) < time.monotonic() - began < 30
        return plans, [(one.number, one.count, one.finish_reason) if isinstance(one, TokenEvent) else one.number
                       for one in events]


def test_idle_ranks_get_a_plan_every_few_seconds() -> None:
    (plans, events), (received, _) = run_ranks(lead, 2)
    assert plans == received >= TURNS + BEATS + 1  # the last one ends them
    ends = [one for one in events if isinstance(one, tuple) and one[2]]
    assert sorted(ends) == [(0, 4, "length"), (1, 4, "length"), (3, 0, "length")] and 3 in events


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
