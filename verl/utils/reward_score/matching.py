"""Matching of predicted calls to gold calls: ToolRL's fine, refined and intermediate scores.

A pair of calls with the same name has a similarity in [0, 1 + number of gold parameters]: the Jaccard index of the
parameter names plus one point per gold parameter with an equal value (Python's `==`: 1 equals 1.0 and True, not "1").
Pairs are chosen greedily in gold order, as ToolRL's code does, or optimally, as its paper describes (arXiv 2504.13958,
section 3.3: maximum over assignments).

A prediction is any JSON value, so every function here raises TypeError, KeyError or AttributeError on a call that is
not {"name": .., "parameters": {..}}; the caller converts that to the lowest score.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

Call = dict[str, Any]
Agreement = Callable[[Sequence[Hashable], Sequence[Hashable]], float]
Similarity = Callable[[Call, Any], float]


class Pair(NamedTuple):
    """A gold call and the prediction that it is matched with, by their places, and the points of the two."""

    gold: int
    predicted: int
    points: float


def multiset_jaccard(gold: Sequence[Hashable], predicted: Sequence[Hashable]) -> float:
    """|intersection| / |union| of two multisets; 1.0 when both are empty."""
    if gold == predicted:
        return 1.0
    if not gold or not predicted:
        return 0.0
    shared = sum((Counter(gold) & Counter(predicted)).values())
    return shared / (len(gold) + len(predicted) - shared)


def set_jaccard(gold: Sequence[Hashable], predicted: Sequence[Hashable]) -> float:
    """Like `multiset_jaccard`, for lists without repeats, such as the keys of an object; several times faster."""
    shared = len(set(gold).intersection(predicted))
    union = len(gold) + len(predicted) - shared
    return shared / union if union else 1.0


def all_in_order(gold: Sequence[Hashable], predicted: Sequence[Hashable]) -> float:
    """1.0 if the lists are equal, order included (ToolRL's REFINEDREWARD as coded)."""
    return 1.0 if gold == predicted else 0.0


def all_in_any_order(gold: Sequence[Hashable], predicted: Sequence[Hashable]) -> float:
    """1.0 if the lists have the same items (ToolRL's refined reward as in the paper)."""
    return 1.0 if gold == predicted or Counter(gold) == Counter(predicted) else 0.0


def parameter_similarity(agreement: Agreement) -> Similarity:
    """Similarity of two calls of the same name, parameter by parameter."""

    def similarity(gold: Call, predicted: Any) -> float:
        wanted, given = gold["parameters"], predicted["parameters"]
        names = agreement(list(wanted.keys()), list(given.keys()))
        return names + sum(1.0 for key, value in wanted.items() if key in given and given[key] == value)

    return similarity


def whole_call_similarity(gold: Call, predicted: Any) -> float:
    """1.0 if the whole calls are equal (ToolRL's INTERMEDIATEREWARD)."""
    return 1.0 if gold == predicted else 0.0


def greedy_pairs(gold: Sequence[Call], predicted: Sequence[Any], similarity: Similarity) -> list[Pair]:
    """Each gold call, in order, takes the most similar unused prediction of its name; ties go to the first."""
    by_name = _indices_by_name(predicted, {call["name"] for call in gold})
    pairs = []
    for number, call in enumerate(gold):
        rivals = by_name[call["name"]]
        best, best_index = 0.0, None
        for index in rivals:
            value = similarity(call, predicted[index])
            if value > best:
                best, best_index = value, index
        if best_index is not None:
            rivals.remove(best_index)
            pairs.append(Pair(number, best_index, best))
    return pairs


def optimal_pairs(gold: Sequence[Call], predicted: Sequence[Any], similarity: Similarity) -> list[Pair]:
    """The best one-to-one assignment of predictions to gold calls of the same name (needs scipy)."""
    import numpy as np
    from scipy.optimize import linear_sum_assignment

    pairs = []
    for name, indices in _indices_by_name(predicted, {call["name"] for call in gold}).items():
        wanted = [number for number, call in enumerate(gold) if call["name"] == name]
        table = np.array([[similarity(gold[number], predicted[index]) for index in indices] for number in wanted])
        if indices:
            for row, column in zip(*linear_sum_assignment(table, maximize=True), strict=True):
                pairs.append(Pair(wanted[row], indices[column], float(table[row, column])))
    return pairs


def _indices_by_name(predicted: Sequence[Any], names: Iterable[str]) -> dict[str, list[int]]:
    by_name: dict[str, list[int]] = {name: [] for name in names}
    for index, call in enumerate(predicted):
        name = call["name"]
        if isinstance(name, str) and name in by_name:
            by_name[name].append(index)
    return by_name
