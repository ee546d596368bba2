"""The thread of the model: its loop, and what it and the thread of the clients say to each other.

Between two steps texts begin where rows are free, and those go whose client has left. Rank 0 leads: it alone hears the
clients, and before each step it tells the others what to do. While there is nothing to do they wait for its word, which
comes every few seconds, so that no collective times out.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, final

import torch

from megatron.inference.generation import End, Generator, Text
from megatron.inference.request import Request, Sampling
from megatron.model.gpt2 import GPT2
from mpu.collectives import broadcast_json
from mpu.groups import Group


@dataclass(frozen=True)
class Begin:
    requests: tuple[Request, ...]


@dataclass(frozen=True)
class Read:
    """A text that has ended, once more, for a verdict (Judge)."""

    number: int
    ids: tuple[int, ...]
    top: int
    """How many of the likeliest tokens are wanted in each place."""


@dataclass(frozen=True)
class Drop:
    """Texts that nobody waits for any longer."""

    numbers: tuple[int, ...]


@dataclass(frozen=True)
class Closed:
    """No more will be asked for."""


@dataclass(frozen=True)
class Broken:
    """The thread of the clients has failed."""

    error: BaseException


Order = Begin | Read | Drop | Closed | Broken


@dataclass(frozen=True)
class News:
    """Of a text: it has so many tokens now, and this is the last of them; or it has ended."""

    number: int
    count: int
    token: int
    logprob: float
    ended: End | None


CHUNK_BYTES = 64 << 20
"""Of logits that exist together."""


@dataclass(frozen=True)
class Verdict:
    """Of a text's tokens from the second on: the first has nothing before it."""

    number: int
    logprobs: tuple[float, ...]
    likeliest: tuple[tuple[tuple[int, float], ...], ...]
    """In each place: tokens with their log-probabilities, the likeliest first."""


@final
class Judge:
    """How likely the model finds each token of a text, and which it finds likeliest there: another reading of the whole
    text, for clients that ask for more than the tokens that were taken."""

    def __init__(self, model: GPT2, vocabulary: int) -> None:
        """Tokens from `vocabulary` on are padding."""
        self._model, self._vocabulary = model, vocabulary
        self._rows = max(1, CHUNK_BYTES // (4 * vocabulary))

    @torch.inference_mode()
    def __call__(self, number: int, ids: tuple[int, ...], top: int) -> Verdict:
        """Collective."""
        tokens = torch.tensor(ids, device=self._model.wpe.weight.device)
        logprobs: list[float] = []
        likeliest: list[tuple[tuple[int, float], ...]] = []
        if len(ids) > 1:
            hidden = self._model.hidden_states(tokens[None, :-1])[0]  # [s - 1, h]
            for rows, targets in zip(hidden.split(self._rows), tokens[1:].split(self._rows), strict=True):
                found = self._model.logits(rows)[:, : self._vocabulary].float().log_softmax(-1)  # [n, V]
                logprobs += found.gather(1, targets[:, None])[:, 0].tolist()
                values, places = found.topk(min(top, self._vocabulary))
                likeliest += [tuple(zip(*pair)) for pair in zip(places.tolist(), values.tolist(), strict=True)]
        return Verdict(number, tuple(logprobs), tuple(likeliest))


TICK_SECONDS = 0.2
"""How long a request to stop may go unnoticed while there is nothing to do."""
HEARTBEAT_SECONDS = 5.0
"""Between two words to ranks that have nothing to do."""

Inbox = queue.SimpleQueue[Order]


@dataclass(frozen=True)
class Turn:
    """What every rank does next, before a step."""

    drop: tuple[int, ...] = ()
    begin: tuple[Request, ...] = ()
    read: tuple[Read, ...] = ()
    last: bool = False

    @classmethod
    def of_json(cls, found: dict[str, Any]) -> Turn:
        return cls(tuple(found["drop"]), tuple(_request(one) for one in found["begin"]),
                   tuple(Read(**{**one, "ids": tuple(one["ids"])}) for one in found["read"]), found["last"])


def _request(found: dict[str, Any]) -> Request:
    return Request(**{**found, "prompt": tuple(found["prompt"]), "stops": tuple(found["stops"]),
                      "sampling": Sampling(**found["sampling"])})


@final
class Hands:
    """What every rank does in a turn."""

    def __init__(self, generator: Generator, judge: Judge) -> None:
        self.generator, self._judge = generator, judge

    def __call__(self, turn: Turn) -> Iterator[Text | Verdict]:
        """The texts that got a token or ended, as they do."""
        for number in turn.drop:
            self.generator.drop(number)
        yield from self.generator.begin(turn.begin)
        yield from self.generator.step()
        for one in turn.read:
            yield self._judge(one.number, one.ids, one.top)


def follow(hands: Hands, world: Group) -> None:
    """The loop of every rank but the first."""
    while not (turn := Turn.of_json(broadcast_json(None, world))).last:
        for _ in hands(turn):
            pass


@final
class Leader:
    def __init__(self, hands: Hands, world: Group, inbox: Inbox, tell: Callable[[list[News | Verdict]], None]) -> None:
        self._hands, self._world, self._inbox, self._tell = hands, world, inbox, tell
        self._running: set[int] = set()
        self._waiting: deque[Request] = deque()
        self._drops: list[int] = []
        self._reads: deque[Read] = deque()
        self._closed = False
        self._spoke = time.monotonic()

    @property
    def _idle(self) -> bool:
        return not self._waiting and not self._running and not self._reads

    def run(self, asked_to_stop: Callable[[], bool], close: Callable[[], None], grace: float) -> bool:
        """Until asked to stop, and what has been asked for by then is done, or `grace` seconds have gone: False.
        `close` makes the thread of the clients say Closed."""
        until = float("inf")
        while not (self._closed and self._idle) and time.monotonic() < until:
            self._listen()
            self._turn()
            if until == float("inf") and asked_to_stop():
                until = time.monotonic() + grace
                close()
        self._say(Turn(last=True))
        return self._idle

    def _listen(self) -> None:
        """To all that has been said by now; where there is nothing to do, for a moment."""
        try:
            order = self._inbox.get(timeout=TICK_SECONDS) if self._idle else self._inbox.get_nowait()
            while True:
                self._obey(order)
                order = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _obey(self, order: Order) -> None:
        match order:
            case Begin(requests):
                self._waiting += requests
            case Read():
                self._reads.append(order)
            case Drop(numbers):
                self._reads = deque(read for read in self._reads if read.number not in numbers)
                self._waiting = deque(request for request in self._waiting if request.number not in numbers)
                self._drops += [number for number in numbers if number in self._running]
            case Closed():
                self._closed = True
            case Broken(error):
                raise error

    def _turn(self) -> None:
        if self._idle:
            if self._world.size > 1 and time.monotonic() - self._spoke >= HEARTBEAT_SECONDS:
                self._say(Turn())
            return
        room = self._hands.generator.room + len(self._drops)
        turn = Turn(tuple(self._drops), tuple(self._waiting.popleft() for _ in range(min(room, len(self._waiting)))),
                    (self._reads.popleft(),) if self._reads else ())  # one at a time: the others wait for tokens
        self._drops.clear()
        self._running.difference_update(turn.drop)
        self._say(turn)
        self._tell([found if isinstance(found, Verdict) else self._news(found) for found in self._hands(turn)])

    def _news(self, text: Text) -> News:
        number, tokens = text.request.number, text.tokens
        (self._running.add if text.ended is None else self._running.discard)(number)
        return News(number, len(tokens), tokens[-1] if tokens else 0, text.logprobs[-1] if tokens else 0.0, text.ended)

    def _say(self, turn: Turn) -> None:
        if self._world.size > 1:
            broadcast_json(asdict(turn), self._world)
            self._spoke = time.monotonic()
