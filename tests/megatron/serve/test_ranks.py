"""A model that is split over ranks, behind one address."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megatron.serve import leader
from tests.megatron.serve.server import served, trained

LONG = {"prompt": "x", "max_tokens": 1500, "temperature": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("run"))


def test_two_ranks_serve_the_text_of_one(folder: Path, tmp_path: Path) -> None:
    asked = [{"prompt": f"prompt {number}", "max_tokens": 30 + number, "seed": number, "n": 2} for number in range(6)]
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
            time.sleep(1.2 * leader.HEARTBEAT_SECONDS * (ranks - 1))  # with nothing to do, ranks hear that they go on
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
