"""Benchmarks by name. `bfcl` is a whole benchmark, `bfcl/simple_python` a category; a path is a training data file.

Your own is `package.module:function` or `path/to/file.py:function`; `..:function/category` is one of its categories.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from toolrl.benchmarks.runner.benchmark import Benchmark, BenchmarkContext
from toolrl.benchmarks.runner.rows import rows_benchmark
from verl.data.first_bytes import DATA_SUFFIXES
from verl.errors import ConfigError
from verl.registry import nearest, resolve

BENCHMARKS: Mapping[str, str] = {
    "bfcl": "toolrl.benchmarks.bfcl.benchmark:bfcl",
    "bfcl_multi_turn": "toolrl.benchmarks.bfcl.benchmark:bfcl_multi_turn",
    "api_bank": "toolrl.benchmarks.api_bank.benchmark:api_bank",
    "bamboogle": "toolrl.benchmarks.qa.search:bamboogle",
    "search": "toolrl.benchmarks.qa.search:search",
    "math": "toolrl.benchmarks.qa.math:math",
    "tau2": "toolrl.benchmarks.tau2.benchmark:tau2",
}


def check_benchmarks(names: Sequence[str]) -> None:
    """Raises ConfigError for an empty list, a duplicate, or an unknown benchmark; categories are not checked."""
    if not names:
        raise ConfigError("eval.benchmarks is not set; set it to [bfcl,api_bank/level_1,FILE] for example")
    if len(set(names)) < len(names):
        raise ConfigError(f"eval.benchmarks has duplicates: {', '.join(names)}")
    for whole in _by_benchmark(names):
        if not whole.endswith(DATA_SUFFIXES):
            resolve("benchmark", whole, BENCHMARKS)


def build_benchmarks(names: Sequence[str], context: BenchmarkContext) -> list[Benchmark]:
    """With the requested categories. Raises ConfigError for unknown ones and duplicate names."""
    benchmarks = [_build(whole, parts, context) for whole, parts in _by_benchmark(names).items()]
    categories = [category.name for benchmark in benchmarks for category in benchmark.categories]
    for taken in ([benchmark.name for benchmark in benchmarks], categories):
        for name in taken:
            if taken.count(name) > 1:
                raise ConfigError(f"two benchmarks have the name {name!r}; rename one, or use two outputs")
    return benchmarks


def _by_benchmark(names: Sequence[str]) -> dict[str, list[str]]:
    """The named categories per benchmark; in path/to/file.py:attribute/category one follows the colon."""
    named: dict[str, list[str]] = {}
    for name in names:
        place, colon, rest = name.rpartition(":")
        whole = name if name.endswith(DATA_SUFFIXES) else place + colon + rest.partition("/")[0]
        named.setdefault(whole, []).append(name)
    return named


def _build(name: str, parts: Sequence[str], context: BenchmarkContext) -> Benchmark:
    """The benchmark with the categories in `parts`; with all of them if its own name is among `parts`."""
    if name.endswith(DATA_SUFFIXES):
        return rows_benchmark(name, context)
    if context.env is not None:
        raise ConfigError(f"{name} has an environment of its own; env.name={context.env.name} suits data files")
    make: Callable[[BenchmarkContext], Benchmark] = resolve("benchmark", name, BENCHMARKS)
    benchmark = make(context)
    if name in parts:
        return benchmark
    known = {category.name: category for category in benchmark.categories}
    chosen = [benchmark.name + part.removeprefix(name) for part in parts]
    for part in chosen:
        if part not in known:
            raise ConfigError(f"{benchmark.name} has no category {part!r}; {nearest(part, list(known))}")
    return replace(benchmark, categories=tuple(known[part] for part in chosen))
