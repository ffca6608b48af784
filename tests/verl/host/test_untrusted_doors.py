"""Files are opened in places that are known: what another party may have written only by untrusted_files.py."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from verl.host.packages import OURS

ROOT = Path(__file__).parents[3]
CALLS = {
    *("read_text", "read_bytes", "extractall", "copytree", "rmtree", "copyfile", "copy2", "ZipFile"),
    *("copy", "unpack_archive", "TarFile"),
}
MODULES = {"os", "io", "tarfile", "zipfile", "gzip", "bz2", "lzma", "codecs"}  # words: allowed


SHUTIL = {"copy"}  # a name of other methods, too
NAMED = "a file that the user names on the command line or in the settings"
OWN = "files of this package, or of an installed one"
MADE = "files that this process made, in folders where only its user writes"
RUN = "files of the run's own folder, which its lock holds; the store checks kinds before"
KERNEL = "/proc, /sys or /dev"
INSIDE = "runs in the sandbox, or as the program's own child, with its rights"
ALLOWED = {
    "verl/checkpoint/checkpoint.py": RUN,
    "verl/checkpoint/manifest.py": MADE,
    "verl/checkpoint/own_code.py": OWN,
    "verl/config/load.py": NAMED,
    "verl/verl_compat/published.py": NAMED,
    "verl/data/first_bytes.py": NAMED,
    "verl/data/rows.py": NAMED,
    "verl/formats/prompt.py": NAMED,
    "verl/host/output.py": KERNEL,
    "verl/tracking/tensorboard.py": RUN,
    "toolrl/envs/agent/inside/programs.py": INSIDE,
    "toolrl/envs/agent/inside/puller.py": "standalone, on other machines; `left_in` has the same rules",
    "toolrl/envs/agent/launcher.py": MADE,
    "toolrl/envs/agent/pull.py": MADE,
    "toolrl/api/child.py": MADE,
    "toolrl/benchmarks/bfcl/env.py": OWN,
    "toolrl/benchmarks/bfcl/tasks.py": OWN,
    "toolrl/check/doctor/__main__.py": KERNEL,
    "toolrl/check/doctor/versions.py": OWN,
    "toolrl/benchmarks/runner/records.py": NAMED,
    "toolrl/serve/export/card.py": "of a folder that copy_tree has made",
    "toolrl/serve/export/folder.py": NAMED,
    "toolrl/serve/export/model_files.py": "of a folder that copy_tree has made",
    "toolrl/serve/openai_server/chat_template.py": OWN,
    "toolrl/serve/openai_server/serving_files.py": "of a folder that copy_tree has made",
    "toolrl/analysis/certify/manifest.py": "a manifest that the user names; /proc",
    "toolrl/analysis/replay/record.py": RUN,
    "toolrl/analysis/report/page.py": OWN,
    "toolrl/sandbox/cgroups.py": KERNEL,
    "toolrl/sandbox/inside/child.py": INSIDE,
    "toolrl/sandbox/inside/interpreter.py": INSIDE,
    "toolrl/sandbox/inside/processes.py": INSIDE,
    "toolrl/sandbox/inside/repository.py": INSIDE,
    "toolrl/sandbox/inside/supervisor.py": INSIDE,
    "toolrl/sandbox/inside/zygote.py": INSIDE,
    "toolrl/sandbox/shell_tool.py": "packs texts of a row, no files",
    "toolrl/servers/serving.py": NAMED,
    "toolrl/swe/abandoned.py": MADE,
    "toolrl/envs/swe/env.py": NAMED,
    "toolrl/swe/inside/run_tests.py": INSIDE,
    "toolrl/swe/remote.py": "packs an image that prepare_image has made",
    "toolrl/swe/runtime.py": "packs a copy that `copy_tree` has made",
    "toolrl/swe/scoring.py": OWN,
    "toolrl/benchmarks/tau2/tasks.py": OWN,
    "toolrl/trackers/services.py": RUN,
    "verl/registry.py": NAMED,
    "verl/rollout/engine_options.py": OWN,
    "verl/rollout/vllm_engine.py": MADE,
    "verl/single_controller/process_watch.py": KERNEL,
    "verl/single_controller/ray.py": MADE,
    "verl/host/code_version.py": OWN,
    "verl/host/digests.py": NAMED,
    "verl/host/lock.py": RUN,
    "verl/host/packages.py": OWN,
    "verl/host/signals.py": KERNEL,
    "verl/host/unpacking.py": "the process without rights",
    "verl/host/untrusted_files.py": "the place for it",
    "verl/host/watcher.py": "removes trees relative to open folders; reads /proc",
    "verl/tracking/jsonl.py": RUN,
    "verl/build/base.py": RUN,
    "verl/build/threads.py": KERNEL,
    "verl/host/free_memory.py": KERNEL,
    "toolrl/reward_score/rubric.py": NAMED,
}


def opens(tree: ast.AST) -> Iterator[int]:
    """The lines of calls that read a path, unpack, copy or remove a tree."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
        owner = getattr(getattr(call.func, "value", None), "id", "")
        first = call.args[0] if call.args else None
        has_mode = isinstance(first, ast.Constant) and set(str(first.value)) <= set("rwxabt+") and first.value
        has_keyword = bool({each.arg for each in call.keywords} & {"encoding", "errors", "newline", "mode"})
        is_open = name == "open" and (isinstance(call.func, ast.Name) or owner in MODULES or has_mode or has_keyword)
        if isinstance(call.func, ast.Name) and name == "read_text":  # a function of ours
            continue
        if is_open or (name in CALLS and (name not in SHUTIL or owner == "shutil")):
            yield call.lineno


def found() -> dict[str, list[int]]:
    lines = {path.relative_to(ROOT).as_posix(): path for package in OURS for path in sorted(package.rglob("*.py"))}
    every = {name: list(opens(ast.parse(path.read_bytes()))) for name, path in lines.items()}
    return {name: each for name, each in every.items() if each}


def test_files_are_opened_where_it_is_known_whose_they_are() -> None:
    """Another place that opens files: use verl/host/untrusted_files.py if others write them; else name the reason."""
    lines = found()
    assert not {name: lines[name] for name in lines.keys() - ALLOWED.keys()}, "opened here; by untrusted_files?"
    assert not ALLOWED.keys() - lines.keys(), "nothing is opened here any more"


def test_the_search_sees_each_way_to_open_a_file() -> None:
    ways = """
open(p)
p.open("rb")
p.open(encoding="utf-8")
p.read_text()
os.open(p, 0)
tarfile.open(p)
tar.extractall(p)
shutil.rmtree(p)
shutil.copy(a, b)
"""
    assert list(opens(ast.parse(ways))) == list(range(2, 11))
    assert not list(opens(ast.parse("session.open(task)\nfields.copy()\nruntime.read(path)")))
