"""What the runs of the study show: rates of the sweep, differences to GRPO, and which of them are equivalent."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
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
    """Markdown: the sweep, then a table per stage, task and validation set."""
    parts = [_sweep_table(task, scores) for task, scores in _swept(results).items()]
    for stage in ("sort", "confirm"):
        for (task, name), by_rule in sorted(scores_of(results, stage).items()):
            parts.append(_stage_table(f"{stage}, {task}, {name}", by_rule, TASKS[task]))
    seconds = sum(result["cpu_s"] for result in results.values() if "scores" in result)
    parts.append(f"{len(results)} runs, {seconds / 3600:.1f} CPU hours.")
    parts += [f"- failed: {run.name}: {result['failed']}" for run, result in results.items() if "failed" in result]
    return "\n\n".join(parts)


def _sweep_table(task: str, scores: Mapping[str, Mapping[float, float]]) -> str:
    rates = TASKS[task].rates
    lines = [f"| rule | {' | '.join(f'{rate:g}' for rate in rates)} |", "| --- " * (len(rates) + 1) + "|"]
    for rule in RULES:
        cells = [f"{scores[rule][rate]:.3f}" if rate in scores.get(rule, ()) else "" for rate in rates]
        lines.append(f"| {rule} | {' | '.join(cells)} |")
    return "\n".join([f"sweep, {task}", "", *lines])


def _stage_table(title: str, by_rule: Mapping[str, Mapping[int, Scores]], task: StudyTask) -> str:
    lines = ["| rule | mean | seeds | difference | 95 % interval | p | verdict |", "| --- " * 7 + "|"]
    found = differences(by_rule)
    tested = [rule for rule in found if rule not in task.copies]
    corrected = dict(zip(tested, holm([found[rule].p for rule in tested]), strict=True))
    for rule in sorted(by_rule, key=lambda rule: -_mean(by_rule[rule])):
        cells = [rule, f"{_mean(by_rule[rule]):.3f}", str(len(by_rule[rule]))]
        if rule in found:
            low, high = found[rule].interval
            cells += [f"{found[rule].mean:+.3f}", f"{low:+.3f} to {high:+.3f}"]
            if rule in corrected:
                cells += [f"{corrected[rule]:.2g}", verdict(found[rule], corrected[rule], task.margin)]
            else:
                cells += ["", "a copy"]
        else:
            cells += [""] * 4
        lines.append(f"| {' | '.join(cells)} |")
    detectable = [each.detectable for each in found.values()]
    note = f"Detectable on average: {fmean(detectable):.2f}; margin {task.margin:g}." if detectable else ""
    return "\n".join([title, "", *lines, "", note])


def _mean(by_seed: Mapping[int, Scores]) -> float:
    return fmean(fmean(scores.values()) for scores in by_seed.values())
