"""Benchmarks published as data sets on the Hugging Face hub: loaded by name if there is no local file."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import get_session

from verl.errors import ConfigError

_REACH_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class HubSet:
    """A published data set. columns: our field name -> its column; without "id", rows are numbered."""

    name: str
    columns: Mapping[str, str]
    split: str = "test"
    config: str | None = None

    def load(self, data_dir: Path) -> Iterable[Mapping[str, Any]]:
        """All rows, of a copy in `data_dir`/owner/name, else of the hub or its cache. Raises ConfigError."""
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
        except Exception as error:  # network errors are those of its HTTP client, which changes
            problem = " ".join(str(error).split())
            raise ConfigError(f"the data set {self.name} cannot be loaded{place} ({problem:.300})") from error
        return loaded

    def rows(self, loaded: Iterable[Mapping[str, Any]], prefix: str) -> Iterator[dict[str, Any]]:
        """Rows with our field names, and ids that begin with `prefix`. Missing columns are left out."""
        for number, row in enumerate(loaded):
            renamed = {name: _text(row[column]) for name, column in self.columns.items() if column in row}
            yield renamed | {"id": f"{prefix}-{renamed.get('id', number)}"}


def _check_reached(config: Any) -> None:
    """Raises OSError if the hub is unreachable: the package itself retries for 25 s and more, and logs every retry."""
    if config.HF_HUB_OFFLINE:
        return
    try:
        get_session().head(config.HF_ENDPOINT, timeout=_REACH_TIMEOUT_S)
    except Exception as error:  # as above
        hint = "set HF_HUB_OFFLINE=1 to use the cache"
        raise OSError(f"{config.HF_ENDPOINT} is unreachable, {error}; {hint}") from error


def _text(value: Any) -> Any:
    """Numbers as strings, 27.0 as 27; everything else unchanged."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value) if isinstance(value, int | float) else value
