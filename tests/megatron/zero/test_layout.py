"""The layout cuts every parameter exactly once, whatever the number of shards."""

from __future__ import annotations

import random

import pytest

from megatron.zero.layout import ALIGNMENT, FlatLayout, Slot


def slots(seed: int) -> list[Slot]:
    draw = random.Random(seed)
    return [
        Slot(f"p{i}", tuple(draw.choices((1, 2, 3, 7, 64), k=draw.choice((0, 1, 2)))), group=draw.choice((0, 1)))
        for i in range(12)
    ]


@pytest.mark.parametrize("shards", [1, 2, 3, 5, 64])
def test_shards_have_every_element_once(shards: int) -> None:
    for seed in range(5):
        layout = FlatLayout(slots(seed), shards)
        seen: dict[str, list[int]] = {slot.name: [0] * slot.numel for slot in layout.slots}
        for rank in range(shards):
            groups = {slot.group: range(*layout.group_range(rank, slot.group)) for slot in layout.slots}
            for segment in layout.segments(rank):
                assert segment.shard_offset + rank * layout.shard_numel == segment.slot.offset + segment.slot_offset
                assert segment.shard_offset in groups[segment.slot.group], "every group is one range"
                for index in range(segment.slot_offset, segment.slot_offset + segment.count):
                    seen[segment.slot.name][index] += 1
        assert all(count == 1 for counts in seen.values() for count in counts)
        parts = sorted([*((slot.offset, slot.end) for slot in layout.slots if slot.numel), *layout.padding_ranges()])
        assert parts[0][0] == 0 and parts[-1][1] == layout.numel, "slots and padding tile the buffer"
        assert all(one[1] == two[0] for one, two in zip(parts, parts[1:], strict=False))
        assert layout.shard_numel % ALIGNMENT == 0 and all(slot.offset % ALIGNMENT == 0 for slot in layout.slots)


def test_more_ranks_than_elements_fit() -> None:
    layout = FlatLayout([Slot("a", (3,)), Slot("b", (5,))], 64)
    assert [list(layout.segments(rank)) for rank in range(2, 64)] == [[]] * 62
