"""What the first rows of a run's data select, for `--cfg job`: their reward, and what happens to overlong ones."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from verl.config.schema import Config
from verl.data.row_names import RowNames
from verl.data.source import source_name, source_rows
from verl.data.tasks import to_tasks
from verl.errors import VerlError
from verl.scoring.rewards import build_rewards
from verl.verl_compat.published import AUTO, overlong_of

_ROWS = 64  # read of each file


def row_choices(config: Config) -> Iterator[str]:
    """A line for every choice of each training file that exists; none if the command leaves nothing to the rows."""
    data, reward = config.data, config.reward
    if AUTO not in (data.truncation, reward.name):
        return
    rewards, names = build_rewards(reward.name, reward.options), RowNames.of(config)
    for file in filter(_exists, data.train_files):
        choices: dict[str, None] = {}
        try:
            for rows in islice(source_rows(file, data), _ROWS):
                tasks_by_row = (to_tasks(row, file, data.split_turns, source_name(file), names) for row in rows)
                for task in (each for tasks in tasks_by_row for each in tasks):
                    cut = overlong_of(task.data_source) if data.truncation == AUTO else data.truncation
                    choices[f"reward.name={rewards.choice(task)}; data.truncation={cut}"] = None
        except VerlError as error:
            choices[str(error)] = None
        yield from (f"{file}: {choice}" for choice in choices)


def _exists(file: str) -> bool:
    return Path(file).is_file()
