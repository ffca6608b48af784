"""Faults, chosen by the seed: one to three of a run, at any time, or at the n-th change of its folder."""

from __future__ import annotations

import random
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.simulation.parts import SERVICE, Mode

if TYPE_CHECKING:
    from tests.simulation.run import Simulation

LONG_S, SHORT_S = 60.0, 8.0  # longer and shorter than the health timeout


@dataclass(frozen=True)
class Fault:
    """What happens, and when: virtual seconds, or changes of the folder."""

    kind: str
    at_s: float | None = None
    at_change: int | None = None
    target: float = 0.0  # which one, as a share of them all
    amount: int = 1
    soon_s: float = 0.5  # after the next start, if the run has ended before

    def apply(self, simulation: Simulation) -> None:
        KINDS[self.kind].apply(simulation, self)

    def explains(self, code: int, message: str, simulation: Simulation) -> bool:
        kind = KINDS[self.kind]
        return code in kind.codes and re.search(kind.message, message) is not None


@dataclass(frozen=True)
class Kind:
    """codes, message: of an end that the fault explains"""

    apply: Callable[[Simulation, Fault], object]
    codes: tuple[int, ...] = ()
    message: str = ""


def _of(members: int, fault: Fault) -> int:
    return min(int(fault.target * members), members - 1)


def _group(name: str) -> Callable[[Simulation], Any]:
    return lambda simulation: getattr(simulation.machine, name)


def _kill(name: str) -> Callable[[Simulation, Fault], object]:
    def apply(simulation: Simulation, fault: Fault) -> None:
        group = _group(name)(simulation)
        group.kill(_of(group.size, fault))

    return apply


def _stop(name: str, seconds: float) -> Callable[[Simulation, Fault], object]:
    def apply(simulation: Simulation, fault: Fault) -> None:
        group = _group(name)(simulation)
        group.stop(_of(group.size, fault), seconds)

    return apply


def _cut(simulation: Simulation, fault: Fault) -> None:
    group = simulation.machine.engines
    assert group is not None
    group.cut(_of(group.size, fault))


def _slow(simulation: Simulation, fault: Fault) -> None:
    for group in (simulation.machine.engines, simulation.machine.trainer):
        assert group is not None
        group.slow_until, group.slow_s = simulation.world.now + 20.0, 3.0


def _twice(simulation: Simulation, fault: Fault) -> None:
    assert simulation.machine.engines is not None
    simulation.machine.engines.twice = 3 * fault.amount


def _scorer(stopped: bool) -> Callable[[Simulation, Fault], object]:
    def apply(simulation: Simulation, fault: Fault) -> None:
        alive = [each for each in simulation.machine.scorers if each.process.alive]
        if alive:
            chosen = alive[_of(len(alive), fault)]
            chosen.stop(LONG_S) if stopped else chosen.kill()

    return apply


def _pause(simulation: Simulation, fault: Fault) -> None:
    simulation.world.jump(40.0 * fault.amount)


def _shelf(slow: bool) -> Callable[[Simulation, Fault], object]:
    def apply(simulation: Simulation, fault: Fault) -> None:
        shelves = simulation.machine.shelves
        setattr(shelves, "slow_until" if slow else "down_until", simulation.world.now + fault.amount)

    return apply


KINDS: dict[str, Kind] = {
    "engine killed": Kind(_kill("engines"), (1,), "rollout rank"),
    "engine stopped": Kind(_stop("engines", LONG_S), (1,), "rollout rank"),
    "engine stopped briefly": Kind(_stop("engines", SHORT_S)),
    "connection to an engine cut": Kind(_cut, (1,), "rollout rank"),
    "requests twice": Kind(_twice),
    "everything slow": Kind(_slow),
    "rank killed": Kind(_kill("trainer"), (1,), "trainer rank"),
    "rank stopped": Kind(_stop("trainer", LONG_S), (1,), "trainer rank .* has not responded"),
    "rank stopped briefly": Kind(_stop("trainer", SHORT_S)),
    "scorer killed": Kind(_scorer(False), (1,), "the reward's process died"),
    "scorer stopped": Kind(_scorer(True), (1,), "the reward's process died"),
    "controller paused": Kind(_pause),
    "SIGTERM": Kind(lambda simulation, fault: signal.raise_signal(signal.SIGTERM), (128 + signal.SIGTERM,)),
    "controller killed": Kind(lambda simulation, fault: simulation.kill(), (-9,)),
    "disk full": Kind(lambda simulation, fault: simulation.fail_writes(fault.amount), (1, 2), "(?i)no space left"),
    "controller killed at a write": Kind(lambda simulation, fault: simulation.kill(), (-9,)),
    "service down": Kind(_shelf(False), (1,), SERVICE),
    "service slow": Kind(_shelf(True), (1,), "longer than env.turn_timeout_s"),
}
_AT_CHANGE = ("disk full", "controller killed at a write")
_OF_TURNS = ("service down", "service slow")


def chosen(source: random.Random, mode: Mode, seconds: float, changes: int) -> list[Fault]:
    """One to three faults. seconds, changes: of the run without any"""
    kinds = [kind for kind in KINDS if mode.turns > 1 or kind not in _OF_TURNS]
    faults: list[Fault] = []
    for _ in range(source.choice((1, 2, 2, 3, 3))):
        kind = source.choice(kinds)
        target, amount, soon_s = source.random(), source.choice((1, 2, 10)), source.uniform(0.0, 4.0)
        if kind in _AT_CHANGE:
            faults.append(Fault(kind, None, source.randint(1, changes), target, amount, soon_s))
            continue
        before = [each.at_s for each in faults if each.at_s is not None]
        if before and source.random() < 0.5:  # in the recovery from another
            at_s = before[-1] + source.uniform(0.0, 12.0)
        else:
            at_s = source.uniform(0.0, seconds)
        faults.append(Fault(kind, at_s, None, target, amount, soon_s))
    return faults
