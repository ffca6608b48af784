"""What a client of a runtime server sends: images and leases that reach for the host, or for all of it, are refused."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.at_a_path import SECRET, host_file
from tests.toolrl.sandbox.sandbox_host import need_bubblewrap
from tests.toolrl.swe.test_swe_remote import TOKEN, runtime_server
from tests.verl.host.test_unpacking import FILE, FOLDER, HARD, LINK, PIPE, Member, beyond_path_max, packed
from toolrl.servers.answers import PIECE
from toolrl.swe import wire
from toolrl.swe.routes import _text

pytestmark = pytest.mark.long
GIT: list[Member] = [(".git", FOLDER, ""), (".git/HEAD", FILE, "ref: refs/heads/main\n"), ("file", FILE, "one")]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("doors")


@pytest.fixture(scope="module")
def client(place: Path) -> Iterator[httpx2.Client]:
    need_bubblewrap()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VERL_SERVICE_TOKEN", TOKEN)
        (place / "environments").mkdir()
        options = ("--max-timeout-s", "600", "--environments", str(place / "environments"))
        with (
            runtime_server(place, *options) as url,
            httpx2.Client(base_url=url, headers={wire.API_KEY: TOKEN}, trust_env=False, timeout=60) as client,
        ):
            yield client


def put(client: httpx2.Client, digest: str, members: list[Member], head: str = "") -> httpx2.Response:
    """head: the commit of its branch, if not that of its name"""
    archive = packed([*members, (".git/refs/heads/main", FILE, f"{head or digest}\n")])
    archive.seek(0)
    return client.put(f"/image/{digest}", content=archive.read(), headers={"Content-Type": wire.TAR})


def started(client: httpx2.Client, **fields: Any) -> httpx2.Response:
    body = {"image": "b" * 40, **fields}
    return client.post("/lease", content=json.dumps(body), headers={"Content-Type": "application/json"})


def outside(host: Path) -> dict[str, list[Member]]:
    """Images that reach for a file of the host on the same disk."""
    return {
        "a .git that is the root": [(".git", LINK, "/"), ("file", FILE, "one")],
        "a .git that is the host's folder": [(".git", LINK, str(host.parent))],
        "a .git that is a file": [(".git", FILE, "gitdir: /"), ("file", FILE, "one")],
        "a .git by another link": [("g", LINK, "/"), (".git", LINK, "g")],
        "a hard link": [*GIT, ("mine", HARD, str(host))],
        "a hard link up": [*GIT, ("mine", HARD, f"{'../' * 20}{host}")],
        "a file through a link": [*GIT, ("l", LINK, str(host.parent)), ("l/host.json", FILE, "changed")],
        "a pipe": [*GIT, ("p", PIPE, "")],
        "links beyond PATH_MAX": [*GIT, *beyond_path_max()],
    }


@pytest.mark.parametrize("bad", outside(Path("/host")))
def test_an_image_that_reaches_for_the_host_is_refused(place: Path, client: httpx2.Client, bad: str) -> None:
    host = host_file(place / "host")
    before = host.stat()
    answer = put(client, "c" * 40, outside(host)[bad])
    assert answer.status_code == wire.REFUSED and "image" in answer.json()["detail"], answer.text
    assert not (place / "server" / "images" / ("c" * 40)).exists()
    now = host.stat()
    assert (now.st_uid, now.st_mode, now.st_nlink) == (before.st_uid, before.st_mode, 1) and host.read_text() == SECRET
    assert [each.name for each in (place / "host").iterdir()] == ["host.json"]
    assert not list(place.glob("server/verl-runtimes-*/tmp*"))  # nothing unfinished is left


@pytest.mark.parametrize(
    "head", ["e" * 40, "", "../" * 20 + "etc/passwd", "x" * 2000, "\0\u202e", "ref: refs/heads/other"]
)
@pytest.mark.parametrize("detached", [False, True])
def test_an_image_under_the_name_of_another_commit_is_refused(
    place: Path, client: httpx2.Client, head: str, detached: bool
) -> None:
    members: list[Member] = [(".git", FOLDER, ""), (".git/HEAD", FILE, head if detached else "ref: refs/heads/main")]
    answer = put(client, "a" * 40, [*members, ("file", FILE, "one")], "e" * 40 if detached else head or "\n")
    assert answer.status_code == wire.REFUSED and "image" in answer.json()["detail"], answer.text
    assert not (place / "server" / "images" / ("a" * 40)).exists() and len(answer.text) < 500


def test_a_link_in_an_image_is_text_that_only_the_runtime_follows(place: Path, client: httpx2.Client) -> None:
    """A commit may hold links that lead outside. The host's files are not where they lead."""
    host = host_file(place / "host")
    links = [
        *GIT,
        ("l", LINK, str(host)),
        ("root", LINK, "/root"),
        (".git/objects", LINK, "/"),
        ("up", LINK, "../../.."),
    ]
    assert put(client, "d" * 40, links).status_code == 200
    lease = {wire.LEASE: started(client, image="d" * 40).json()["lease"]}
    script = "cat l; ls root/ up/work; cat /testbed/file; ls -ld /image.git/objects"
    asked = {"command": script, "shell": True}
    done = client.post("/execute", json=asked, headers=lease).json()
    assert "one" in done["stdout"] and "/image.git/objects -> /" in done["stdout"], done
    assert "reward" not in done["stdout"] and "work': No such file" in done["stderr"], done
    client.post("/close", headers=lease)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("memory_mib", 10**9),
        ("file_mib", 10**9),
        ("files", 10**12),
        ("processes", 10**7),
        ("command_s", 10**9),
        ("command_s", 601),  # --max-timeout-s
        ("command_s", math.inf),
        ("command_s", math.nan),
        ("output_chars", 10**12),
        ("memory_mib", -1),
        ("memory_mib", 10**40),
    ],
)
def test_a_lease_beyond_the_servers_limits_is_refused(client: httpx2.Client, name: str, value: float) -> None:
    assert put(client, "b" * 40, GIT).status_code == 200
    answer = started(client, limits={name: value})
    assert answer.status_code == wire.REFUSED and name in answer.text, answer.text


@pytest.mark.parametrize(
    "workdir",
    [
        *("/proc", "/proc/self", "/tmp/x", "/usr", "/usr/local/x", "/etc", "/home", "/home/user", "/lib", "/sandbox"),
        *(
            "/image.git",
            "/base.git/x",
            "/tests",
            "/dev/shm",
            "/environment",
            "/testbed/x",
            "/" + "x" * 300,
            "/a" * 2000,
        ),
    ],
)
def test_a_working_folder_that_is_taken_is_the_requests_fault(client: httpx2.Client, workdir: str) -> None:
    assert put(client, "b" * 40, GIT).status_code == 200
    answer = started(client, workdir=workdir)
    assert answer.status_code == wire.REFUSED and "workdir" in answer.text, answer.text


@pytest.mark.parametrize("name", ["..", ".", ".hidden", "x" * 300, "a/b", "absent"])
def test_an_environment_is_a_folder_in_that_of_environments(client: httpx2.Client, name: str) -> None:
    assert put(client, "b" * 40, GIT).status_code == 200
    answer = started(client, environment=name)
    assert answer.status_code == wire.REFUSED and "environment" in answer.text, answer.text


def test_a_command_has_a_time_limit_that_the_server_allows(client: httpx2.Client) -> None:
    assert put(client, "b" * 40, GIT).status_code == 200
    headers = {wire.LEASE: started(client, workdir="/app").json()["lease"], "Content-Type": "application/json"}
    client.post("/create_session", content="{}", headers=headers)
    for route, field in (("execute", "timeout"), ("run_in_session", "timeout"), ("run_in_session", "soft_timeout")):
        for seconds in (601, -1, math.inf, math.nan):
            body = json.dumps({"command": "pwd", "shell": True, field: seconds})
            answer = client.post(f"/{route}", content=body, headers=headers)
            assert answer.status_code == wire.REFUSED and "--max-timeout-s" in answer.text, (
                route,
                seconds,
                answer.text,
            )
    body = json.dumps({"command": "cd /app && ls", "shell": True, "timeout": 600})
    assert client.post("/execute", content=body, headers=headers).json()["stdout"] == "file\n"
    client.post("/close", headers=headers)


@pytest.fixture
def lease(client: httpx2.Client) -> Iterator[dict[str, str]]:
    assert put(client, "b" * 40, GIT).status_code == 200
    headers = {wire.LEASE: started(client).json()["lease"]}
    yield headers
    client.post("/close", headers=headers)


def test_an_output_of_a_program_holds_up_no_other_request(client: httpx2.Client, lease: dict[str, str]) -> None:
    """Bytes that are no text take longest to write as JSON."""
    ended, waits = threading.Event(), [0.0]

    def ask() -> None:
        with httpx2.Client(base_url=client.base_url, headers=client.headers, trust_env=False, timeout=60) as other:
            while not ended.is_set():
                began = time.perf_counter()
                assert other.get("/health").status_code == 200
                waits.append(time.perf_counter() - began)

    asking = threading.Thread(target=ask)
    began = time.perf_counter()
    asking.start()
    try:
        command = {"command": "head -c 15000000 /dev/urandom", "shell": True}
        answer = client.post("/execute", json=command, headers=lease).content
    finally:
        ended.set()
        asking.join()
    took = time.perf_counter() - began
    assert len(answer) > 15_000_000 and max(waits) < took / 3, (max(waits), took)


def test_an_output_in_pieces_is_the_whole() -> None:
    data = ("\u00e4\u20ac\U0001f600" * PIECE).encode() + b"\xff\xe2\x82"
    for shift in range(4):
        text = (b"x" * shift + data).decode(errors="backslashreplace")
        assert json.loads(b"".join([b"{", *_text("stdout", b"x" * shift + data), b"}"])) == {"stdout": text}


@pytest.mark.parametrize("encoding", ["punycode", "idna", "rot13", "none", "\0"])
def test_files_are_read_in_encodings_of_texts(client: httpx2.Client, lease: dict[str, str], encoding: str) -> None:
    assert client.post("/read_file", json={"path": "file"}, headers=lease).json() == {"content": "one"}
    answer = client.post("/read_file", json={"path": "file", "encoding": encoding}, headers=lease)
    assert answer.status_code == wire.FAILED, answer.text


@pytest.mark.parametrize("field", ["path", "content"])
def test_half_a_character_is_the_requests_fault(client: httpx2.Client, lease: dict[str, str], field: str) -> None:
    body = json.dumps({"path": "x", "content": "x", field: "\ud800"})
    headers = {**lease, "Content-Type": "application/json"}
    assert client.post("/write_file", content=body, headers=headers).status_code == wire.FAILED
