"""Tar files of another party: each is unpacked into its folder, or refused with the entry, and nothing lies outside."""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from tests.support.at_a_path import SECRET, host_file
from verl.errors import DataError
from verl.host.unpacking import leads_out
from verl.host.untrusted_files import UNPRIVILEGED_UID, Limits, Links, unpack

Member = tuple[str, bytes, str]  # name, kind, where a link leads or what a file holds
FILE, LINK, HARD, FOLDER, PIPE = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE


def packed(members: Sequence[Member], **fields: Any) -> BinaryIO:
    made = tempfile.TemporaryFile()  # noqa: SIM115  closed with the test
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, kind, text in members:
            member = tarfile.TarInfo(name)
            member.type, member.mode = kind, 0o7777
            data = text.encode() if kind == FILE else b""
            member.size, member.linkname = len(data), "" if kind == FILE else text
            for field, value in fields.items():
                setattr(member, field, value)
            tar.addfile(member, io.BytesIO(data))
    return made


def beyond_path_max() -> list[Member]:
    """Links nested so deep that resolving one path fails, and then one out of the tree: CVE-2025-4517's way."""
    members: list[Member] = []
    deep, way = "", "d" * 247
    for letter in "abcdefghijklmnop":
        members += [(f"{deep}{way}", FOLDER, ""), (f"{deep}{letter}", LINK, way)]
        deep += f"{letter}/"
    short = "/".join("abcdefghijklmnop")
    members.append((f"{short}/{'l' * 254}", LINK, "../" * 16))
    members.append(("escape", LINK, f"{short}/{'l' * 254}/../../host"))
    return [*members, ("escape/written", FILE, "by the archive"), ("escape/host.json", FILE, "by the archive")]


BAD: dict[str, list[Member]] = {
    "a link to the root": [(".git", LINK, "/")],
    "a link up": [("a/l", LINK, "../../x")],
    "a link up by another link": [("d", FOLDER, ""), ("d/x", LINK, ".."), ("y", LINK, "d/x/../..")],
    "a file through a link": [("l", LINK, "."), ("l/file", FILE, "one")],
    "a file through a link out": [("l", LINK, "../host"), ("l/written", FILE, "one")],
    "a link that becomes a folder": [("l", LINK, "../host"), ("l", FOLDER, ""), ("l/written", FILE, "one")],
    "a hard link out": [("h", HARD, "../host/host.json")],
    "a hard link to the root": [("h", HARD, "/etc/passwd")],
    "a hard link through a link": [("l", LINK, "../host"), ("h", HARD, "l/host.json")],
    "a hard link to a link": [("l", LINK, "../host/host.json"), ("h", HARD, "l")],
    "a hard link to nothing": [("h", HARD, "absent")],
    "a path up": [("../host/written", FILE, "one")],
    "a path up within": [("a/../../host/written", FILE, "one")],
    "a path from the root": [("/tmp/written", FILE, "one")],
    "a pipe": [("p", PIPE, "")],
    "a device": [("c", tarfile.CHRTYPE, "")],
    "a disk": [("b", tarfile.BLKTYPE, "")],
    "a name that is too long": [("n" * 256, FILE, "one")],
    "a file in a file": [("a", FILE, "one"), ("a/b", FILE, "two")],
    "a file over a folder": [("a/b", FILE, "one"), ("a", FILE, "two")],
    "too deep": [("d/" * 60 + "file", FILE, "one")],
    "too many": [(f"f{number}", FILE, "") for number in range(200)],
    "too large": [(f"f{number}", FILE, "x" * (1 << 19)) for number in range(3)],
    "beyond PATH_MAX": beyond_path_max(),
    "the archive itself": [(".", FILE, "one")],
}
SMALL = Limits(mib=1, files=100, depth=50, seconds=30)


@pytest.mark.parametrize("links", ["inside", "kept", "none"])
@pytest.mark.parametrize("bad", BAD)
def test_an_entry_that_leads_out_or_is_no_file_is_refused_with_its_name(tmp_path: Path, bad: str, links: Links) -> None:
    host = host_file(tmp_path / "host")
    before = {each: each.lstat() for each in (host, host.parent, tmp_path, Path("/etc/passwd"))}
    only_links = all(kind in (LINK, FOLDER) for _, kind, _ in BAD[bad])
    if links == "kept" and only_links and bad != "a link that becomes a folder":
        unpack(packed(BAD[bad]), tmp_path / "new", SMALL, links)  # they are text; see below for who follows it
    else:
        with pytest.raises(DataError) as caught:
            unpack(packed(BAD[bad]), tmp_path / "new", SMALL, links)
        assert caught.value.file and SECRET not in str(caught.value) and "unpacked within" not in str(caught.value)
    assert {each.name for each in tmp_path.iterdir()} == {"host", "new"} and list(host.parent.iterdir()) == [host]
    assert host.read_text() == SECRET and not Path("/tmp/written").exists()
    for path, found in before.items():
        if path != tmp_path:
            now = path.lstat()
            assert (now.st_uid, now.st_gid, now.st_mode, now.st_nlink) == (
                found.st_uid,
                found.st_gid,
                found.st_mode,
                found.st_nlink,
            )


def test_a_tree_is_as_it_was_packed_without_special_rights(tmp_path: Path) -> None:
    name = os.fsdecode(b"\xff")
    members = [
        ("./a/b", FILE, "one"),
        ("a/b", FILE, "two"),  # added later to the same file
        ("a/in", LINK, "b"),
        ("up", LINK, "a/../a/b"),
        ("nowhere", LINK, "absent"),
        ("loop", LINK, "loop"),
        ("h", HARD, "./a/b"),
        (name, FILE, "odd"),
        ("n" * 255, FILE, "long"),
        ("closed", FOLDER, ""),
    ]
    assert unpack(packed(members), tmp_path / "new", SMALL) == 3 + 3 + 3 + 4
    new = tmp_path / "new"
    assert (new / "a" / "b").read_text() == "two" == (new / "h").read_text() == (new / "up").read_text()
    assert (new / "a" / "in").readlink() == Path("b") and (new / name).read_text() == "odd"
    assert (new / "a" / "b").stat().st_mode & 0o7777 == 0o755
    assert {each.lstat().st_uid for each in new.rglob("*")} == {os.geteuid()}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user; run as root")
def test_root_leaves_a_tree_to_the_user_of_untrusted_code(tmp_path: Path) -> None:
    unpack(packed([("a/b", FILE, "one"), ("l", LINK, "/etc/passwd")]), tmp_path / "new", SMALL, "kept", mine=False)
    assert {each.lstat().st_uid for each in (tmp_path / "new", *(tmp_path / "new").rglob("*"))} == {UNPRIVILEGED_UID}
    assert Path("/etc/passwd").stat().st_uid == 0


@pytest.mark.parametrize(
    "text",
    [b"", b"no tar file", b"\0" * 100, b"x" * 10_000],
)
def test_a_file_that_is_no_tar_archive_is_refused(tmp_path: Path, text: bytes) -> None:
    with tempfile.TemporaryFile() as file:
        file.write(text)
        with pytest.raises(DataError, match="is no whole tar file"):
            unpack(file, tmp_path / "new", SMALL)


def test_a_damaged_or_cut_archive_is_no_shorter_one(tmp_path: Path) -> None:
    whole = packed([(f"f{number}", FILE, "x" * 600) for number in range(3)])
    whole.seek(0)
    data = whole.read()
    blocks = {f"cut {cut}": data[:cut] for cut in (100, 700, 1600, 2000, 3300)}
    blocks["a header"] = data[:1536] + b"\xff" * 512 + data[2048:]
    for number, (what, left) in enumerate(blocks.items()):
        with tempfile.TemporaryFile() as file:
            file.write(left)
            with pytest.raises(DataError):
                unpack(file, tmp_path / f"new{number}", SMALL)
                pytest.fail(f"{what} was accepted")


def test_the_decompressed_size_is_bounded(tmp_path: Path) -> None:
    """A file of holes, a compressed archive of zeros, a header of 2 GiB: refused in seconds, without the memory."""
    sparse = io.BytesIO()
    with tarfile.open(fileobj=sparse, mode="w") as tar:
        member = tarfile.TarInfo("sparse")
        member.size = 0
        member.pax_headers = {"GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.size": str(1 << 42)}
        member.pax_headers["GNU.sparse.map"] = "0,0"
        tar.addfile(member)
    bomb = io.BytesIO()
    with tarfile.open(fileobj=bomb, mode="w:gz") as tar:
        member = tarfile.TarInfo("zeros")
        member.size = 64 << 20
        tar.addfile(member, io.BytesIO(bytes(member.size)))
    header = tarfile.TarInfo("long")
    header.type, header.size = tarfile.GNUTYPE_LONGNAME, 2 << 30
    for number, data in enumerate((sparse.getvalue(), bomb.getvalue(), header.tobuf() + bytes(1024))):
        with tempfile.TemporaryFile() as file:
            file.write(data)
            if number == 2:
                file.truncate(3 << 30)
            with pytest.raises(DataError) as caught:
                unpack(file, tmp_path / f"new{number}", SMALL)
        assert "unpacked within" not in str(caught.value)  # no need to wait for the limit of time
        assert sum(each.stat().st_blocks << 9 for each in (tmp_path / f"new{number}").rglob("*")) < 2 << 20


def test_unpacking_ends_in_time(tmp_path: Path) -> None:
    with tempfile.TemporaryFile() as file:
        file.truncate(1 << 40)
        file.write(packed([("a", FILE, "one")]).read() or b"")
        with pytest.raises(DataError, match=r"within 0.05 s|no whole tar file"):
            unpack(file, tmp_path / "new", Limits(seconds=0.05))


def test_links_are_followed_as_the_kernel_does() -> None:
    links = {("a",): "b", ("b",): "c/..", ("d", "up"): "..", ("loop",): "loop", ("root",): "/"}
    for text, out in (("a", False), ("../x", True), ("d/up/..", True), ("d/up", False), ("loop/..", False)):
        assert leads_out(("link",), text, links) is out, text
    assert leads_out(("link",), "root/etc", links) and not leads_out(("e", "link"), "../d", links)
    assert leads_out(("link",), "a/../..", links)
