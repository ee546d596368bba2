"""A model that is split over ranks, behind one address."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import pytest

from megatron.inference.decoder import Decoder
from megatron.inference.generation import Generator
from megatron.inference.request import Request, Sampling
from megatron.model.gpt2 import GPT2
from megatron.serve import scheduler
from megatron.serve.scheduler import (CancelSequences, LogprobScorer, QueueClosed, ScoreSequence, StartSequences,
                                      TokenEvent)
from mpu import groups
from tests.distributed import run_ranks
from tests.megatron.helpers import tiny_model
from tests.megatron.serve.server import served, trained

LONG = {"prompt": "x", "max_tokens": 1500, "temperature": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("run"))


TURNS, BEATS = 3, 3


def lead(rank: int, world: int) -> tuple[int, list[object]]:
    """(words to the others, what was told) of a leader that has a few orders, and then none until it has said a few
    times that they go on."""
    made = groups.build(world)
    model = GPT2(tiny_model(), made.tp)
    hands = scheduler.StepExecutor(Generator(Decoder(model, 2), vocabulary=257, eod=None), LogprobScorer(model, 257))
    inbox, told, words = scheduler.Inbox(), [], 0
    say = scheduler.broadcast_json

    def counted(*arguments: object) -> object:
        nonlocal words
        words += 1
        return say(*arguments)  # type: ignore[arg-type]

    with patch.object(scheduler, "HEARTBEAT_SECONDS", 0.1), patch.object(scheduler, "POLL_SECONDS", 0.02), \
            patch.object(scheduler, "broadcast_json", counted):
        if rank > 0:
            scheduler.run_worker(hands, made.world)
            return words, []
        texts = [Request(number, (5, 6), 4, Sampling(greedy=True)) for number in range(3)]
        for order in (StartSequences(tuple(texts)), ScoreSequence(7, (5, 6, 7), 2), CancelSequences((2, 99))):
            inbox.put(order)
        began = time.monotonic()
        finished = scheduler.GenerationScheduler(hands, made.world, inbox, told.extend).run(
            lambda: words >= TURNS + BEATS or time.monotonic() - began > 30, lambda: inbox.put(QueueClosed()), 5)
        beats = words - TURNS - 1
        assert finished and 0.1 * beats < time.monotonic() - began < 30
        return words, [(one.number, one.count, one.finish_reason) if isinstance(one, TokenEvent) else one.number
                       for one in told]


def test_ranks_with_nothing_to_do_hear_that_they_go_on() -> None:
    (words, told), (heard, _) = run_ranks(lead, 2)
    assert words == heard >= TURNS + BEATS + 1  # the last one ends them
    ends: Sequence[object] = [one for one in told if isinstance(one, tuple) and one[2]]
    assert ends == [(0, 4, "length"), (1, 4, "length")] and 7 in told


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
