"""Files of other parties: whatever lies at a path, the answer is right or one error with the path, in time."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.at_a_path import KINDS, SECRET, host_file, nested
from verl.errors import DataError
from verl.host import untrusted_files
from verl.host.watcher import remove_tree

pytestmark = pytest.mark.long  # the removal of thousands of nested folders takes seconds
MOST = 1000
READERS: dict[str, Callable[[Path, str], bytes]] = {
    "read": lambda folder, name: untrusted_files.read(folder, name, MOST),
    "read_end": lambda folder, name: untrusted_files.read_end(folder, name, MOST),
}
NO_FILES = [kind for kind in KINDS if kind != "giant"]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A folder of another party, beside a file of the host."""
    host_file(tmp_path / "host")
    (tmp_path / "theirs").mkdir()
    yield tmp_path / "theirs"
    remove_tree(tmp_path / "theirs")  # pytest cannot


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_path_that_is_no_regular_file_is_refused_at_once(place: Path, kind: str, reader: str) -> None:
    KINDS[kind](place / "file", place.parent / "host" / "host.json")
    started = time.monotonic()
    if reader == "read_end" and kind == "giant":
        assert READERS[reader](place, "file") == bytes(MOST)
    else:
        with pytest.raises(DataError, match=r"theirs/file: (is|has|cannot)") as caught:
            READERS[reader](place, "file")
        assert SECRET not in str(caught.value)
    assert time.monotonic() - started < 60  # what waits here waits for ever
    remove_tree(place)
    assert not place.exists() and (place.parent / "host" / "host.json").read_text() == SECRET


@pytest.mark.parametrize("reader", READERS)
def test_no_component_of_a_path_is_a_link_or_leads_up(place: Path, reader: str) -> None:
    (place / "out").symlink_to(place.parent / "host")
    (place / "in").mkdir()
    (place / "in" / "file").write_text("one")
    (place / "also").symlink_to("in")
    assert READERS[reader](place, "in/file") == b"one"
    for name in ("out/host.json", "also/file", "../host/host.json", "in/../../host/host.json", "..", "", "in", "a\0b"):
        with pytest.raises(DataError):
            READERS[reader](place, name)
    with pytest.raises(DataError):
        READERS[reader](place, str(place.parent / "host" / "host.json"))
    with pytest.raises(FileNotFoundError):
        READERS[reader](place, "absent")


@pytest.mark.parametrize("name", ["n" * 255, os.fsdecode(b"\xff\xfe"), "a\nb", "\u202egnp"])
def test_odd_names_are_read_and_shown(place: Path, name: str) -> None:
    (place / name).write_text("one")
    assert untrusted_files.read(place, name, MOST) == b"one"
    (place / name).unlink()
    os.mkfifo(place / name)
    with pytest.raises(DataError, match="is a pipe") as caught:
        untrusted_files.read(place, name, MOST)
    text = str(caught.value)
    assert text.isprintable() and len(text) < 500 and text.encode()


def test_a_file_that_grows_or_vanishes_meanwhile_has_one_answer(place: Path) -> None:
    path, over = place / "file", threading.Event()

    def change() -> None:
        while not over.is_set():
            path.write_bytes(bytes(MOST))
            with path.open("ab") as file:
                file.write(bytes(MOST))
            path.unlink()
            path.symlink_to("/dev/zero")
            path.unlink()
            os.mkfifo(path)
            path.unlink()

    changing = threading.Thread(target=change)
    changing.start()
    try:
        until = time.monotonic() + 2
        while time.monotonic() < until:
            for reader in READERS.values():
                try:
                    assert len(reader(place, "file")) <= MOST
                except (DataError, FileNotFoundError):
                    continue
    finally:
        over.set()
        changing.join()


def test_a_tree_is_removed_however_deep_wide_or_closed_and_nothing_else(tmp_path: Path) -> None:
    host = host_file(tmp_path / "host")
    top = tmp_path / "top"
    top.mkdir()
    nested(top / "deep", 3000)
    nested(top / "long", 300, "n" * 255)
    for number in range(300):
        (top / f"wide{number}" / "in").mkdir(parents=True)
        (top / f"wide{number}" / "in" / "file").touch(mode=0)
    (top / "link").symlink_to(host.parent)
    (top / "wide0" / "in" / "link").symlink_to(host)
    os.mkfifo(top / "pipe")
    (top / os.fsdecode(b"\xff")).touch()
    (top / "wide1" / "in").chmod(0)
    (top / "wide1").chmod(0)
    remove_tree(top)
    assert {each.name for each in tmp_path.iterdir()} == {"host"} and host.read_text() == SECRET


def test_removing_links_and_files_leaves_their_targets(tmp_path: Path) -> None:
    host = host_file(tmp_path / "host")
    (tmp_path / "link").symlink_to(host.parent)
    (tmp_path / "file").touch()
    for name in ("link", "file", "absent"):
        remove_tree(tmp_path / name)
    assert {each.name for each in tmp_path.iterdir()} == {"host"} and host.read_text() == SECRET
