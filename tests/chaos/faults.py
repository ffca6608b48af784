"""Faults of the machine, of files and of other programs. The name of a function is the name of its case."""

from __future__ import annotations

import mmap
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.chaos import commands, data_files
from tests.chaos.checks import check_equal, check_refused, check_reported, check_whole, last, outputs
from tests.chaos.harness import (
    BROKEN_STEP,
    STEPS,
    Ended,
    Lab,
    Result,
    Running,
    check_resumed,
    lost,
    place,
    servers,
    uncounted,
)
from tests.chaos.outcome import metrics, newest, weights
from tests.support.programs import need
from tests.support.proxy import MODES, behind
from tests.support.service import free_port
from verl.tracking.jsonl import read_jsonl

_NO_JUMP = bytes(8)
_JUMP_S = 3600
_RAY_START_S = 120.0
_OWN_DISKS = ("transcripts", "validation", "samples", "tensorboard", "checkpoints", "records")  # folders of a run
_WRITING = {"records": ("trainer.record=true",)}


def run_fault(lab: Lab, name: str) -> Result:
    """Run the case of this name, and check everything."""
    result = Result()
    _FAULTS[name](lab, result)
    return result


def disk_full(lab: Lab, result: Result) -> None:
    """The outputs' disk is filled up before the second checkpoint."""
    with outputs() as (where, out):
        out.mkdir()
        inside = where.mount(out, "size=64m")
        overrides = lab.overrides("hf", out)
        ended = _ended_filled(lab.start(where, overrides, "update"), inside)
        check_refused(result, ended, (2,), str(out), "Free some space")
        result.need(not (left := where.leftovers()), f"left: {'; '.join(left[:6])}")
        where.clear()
        check_resumed(result, lab, where, overrides, newest(inside), inside)
        check_equal(result, inside, lab.baseline("hf"))


def _ended_filled(running: Running, folder: Path, strike: Callable[[], None] = lambda: None) -> Ended:
    """How a run ends if no space is left on the folder's disk from its point on; there is space again afterwards."""
    running.reached()
    file = folder / "filling"
    subprocess.run(["dd", "if=/dev/zero", f"of={file}", "bs=64k"], check=False, capture_output=True)
    try:
        running.struck = time.monotonic()
        strike()
        running.go()
        return running.ended()
    finally:
        file.unlink(missing_ok=True)


def _full_at(lab: Lab, result: Result, name: str) -> None:
    """The disk of one kind of a run's outputs is filled up in the second step, all others have space."""
    with outputs() as (where, out):
        run = out / "run"
        (run / name).mkdir(parents=True)
        inside = where.mount(run / name, "size=64m")
        for folder in _OWN_DISKS if not name else ():
            (inside / folder).mkdir()
            where.mount(run / folder, "size=64m")
        overrides = lab.overrides("hf", out, (), *_WRITING.get(name, ()))
        ended = _ended_filled(lab.start(where, overrides, "validation" if name == "validation" else "update"), inside)
        check_refused(result, ended, (2,), f"no space left on {run / name}", "Free some space")
        result.need(not (left := where.leftovers()), f"left: {'; '.join(left[:6])}")
        where.clear()
        found = where.inside(out)
        check_resumed(result, lab, where, overrides, newest(found), found)
        check_equal(result, found, lab.baseline("hf"))


def log_full(lab: Lab, result: Result) -> None:
    """The console of a run goes to a file on a disk that is full from the second step on."""
    with outputs() as (where, out):
        logs = where.tmp.with_suffix(".logs")
        logs.mkdir()
        inside = where.mount(logs, "size=64m")
        overrides = lab.overrides("hf", out)
        running = lab.start(where, overrides, "update", to=logs / "log.txt")
        running.reached()
        with (inside / "log.txt").open("ab") as log:  # its last page has no room, either
            log.write(bytes(-log.tell() % mmap.PAGESIZE))  # words: allowed
        ended = _ended_filled(running, inside)
        check_refused(result, ended, (2,), f"no space left on {logs / 'log.txt'}", "Free some space")
        result.need(not (left := where.leftovers()), f"left: {'; '.join(left[:6])}")
        where.clear()
        check_resumed(result, lab, where, overrides, newest(out), out)
        check_equal(result, out, lab.baseline("hf"))


def crash_report_full(lab: Lab, result: Result) -> None:
    """A rank is killed, and the disk for the report of the crash is full."""
    with outputs() as (where, out):
        logs = out / "run" / "logs"
        logs.mkdir(parents=True)
        inside = where.mount(logs, "size=64m")
        overrides = lab.overrides("hf", out)
        running = lab.start(where, overrides, "update")
        ranks = running.reached()["rank"]
        ended = _ended_filled(running, inside, lambda: running.strike(ranks, "KILL"))
        check_refused(result, ended, (1,), "trainer rank 0", f"are not kept: no space left on {logs}")
        where.clear()
        check_resumed(result, lab, where, overrides, newest(out), out)
        check_equal(result, out, lab.baseline("hf"))


def _other_ranks(lab: Lab, result: Result, before: int, after: int) -> None:
    """A run that was ended in its second step goes on with another number of ranks."""
    with outputs() as (where, out):
        overrides = lab.overrides("hf", out, (), f"trainer.n_gpus_per_node={before}")
        running = lab.start(where, overrides, "update")
        running.strike(running.reached()["controller"], "KILL")
        running.go()
        running.ended()
        result.need(newest(out) == BROKEN_STEP - 1, f"the newest checkpoint is of step {newest(out)}")
        where.leftovers()
        where.clear()
        ended = lab.start(where, [*overrides, f"trainer.n_gpus_per_node={after}"]).ended()
        check_reported(result, ended)
        result.need(ended.code == 0, f"exit {ended.code}: {last(ended)}")
        result.need(newest(out) == STEPS, f"the newest checkpoint is of step {newest(out)}")
        rows, wanted = metrics(out), lab.baseline("hf").rows
        result.need([row["step"] for row in rows] == [row["step"] for row in wanted], "not every step once")
        apart = max(abs(one["reward/total"] - two["reward/total"]) for one, two in zip(rows, wanted, strict=False))
        result.facts["rewards_apart"] = apart
        result.facts["bit_equal"] = weights(out) == lab.baseline("hf").weights
        result.need(not (left := where.leftovers()), f"left: {'; '.join(left[:6])}")


def network_before_a_server(lab: Lab, result: Result) -> None:
    """Of two environment servers one is behind a network that treats every connection in another way."""
    with outputs() as (where, out), servers("env") as urls, behind(urls[0], turns=MODES) as network:
        overrides = lab.overrides("env", out, (network.url, urls[1]), "env.options.timeout_s=3")
        ended = lab.start(where, overrides).ended()
        check_reported(result, ended)
        result.need(ended.code == 0, f"exit {ended.code}: {last(ended)}")
        result.need(network.url in ended.text, f"the server is not named: {last(ended)}")
        result.facts["lost"] = lost(out)
        for problem in uncounted(out):
            result.need(False, problem)
        result.need(not (left := where.leftovers()), f"left: {'; '.join(left[:6])}")


def output_read_only(lab: Lab, result: Result) -> None:
    """Nothing can be written to the outputs' folder."""
    with outputs() as (where, out):
        out.mkdir()
        where.mount(out, "size=1m,ro")
        ended = lab.start(where, lab.overrides("hf", out)).ended()
        check_refused(result, ended, (2,), "cannot be written")
        result.need(not (left := where.leftovers()), f"left: {'; '.join(left[:6])}")


def tmpdir_full(lab: Lab, result: Result) -> None:
    """The temporary folder is filled up in the second step."""
    with outputs() as (where, out):
        temporary = where.mount(where.tmp, "size=64m")
        overrides = lab.overrides("hf", out)
        ended = _ended_filled(lab.start(where, overrides, "rollout"), temporary)
        if ended.code == 0:
            check_reported(result, ended)
        else:
            check_refused(result, ended, (1, 2), str(where.tmp))
            where.clear()
            check_resumed(result, lab, where, overrides, newest(out), out)
        check_equal(result, out, lab.baseline("hf"))


def small_shm(lab: Lab, result: Result) -> None:
    """/dev/shm of 2 MiB, as in many a container."""
    with outputs(shm_mib=2) as (where, out):
        ended = lab.start(where, lab.overrides("hf", out)).ended()
        check_whole(result, ended, out, lab.baseline("hf"), where)


def small_shm_vllm(lab: Lab, result: Result) -> None:
    """The same with vLLM."""
    with outputs(shm_mib=2) as (where, out):
        ended = lab.start(where, lab.overrides("vllm", out)).ended()
        check_reported(result, ended)
        result.need(ended.code == 0, f"exit {ended.code}: {last(ended)}")
        result.need(not (left := where.leftovers()), f"left: {'; '.join(left[:6])}")


def _damaged(lab: Lab, result: Result, damage: Callable[[Path], None]) -> None:
    """A finished run whose newest checkpoint is damaged takes the one before it, and does the last step again."""
    unbroken = lab.baseline("hf")
    with outputs() as (where, out):
        shutil.copytree(unbroken.folder, out)
        damage(out / "run" / "checkpoints" / f"step-{STEPS:06d}")
        ended = lab.start(where, lab.overrides("hf", out)).ended()
        skipped = f"step-{STEPS:06d}"
        result.need("skipped" in ended.text and skipped in ended.text, f"{skipped} is not named: {last(ended)}")
        check_whole(result, ended, out, unbroken, where)


def checkpoint_truncated(lab: Lab, result: Result) -> None:
    """A file of weights that was cut."""
    _damaged(lab, result, lambda step: os.truncate(step / "hf" / "model.safetensors", 1000))


def checkpoint_flipped(lab: Lab, result: Result) -> None:
    """A byte of the optimizer's state that is another one."""

    def flip(step: Path) -> None:
        (file,) = (step / "actor").glob("*.distcp")
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)

    _damaged(lab, result, flip)


def checkpoint_file_missing(lab: Lab, result: Result) -> None:
    """The controller's state is gone."""
    _damaged(lab, result, lambda step: (step / "state.json").unlink())


def manifest_cut(lab: Lab, result: Result) -> None:
    """The manifest ends in its middle."""
    _damaged(lab, result, lambda step: os.truncate(step / "manifest.json", 100))


def manifest_nested(lab: Lab, result: Result) -> None:
    """The manifest is brackets alone, deeper than any parser goes."""

    def nest(step: Path) -> None:
        (step / "manifest.json").write_text("[" * 100_000)

    _damaged(lab, result, nest)


def all_checkpoints_damaged(lab: Lab, result: Result) -> None:
    """Starting anew is for the user to decide."""
    with outputs() as (where, out):
        shutil.copytree(lab.baseline("hf").folder, out)
        for file in (out / "run" / "checkpoints").glob("step-*/state.json"):
            file.unlink()
        ended = lab.start(where, lab.overrides("hf", out)).ended()
        check_refused(result, ended, (2,), "all are damaged")
        result.need(not (left := where.leftovers()), f"left: {'; '.join(left[:6])}")


def _clock(lab: Lab, result: Result, seconds: int) -> None:
    """The wall clock of all Python code jumps in the second step; the monotonic one goes on."""
    need("cc")
    with outputs() as (where, out):
        folder = where.tmp.with_suffix(".talk")
        folder.mkdir()
        library, clock = folder / "clock.so", folder / "clock"
        source = Path(__file__).with_name("clock.c")
        subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", library, source, "-ldl"], check=True)
        clock.write_bytes(_NO_JUMP)
        faked = {"LD_PRELOAD": str(library), "CHAOS_CLOCK": str(clock)}
        running = lab.start(where, lab.overrides("hf", out), "rollout", faked)
        running.reached()
        with clock.open("r+b") as file:  # in place, for it is mapped
            file.write(seconds.to_bytes(8, sys.byteorder, signed=True))
        running.go()
        ended = running.ended()
        check_whole(result, ended, out, lab.baseline("hf"), where)
        times = [row["time"] for row in read_jsonl(out / "run" / "metrics.jsonl")]
        result.need(abs(times[-1] - times[0]) > _JUMP_S / 2, "the clock did not jump")


def clock_forward(lab: Lab, result: Result) -> None:
    """By an hour."""
    _clock(lab, result, _JUMP_S)


def clock_back(lab: Lab, result: Result) -> None:
    """By an hour: the newest must not be found by times."""
    _clock(lab, result, -_JUMP_S)


def rendezvous_port_taken(lab: Lab, result: Result) -> None:
    """Another program takes the port at which the ranks were to meet."""
    with outputs() as (where, out):
        overrides = lab.overrides("hf", out, (), "trainer.n_gpus_per_node=2", "rollout.num_engines=1")
        ended = lab.start(where, overrides, environment={"CHAOS_TAKE_PORTS": "1"}).ended()
        check_reported(result, ended)
        if ended.code != 0:
            check_refused(result, ended, (1,), "port")
            where.clear()
            again = lab.start(where, overrides).ended()
            result.need(again.code == 0, f"started again it ended with {again.code}: {last(again)}")
        result.need(not (left := where.leftovers()), f"left: {'; '.join(left[:6])}")


def ray_port_taken(lab: Lab, result: Result) -> None:
    """Other programs listen where a Ray would by default."""
    with outputs() as (where, out):
        listening = []
        for port in (6379, 8265, 10001):
            try:
                listening.append(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue  # another program does already
        try:
            ended = lab.start(where, lab.overrides("hf", out)).ended()
        finally:
            for each in listening:
                each.close()
        check_whole(result, ended, out, lab.baseline("hf"), where)


def server_port_taken(lab: Lab, result: Result) -> None:
    """An environment server whose port another program has."""
    with outputs() as (where, _), socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [*where.enter, sys.executable, "-m", "toolrl.envs.openenv.server", "--env", "shop", "--port", port]
        done = subprocess.run(
            command, env=where.environment({}), capture_output=True, text=True, timeout=120, check=False
        )
        lines = (done.stdout + done.stderr).strip().splitlines()
        result.facts |= {"exit": done.returncode, "lines": len(lines)}
        result.need(done.returncode == 2, f"exit {done.returncode}")
        result.need(len(lines) == 1 and port in lines[0], f"printed {lines[-3:]}")
        result.need(not (left := where.leftovers()), f"left: {'; '.join(left[:6])}")


def foreign_ray(lab: Lab, result: Result) -> None:
    """The Ray of another user runs on this machine, at the default port."""
    if os.geteuid() != 0:
        pytest.skip("only root can be another user")
    account = pwd.getpwnam("nobody")  # words: allowed
    with outputs() as (where, out), place() as theirs:
        os.chown(theirs.tmp, account.pw_uid, account.pw_gid)
        ray = [*theirs.enter, "setpriv", f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", "--clear-groups"]
        ray += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]  # Python may lie in root's home
        ray += [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus=1"]
        ray += [f"--temp-dir={theirs.tmp}", f"--port={free_port()}", "--include-dashboard=false"]
        environment = theirs.environment({"HOME": str(theirs.tmp), "PYTHONPATH": ""})
        head = subprocess.Popen(ray, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + _RAY_START_S
            while not any(each.name() == "raylet" for each in theirs.alive()):
                assert head.poll() is None and time.monotonic() < deadline, "the other user's Ray did not start"
                time.sleep(0.5)
            before = {each.pid for each in theirs.alive()}
            ended = lab.start(where, lab.overrides("hf", out)).ended()
            check_whole(result, ended, out, lab.baseline("hf"), where)
            gone = before - {each.pid for each in theirs.alive()}
            result.need(head.poll() is None and not gone, f"of the other Ray {len(gone)} processes are gone")
        finally:
            head.kill()
            head.wait()


def two_runs_one_folder(lab: Lab, result: Result) -> None:
    """A second run in the folder of one that runs."""
    with outputs() as (where, out), place() as other:
        overrides = lab.overrides("hf", out)
        first = lab.start(where, overrides, "rollout")
        first.reached()
        second = lab.start(other, overrides).ended(limit_s=150)
        first.go()
        check_refused(result, second, (2,), str(first.process.pid), socket.gethostname())
        check_whole(result, first.ended(), out, lab.baseline("hf"), where)
        result.facts["exit"] = second.code
        result.need(not (left := other.leftovers()), f"the second left: {'; '.join(left[:6])}")


def two_runs_two_folders(lab: Lab, result: Result) -> None:
    """Two runs of one user on one machine, at the same time."""
    with outputs() as (where, out), outputs() as (elsewhere, apart):
        both = [lab.start(where, lab.overrides("hf", out)), lab.start(elsewhere, lab.overrides("hf", apart))]
        one, two = (each.ended(limit_s=400) for each in both)
        check_whole(result, one, out, lab.baseline("hf"), where)
        check_whole(result, two, apart, lab.baseline("hf"), elsewhere)


def interrupted_twice(lab: Lab, result: Result) -> None:
    """Ctrl-C in a terminal, which the whole foreground group gets, and again in haste."""
    with outputs() as (where, out):
        overrides = lab.overrides("hf", out)
        running = lab.start(where, overrides, "rollout")
        running.reached()
        running.struck = time.monotonic()
        os.killpg(running.process.pid, signal.SIGINT)
        running.go()
        time.sleep(0.5)
        if running.process.poll() is None:
            os.killpg(running.process.pid, signal.SIGINT)
        ended = running.ended()
        check_refused(result, ended, (130,), "interrupted")
        result.need(not (left := where.leftovers()), f"left: {'; '.join(left[:6])}")
        where.clear()
        check_resumed(result, lab, where, overrides, newest(out), out)
        check_equal(result, out, lab.baseline("hf"))


def terminated_with_checkpoint(lab: Lab, result: Result) -> None:
    """A scheduler's SIGTERM, with the grace period used: the step that was done is kept."""
    with outputs() as (where, out):
        overrides = lab.overrides("hf", out, (), "trainer.save_freq=0", "trainer.save_on_signal=true")
        running = lab.start(where, overrides, "update")
        running.strike(running.reached()["controller"], "TERM")
        running.go()
        ended = running.ended()
        check_refused(result, ended, (143,), "SIGTERM")
        saved = newest(out)
        result.need(saved >= BROKEN_STEP - 1, f"the newest checkpoint is of step {saved}")
        result.need(not (left := where.leftovers()), f"left: {'; '.join(left[:6])}")
        where.clear()
        check_resumed(result, lab, where, overrides, saved, out)
        check_equal(result, out, lab.baseline("hf"))


_FAULTS: dict[str, Callable[[Lab, Result], None]] = {
    each.__name__: each
    for each in (
        disk_full,
        log_full,
        crash_report_full,
        network_before_a_server,
        output_read_only,
        tmpdir_full,
        small_shm,
        small_shm_vllm,
        checkpoint_truncated,
        checkpoint_flipped,
        checkpoint_file_missing,
        manifest_cut,
        manifest_nested,
        all_checkpoints_damaged,
        clock_forward,
        clock_back,
        rendezvous_port_taken,
        ray_port_taken,
        server_port_taken,
        foreign_ray,
        two_runs_one_folder,
        two_runs_two_folders,
        interrupted_twice,
        terminated_with_checkpoint,
        data_files.parquet_damaged,
    )
}
_FAULTS |= {f"{name or 'metrics'}_full": partial(_full_at, name=name) for name in ("", *_OWN_DISKS)}
_FAULTS |= {f"{name}_killed": partial(commands.killed, name=name) for name in commands.COMMANDS}
_FAULTS |= {f"{name}_full": partial(commands.full, name=name) for name in commands.COMMANDS if name != "train"}
_FAULTS |= {
    "fewer_ranks": partial(_other_ranks, before=2, after=1),
    "more_ranks": partial(_other_ranks, before=1, after=2),
}
NAMES = tuple(_FAULTS)
