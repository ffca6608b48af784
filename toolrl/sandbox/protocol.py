"""SandboxFusion's HTTP protocol: POST /run_code and /run_jupyter.

Files are sent as base64. Errors of user code have status "Failed"; "SandboxError" is the server's own fault. See
https://github.com/bytedance/SandboxFusion.
"""

from dataclasses import replace
from typing import Annotated, Any

from pydantic import BaseModel, Field

from verl.envs.sandbox import Limits, Status
from verl.errors import DataError

RUN_STATUS = {Status.FINISHED: "Finished", Status.ERROR: "Error", Status.TIMEOUT: "TimeLimitExceeded"}
STATUS_OF = {name: status for status, name in RUN_STATUS.items()}
MAX_FILES = 1024  # per request, uploaded and fetched each
MAX_CELLS = 1024
Seconds = Annotated[float, Field(allow_inf_nan=False)]


class RunCodeRequest(BaseModel):
    code: str
    language: str
    compile_timeout: Seconds = 10.0
    run_timeout: Seconds = 10.0
    memory_limit_MB: int = -1
    stdin: str | None = None
    files: dict[str, str | None] = Field(default_factory=dict, max_length=MAX_FILES)
    fetch_files: list[str] = Field(default_factory=list, max_length=MAX_FILES)


class CommandRunResult(BaseModel):
    status: str
    execution_time: float | None = None
    return_code: int | None = None
    stdout: str | None = None
    stderr: str | None = None


class RunCodeResponse(BaseModel):
    status: str  # Success | Failed | SandboxError
    message: str = ""
    compile_result: CommandRunResult | None = None
    run_result: CommandRunResult | None = None
    executor_pod_name: str | None = None
    files: dict[str, str] = Field(default_factory=dict)


class RunJupyterRequest(BaseModel):
    cells: list[str] = Field(max_length=MAX_CELLS)
    cell_timeout: Seconds = 0.0  # per cell; 0: only the total applies
    total_timeout: Seconds = 45.0
    memory_limit_MB: int = -1
    kernel: str = "python3"
    files: dict[str, str | None] = Field(default_factory=dict, max_length=MAX_FILES)
    fetch_files: list[str] = Field(default_factory=list, max_length=MAX_FILES)


class CellResult(BaseModel):
    """The result of one cell; `error` has an entry if it failed."""

    stdout: str = ""
    stderr: str = ""
    display: list[dict[str, Any]] = Field(default_factory=list)
    error: list[dict[str, Any]] = Field(default_factory=list)


class RunJupyterResponse(BaseModel):
    """The response of /run_jupyter. Cells after a timeout are missing."""

    status: str
    message: str = ""
    driver: CommandRunResult | None = None
    cells: list[CellResult] = Field(default_factory=list)
    files: dict[str, str] = Field(default_factory=dict)


def limits_of(wall_s: float, memory_mib: int, default: Limits, largest: Limits) -> Limits:
    """The limits of a request. Raises DataError above the server's maximum."""
    memory_mib = memory_mib if memory_mib > 0 else default.memory_mib
    if wall_s > largest.wall_s:
        expected = f"at most {largest.wall_s:g} s on this server (--max-timeout-s)"
        raise DataError(f"a timeout of {wall_s:g} s", expected, field="run_timeout")
    if memory_mib > largest.memory_mib:
        expected = f"at most {largest.memory_mib} on this server (--max-memory-mib)"
        raise DataError(f"{memory_mib} MiB of memory", expected, field="memory_limit_MB")
    return replace(default, wall_s=wall_s, cpu_s=wall_s, memory_mib=memory_mib)
