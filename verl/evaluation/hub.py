"""Benchmarks that are published as data sets of the Hugging Face hub: loaded by name where no file lies at hand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import get_session

from verl.errors import ConfigError

_REACHED_S = 5.0


@dataclass(frozen=True, slots=True)
class HubSet:
    """A published data set. columns: what we call a field -> what it does; without "id", rows are numbered."""

    name: str
    columns: Mapping[str, str]
    split: str = "test"
    config: str | None = None

    def load(self, data_dir: Path) -> Iterable[Mapping[str, Any]]:
        """All rows. A copy in `data_dir`/owner/name comes before the hub; without a network, what was loaded before.

        Raises ConfigError for what cannot be loaded.
        """
        try:
            import datasets  # heavy
        except ImportError as error:
            raise ConfigError(f"{self.name} needs the package datasets (pip install datasets)") from error
        copy = data_dir / self.name
        source, place = (str(copy), f" from {str(copy)!r}") if copy.is_dir() else (self.name, "")
        try:
            if not copy.is_dir():
                _check_reached(datasets.config)
            loaded: Iterable[Mapping[str, Any]] = datasets.load_dataset(source, self.config, split=self.split)
        except Exception as error:  # those of the network are its HTTP client's, which changes
            problem = " ".join(str(error).split())
            raise ConfigError(f"the data set {self.name} cannot be loaded{place} ({problem:.300})") from error
        return loaded

    def rows(self, loaded: Iterable[Mapping[str, Any]], prefix: str) -> Iterator[dict[str, Any]]:
        """The same in our words, with ids that begin with `prefix`. A column that is not there is left out."""
        for number, row in enumerate(loaded):
            told = {ours: _text(row[theirs]) for ours, theirs in self.columns.items() if theirs in row}
            yield told | {"id": f"{prefix}-{told.get('id', number)}"}


def _check_reached(config: Any) -> None:
    """Raises OSError where nothing answers: the package itself would try for 25 s and more, and tell of every try."""
    if config.HF_HUB_OFFLINE:
        return
    try:
        get_session().head(config.HF_ENDPOINT, timeout=_REACHED_S)
    except Exception as error:  # as above
        hint = "HF_HUB_OFFLINE=1 takes what was loaded before"
        raise OSError(f"{config.HF_ENDPOINT} is not reached, {error}; {hint}") from error


def _text(value: Any) -> Any:
    """A number as a text, 27.0 as 27; everything else as it is."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value) if isinstance(value, int | float) else value
