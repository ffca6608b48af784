"""What the rows of data may name: known rewards and environments, and the code that the command itself names.

Rows may be another author's, so a name in them is never looked up as a module or a file: `"reward": "os:popen"` would
run the policy's text. Nothing is imported here.
"""

from dataclasses import dataclass
from typing import Self

from verl.config.schema import Config
from verl.errors import DataError
from verl.utils.reward_score.base import REWARDS


@dataclass(frozen=True, slots=True)
class RowNames:
    """rewards, envs: that the command names; user_code: whether rows may name code, too (data.user_code)"""

    rewards: tuple[str, ...] = ()
    envs: tuple[str, ...] = ()
    user_code: bool = False

    @classmethod
    def of(cls, config: Config) -> Self:
        return cls(tuple(config.reward.terms), (config.env.name,), config.data.user_code)

    def reward(self, name: str) -> str:
        """The reward that a row's `reward` stands for: rows may leave out where the command has it from, and write
        `score` for mine.py:score. Raises DataError for code that the command does not name."""
        if name not in REWARDS:
            name = next((each for each in self.rewards if each.rpartition(":")[2] == name), name)
        return self._checked("reward", name, self.rewards)

    def env(self, name: str) -> str:
        """The environment of a row's `env`. Raises DataError for code that the command does not name."""
        return self._checked("env", name, self.envs)

    def _checked(self, field: str, name: str, given: tuple[str, ...]) -> str:
        if name in given or self.user_code or ":" not in name:  # without a colon it is known, or unknown
            return name
        own = ", ".join(each for each in given if ":" in each)
        raise DataError(
            f"{name!a} names code, which a row may not",
            f"a known name (docs/data.md), or one that the command names ({own or f'it has no {field}.name of yours'})",
            f"If you trust it, set {field}.name={name}, or data.user_code=true (--user-code) for all of the rows",
            field=field,
        )
