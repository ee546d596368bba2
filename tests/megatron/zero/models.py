"""Models that are not GPT-2's, each with one thing that an engine may trip over.

A *model* takes [n, WIDTH] numbers and returns their mean loss; its weights are always the same. `Net` is the plain one,
the others differ from it in one thing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.model import GPT2
from tests.megatron.zero.run import configure_gpt2

WIDTH = 6


class Block(nn.Module):
    """x + f(x)."""

    def __init__(self, hidden: int = 7) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(self.wide(x).tanh())


class Net(nn.Module):
    """Three blocks between two layers of the root. The others differ from it in one thing."""

    Element: type[nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(self.Element() for _ in range(3))
        self.change()

    def change(self) -> None:
        """What a model of its own does to the parts."""

    def forward(self, x: Tensor) -> Tensor:
        return (self.last(self.middle(self.first(x))).float() - 1).square().mean()

    def middle(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class OddSizes(Net):
    """A scalar, one element, three elements and none, in a block and in the root."""

    class Element(Block):
        def __init__(self) -> None:
            super().__init__()
            self.scalar, self.one = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(1))
            self.three, self.none = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(0, 4))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.scalar) * self.one + self.three.sum() + self.none.sum()

    def change(self) -> None:
        self.scalar, self.none = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.ones(0))

    def middle(self, x: Tensor) -> Tensor:
        return super().middle(x) * self.scalar + self.none.sum()


class ThreeElements(nn.Module):
    """Nothing to cut: the root has everything, which are fewer elements than a shard has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.1, 0.2, 0.3]))

    def forward(self, x: Tensor) -> Tensor:
        return (x[:, :3] * self.weight - 1).square().mean()


class Ending(nn.Module):
    """Returns what its last layer returns: one number."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 7), nn.Linear(7, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.wide(x).tanh().mean(0))  # type: ignore[no-any-return]


class EndsInABlock(nn.Module):
    """Nothing is left for the root. Returns what its last block returns, and that what its last layer returns: one
    tensor is the output of all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks = nn.ModuleList([Block(), Block(), Ending()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class RootEndsInABlock(EndsInABlock):
    """With layers of the root before."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.first(x))


class Passes(Net):
    """A block that returns what it was given, now and then."""

    class Element(Block):
        rests = False

        def forward(self, x: Tensor) -> Tensor:
            return x if self.rests else super().forward(x)

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            getattr(block, "module", block).rests = (int(x[0, -1]) + number) % 3 == 0
        return super().forward(x)


class FrozenTwice(Net):
    """A block with frozen layers is used twice in a row."""

    def change(self) -> None:
        self.blocks[1].requires_grad_(False)
        self.blocks[2].wide.requires_grad_(False)

    def middle(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(block(x))
        return x


@dataclass
class Record:
    x: Tensor


class Dicts(Net):
    """A block returns a dict, with an object of its own inside, and with a view of its parameter, as position
    embeddings do."""

    class Element(Block):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH))

        def forward(self, x: Any) -> Any:
            found = super().forward(x["record"].x + x["shift"].tanh())
            return {"record": Record(found), "deep": [x["record"].x], "none": None, "shift": self.table[:1]}

    def middle(self, x: Tensor) -> Tensor:
        state: Any = {"record": Record(x), "shift": torch.zeros(1)}
        for block in self.blocks:
            state = block(state)
        return state["record"].x + state["deep"][0] + state["shift"]  # type: ignore[no-any-return]


class LayerDrop(Net):
    """A block that some steps skip, on all ranks alike."""

    def forward(self, x: Tensor) -> Tensor:
        self.skipped = int(x[0, -1]) % 3  # the number of the step
        return super().forward(x)

    def middle(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = x if index == self.skipped else block(x)
        return x


class RankDrop(LayerDrop):
    """Each rank's data decide which block it skips."""

    def forward(self, x: Tensor) -> Tensor:
        self.skipped = int(x[0, 0] > 0)
        return Net.forward(self, x)


class Frozen(Net):
    """One whole block, parts of another, and a layer of the root."""

    def change(self) -> None:
        for part in (self.blocks[0], self.blocks[1].wide, self.first):  # type: ignore[union-attr]
            part.requires_grad_(False)


class InPlace(Net):
    """Blocks have buffers, and what they return is overwritten."""

    class Element(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("offset", torch.linspace(0, 1, WIDTH))
            self.offset: Tensor

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + self.offset)

    def middle(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x.mul_(0.5).add_(1)
        return x


class Permuted(Net):
    """A parameter that is not contiguous."""

    def change(self) -> None:
        self.last.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).t())


class Words(nn.Module):
    """GPT-2, whose token table is summed up in place."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt2 = GPT2(configure_gpt2().model)

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x.abs() * 10).long() % 61
        return self.gpt2(tokens[:, :-1], tokens[:, 1:])  # type: ignore[no-any-return]


# ---- a weight that is used more than once, or elsewhere than in the forward of its block -----------------------------


class Tied(Net):
    """Two blocks share a weight, and another shares one with the root."""

    def change(self) -> None:
        self.blocks[2].wide.weight = self.blocks[0].wide.weight  # type: ignore[union-attr]
        self.table = nn.Linear(WIDTH, 7)
        self.blocks[1].wide.weight = self.table.weight  # type: ignore[union-attr]

    def middle(self, x: Tensor) -> Tensor:
        return super().middle(x) + self.table(x).mean(1, keepdim=True)


class RootReadsBlock(Net):
    """The root uses a parameter of a block outside the block's forward."""

    def middle(self, x: Tensor) -> Tensor:
        return super().middle(x) + F.linear(x, self.blocks[1].wide.weight).mean(1, keepdim=True)  # type: ignore


class BlockTwice(Net):
    """Blocks are used more than once, and without gradients between uses with them."""

    def middle(self, x: Tensor) -> Tensor:
        x = super().middle(x)
        with torch.no_grad():
            aim = self.blocks[2](self.blocks[0](x))
        return super().middle(self.blocks[1](x)) + aim


class Experts(Net):
    """The elements of a second list are called by those of the first, between their own layers."""

    class Element(Block):
        expert: tuple[nn.Module, ...] = ()

        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            for expert in self.expert:
                x = torch.tanh(expert(x))
            return super().forward(x)

    def change(self) -> None:
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        for block, expert in zip(self.blocks, self.experts):
            block.expert = (expert,)  # type: ignore[assignment]


class ReadLater(Net):
    """What a block keeps as an attribute reaches the loss."""

    class Element(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            self.kept = self.wide(x).square().mean()
            return y

    def middle(self, x: Tensor) -> Tensor:
        return super().middle(x) + sum(block.kept for block in self.blocks)  # type: ignore[misc]


class Boxed:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class Opaque(Net):
    """A block returns an object, with its only tensor inside."""

    class Element(Block):
        def forward(self, x: Tensor) -> Any:
            return Boxed(super().forward(x))

    def middle(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).x
        return x
