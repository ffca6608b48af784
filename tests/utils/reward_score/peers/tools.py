"""The tool and the environment of the cases, for TRL and for us."""


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
        self.value += number
        return self.value
