"""Models that use a weight more than once, or elsewhere than in the forward of its block (see models.py)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.megatron.zero.models import WIDTH, Block, Net


class TiedBlocks(Net):
    def change(self) -> None:
        self.blocks[2].wide.weight = self.blocks[0].wide.weight  # type: ignore[union-attr]


class TiedInOneBlock(Net):
    def change(self) -> None:
        for block in self.blocks:
            block.again = block.wide  # type: ignore[assignment]


class TiedToRoot(Net):
    def change(self) -> None:
        self.table = nn.Linear(WIDTH, 7)
        self.blocks[1].wide.weight = self.table.weight  # type: ignore[union-attr]

    def middle(self, x: Tensor) -> Tensor:
        return super().middle(x) + self.table(x).mean(1, keepdim=True)


class RootReadsBlock(Net):
    """The root uses a parameter of a block outside the block's forward."""

    def middle(self, x: Tensor) -> Tensor:
        return super().middle(x) + F.linear(x, self.blocks[1].wide.weight).mean(1, keepdim=True)  # type: ignore


class BlockReadsBlock(Net):
    """A block keeps a reference to another one, and calls it."""

    class Element(Block):
        other: tuple[nn.Module, ...] = ()

        def forward(self, x: Tensor) -> Tensor:
            for other in self.other:
                x = other(x)
            return super().forward(x)

    def change(self) -> None:
        self.blocks[0].other = (self.blocks[2],)  # type: ignore[assignment]


class BlockTwice(Net):
    def middle(self, x: Tensor) -> Tensor:
        return super().middle(self.blocks[1](super().middle(x)))


class NestedLists(Net):
    """The elements of the list are lists, which nobody calls."""

    def change(self) -> None:
        self.pairs = nn.ModuleList(nn.ModuleList([Block(), nn.Linear(WIDTH, WIDTH)]) for _ in range(2))

    def middle(self, x: Tensor) -> Tensor:
        for one, two in self.pairs:  # type: ignore[misc]
            x = two(one(x))
        return super().middle(x)


class OtherMethod(Net):
    """Blocks are used by a method that is not forward."""

    class Element(Block):
        def act(self, x: Tensor) -> Tensor:
            return super().forward(x)

    def middle(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block.act(x)  # type: ignore[operator]
        return x


class Teacher(Net):
    """A block used without gradients, between uses with them."""

    def middle(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            aim = self.blocks[2](self.blocks[0](x))
        return super().middle(x) + aim


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


class Wrapped(Net):
    """The elements of a second list have those of the first inside."""

    class Around(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.scale = inner, nn.Parameter(torch.randn(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x * self.scale) * self.scale  # type: ignore[no-any-return]

    def change(self) -> None:
        self.wrapped = nn.ModuleList(map(Wrapped.Around, self.blocks))

    def middle(self, x: Tensor) -> Tensor:
        for block in self.wrapped:
            x = block(x)
        return x


class ReadLater(Net):
    """What a block keeps as an attribute reaches the loss."""

    class Element(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            self.kept = self.wide(x).square().mean()
            return y

    def middle(self, x: Tensor) -> Tensor:
        return super().middle(x) + sum(block.kept for block in self.blocks)  # type: ignore[misc]


class InAnObject(Net):
    """A block returns an object beside its tensor, with other tensors inside."""

    class Element(Block):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), torch.distributions.Normal(self.wide(x), 1.0)

    def middle(self, x: Tensor) -> Tensor:
        likelihood = x.new_zeros(())
        for block in self.blocks:
            x, found = block(x)
            likelihood = likelihood + found.log_prob(torch.ones_like(found.mean)).mean()
        return x + likelihood


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
