"""The two threads of a server, put together: from listening to the last word."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable

from megatron.inference.answers import generator_of
from megatron.inference.decoder import Decoder
from megatron.inference.loading import Loaded
from megatron.inference.wording import Wording
from megatron.serve.answers import Answers
from megatron.serve.asked import Subject
from megatron.serve.desk import STOPPING, Desk
from megatron.serve.door import Door
from megatron.serve.front import Front
from megatron.serve.judge import Judge
from megatron.serve.leader import Hands, Inbox, Leader, follow
from megatron.serve.limits import Limits
from megatron.serve.metrics import Metrics
from megatron.serve.refusal import Refusal
from mpu.groups import Groups

LAST_SECONDS = 5.0
"""For clients to take what is left, once the model has stopped."""
LAST_SECONDS_OF_FAILURE = 1.0
"""Shorter than a launcher waits before it ends all ranks."""


def hands_of(loaded: Loaded, rows: int) -> Hands:
    generator = generator_of(loaded, Decoder(loaded.model, rows), Wording(loaded.tokenizer), slides=False)
    return Hands(generator, Judge(loaded.model, loaded.tokenizer.vocab_size))


def work(loaded: Loaded, groups: Groups, rows: int) -> None:
    """A rank that is told what to do."""
    follow(hands_of(loaded, rows), groups.world)


def subject_of(loaded: Loaded, name: str, limits: Limits) -> Subject:
    shape, tokenizer = loaded.model.config, loaded.tokenizer
    eod = tokenizer.eod if tokenizer.eod < shape.tokens else None
    return Subject(name, tokenizer, shape.max_position_embeddings, eod, limits, int(time.time()))


def serve(loaded: Loaded, groups: Groups, *, rows: int, name: str, listener: socket.socket, host: str, key: str | None,
          allowed: Iterable[str], limits: Limits, log: Callable[[str], None], ready: Callable[[], None],
          asked_to_stop: Callable[[], bool]) -> None:
    """The rank that hears the clients; until it is asked to stop. `ready` is called when it listens."""
    hands, inbox, metrics = hands_of(loaded, rows), Inbox(), Metrics()
    desk = Desk(inbox, rows, limits.max_waiting, metrics)
    answers = Answers(subject_of(loaded, name, limits), desk, Door(host, key, allowed), metrics, limits)
    front = Front(listener, answers, desk, inbox, metrics, limits, log)
    leader = Leader(hands, groups.world, inbox, front.tell)
    late = Refusal(503, f"{STOPPING}, and this was not done in time", code="stopping")
    front.start()
    try:
        ready()
        if not leader.run(asked_to_stop, front.close, limits.grace):
            front.fail(late)
    except BaseException as error:
        has_failed = isinstance(error, Exception)
        front.fail(Refusal(500, "the model has failed, and the server ends") if has_failed else late)
        front.finish(LAST_SECONDS_OF_FAILURE)
        raise
    front.finish(LAST_SECONDS)
