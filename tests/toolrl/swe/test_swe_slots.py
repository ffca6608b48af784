"""Slots of a stage: the lowest place first, and none is lost with a canceled episode."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolrl.swe.slots import OrderedSlots


@given(st.lists(st.integers(0, 9), max_size=12), st.integers(1, 3))
def test_places_come_in_order_and_equal_ones_as_they_arrived(places: Sequence[int], num_slots: int) -> None:
    served: list[tuple[int, int]] = []

    async def hold(slots: OrderedSlots, number: int) -> None:
        await slots.acquire(places[number])
        served.append((places[number], number))
        slots.release()

    async def main() -> None:
        slots = OrderedSlots(num_slots)
        for _ in range(num_slots):
            await slots.acquire(99)
        waiting = [asyncio.create_task(hold(slots, number)) for number in range(len(places))]
        await asyncio.sleep(0)
        for _ in range(num_slots):
            slots.release()
        await asyncio.gather(*waiting)
        assert slots.free == num_slots

    asyncio.run(main())
    assert served == sorted(served)


@pytest.mark.parametrize("handed_over", [False, True])
async def test_a_canceled_episode_passes_its_slot_on(handed_over: bool) -> None:
    slots = OrderedSlots(1)
    await slots.acquire(0)
    first, second = (asyncio.create_task(slots.acquire(place)) for place in (1, 2))
    await asyncio.sleep(0)
    if handed_over:  # the slot and the end come in the same moment
        slots.release()
        first.cancel()
    else:
        first.cancel()
        await asyncio.sleep(0)
        slots.release()
    await asyncio.wait_for(second, 1)
    assert first.cancelled() and slots.free == 0
    slots.release()
    assert slots.free == 1
