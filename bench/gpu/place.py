"""Where a measurement runs. Importing this needs nothing but Python."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROMPT, RESPONSE, RESPONSES = 900, 250, 4  # tokens, and responses per prompt


@dataclass(frozen=True)
class Place:
    """Of one session.

    work: a folder that stays on the machine
    rehearse: on a CPU with tiny sizes
    again: whether a measurement of this session failed before
    limit: seconds that the running measurement may take
    """

    work: Path
    rehearse: bool = False
    again: bool = False
    limit: float = math.inf

    @property
    def device(self) -> str:
        return "cpu" if self.rehearse else "cuda"

    @property
    def lengths(self) -> tuple[int, int, int]:
        """Tokens of a prompt and of a response, responses per prompt."""
        return (20, 6, 2) if self.rehearse else (PROMPT, RESPONSE, RESPONSES)
