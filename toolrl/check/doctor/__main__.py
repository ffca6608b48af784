"""`toolrl doctor`: checks whether this machine can train, with hints for what is missing.

The exit code is 1 if training cannot work here, else 0. Only the standard library is imported, so that broken
environments can be checked, too; vLLM is started in a separate process, with a timeout.
"""

import argparse
import asyncio
import contextlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

from toolrl.check.doctor.versions import Check, Flavour, check_all, find_flavour, find_gpus
from toolrl.check.head_sizes import describe_head_sizes
from verl.host.arguments import Arguments
from verl.host.packages import SET_UP
from verl.units import GIB

DISK_WARN_GIB = 10  # an environment and one checkpoint of a small model
DISK_FAIL_GIB = 1
MEMORY_WARN_GIB = 8
SHM_WARN_GIB = 1  # used by the weight sync from trainer to vLLM
SANDBOX_DEADLINE_S = 60.0
INSTALL_SANDBOX = "only recipes that run code need it: apt-get install bubblewrap"
ALLOW_SANDBOX = (
    "only recipes that run code need it. A container needs a seccomp profile that allows user namespaces; "
    "on a host see user.max_user_namespaces and kernel.apparmor_restrict_unprivileged_userns in sysctl"
)
VLLM_DEADLINE_S = 300.0  # a start takes 15 to 60 s, more on a busy machine
TINY_QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 192,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "vocab_size": 2048,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


def check_accelerator(flavour: Flavour) -> Check:
    gpus, device = find_gpus(), os.environ.get("VERL_DEVICE")
    forced = " (VERL_DEVICE)" if device else ""
    if device not in (None, "", "cpu", "gpu"):
        return Check("device", "fail", f"VERL_DEVICE is {device!r}", "set it to cpu or gpu, or unset it")
    if flavour == "cpu":
        return Check("device", "ok", f"CPU, {len(os.sched_getaffinity(0))} cores{forced}")
    if not gpus:
        return Check("device", "fail", f"no NVIDIA GPU found{forced}", "see what `nvidia-smi -L` prints, or unset it")
    return Check("device", "ok", f"{len(gpus)} GPU(s): {gpus[0]}")


def check_models(flavour: Flavour) -> Check:
    """Requirements on models, which depend on the device alone."""
    return Check("models", "note", describe_head_sizes(on_cpu=flavour == "cpu"))


def check_disk(folder: Path) -> Check:
    free = shutil.disk_usage(folder).free / GIB
    hint = f"free some; {DISK_WARN_GIB} GiB are enough for the environment and a small model's checkpoints"
    check = Check("disk", "warn" if free >= DISK_FAIL_GIB else "fail", f"{free:.1f} GiB free in {folder}", hint)
    return check if free < DISK_WARN_GIB else Check("disk", "ok", check.found)


def check_free_memory(meminfo: Path = Path("/proc/meminfo"), limit: Path = Path("/sys/fs/cgroup/memory.max")) -> Check:
    """Available memory: the machine's, or the container's limit if that is less."""
    if not meminfo.is_file():
        return Check("memory", "note", "unknown: this system has no /proc/meminfo")
    lines = dict(line.split(":", 1) for line in meminfo.read_text(encoding="utf-8").splitlines() if ":" in line)
    available = int(lines["MemAvailable"].split()[0]) * 1024
    cap = limit.read_text(encoding="utf-8").strip() if limit.is_file() else "max"
    free = min(available, int(cap) if cap.isdigit() else available) / GIB
    if free >= MEMORY_WARN_GIB:
        return Check("memory", "ok", f"{free:.1f} GiB available")
    return Check("memory", "warn", f"{free:.1f} GiB available", f"below {MEMORY_WARN_GIB} GiB: use a small model")


def check_shm(folder: Path = Path("/dev/shm")) -> Check:
    """Shared memory, used for Ray's objects and vLLM's messages."""
    if not folder.is_dir():
        return Check("/dev/shm", "warn", "missing", "Ray will store its objects on disk, which is slower")
    free = shutil.disk_usage(folder).free / GIB
    if free >= SHM_WARN_GIB:
        return Check("/dev/shm", "ok", f"{free:.1f} GiB free")
    hint = "in a container: start it with --shm-size=8g or --ipc=host"
    return Check("/dev/shm", "warn", f"{free:.1f} GiB free", hint)


def check_sandbox(deadline_s: float = SANDBOX_DEADLINE_S) -> Check:
    """Never a failure, because only recipes with a code tool need the sandbox."""
    if shutil.which("bwrap") is None:
        return Check("sandbox", "note", "no program `bwrap`", INSTALL_SANDBOX)
    command = [sys.executable, "-m", "toolrl.check.doctor", "--probe-sandbox"]
    try:
        tried = subprocess.run(command, capture_output=True, text=True, check=False, timeout=deadline_s)
    except subprocess.TimeoutExpired:
        return Check("sandbox", "note", f"no answer in {deadline_s:.0f} s", "is the machine overloaded?")
    if tried.returncode == 0:
        return Check("sandbox", "note", tried.stdout.strip())
    reason = (tried.stderr.strip().splitlines() or ["no output"])[-1]
    return Check("sandbox", "note", f"does not work: {reason}", ALLOW_SANDBOX)


def probe_sandbox() -> None:
    """Entry point of `check_sandbox`'s subprocess."""
    local: Any = importlib.import_module("toolrl.sandbox.local")

    async def run() -> None:
        sandbox = local.LocalSandbox(workers=1)
        cgroups = sandbox.cgroups
        limits = f"cgroup version {cgroups.version}" if cgroups else "polling, as no cgroup can be made"
        try:
            await sandbox.run("pass")  # starts the fork server
            started = time.monotonic()
            await sandbox.run("pass")
            print(
                f"bubblewrap works: {1000 * (time.monotonic() - started):.0f} ms for an execution; limits by {limits}"
            )
        finally:
            await sandbox.close()

    asyncio.run(run())


def check_vllm(deadline_s: float = VLLM_DEADLINE_S) -> Check:
    """Start a real engine on a tiny random model, generate, and report the time."""
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process: starts faster and leaves nothing behind
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(TINY_QWEN2), encoding="utf-8")
        process = subprocess.Popen(
            [sys.executable, "-m", "toolrl.check.doctor", "--probe", folder],
            env=os.environ | settings,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # so that children of the engine can be ended with it
        )
        try:
            output, _ = process.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            return Check("vLLM engine", "fail", f"no answer in {deadline_s:.0f} s", "is the machine overloaded?")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with all of its children
            process.wait()
    lines = output.strip().splitlines() or ["no output"]
    if process.returncode == 0:
        return Check("vLLM engine", "ok", lines[-1])
    reason = next((line for line in reversed(lines) if "Error" in line), lines[-1])
    return Check("vLLM engine", "fail", f"does not start: {reason.strip()}", f"fix the failures above, or {SET_UP}")


def probe_vllm(folder: str) -> None:
    """Entry point of `check_vllm`'s subprocess."""
    start = time.monotonic()
    vllm: Any = importlib.import_module("vllm")  # by name: neither this file nor mypy may depend on vLLM
    imported = time.monotonic()
    engine = vllm.LLM(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=4,
        gpu_memory_utilization=0.1,
        enforce_eager=True,
        generation_config="vllm",
        disable_log_stats=True,
    )
    started = time.monotonic()
    sampling = vllm.SamplingParams(max_tokens=8, detokenize=False, ignore_eos=True)
    outputs = engine.generate([{"prompt_token_ids": [1, 2, 3, 4]}], sampling, use_tqdm=False)
    generated = f"{len(outputs[0].outputs[0].token_ids)} tokens {time.monotonic() - started:.1f} s"
    print(f"works: import {imported - start:.1f} s, start {started - imported:.1f} s, {generated}", flush=True)


def quick(flavour: Flavour, *, dev: bool) -> int:
    """Prints one line if all packages are installed, else one line per problem."""
    failed = [check for check in check_all(flavour, dev=dev) if check.status == "fail"]
    missing = [check.name for check in failed if check.found == "missing"]
    for check in failed:
        if check.name not in missing:
            print(f"{check.name}: {check.found}. Hint: {check.hint}")
    if missing:
        print(f"missing: {', '.join(missing)}. Hint: {SET_UP}")
    if not failed:
        print(f"toolrl ({flavour}): all packages are installed in tested versions")
    return 1 if failed else 0


def examine(flavour: Flavour, *, dev: bool, with_vllm: bool) -> int:
    failed = 0
    slow: list[Callable[[], Check]] = [check_sandbox, *([check_vllm] if with_vllm else [])]
    quick = (
        check_accelerator(flavour),
        check_models(flavour),
        check_disk(Path.cwd()),
        check_free_memory(),
        check_shm(),
    )
    for check in chain(check_all(flavour, dev=dev), quick, (run() for run in slow)):
        print(f"{check.status:5} {check.name:16} {check.found}", flush=True)
        if check.hint:
            print(f"{'':5} {'':16} -> {check.hint}")
        failed += check.status == "fail"
    print(f"\n{failed} check(s) failed; fix them before training." if failed else "\nTraining can work here.")
    return 1 if failed else 0


def arguments() -> Arguments:
    parser = Arguments("toolrl doctor", __doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="versions only, one line if all is well")
    parser.add_argument("--dev", action="store_true", help="check the packages of tests and linters, too")
    parser.add_argument("--no-vllm", action="store_true", help="do not start a vLLM engine")
    parser.add_argument("--probe", metavar="FOLDER", help=argparse.SUPPRESS)
    parser.add_argument("--probe-sandbox", action="store_true", help=argparse.SUPPRESS)
    return parser


def main(argv: list[str] | None = None) -> int:
    options = arguments().read(argv)
    if options.probe_sandbox:
        probe_sandbox()
        return 0
    if options.probe:
        probe_vllm(options.probe)
        return 0
    if options.quick:
        return quick(find_flavour(), dev=options.dev)
    return examine(find_flavour(), dev=options.dev, with_vllm=not options.no_vllm)


if __name__ == "__main__":
    sys.exit(main())
