"""The tools, the environment and the rewards of the cases, for TRL and for us."""

from functools import partial


def weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: Its name.
    """
    return {"Oslo": "rain", "Rome": "sun"}[city]


class Counter:
    def reset(self, **row: object) -> str:
        self.value = 0
        return " It is at 0."

    def add(self, number: int) -> int:
        """Add a number.

        Args:
            number: It.
        """
        if number < 0:
            raise ValueError("It only grows.")
        self.value += number
        return self.value


def facts(city: str) -> dict:
    """Facts of a city.

    Args:
        city: Its name.
    """
    return {"name": city, "rivers": None, "size": 1.5, "old": True, "parts": ["a", "ü"]}


async def slow(completions, **_):
    return [0.5 for _ in completions]


class Rated:
    """A reward as an object."""

    def __init__(self, value):
        self.value = value

    def __call__(self, prompts, completions, answer, **_):
        return tuple(self.value for _ in completions)


def rate(completions, scale, **_):
    return [scale for _ in completions]


def unsure(completions, **_):
    return [float("nan") for _ in completions]


def nothing(completions, **_):
    return [None for _ in completions]


def flag(completions, **_):
    return [True for _ in completions]


def tensor(completions, **_):
    import torch

    return torch.full((len(completions),), 2.0)


def array(completions, completion_ids, **_):
    import numpy as np

    return np.array([float(len(ids)) for ids in completion_ids], dtype=np.float32)


KINDS = [slow, Rated(0.25), partial(rate, scale=3.0), unsure, nothing, flag, tensor, array]
WEIGHTS = [1.0, 2.0, 0.5, 7.0, 9.0, -1.0, 0.25, 0.125]
