"""Fetch ToolRL's published files with git: the raw RL examples, and real data for this project's tests.

    python scripts/get_toolrl_data.py                          # clones the published commit; needs git and a network
    python scripts/get_toolrl_data.py --repository ~/ToolRL    # uses an existing clone
    export TOOLRL_TEST_DATA=$PWD/dataset/toolrl_test_data      # then the tests find them

Writes rlla_rl.json and rlla_sft.json to dataset/rlla_4k_raw/ (input of preprocess_rlla.py) and the test files to --out.
The reward's test cases are generated here, by running ToolRL's own reward on corrupted responses. Files with a known
hash are verified. All data is ToolRL's, Apache-2.0.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import hashlib
import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout that is not installed, too

from verl.data.tasks import TaskSet
from verl.errors import DataError, VerlError
from verl.host.exits import write_error
from verl.host.files import replacing
from verl.utils.reward_score.rlla import TOGGLES
from verl.utils.reward_score.rlla_mutations import corrupted_responses

REPOSITORY = "https://github.com/qiancheng0/ToolRL"
COMMIT = "8cee13ec0ca72f0461da372a93a6fd8140dbb840"
REWARD_FILE = "verl/utils/reward_score/rlla.py"
NUM_CASES = 800
STEPS = (0, 1, 15, 29, 30, 31, 75, 104, 105, 149, 150, 151, 400)
TEMPLATES = {
    "qwen": "<|im_start|>system\nS<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>",
    "llama": "<|start_header_id|>user<|end_header_id|>\n\nU<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n{}<|eot_id|>",
}


@dataclass(frozen=True, slots=True)
class Published:
    """The path of a file in ToolRL's repository, and its SHA-256 if known."""

    path: str
    sha256: str | None = None


RAW_FILES: Mapping[str, Published] = {
    "rlla_rl.json": Published("dataset/rlla_4k_raw/rlla_rl.json"),
    "rlla_sft.json": Published(
        "dataset/rlla_4k_raw/rlla_sft.json", "ef42a7b1574f1552d6cc7bf9f060a6425458ff67bae2baf53e945dc640dc125c"
    ),
}
TEST_FILES: Mapping[str, Published] = {
    "toolrl/LICENSE": Published("LICENSE", "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"),
    "toolrl/rlla_sft.json": RAW_FILES["rlla_sft.json"],
    "toolrl/rlla_test.parquet": Published(
        "dataset/rlla_4k/test.parquet", "f7f300ebe755fd04985c83e18097d5a94a08619d72809fe06128ed3f00da7554"
    ),
    "toolrl/benchmarks/apibank_level-1.json": Published(
        "benchmarks/API-Bank/level-1-api_processed.json",
        "51ebc8209ba467ce4cc1854d23b2cfd89759f3c45ff2aaf90de4f003162ea98f",
    ),
    "toolrl/benchmarks/apibank_level-2.json": Published(
        "benchmarks/API-Bank/level-2-api_processed.json",
        "75c8097b3127d1f7aec13edb6b7a8428565d753b107f2b1e20daa3d0cfda51db",
    ),
    "toolrl/benchmarks/apibank_level-3.json": Published(
        "benchmarks/API-Bank/level-3-api_processed.json",
        "57228427976f05725d9cf2f0ab03ac16487efaed67d5a929b28e974b9b27ef05",
    ),
    "toolrl/benchmarks/bamboogle.json": Published(
        "benchmarks/Bamboogle/data.json", "82d2ff3996093300bf207c01f0a91a6fe7bd3608287ae623650788b712777f0c"
    ),
}


@contextlib.contextmanager
def checked_out(repository: str, commit: str) -> Iterator[Path]:
    """A temporary folder with the repository's files at this commit."""
    if Path(repository).expanduser().exists():
        repository = str(Path(repository).expanduser().resolve())  # git runs in another folder
    with tempfile.TemporaryDirectory() as folder:
        for command in (
            ["init", "--quiet"],
            ["fetch", "--quiet", "--depth", "1", "--end-of-options", repository, commit],
            ["checkout", "--quiet", "FETCH_HEAD"],
        ):
            try:
                subprocess.run(["git", "-C", folder, *command], check=True, capture_output=True, text=True)
            except FileNotFoundError as error:
                raise DataError("git is not installed", hint="Install git") from error
            except subprocess.CalledProcessError as error:
                raise DataError(
                    f"git {command[0]} failed ({error.stderr.strip()})",
                    hint="Check the network and --commit (all 40 digits), or pass an existing clone with --repository",
                    file=repository,
                ) from error
        yield Path(folder)


def copy_checked(source: Path, published: Published, target: Path) -> None:
    """Copy one file. Raises DataError if it is missing or differs from the published one."""
    path = source / published.path
    if not path.is_file():
        raise DataError("is not in the repository", file=published.path, hint="Check --commit")
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if published.sha256 and found != published.sha256:
        raise DataError(f"has SHA-256 {found}", published.sha256, "Use the published commit", published.path)
    with replacing(target) as unfinished:
        shutil.copyfile(path, unfinished)


def copy_all(clone: Path, files: Mapping[str, Published], folder: Path, console: Console) -> None:
    for name, published in files.items():
        copy_checked(clone, published, folder / name)
        console.print(escape(f"wrote {folder / name}"))


def reward_cases(reward_file: Path, tasks: Sequence[Any]) -> list[dict[str, Any]]:
    """NUM_CASES corrupted responses scored by ToolRL's own code under random variants, steps and chat templates."""
    spec = importlib.util.spec_from_file_location("toolrl_rlla", reward_file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    generator = random.Random(0)
    cases = []
    for _ in range(NUM_CASES):
        task = generator.choice(tasks)
        response = generator.choice(
            [task.answer, *(corrupted.text for corrupted in corrupted_responses(task, task.answer))]
        )
        variant = {name: "1" for name in TOGGLES if name != "SCHEDULELENGTH" and generator.random() < 0.25}
        if "WITHLENGTH" in variant and generator.random() < 0.5:
            variant["SCHEDULELENGTH"] = "1"  # has no effect alone in ToolRL's code, but has here
        family, step = generator.choice(sorted(TEMPLATES)), generator.choice(STEPS)
        solution = TEMPLATES[family].format(response)
        want = score_silently(module.compute_score, solution, task.answer, step, variant | {"EXPERIMENT_NAME": family})
        case = {"solution": solution, "truth": task.answer, "env": variant, "step": step, "want": want}
        cases.append(case | {"family": family})
    return cases


def score_silently(
    compute_score: Callable[..., Sequence[float]], solution: str, truth: str, step: int, variant: dict[str, str]
) -> list[float]:
    """Calls ToolRL's reward, which reads the environment and prints each response; isolates both."""
    before = dict(os.environ)
    for name in TOGGLES:
        os.environ.pop(name, None)
    os.environ.update(variant)
    try:
        with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
            return list(compute_score(solution, truth, step=step))
    finally:
        os.environ.clear()
        os.environ.update(before)


def fetch(arguments: argparse.Namespace, console: Console) -> None:
    out, raw = Path(arguments.out), Path(arguments.raw)
    console.print(escape(f"fetching {arguments.commit[:7]} of {arguments.repository}"))
    with checked_out(arguments.repository, arguments.commit) as clone:
        copy_all(clone, TEST_FILES, out, console)
        tasks = TaskSet(str(out / "toolrl/rlla_test.parquet"), max_bad_share=1.0)
        target = out / "parity/reward_cases.json.gz"
        with replacing(target) as unfinished, gzip.open(unfinished, "wt") as file:
            json.dump(reward_cases(clone / REWARD_FILE, tasks), file)
        console.print(escape(f"wrote {target}"))
        copy_all(clone, RAW_FILES, raw, console)
    console.print(escape(f"to use them in the tests: export TOOLRL_TEST_DATA={out.resolve()}"))


def main(argv: Sequence[str] | None = None) -> int:
    """Fetch everything; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repository", default=REPOSITORY, help="URL, or folder of a clone")
    parser.add_argument("--commit", default=COMMIT)
    parser.add_argument("--out", default="dataset/toolrl_test_data", help="folder for the test files")
    parser.add_argument("--raw", default="dataset/rlla_4k_raw", help="folder for the raw files")
    console = Console(stderr=True, soft_wrap=True)
    try:
        fetch(parser.parse_args(argv), console)
    except VerlError as error:
        return write_error(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
