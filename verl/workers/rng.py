"""Save and restore the random generators of one process: torch (all its devices), numpy and Python."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def get_random_state() -> dict[str, Any]:
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }


def set_random_state(states: Sequence[dict[str, Any]], rank: int) -> None:
    """Restore this rank's state; a rank beyond the saved ones keeps its own."""
    if rank >= len(states):
        return
    state = states[rank]
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
