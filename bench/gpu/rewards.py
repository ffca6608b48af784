"""The reward of both sides: a hash of the response, so that no group has equal rewards and is left out."""

import zlib


def hashed(response: str, answer: str) -> float:
    return zlib.crc32(response.encode()) / 2**32
