"""Device code in a shared library: what is for other cards is cut out.

nvcc puts the device code of one source file into a container in section .nv_fatbin: a header, then an entry for each
architecture with a header of its own. The driver is handed the container's address and chooses by the headers: machine
code (SASS) of the card's major version and at most its minor one, else the newest PTX that it can translate.
`blank` leaves each container with the entries that this choice is made from, as if nvcc had been asked for them alone,
and fills up with zeros behind them: no address in the library changes. NVIDIA does not document the layout; cuobjdump
reads it the same way.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

CONTAINER, ENTRY = struct.Struct("<IHHQ"), struct.Struct("<HHIQIIHHI")
MAGIC = 0xBA55ED50
PTX, SASS = 1, 2


@dataclass(frozen=True)
class Entry:
    """Device code for one architecture; start, end: offsets in the library, its header included. arch: 90 for 9.0"""

    kind: int
    arch: int
    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Container:
    start: int
    end: int
    entries: tuple[Entry, ...]

    def loadable(self, arch: int) -> list[Entry]:
        """The entries among which the driver chooses on a card of that architecture."""
        major = arch // 10
        sass = [
            entry for entry in self.entries if entry.kind == SASS and entry.arch // 10 == major and entry.arch <= arch
        ]
        return sass or [entry for entry in self.entries if entry.kind == PTX and entry.arch <= arch]


def blank(library: bytearray, arch: int) -> int:
    """Cut out, in place, what a card of that architecture never loads; returns the bytes that became zeros.

    A container without anything for the card keeps its smallest entry, so that the driver finds there, as before, code
    for other cards only.
    """
    zeros = 0
    for container in containers(library):
        kept = container.loadable(arch) or [min(container.entries, key=lambda entry: entry.size)]
        body = b"".join(library[entry.start : entry.end] for entry in kept)
        start = container.start + CONTAINER.size
        magic, version, header, _ = CONTAINER.unpack_from(library, container.start)
        CONTAINER.pack_into(library, container.start, magic, version, header, len(body))
        library[start : container.end] = body + bytes(container.end - start - len(body))
        zeros += container.end - start - len(body)
    return zeros


def containers(library: bytes | bytearray) -> list[Container]:
    """All containers of a 64-bit ELF library. ValueError: not such a library, or a layout that is unknown here."""
    return [
        container for start, end in _sections(library, b".nv_fatbin") for container in _section(library, start, end)
    ]


def _section(library: bytes | bytearray, start: int, end: int) -> Iterator[Container]:
    while start < end:
        if library[start : start + 8] == bytes(8):  # padding
            start += 8
            continue
        magic, version, header, size = CONTAINER.unpack_from(library, start)
        if (magic, version, header) != (MAGIC, 1, CONTAINER.size) or not 0 < size <= end - start - header:
            raise ValueError(f"offset {start}: not the header of a container of device code")
        stop = start + header + size
        yield Container(start, stop, tuple(_entries(library, start + header, stop)))
        start = stop


def _entries(library: bytes | bytearray, start: int, end: int) -> Iterator[Entry]:
    while start < end:
        kind, version, header, size, _, _, _, _, arch = ENTRY.unpack_from(library, start)
        if kind not in (PTX, SASS) or version != 0x101 or start + header + size > end:
            raise ValueError(f"offset {start}: not the header of an entry of device code")
        yield Entry(kind, arch, start, start + header + size)
        start += header + size


def _sections(library: bytes | bytearray, name: bytes) -> Sequence[tuple[int, int]]:
    """Start and end of the sections of that name."""
    if library[:5] != b"\x7fELF\x02":
        raise ValueError("not a 64-bit ELF file")
    table = struct.unpack_from("<Q", library, 0x28)[0]
    stride, count, names = struct.unpack_from("<HHH", library, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", library, table + index * stride) for index in range(count)]
    strings = headers[names][4]

    def is_named(header: tuple[int, ...]) -> bool:
        begin = strings + header[0]
        return bytes(library[begin : begin + len(name) + 1]) == name + b"\0"

    return [(header[4], header[4] + header[5]) for header in headers if is_named(header)]
