"""What the runs of the study show: rates of the sweep, differences to GRPO, and which of them are equivalent."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import inf
from statistics import fmean, mode
from typing import Any

from bench.algorithms.design import BASE, RULES, SORT_TASKS, TASKS, StudyRun, StudyTask
from toolrl.analysis.compare.paired import Difference, Scores, difference, holm

Results = Mapping[StudyRun, Mapping[str, Any]]
SIGNIFICANT = 0.05
_NEAREST, _FARTHEST = 3, 4


def mean_score(result: Mapping[str, Any]) -> float:
    """The mean reward over the validation sets, which have equally many rows."""
    return fmean(fmean(scores) for scores in result["scores"].values())


def best_rates(results: Results) -> dict[str, dict[str, float]]:
    """By task and rule, the rate that is best for most rules, unless the rule's own best run is better by the margin.

    Smaller differences of single runs are chance, and would give rules different rates for no reason.
    """
    return {task: _best_rates(scores, TASKS[task].margin) for task, scores in _swept(results).items()}


def _best_rates(scores: Mapping[str, Mapping[float, float]], margin: float) -> dict[str, float]:
    best = {rule: max(by_rate, key=by_rate.__getitem__) for rule, by_rate in scores.items()}
    common = mode(best.values())
    near = {rule for rule, by_rate in scores.items() if by_rate.get(common, -inf) >= by_rate[best[rule]] - margin}
    return {rule: common if rule in near else rate for rule, rate in best.items()}


def _swept(results: Results) -> dict[str, dict[str, dict[float, float]]]:
    """{task: {rule: {rate: score}}}"""
    found: dict[str, dict[str, dict[float, float]]] = {task: defaultdict(dict) for task in SORT_TASKS}
    for run, result in results.items():
        if run.stage == "sweep" and "scores" in result:
            found[run.task][run.rule][run.rate] = mean_score(result)
    return {task: by_rule for task, by_rule in found.items() if by_rule}


def scores_of(results: Results, stage: str) -> dict[tuple[str, str], dict[str, dict[int, Scores]]]:
    """{(task, validation set): {rule: {seed: score by row}}}, of the runs that have not failed"""
    found: dict[tuple[str, str], dict[str, dict[int, Scores]]] = defaultdict(lambda: defaultdict(dict))
    for run, result in results.items():
        if run.stage == stage and "scores" in result:
            for name, scores in result["scores"].items():
                found[run.task, name][run.rule][run.seed] = dict(enumerate(scores))
    return found


def differences(by_rule: Mapping[str, Mapping[int, Scores]]) -> dict[str, Difference]:
    """Of every rule to GRPO, over the seeds that both have; rules with fewer than two are left out."""
    base = by_rule.get(BASE, {})
    found = {}
    for rule, by_seed in by_rule.items():
        seeds = sorted(by_seed.keys() & base.keys())
        if rule != BASE and len(seeds) > 1:
            found[rule] = difference([by_seed[seed] for seed in seeds], [base[seed] for seed in seeds])
    return found


def chosen_rules(results: Results) -> list[str]:
    """GRPO, its three nearest and the four farthest, by the mean over tasks of |difference| / margin.

    A task does not count for its copies and for rules that it does not suit.
    """
    by_task: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for (task, _), by_rule in scores_of(results, "sort").items():
        for rule, found in differences(by_rule).items():
            if rule not in (*TASKS[task].copies, *TASKS[task].unsuited):
                by_task[rule][task].append(abs(found.mean) / TASKS[task].margin)
    distances = {rule: [fmean(each) for each in found.values()] for rule, found in by_task.items()}
    order = sorted(distances, key=lambda rule: fmean(distances[rule]))
    return [BASE, *order[:_NEAREST], *order[-_FARTHEST:]]


def verdict(found: Difference, p: float, margin: float) -> str:
    """p: corrected. A difference that is found may still be within the margin."""
    low, high = found.interval
    if p < SIGNIFICANT:
        return "differs"
    return "equivalent" if -margin < low and high < margin else ""


def tables(results: Results) -> str:
    """Markdown: the sweep, then a table per stage."""
    parts = [_sweep_table(results), *(_stage_table(stage, results) for stage in ("sort", "confirm"))]
    seconds = sum(result["cpu_s"] for result in results.values() if "scores" in result)
    parts.append(f"{len(results)} runs, {seconds / 3600:.1f} CPU hours.")
    parts += [f"- failed: {run.name}: {result['failed']}" for run, result in results.items() if "failed" in result]
    return "\n\n".join(filter(None, parts))


def _sweep_table(results: Results) -> str:
    """The chosen rates are bold."""
    swept, chosen = _swept(results), best_rates(results)
    columns = [(task, rate) for task in swept for rate in TASKS[task].rates]

    def cell(rule: str, task: str, rate: float) -> str:
        score = swept[task].get(rule, {}).get(rate)
        text = "" if score is None else f"{score:.3f}"
        return f"**{text}**" if chosen[task].get(rule) == rate else text

    rows = [[rule, *(cell(rule, *column) for column in columns)] for rule in RULES]
    return _markdown("sweep", ["rule", *(f"{task}, {rate:g}" for task, rate in columns)], rows)


def _stage_table(stage: str, results: Results) -> str:
    """By validation set the mean of GRPO, and each rule's difference to it; the rules in the order of these."""
    columns = {
        f"{task}, {name}": _Column(by_rule, TASKS[task]) for (task, name), by_rule in scores_of(results, stage).items()
    }
    rules = {rule for column in columns.values() for rule in column.differences}
    order = sorted(rules, key=lambda rule: -fmean(each.distance(rule) for each in columns.values()))
    rows = [[rule, *(column.cell(rule) for column in columns.values())] for rule in [BASE, *order] if columns]
    detectable = [f"{name} {column.detectable:.2f}" for name, column in columns.items() if column.differences]
    table = _markdown(stage, ["rule", *columns], rows)
    return f"{table}\n\nDetectable: {'; '.join(detectable)}." if detectable else table


class _Column:
    """A validation set of a stage."""

    def __init__(self, by_rule: Mapping[str, Mapping[int, Scores]], task: StudyTask) -> None:
        self.differences = differences(by_rule)
        self._by_rule, self._task = by_rule, task
        tested = [rule for rule in self.differences if rule not in task.copies]
        self._p = dict(zip(tested, holm([self.differences[rule].p for rule in tested]), strict=True))

    @property
    def detectable(self) -> float:
        return fmean(each.detectable for each in self.differences.values())

    def distance(self, rule: str) -> float:
        """In margins; 0 if it is not known."""
        return self.differences[rule].mean / self._task.margin if rule in self.differences else 0.0

    def cell(self, rule: str) -> str:
        by_seed = self._by_rule.get(rule, {})
        if rule == BASE:
            return f"{fmean(fmean(scores.values()) for scores in by_seed.values()):.3f}" if by_seed else ""
        if rule not in self.differences:
            return f"seeds: {len(by_seed)}"
        low, high = self.differences[rule].interval
        text = f"{self.differences[rule].mean:+.3f} ({low:+.3f} to {high:+.3f})"
        if rule in self._task.copies:
            return f"{text} copy"
        found = verdict(self.differences[rule], self._p[rule], self._task.margin)
        return f"**{text}, p {self._p[rule]:.2g}**" if found == "differs" else f"{text} {found}".rstrip()


def _markdown(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Empty without any cell."""
    if not any(any(cells[1:]) for cells in rows):
        return ""
    lines = [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]
    return "\n".join([title, "", *lines])
