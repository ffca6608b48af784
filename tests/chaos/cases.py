"""The list of the chaos suite: which process gets which signal at which point of a run, and what has to come of it.

A case breaks a run of three steps in its second one. What is expected is the same for every point, with the
exceptions in `EXPECTED`; faults of the machine, no signals, are listed at the end and written out in faults.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

TARGETS: Mapping[str, str] = {  # target -> what the report names it by (a regular expression, case ignored)
    "controller": r"SIGTERM|SIGHUP|terminated|hang-?up|interrupted",
    "rank": r"trainer rank \d",
    "engine": r"(rollout|engine) (rank|engine|\d)|rollout engine",
    "engine core": r"vLLM|rollout (rank|engine)",
    "scorer": r"scor(er|ing)|reward's process",
    "sandbox worker": r"sandbox",
    "environment server": r"environment server",
    "raylet": r"raylet",
}
SIGNALS = ("KILL", "TERM", "STOP")  # STOP for 60 s, then CONT; the controller gets HUP and INT, too
POINTS = (
    "start",  # workers are there, nothing has been asked of them
    "rollout",  # responses are being generated
    "tool call",  # an environment or a tool is answering
    "score",  # a response is being scored
    "update",  # the ranks are about to learn; engines, scorers and sandboxes are idle
    "weight sync",  # the engines have started to take new weights
    "canary",  # they have them, and the probe is about to be generated
    "checkpoint write",  # the ranks have written their parts
    "manifest rename",  # all is written, nothing renamed yet
    "validation",
    "shutdown",  # the last step is saved
)


WATCHED = "ended without cleaning up"  # message of the watcher for a controller that was killed


class End(StrEnum):
    """What has to come of a case."""

    KILLED = "killed"  # exit -9, reported by the watcher that outlives the controller
    FAILED = "failed"  # exit 1, one report that names the culprit
    TERMINATED = "terminated"  # exit 143, 129 or 130, reported
    HEALED = "healed"  # exit 0 by itself after a report, the end bit-equal: what was lost is asked again
    COUNTED = "counted"  # exit 0 by itself after a report; a lost response is counted as a fault, never a zero
    UNHARMED = "unharmed"  # exit 0, bit-equal; nothing has to be reported


EXPECTED: Mapping[str, End] = {
    "controller": End.KILLED,
    "rank": End.FAILED,
    "engine": End.HEALED,
    "engine core": End.HEALED,
    "scorer": End.HEALED,
    "sandbox worker": End.COUNTED,
    "environment server": End.COUNTED,
    "raylet": End.FAILED,
}
EXIT_CODES = {"TERM": 143, "HUP": 129, "INT": 130}


@dataclass(frozen=True)
class Case:
    """One fault, injected once. setup: of the run (harness.SETUPS); short: also a part of every change's checks."""

    target: str
    signal: str
    point: str
    setup: str = "hf"
    end: End | None = None  # as EXPECTED, if left out
    short: bool = False

    @property
    def name(self) -> str:
        parts = (self.target, self.signal, self.point, self.setup)
        return "-".join(word.replace(" ", "_") for word in parts)

    @property
    def expected(self) -> End:
        if self.end is not None:
            return self.end
        if self.target == "controller":
            if self.signal == "STOP":  # it goes on where it was: no deadline may count the time
                return End.UNHARMED
            return End.KILLED if self.signal == "KILL" else End.TERMINATED
        return End.UNHARMED if self.point == "shutdown" else EXPECTED[self.target]

    @property
    def exit_code(self) -> int:
        codes = {End.KILLED: -9, End.FAILED: 1, End.TERMINATED: EXIT_CODES.get(self.signal, 0)}
        return codes.get(self.expected, 0)


CASES = (
    Case("controller", "KILL", "start"),
    Case("controller", "KILL", "rollout"),
    Case("controller", "KILL", "score"),
    Case("controller", "KILL", "update"),
    Case("controller", "KILL", "weight sync"),
    Case("controller", "KILL", "canary"),
    Case("controller", "KILL", "checkpoint write", short=True),
    Case("controller", "KILL", "manifest rename"),
    Case("controller", "KILL", "validation"),
    Case("controller", "KILL", "shutdown"),
    Case("controller", "KILL", "tool call", "tools"),
    Case("controller", "KILL", "tool call", "env"),
    Case("controller", "KILL", "tool call", "agent"),  # the gateway's process
    Case("controller", "KILL", "rollout", "vllm"),  # and resume with vLLM
    Case("controller", "TERM", "start"),
    Case("controller", "TERM", "rollout"),
    Case("controller", "TERM", "checkpoint write"),
    Case("controller", "TERM", "update", "vllm"),
    Case("controller", "TERM", "tool call", "tools"),
    Case("controller", "TERM", "tool call", "agent"),
    Case("controller", "HUP", "rollout"),
    Case("controller", "HUP", "update"),
    Case("controller", "INT", "rollout"),
    Case("controller", "INT", "tool call", "tools"),
    Case("controller", "INT", "validation"),
    Case("controller", "STOP", "rollout"),
    Case("controller", "STOP", "weight sync", "vllm"),
    Case("rank", "KILL", "start"),
    Case("rank", "KILL", "update"),
    Case("rank", "KILL", "canary"),
    Case("rank", "KILL", "checkpoint write"),
    Case("rank", "KILL", "weight sync", "vllm"),
    Case("rank", "KILL", "shutdown"),
    Case("rank", "TERM", "update", end=End.UNHARMED),  # workers leave SIGTERM to the controller
    Case("rank", "STOP", "update"),
    Case("engine", "KILL", "rollout", short=True),
    Case("engine", "KILL", "update"),
    Case("engine", "KILL", "weight sync"),
    Case("engine", "KILL", "canary"),
    Case("engine", "KILL", "validation"),
    Case("engine", "KILL", "shutdown"),
    Case("engine", "KILL", "tool call", "tools"),
    Case("engine", "KILL", "rollout", "vllm"),
    Case("engine", "TERM", "rollout", end=End.UNHARMED),
    Case("engine", "STOP", "rollout"),
    Case("engine core", "KILL", "rollout", "vllm"),
    Case("engine core", "KILL", "weight sync", "vllm"),
    Case("engine core", "KILL", "shutdown", "vllm"),
    Case("engine core", "TERM", "rollout", "vllm"),
    Case("engine core", "STOP", "rollout", "vllm"),
    Case("scorer", "KILL", "update", short=True),  # idle
    Case("scorer", "KILL", "score"),
    Case("scorer", "KILL", "validation"),
    Case("scorer", "KILL", "shutdown"),
    Case("scorer", "TERM", "score"),
    Case("scorer", "STOP", "update"),
    Case("scorer", "STOP", "score"),
    Case("sandbox worker", "KILL", "tool call", "tools"),
    Case("sandbox worker", "KILL", "update", "tools"),
    Case("sandbox worker", "TERM", "tool call", "tools"),
    Case("sandbox worker", "STOP", "tool call", "tools"),
    Case("environment server", "KILL", "tool call", "env"),
    Case("environment server", "KILL", "update", "env"),
    Case("environment server", "TERM", "tool call", "env"),
    Case("environment server", "STOP", "tool call", "env"),
    Case("raylet", "KILL", "rollout"),
    Case("raylet", "KILL", "update"),
    Case("raylet", "KILL", "checkpoint write"),
    Case("raylet", "KILL", "shutdown"),
    Case("raylet", "TERM", "rollout", end=End.UNHARMED),
    Case("raylet", "STOP", "rollout", end=End.UNHARMED),  # not needed in three steps: the end alone waits for it
)

_FULL = "a line with the path, exit code 2; nothing is damaged, with space it goes on bit-equal"
_WHOLE = "no output is damaged; the same command completes as if unbroken"
FAULTS: Mapping[str, str] = {  # function of faults.py -> what has to come of it
    "disk_full": "reported with the hint, earlier checkpoints whole; with space it goes on",
    "log_full": _FULL,
    "crash_report_full": "exit code 1 with the cause and the path of the report that is missing; goes on bit-equal",
    "network_before_a_server": "ends well; lost responses are counted, none is a zero; the server is named",
    "output_read_only": "refused in a line",
    "tmpdir_full": "goes on, or is reported with the folder; with space it goes on",
    "small_shm": "ends well, bit-equal",
    "small_shm_vllm": "ends well",
    "checkpoint_truncated": "skipped, named; the one before is taken, bit-equal",
    "checkpoint_flipped": "skipped, named; the one before is taken, bit-equal",
    "checkpoint_file_missing": "skipped, named; the one before is taken, bit-equal",
    "manifest_cut": "skipped, named; the one before is taken, bit-equal",
    "manifest_nested": "skipped, named; the one before is taken, bit-equal",
    "all_checkpoints_damaged": "refused in a line",
    "clock_forward": "ends well, bit-equal",
    "clock_back": "ends well, bit-equal",
    "rendezvous_port_taken": "ends well, or is reported with the port",
    "ray_port_taken": "ends well, bit-equal",
    "server_port_taken": "refused in a line",
    "foreign_ray": "not joined, not touched; ends well, bit-equal",
    "two_runs_one_folder": "the second is refused with host and process of the first, which ends bit-equal",
    "two_runs_two_folders": "both end well, bit-equal",
    "interrupted_twice": "exit 130, nothing left; goes on bit-equal",
    "terminated_with_checkpoint": "exit 143 with a checkpoint of the step that was done; goes on bit-equal",
    "parquet_damaged": "refused in a line with the file, within 3 s",
    "metrics_full": _FULL,
    "transcripts_full": _FULL,
    "validation_full": _FULL,
    "samples_full": _FULL,
    "tensorboard_full": _FULL,
    "checkpoints_full": _FULL,
    "records_full": _FULL,
    "export_killed": _WHOLE,
    "report_killed": _WHOLE,
    "generate_killed": _WHOLE,
    "eval_killed": _WHOLE,
    "sft_killed": _WHOLE,
    "train_killed": _WHOLE,
    "export_full": _FULL,
    "report_full": _FULL,
    "generate_full": _FULL,
    "eval_full": _FULL,
    "sft_full": _FULL,
    "fewer_ranks": "goes on with one rank of two, every step once",
    "more_ranks": "goes on with two ranks after one, every step once",
}
