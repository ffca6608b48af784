"""Faults of the machine, of files and of other programs. The name of a function is the name of its case."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.chaos.harness import (
    BROKEN_STEP,
    MAX_LINES,
    STEPS,
    TRACEBACK,
    Baseline,
    Ended,
    Lab,
    Result,
    Running,
    check_resumed,
    differing,
    place,
)
from tests.chaos.outcome import metrics, newest, weights
from tests.chaos.place import Place
from tests.support.programs import need
from tests.support.service import free_port
from verl.tracking.jsonl import read_jsonl

_NO_JUMP = bytes(8)
_JUMP_S = 3600
_RAY_START_S = 120.0


def run_fault(lab: Lab, name: str) -> Result:
    """Do what the case of this name says, and check everything."""
    result = Result()
    _FAULTS[name](lab, result)
    return result


@contextmanager
def _outputs(shm_mib: int = 2048) -> Iterator[tuple[Place, Path]]:
    with place(shm_mib) as where:
        out = where.tmp.with_suffix(".out")
        try:
            yield where, out
        finally:
            shutil.rmtree(out, ignore_errors=True)


def _check_whole(result: Result, ended: Ended, out: Path, unbroken: Baseline, where: Place) -> None:
    """It ended well, as if nothing had been."""
    _told(result, ended)
    result.need(ended.code == 0, f"exit {ended.code}: {_last(ended)}")
    result.need(not (left := where.leftovers()), f"left: {'; '.join(left[:6])}")
    if ended.code == 0:
        _check_equal(result, out, unbroken)


def _check_equal(result: Result, out: Path, unbroken: Baseline) -> None:
    equal = newest(out) == STEPS and weights(out) == unbroken.weights and metrics(out) == unbroken.rows
    result.facts["bit_equal"] = equal
    result.need(equal, f"the end is not bit-equal: {differing(metrics(out), unbroken.rows)}")


def _check_refused(result: Result, ended: Ended, codes: Sequence[int], *words: str) -> None:
    """It ended with one of the codes, in few lines that hold all these words."""
    _told(result, ended)
    result.need(ended.code in codes, f"exit {ended.code}, not {codes}: {_last(ended)}")
    lacking = [word for word in words if word not in ended.text]
    result.need(not lacking, f"the report lacks {lacking}: {_last(ended)}")
    result.need(len(ended.after) <= MAX_LINES, f"{len(ended.after)} lines after the crash")


def _told(result: Result, ended: Ended) -> None:
    result.facts |= {"exit": ended.code, "seconds": round(ended.seconds, 1), "lines": len(ended.after)}
    result.need(TRACEBACK not in ended.text, "a traceback on the console")


def _last(ended: Ended) -> str:
    return " | ".join(line for _, line in ended.lines[-4:])[-400:]


def disk_full(lab: Lab, result: Result) -> None:
    """The outputs' disk is filled up before the second checkpoint."""
    with _outputs() as (where, out):
        out.mkdir()
        inside = where.mount(out, "size=64m")
        words = lab.words("hf", out)
        ended = _ended_filled(lab.start(where, words, "update"), inside)
        _check_refused(result, ended, (2,), str(out), "Free some space")
        result.need(not (left := where.leftovers()), f"left: {'; '.join(left[:6])}")
        where.clear()
        check_resumed(result, lab, where, words, newest(inside), inside)
        _check_equal(result, inside, lab.baseline("hf"))


def _ended_filled(running: Running, folder: Path) -> Ended:
    """How a run ends if no space is left on the folder's disk from its point on; there is space again afterwards."""
    running.reached()
    file = folder / "filling"
    subprocess.run(["dd", "if=/dev/zero", f"of={file}", "bs=64k"], check=False, capture_output=True)
    try:
        running.struck = time.monotonic()
        running.go()
        return running.ended()
    finally:
        file.unlink(missing_ok=True)


def output_read_only(lab: Lab, result: Result) -> None:
    """Nothing can be written to the outputs' folder."""
    with _outputs() as (where, out):
        out.mkdir()
        where.mount(out, "size=1m,ro")
        ended = lab.start(where, lab.words("hf", out)).ended()
        _check_refused(result, ended, (2,), "cannot be written")
        result.need(not (left := where.leftovers()), f"left: {'; '.join(left[:6])}")


def tmpdir_full(lab: Lab, result: Result) -> None:
    """The temporary folder is filled up in the second step."""
    with _outputs() as (where, out):
        temporary = where.mount(where.tmp, "size=64m")
        words = lab.words("hf", out)
        ended = _ended_filled(lab.start(where, words, "rollout"), temporary)
        if ended.code == 0:
            _told(result, ended)
        else:
            _check_refused(result, ended, (1, 2), str(where.tmp))
            where.clear()
            check_resumed(result, lab, where, words, newest(out), out)
        _check_equal(result, out, lab.baseline("hf"))


def small_shm(lab: Lab, result: Result) -> None:
    """/dev/shm of 2 MiB, as in many a container."""
    with _outputs(shm_mib=2) as (where, out):
        ended = lab.start(where, lab.words("hf", out)).ended()
        _check_whole(result, ended, out, lab.baseline("hf"), where)


def small_shm_vllm(lab: Lab, result: Result) -> None:
    """The same with vLLM."""
    with _outputs(shm_mib=2) as (where, out):
        ended = lab.start(where, lab.words("vllm", out)).ended()
        _told(result, ended)
        result.need(ended.code == 0, f"exit {ended.code}: {_last(ended)}")
        result.need(not (left := where.leftovers()), f"left: {'; '.join(left[:6])}")


def _damaged(lab: Lab, result: Result, damage: Callable[[Path], None]) -> None:
    """A finished run whose newest checkpoint is damaged takes the one before it, and does the last step again."""
    unbroken = lab.baseline("hf")
    with _outputs() as (where, out):
        shutil.copytree(unbroken.folder, out)
        damage(out / "run" / "checkpoints" / f"step-{STEPS:06d}")
        ended = lab.start(where, lab.words("hf", out)).ended()
        skipped = f"step-{STEPS:06d}"
        result.need("skipped" in ended.text and skipped in ended.text, f"{skipped} is not named: {_last(ended)}")
        _check_whole(result, ended, out, unbroken, where)


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
    with _outputs() as (where, out):
        shutil.copytree(lab.baseline("hf").folder, out)
        for file in (out / "run" / "checkpoints").glob("step-*/state.json"):
            file.unlink()
        ended = lab.start(where, lab.words("hf", out)).ended()
        _check_refused(result, ended, (2,), "all are damaged")
        result.need(not (left := where.leftovers()), f"left: {'; '.join(left[:6])}")


def _clock(lab: Lab, result: Result, seconds: int) -> None:
    """The wall clock of all Python code jumps in the second step; the monotonic one goes on."""
    need("cc")
    with _outputs() as (where, out):
        folder = where.tmp.with_suffix(".talk")
        folder.mkdir()
        library, clock = folder / "clock.so", folder / "clock"
        source = Path(__file__).with_name("clock.c")
        subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", library, source, "-ldl"], check=True)
        clock.write_bytes(_NO_JUMP)
        faked = {"LD_PRELOAD": str(library), "CHAOS_CLOCK": str(clock)}
        running = lab.start(where, lab.words("hf", out), "rollout", faked)
        running.reached()
        with clock.open("r+b") as file:  # in place, for it is mapped
            file.write(seconds.to_bytes(8, sys.byteorder, signed=True))
        running.go()
        ended = running.ended()
        _check_whole(result, ended, out, lab.baseline("hf"), where)
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
    with _outputs() as (where, out):
        words = lab.words("hf", out, (), "trainer.n_gpus_per_node=2", "rollout.num_engines=1")
        ended = lab.start(where, words, environment={"CHAOS_TAKE_PORTS": "1"}).ended()
        _told(result, ended)
        if ended.code != 0:
            _check_refused(result, ended, (1,), "port")
            where.clear()
            again = lab.start(where, words).ended()
            result.need(again.code == 0, f"started again it ended with {again.code}: {_last(again)}")
        result.need(not (left := where.leftovers()), f"left: {'; '.join(left[:6])}")


def ray_port_taken(lab: Lab, result: Result) -> None:
    """Other programs listen where a Ray would by default."""
    with _outputs() as (where, out):
        listening = []
        for port in (6379, 8265, 10001):
            try:
                listening.append(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue  # somebody does already
        try:
            ended = lab.start(where, lab.words("hf", out)).ended()
        finally:
            for each in listening:
                each.close()
        _check_whole(result, ended, out, lab.baseline("hf"), where)


def server_port_taken(lab: Lab, result: Result) -> None:
    """An environment server whose port another program has."""
    with _outputs() as (where, _), socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [*where.enter, sys.executable, "-m", "verl.kit.openenv.server", "--env", "shop", "--port", port]
        done = subprocess.run(
            command, env=where.environment({}), capture_output=True, text=True, timeout=120, check=False
        )
        lines = (done.stdout + done.stderr).strip().splitlines()
        result.facts |= {"exit": done.returncode, "lines": len(lines)}
        result.need(done.returncode == 2, f"exit {done.returncode}")
        result.need(len(lines) == 1 and port in lines[0], f"said {lines[-3:]}")
        result.need(not (left := where.leftovers()), f"left: {'; '.join(left[:6])}")


def foreign_ray(lab: Lab, result: Result) -> None:
    """The Ray of another user runs on this machine, at the default port."""
    if os.geteuid() != 0:
        pytest.skip("only root can be another user")
    nobody = pwd.getpwnam("nobody")
    with _outputs() as (where, out), place() as theirs:
        os.chown(theirs.tmp, nobody.pw_uid, nobody.pw_gid)
        ray = [*theirs.enter, "setpriv", f"--reuid={nobody.pw_uid}", f"--regid={nobody.pw_gid}", "--clear-groups"]
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
            ended = lab.start(where, lab.words("hf", out)).ended()
            _check_whole(result, ended, out, lab.baseline("hf"), where)
            gone = before - {each.pid for each in theirs.alive()}
            result.need(head.poll() is None and not gone, f"of the other Ray {len(gone)} processes are gone")
        finally:
            head.kill()
            head.wait()


def two_runs_one_folder(lab: Lab, result: Result) -> None:
    """A second run in the folder of one that runs."""
    with _outputs() as (where, out), place() as other:
        words = lab.words("hf", out)
        first = lab.start(where, words, "rollout")
        first.reached()
        second = lab.start(other, words).ended(limit_s=150)
        first.go()
        _check_refused(result, second, (2,), str(first.process.pid), socket.gethostname())
        _check_whole(result, first.ended(), out, lab.baseline("hf"), where)
        result.facts["exit"] = second.code
        result.need(not (left := other.leftovers()), f"the second left: {'; '.join(left[:6])}")


def two_runs_two_folders(lab: Lab, result: Result) -> None:
    """Two runs of one user on one machine, at the same time."""
    with _outputs() as (where, out), _outputs() as (elsewhere, apart):
        both = [lab.start(where, lab.words("hf", out)), lab.start(elsewhere, lab.words("hf", apart))]
        one, two = (each.ended(limit_s=400) for each in both)
        _check_whole(result, one, out, lab.baseline("hf"), where)
        _check_whole(result, two, apart, lab.baseline("hf"), elsewhere)


def interrupted_twice(lab: Lab, result: Result) -> None:
    """Ctrl-C in a terminal, which the whole foreground group hears, and again in haste."""
    with _outputs() as (where, out):
        words = lab.words("hf", out)
        running = lab.start(where, words, "rollout")
        running.reached()
        running.struck = time.monotonic()
        os.killpg(running.process.pid, signal.SIGINT)
        running.go()
        time.sleep(0.5)
        if running.process.poll() is None:
            os.killpg(running.process.pid, signal.SIGINT)
        ended = running.ended()
        _check_refused(result, ended, (130,), "interrupted")
        result.need(not (left := where.leftovers()), f"left: {'; '.join(left[:6])}")
        where.clear()
        check_resumed(result, lab, where, words, newest(out), out)
        _check_equal(result, out, lab.baseline("hf"))


def terminated_with_checkpoint(lab: Lab, result: Result) -> None:
    """A scheduler's SIGTERM, with the grace period used: the step that was done is kept."""
    with _outputs() as (where, out):
        words = lab.words("hf", out, (), "trainer.save_freq=0", "trainer.save_on_signal=true")
        running = lab.start(where, words, "update")
        running.strike(running.reached()["controller"], "TERM")
        running.go()
        ended = running.ended()
        _check_refused(result, ended, (143,), "SIGTERM")
        saved = newest(out)
        result.need(saved >= BROKEN_STEP - 1, f"the newest checkpoint is of step {saved}")
        result.need(not (left := where.leftovers()), f"left: {'; '.join(left[:6])}")
        where.clear()
        check_resumed(result, lab, where, words, saved, out)
        _check_equal(result, out, lab.baseline("hf"))


_FAULTS: dict[str, Callable[[Lab, Result], None]] = {
    each.__name__: each
    for each in (
        disk_full,
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
    )
}
NAMES = tuple(_FAULTS)
