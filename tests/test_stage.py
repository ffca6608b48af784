"""Archives for a machine without a package index: device code, contents, and calls that bring them."""

from __future__ import annotations

import hashlib
import re
import struct
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.gpu import stage
from bench.gpu.fatbin import PTX, SASS, Container, blank, containers
from tests.conftest import ROOT

Code = tuple[int, int, bytes]  # kind, architecture, body
HOST = b"host code"
ALL = (
    (SASS, 75, b"75" * 8),
    (SASS, 90, b"90a" * 8),
    (SASS, 100, b"100" * 8),
    (PTX, 80, b"ptx80" * 8),
    (SASS, 90, b"90" * 8),
)


def container(codes: Sequence[Code]) -> bytes:
    """As nvcc lays it out: headers of 64 bytes, or of 112 where an entry has options."""
    body = b""
    for kind, arch, code in codes:
        header = 112 if arch >= 100 else 64
        entry = struct.pack("<HHIQIIHHI", kind, 0x101, header, len(code), len(code), 0, 8, 1, arch)
        body += entry.ljust(header, b"\0") + code
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def library(*parts: bytes) -> bytes:
    """A 64-bit ELF file with these in its section .nv_fatbin, between a section of host code and the names."""
    names = b"\0.text\0.nv_fatbin\0.shstrtab\0"
    contents = [HOST, b"".join(parts), names]
    start, headers = 64, [bytes(64)]
    for name, content in zip((1, 7, 18), contents, strict=True):
        headers.append(struct.pack("<IIQQQQ", name, 1, 0, 0, start, len(content)).ljust(64, b"\0"))
        start += len(content)
    head = bytearray(b"\x7fELF\x02\x01\x01".ljust(64, b"\0"))
    struct.pack_into("<Q", head, 0x28, start)
    struct.pack_into("<HHH", head, 0x3A, 64, len(headers), len(headers) - 1)
    return bytes(head) + b"".join(contents) + b"".join(headers)


def codes(content: bytes, found: Container) -> list[Code]:
    bodies = [content[each.end - length(content, each.start) : each.end] for each in found.entries]
    return [(each.kind, each.arch, body) for each, body in zip(found.entries, bodies, strict=True)]


def length(content: bytes, entry: int) -> int:
    size: int = struct.unpack_from("<Q", content, entry + 8)[0]
    return size


def test_code_for_other_cards_is_cut_out() -> None:
    before = library(container(ALL), bytes(16), container(ALL[3:]))
    after = bytearray(before)
    zeros = blank(after, 90)
    first, second = containers(after)
    assert codes(after, first) == [ALL[1], ALL[4]]
    assert codes(after, second) == [ALL[4]]
    assert first.start == containers(before)[0].start and second.start == containers(before)[1].start
    assert zeros == (64 + 16) + (112 + 24) + (64 + 40) + (64 + 40)
    assert len(after) == len(before) and HOST in after and b"ptx" not in after
    assert blank(after, 90) == 0


def test_ptx_stays_where_the_driver_has_to_translate_it() -> None:
    only_older = ALL[0], ALL[3], (SASS, 80, b"sass80" * 8), (PTX, 100, b"ptx100" * 8)
    content = bytearray(library(container(only_older)))
    blank(content, 90)
    assert codes(content, containers(content)[0]) == [ALL[3]]


def test_a_container_for_other_cards_alone_keeps_one_entry() -> None:
    """An empty container might be an error to the driver, and one without code for the card is none."""
    content = bytearray(library(container([(SASS, 120, b"120" * 16), (SASS, 100, b"100" * 8)])))
    blank(content, 90)
    assert codes(content, containers(content)[0]) == [(SASS, 100, b"100" * 8)]


CODES = st.lists(
    st.tuples(
        st.sampled_from([PTX, SASS]),
        st.sampled_from([75, 80, 86, 89, 90, 100, 103, 120]),
        st.binary(min_size=1, max_size=5).map(lambda part: part * 8),
    ),
    min_size=1,
    max_size=8,
)


def chosen(options: list[Code], arch: int) -> list[Code]:
    """The driver's choice. Codes of one architecture, as of 9.0 and 9.0a, differ in flags: both are its choice here."""
    runs = [each for each in options if each[0] == SASS and each[1] // 10 == arch // 10 and each[1] <= arch]
    runs = runs or [each for each in options if each[0] == PTX and each[1] <= arch]
    return [each for each in runs if each[1] == max(runs, key=lambda each: each[1])[1]]


@given(st.lists(CODES, min_size=1, max_size=4), st.sampled_from([80, 89, 90, 100, 120]), st.integers(0, 3))
def test_the_driver_chooses_the_same_code(all_codes: list[list[Code]], arch: int, padding: int) -> None:
    content = bytearray(library(*(container(each) + bytes(8 * padding) for each in all_codes)))
    blank(content, arch)
    after = [codes(content, each) for each in containers(content)]
    assert [chosen(each, arch) for each in after] == [chosen(each, arch) for each in all_codes]
    assert all(after)


@pytest.mark.parametrize(
    "content",
    [
        b"PK\x03\x04" + bytes(100),
        library(b"\x50\xed\x55\xba" + bytes(20)),
        library(container(ALL)[:-16]),
        library(container([(7, 90, b"unknown!")])),
        library(b"no magic" * 4),
    ],
    ids=["not ELF", "header", "cut off", "kind", "magic"],
)
def test_an_unknown_layout_is_refused(content: bytes) -> None:
    before = bytearray(content)
    with pytest.raises(ValueError, match="not "):
        blank(before, 90)
    assert before == content


def wheel(folder: Path, name: str, files: dict[str, bytes], executable: str = "", version: str = "1.0") -> Path:
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in files.items():
            info = zipfile.ZipInfo(member)
            info.external_attr = (0o100755 if member == executable else 0o100644) << 16
            archive.writestr(info, content)
    return path


def test_an_archive_depends_on_the_wheels_alone(tmp_path: Path) -> None:
    files = {
        "ray/core/raylet": b"\x7fELF",
        "ray/__init__.py": b"",
        "ray/jars/ray.jar": b"java",
        "dill-1.data/scripts/x": b"",
    }
    code = {stage.DEVICE_CODE: library(container(ALL)), "vllm/vllm-rs": b"rust"}
    digests = set()
    for folder in (tmp_path / "one", tmp_path / "two"):
        folder.mkdir()
        wheels = wheel(folder, "ray", files, "ray/core/raylet"), wheel(folder, "vllm", code)
        assert stage.pack(folder / "a.tar.xz", wheels, stage.HOPPER)[0] == 3
        digests.add(hashlib.sha256((folder / "a.tar.xz").read_bytes()).digest())
        files = dict(reversed(files.items()))
    assert len(digests) == 1
    with tarfile.open(tmp_path / "one/a.tar.xz") as tar:
        assert tar.getnames() == ["ray/core/raylet", "ray/__init__.py", stage.DEVICE_CODE]
        assert [member.mode for member in tar] == [0o755, 0o644, 0o644]
        packed = tar.extractfile(stage.DEVICE_CODE)
        assert packed is not None and b"90a" in (content := packed.read()) and b"ptx" not in content
    stage.pack(tmp_path / "whole.tar.xz", [tmp_path / "one/vllm-1.0-py3-none-any.whl"], None)
    with tarfile.open(tmp_path / "whole.tar.xz") as tar:
        packed = tar.extractfile(stage.DEVICE_CODE)
        assert packed is not None and packed.read() == code[stage.DEVICE_CODE]


def test_a_file_of_two_wheels_is_refused(tmp_path: Path) -> None:
    wheels = [wheel(tmp_path, name, {"shared/__init__.py": b""}) for name in ("a", "b")]
    with pytest.raises(SystemExit, match=r"shared/__init__.py is in .*a-1.0.* and in .*b-1.0"):
        stage.pack(tmp_path / "out.tar.xz", wheels, None)


def test_calls_bring_what_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    archives = [tmp_path / f"{name}.tar.xz" for name in "abc"]
    for path, mib in zip(archives, (3, 4, 5), strict=True):
        path.write_bytes(bytes(mib * stage.MIB))
    assert list(stage.calls(archives, 9)) == [archives[:2], archives[2:]]
    assert list(stage.calls(archives, 12)) == [archives]
    assert list(stage.calls(archives, 1)) == [[path] for path in archives]
    repository = stage.repository_mib()
    assert 5 < repository < 40
    stage.print_calls(tmp_path, archives, repository + 9.5)
    printed = capsys.readouterr().out
    assert "SUMS a.tar.xz b.tar.xz\n" in printed and "too much" not in printed
    assert printed.count(f"python bench/gpu/short.py --stage {tmp_path}\n") == 2
    stage.print_calls(stage.ROOT / "outputs/stage", archives, repository + 9.5)
    assert capsys.readouterr().out.count("python bench/gpu/short.py --stage outputs/stage\n") == 2, "in any copy"
    stage.print_calls(tmp_path, archives, repository + 4)
    assert "1.0 MiB too much" in capsys.readouterr().out


def test_the_command_end_to_end(tmp_path: Path) -> None:
    """With small wheels in place of those that it would download."""
    (tmp_path / "wheels").mkdir()
    for pin in [*stage.VLLM, *stage.read_pins(stage.PACKAGES)]:
        name, version = pin.replace("-", "_").split("==")
        files = {stage.DEVICE_CODE: library(container(ALL))} if name == "vllm" else {f"{name}/__init__.py": b""}
        wheel(tmp_path / "wheels", name, files, version=version)

    def build(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "bench/gpu/stage.py", "--out", tmp_path, *options]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    def names() -> list[str]:
        with tarfile.open(tmp_path / "packages.tar.xz") as tar:
            return tar.getnames()

    done = build()
    assert done.returncode == 0, done.stderr
    assert "of device code for other cards left out" in done.stdout and "Call 1" in done.stdout
    assert "ray/__init__.py" in names() and "trl/__init__.py" in names()
    sums = (tmp_path / "SUMS").read_text()
    assert subprocess.run(["sha256sum", "--check", "--strict", "SUMS"], cwd=tmp_path).returncode == 0

    too_large = build("--piece-mib", "0.0001")
    assert too_large.returncode == 1 and "packages.tar.xz is larger than 0.0001 MiB" in too_large.stderr
    assert not (tmp_path / "SUMS").exists()

    assert build("--no-ray", "--no-blank").returncode == 0
    assert "ray/__init__.py" not in names()
    assert (tmp_path / "SUMS").read_text() != sums
    assert build().returncode == 0
    assert (tmp_path / "SUMS").read_text() == sums


def versions(pins: Sequence[str]) -> dict[str, str]:
    pairs = (pin.split("==") for pin in pins)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pairs}


def test_the_pins_agree() -> None:
    staged = versions([*stage.VLLM, *stage.read_pins(stage.PACKAGES)])
    there = versions(stage.read_pins(ROOT / "bench/gpu/image.txt"))
    tested = versions(stage.read_pins(ROOT / "scripts/requirements/gpu.txt"))
    assert not staged.keys() & there.keys(), "two copies"
    shared = staged.keys() & tested.keys()
    assert {"vllm", "ray", "hydra-core"} <= shared
    assert {name: staged[name] for name in shared} == {name: tested[name] for name in shared}
    assert there["torch"] == tested["torch"]
