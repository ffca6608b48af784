"""The timer of an environment counts time in which the process runs."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.virtual_clock import VirtualClockLoop, run_at_once
from verl.envs.clock import EnvTimer


class Jumping(VirtualClockLoop):
    """A loop whose clock can be put forward, as that of a process is while it is stopped."""

    skipped_s = 0.0

    def time(self) -> float:
        return super().time() + self.skipped_s


def timed(limit_s: float, *steps_s: float) -> float:
    """The seconds of a block of these waits, with an hour of a stopped process in each of them."""

    async def block() -> float:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, Jumping)
        timer = EnvTimer(limit_s)
        async with timer.running():
            for seconds in steps_s:
                loop.call_later(seconds / 2, lambda: setattr(loop, "skipped_s", loop.skipped_s + 3600.0))
                await asyncio.sleep(seconds)
        return timer.seconds

    with asyncio.Runner(loop_factory=Jumping) as runner:
        return runner.run(block())


@pytest.mark.parametrize("limit_s", [3.0, 60.0, 3000.0])
def test_time_while_the_process_is_stopped_is_not_charged_to_the_environment(limit_s: float) -> None:
    assert timed(limit_s, 0.02) < 3.0


def test_two_stops_in_a_block_do_not_add_up_to_its_limit() -> None:
    assert timed(10.0, 0.02, 0.02) < 6.0


def test_without_a_stop_the_limit_holds() -> None:
    async def block() -> None:
        async with EnvTimer(0.05).running():
            await asyncio.sleep(60)

    with pytest.raises(TimeoutError):
        run_at_once(block())
