"""SWE-ReX's wire (1.4), and what our server adds to it.

    GET  /is_alive                          POST /create_session  /run_in_session  /close_session
    POST /execute  /read_file  /write_file  POST /upload (multipart: file, target_path, unzip)  POST /close

An error of a runtime is status 511 with `swerexception`. Our additions: a lease per runtime, named by a header, which
ends when no request renews it; images by digest; statuses and soft time-outs of commands; snapshots.

    PUT  /image/DIGEST  a tar file          POST /lease           LeaseRequest -> Lease; 429: full, 409: no such image
    POST /snapshot -> Snapshot              POST /restore         Snapshot        POST /end_processes
"""

from __future__ import annotations

import secrets
from typing import Any, Literal

from pydantic import BaseModel, Field

from toolrl.swe.runtime import RuntimeLimits

TAR = "application/x-tar"
API_KEY, REQUEST_ID, LEASE = "X-API-Key", "X-Request-ID", "X-Runtime-Lease"
FAILED = 511
MAX_BODY = "X-Max-Body-MiB"  # of an answer NO_IMAGE: the largest that is accepted
UNAUTHORIZED = 401
NO_IMAGE, NO_LEASE, TOO_LARGE, REFUSED, FULL = 409, 410, 413, 422, 429
ERRORS = "swerex.exceptions."  # of class paths
TIMED_OUT = ERRORS + "CommandTimeoutError"


class SessionRequest(BaseModel):
    session: str = "default"
    session_type: Literal["bash"] = "bash"
    startup_source: list[str] = []
    startup_timeout: float = 1.0


class ActionRequest(BaseModel):
    """A command, or an interrupt. soft_timeout, extended: ours; the observation then has a status and is no error"""

    action_type: Literal["bash", "bash_interrupt"] = "bash"
    command: str = ""
    session: str = "default"
    timeout: float | None = None
    check: Literal["silent", "raise", "ignore"] = "raise"
    error_msg: str = ""
    is_interactive_command: bool = False
    is_interactive_quit: bool = False
    soft_timeout: float | None = None
    extended: bool = False


class ActionResponse(BaseModel):
    output: str = ""
    exit_code: int | None = None
    failure_reason: str = ""
    expect_string: str = ""
    session_type: Literal["bash"] = "bash"
    status: str = ""
    cwd: str = ""
    shell_restarted: bool = False


class CommandRequest(BaseModel):
    command: str | list[str]
    timeout: float | None = None
    shell: bool = False
    check: bool = False
    error_msg: str = ""
    env: dict[str, str] | None = None
    cwd: str | None = None
    merge_output_streams: bool = False


class CommandResponse(BaseModel):
    stdout: str = ""
    stderr: str = ""
    exit_code: int | None = None


class ReadFile(BaseModel):
    path: str
    encoding: str | None = None
    errors: str | None = None


class WriteFile(BaseModel):
    path: str
    content: str


class LeaseRequest(BaseModel):
    """A runtime of an image. lease: its name, by which a repeated request is known; environment: name of a folder of
    the server; workdir: see SweTask"""

    lease: str = Field(default_factory=lambda: secrets.token_hex(16), pattern=r"^[0-9a-f]{32}$")
    image: str = Field(pattern=r"^[0-9a-f]{40}$")
    environment: str = Field(default="", pattern=r"^([A-Za-z0-9_-][A-Za-z0-9_.-]{0,99})?$")
    setup: str = ""
    workdir: str = Field(default="", pattern=r"^(/[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}){0,10}$")
    limits: RuntimeLimits = Field(default_factory=RuntimeLimits)


class Lease(BaseModel):
    lease: str
    lease_s: float


class Snapshot(BaseModel):
    name: str


def failure(class_path: str, message: str) -> dict[str, Any]:
    """The body of an error, which SWE-ReX's client raises again."""
    return {"swerexception": {"message": message, "class_path": class_path, "traceback": "", "extra_info": {}}}
