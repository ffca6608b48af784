"""From records to scores: per category, per aggregate, and as differences of two models on the same tasks."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import comb
from pathlib import Path
from typing import Any

from toolrl.benchmarks.runner.benchmark import Benchmark, Category
from toolrl.benchmarks.runner.records import NOT_ASKED
from toolrl.benchmarks.runner.stats import Estimate, aggregate, estimate
from verl.types import Task

Answers = Sequence[Sequence[Mapping[str, Any]]]  # [tasks][n] records
Pending = Sequence[tuple[Category, Sequence[Task]]]
_RIGHT = 1.0 - 1e-9
CUT_OFF = ("length", "abort", "turn_timeout", "episode_timeout", NOT_ASKED)


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A model's answers to all tasks, their folder, and the settings they depend on."""

    name: str
    folder: Path
    settings: Mapping[str, Any]
    answers: Mapping[str, Answers]  # by category


def scores_of(benchmark: Benchmark, answers: Mapping[str, Answers], resamples: int) -> dict[str, Estimate]:
    """Scores by category and aggregate: the mean over tasks, each the mean of its n rollouts."""
    return _with_aggregates(benchmark, _per_task(answers), resamples)


def differences(
    benchmark: Benchmark, answers: Mapping[str, Answers], base: Mapping[str, Answers], resamples: int
) -> dict[str, Estimate]:
    """By category and aggregate, model minus base, paired by task. Both must have the same tasks in the same order."""
    means, base_means = _per_task(answers), _per_task(base)
    paired = {name: [mine - other for mine, other in zip(means[name], base_means[name], strict=True)] for name in means}
    return _with_aggregates(benchmark, paired, resamples)


def _in_common(answers: Mapping[str, Answers], others: Mapping[str, Answers]) -> dict[str, Answers]:
    known = {name: {rows[0]["digest"] for rows in records} for name, records in others.items()}
    return {name: [rows for rows in records if rows[0]["digest"] in known[name]] for name, records in answers.items()}


def _per_task(answers: Mapping[str, Answers]) -> dict[str, list[float]]:
    return {name: [_mean([row["metric_value"] for row in rows]) for rows in tasks] for name, tasks in answers.items()}


def _with_aggregates(
    benchmark: Benchmark, per_task: Mapping[str, Sequence[float]], resamples: int
) -> dict[str, Estimate]:
    scores = {name: estimate(name, values, resamples) for name, values in per_task.items() if values}
    return scores | aggregate(benchmark.aggregates, scores)


def result_of(benchmark: Benchmark, asked: Pending, model: Evaluated, resamples: int) -> dict[str, Any]:
    """One benchmark and one model, for a JSON file and for `tables.result_grid`."""
    names = [category.name for category in benchmark.categories]
    tasks = {category.name: len(records) for category, records in asked if category.name in names}
    answers = {name: model.answers[name] for name in tasks}
    scores = scores_of(benchmark, answers, resamples)
    return {
        "benchmark": benchmark.name,
        "model": model.name,
        "settings": model.settings,
        "categories": {
            category.name: _category(category, answers[category.name], tasks[category.name], scores[category.name])
            for category in benchmark.categories
            if category.name in scores
        },
        "aggregates": {
            each.name: {"score": records.as_dict(), "rows": records.num_rows, "formula": each.formula}
            for each in benchmark.aggregates
            if (records := scores.get(each.name))
        },
        "notes": [*benchmark.notes, *_not_asked(answers)],
    }


def comparison_of(benchmark: Benchmark, model: Evaluated, base: Evaluated, resamples: int) -> dict[str, Any]:
    """One benchmark and two models on their common tasks, for a JSON file and `tables.comparison_grid`."""
    names = [category.name for category in benchmark.categories]
    ours, theirs = ({name: each.answers[name] for name in names} for each in (model, base))
    ours, theirs = _in_common(ours, theirs), _in_common(theirs, ours)
    of_model, of_base = (scores_of(benchmark, each, resamples) for each in (ours, theirs))
    compared = differences(benchmark, ours, theirs, resamples)
    return {
        "benchmark": benchmark.name,
        "model": model.name,
        "base": base.name,
        "settings": {"model": model.settings, "base": base.settings},
        "episodes": {category.name: asdict(category.episode) for category in benchmark.categories},
        "scores": {
            name: {
                "model": of_model[name].as_dict(),
                "base": of_base[name].as_dict(),
                "difference": difference.as_dict(),
                "rows": difference.num_rows,
            }
            for name, difference in compared.items()
        },
        "aggregates": {each.name: {"formula": each.formula} for each in benchmark.aggregates if each.name in compared},
        "notes": [
            *benchmark.notes,
            *(
                f"{name} is {model.settings[name]}, the base's {base.settings[name]}: limited by each model's context"
                for name in ("data.max_prompt_length", "data.max_response_length")
                if model.settings[name] != base.settings[name]
            ),
        ],
    }


def _category(category: Category, answers: Answers, num_tasks: int, score: Estimate) -> dict[str, Any]:
    """`missing` tasks failed for infrastructure reasons and are excluded from the score."""
    rows = [row for task in answers for row in task]
    answered = [row for row in rows if row["stop_reason"] != NOT_ASKED]
    parts = sorted({name for row in answered for name in row["score"]["parts"]})
    calls = sum(len(row["tool_uses"]) for row in answered)
    right = [[row["metric_value"] >= _RIGHT for row in task] for task in answers]
    several: dict[str, Any] = {
        "pass@n": _mean([any(task) for task in right]),
        "pass^n": _mean([all(task) for task in right]),
        "pass^k": {  # all of k rollouts of a task, drawn without replacement, are right (arXiv 2406.12045)
            str(k): _mean([comb(sum(task), k) / comb(len(task), k) for task in right])
            for k in range(1, len(right[0]) + 1)
        },
    }
    if category.answer_of is not None:
        several["maj@n"] = _mean([_majority_is_right(task, category.answer_of) for task in answers])
    return {
        "metric": category.metric,
        "episode": asdict(category.episode),
        "score": score.as_dict(),
        **(several if len(answers[0]) > 1 else {}),
        "rows": len(answers),
        "missing": num_tasks - len(answers),
        "total": _mean([row["score"]["total"] for row in answered]),
        "parts": {name: _mean([row["score"]["parts"].get(name, 0.0) for row in answered]) for name in parts},
        "turns": _mean([row["num_turns"] for row in answered]),
        "tool_calls": _mean([len(row["tool_uses"]) for row in answered]),
        "tool_productivity": sum(map(sum, right)) / calls if calls else None,  # OTC (arXiv 2504.14870)
        "tokens": _mean([row["num_tokens"] for row in answered]),
        "cut_off": _mean([row["stop_reason"] in CUT_OFF for row in rows]),
        "not_asked": sum(task[0]["stop_reason"] == NOT_ASKED for task in answers),
    }


def _majority_is_right(task: Sequence[Mapping[str, Any]], answer_of: Callable[[str], str | None]) -> bool:
    """Whether the most frequent answer of a task's rollouts is right; among equally frequent ones the first counts."""
    texts = (
        "\n".join(each["content"] for each in row.get("responses", ()) if each["role"] == "assistant") for row in task
    )
    answers = [answer_of(text) for text in texts]
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return False
    ((chosen, _),) = votes.most_common(1)
    return bool(task[answers.index(chosen)]["metric_value"] >= _RIGHT)


def _not_asked(answers: Mapping[str, Answers]) -> Iterator[str]:
    """One line per category with prompts that count as wrong without generation, with the first reason."""
    for name, records in answers.items():
        problems = [task[0]["problem"] for task in records if task[0]["stop_reason"] == NOT_ASKED]
        if problems:
            yield f"{name}: {len(problems)} prompts count as wrong without generation; the first: {problems[0]}"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
