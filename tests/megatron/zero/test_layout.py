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


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("shards", [1, 2, 3, 5, 64])
def test_segments_cover_every_element_once(seed: int, shards: int) -> None:
    layout = FlatLayout(slots(seed), shards)
    seen: dict[str, list[int]] = {slot.name: [0] * slot.numel for slot in layout.slots}
    for rank in range(shards):
        for segment in layout.segments(rank):
            assert segment.shard_offset + rank * layout.shard_numel == segment.slot.offset + segment.slot_offset
            for index in range(segment.slot_offset, segment.slot_offset + segment.count):
                seen[segment.slot.name][index] += 1
    assert all(count == 1 for counts in seen.values() for count in counts)


@pytest.mark.parametrize("shards", [1, 3])
def test_slots_and_gaps_tile_the_buffer(shards: int) -> None:
    layout = FlatLayout(slots(2), shards)
    parts = sorted([*((slot.offset, slot.end) for slot in layout.slots if slot.numel), *layout.padding_ranges()])
    assert parts[0][0] == 0 and parts[-1][1] == layout.numel
    assert all(one[1] == two[0] for one, two in zip(parts, parts[1:], strict=False))


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_every_group_is_one_span_and_spans_hold_their_segments(shards: int) -> None:
    layout = FlatLayout(slots(1), shards)
    for rank in range(shards):
        groups = sorted({slot.group for slot in layout.slots})
        spans = {group: range(*layout.group_range(rank, group)) for group in groups}
        for segment in layout.segments(rank):
            assert segment.shard_offset in spans[segment.slot.group]


def test_shards_and_slots_are_aligned_and_more_ranks_than_elements_fit() -> None:
    layout = FlatLayout([Slot("a", (3,)), Slot("b", (5,))], 64)
    assert layout.shard_numel % ALIGNMENT == 0 and all(slot.offset % ALIGNMENT == 0 for slot in layout.slots)
    assert [list(layout.segments(rank)) for rank in range(2, 64)] == [[]] * 62
