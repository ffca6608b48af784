"""Folders of tasks in Harbor's layout, the format of Terminal-Bench from version 2 on: each task is a folder.

    instruction.md  task.toml  environment/  tests/test.sh  solution/solve.sh

Here the instruction becomes the prompt; the environment reads the rest (toolrl/swe/harbor.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from verl.errors import DataError
from verl.host import untrusted_files

INSTRUCTION, SETTINGS = "instruction.md", "task.toml"
_MOST_BYTES = 1 << 24
OLD_SETTINGS = "task.yaml"  # Terminal-Bench 1


def find_task_folders(folder: Path) -> list[Path]:
    """The folder itself if it is a task, else those directly in it, by name; [] if there are none."""
    within = [folder, *sorted(each for each in folder.iterdir() if each.is_dir())]
    found = [each for each in within if any((each / name).is_file() for name in (SETTINGS, OLD_SETTINGS))]
    return found[:1] if folder in found else found


def read_task_folders(folders: list[Path]) -> Iterator[Any]:
    """A task row of each; a DataError in place of one that has no instruction."""
    for folder in folders:
        try:
            yield task_row({"harbor": str(folder)})
        except DataError as error:
            yield error


def task_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """The task row of `{harbor: FOLDER}`, whose other columns are for the environment. Raises DataError."""
    instruction = read_instruction(Path(row["harbor"]))
    return {
        "data_source": "swe",
        "prompt": [{"role": "user", "content": instruction}],
        "reward_model": {"ground_truth": "tests/test.sh"},
        "extra_info": {**row, "harbor": str(Path(row["harbor"]).absolute())},
    }


def read_task_file(folder: Path, name: str) -> str:
    """Raises OSError, ValueError."""
    return untrusted_files.read(folder, name, _MOST_BYTES, shared=True).decode()


def read_instruction(folder: Path) -> str:
    """The text without canary lines. Raises DataError."""
    try:
        lines = read_task_file(folder, INSTRUCTION).splitlines()
    except (OSError, ValueError) as error:
        hint = "Terminal-Bench 1 (task.yaml) must be migrated to Harbor first"
        problem = f"{folder} cannot be read ({error})"
        raise DataError(problem, "the folder of a Harbor task", hint, field="harbor") from error
    while lines and (not lines[0].strip() or (lines[0].startswith(("#", "<!--")) and "canary" in lines[0].lower())):
        del lines[0]
    return "\n".join(lines).strip()
