"""For tools that still call it; the build description is in pyproject.toml."""

from setuptools import setup

setup()
