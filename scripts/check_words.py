"""Do code and docs speak the field's language? Run by `.ci/run`; the exit code is 1 where they do not.

    python scripts/check_words.py

Two lists: words that hide what the code does from whoever greps for the usual one, which appear in no identifier,
comment, docstring, message or page; and terms of the field that are found where the thing is implemented.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
AVOIDED: Mapping[str, str] = {  # a regular expression, case ignored -> what to write
    r"told|tells?|telling": "print, log, report, format, pass, list, distinguish",
    r"says?|said|saying": "print, report, state, name; for text: written, content",
    r"words": "text, arguments, argv, terms",
    r"mend|mends|mended|mending": "hint, fix, suggestion",
    r"exams?|lessons?": "benchmark, online evaluation; training batch",
    r"heeds?|hears?|heard": "respect, ignore; learn of, is notified",
    r"nobody|whoever|somebody": "no process, no caller, the caller, the user",
    r"in vain|begun|kin|at rest": "without effect; started; group; offloaded",
    r"codecs?": "tool-call format, chat template",
    r"repl(?:y|ies)": "response",
    r"publications?|publish(?:es|ing)?": "weight sync",
    r"penalised|normalised|tokenised|normalise|tokenise|colour": "American spelling",
}
FOUND: Mapping[str, str] = {  # a term -> the folder or file that implements it
    "weight sync": "verl/trainer/weight_sync.py",
    "reward shaping": "verl/utils/reward_score",
    "advantage normalization": "verl/algorithms/estimators/advantage.py",
    "off-policy": "verl/algorithms/correction.py",
    "rejection sampling": "verl/algorithms/filters.py",
    "importance sampling": "verl/algorithms/correction.py",
    "overlong": "verl/algorithms/overlong.py",
    "early stopping": "verl/kit/collapse",
    "clip ratio": "verl/algorithms/losses/policy_loss.py",
    "hyperparameter": "verl/config/recipe",
}
# Other people's texts: prompts and data of published systems, protocols' words, names of other packages' keys.
ALLOWED = "words: allowed"


def lines() -> Iterator[tuple[Path, int, str]]:
    """Every line of package and docs with its place."""
    files = [path for folder in ("verl", "docs") for path in sorted((ROOT / folder).rglob("*"))]
    for path in [ROOT / "README.md", *files]:
        if path.suffix in (".py", ".md", ".yaml") and "mini" not in path.relative_to(ROOT).parts:
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                yield path.relative_to(ROOT), number, line


def avoided() -> list[str]:
    """Lines with a word to avoid, each with what to write instead."""
    patterns = {
        re.compile(rf"(?<![A-Za-z])(?:{words})(?![A-Za-z])", re.IGNORECASE): instead
        for words, instead in AVOIDED.items()
    }
    return [
        f"{path}:{number}: {found.group()!r}: write {instead}"
        for path, number, line in lines()
        if ALLOWED not in line
        for pattern, instead in patterns.items()
        if (found := pattern.search(line))
    ]


def missing() -> list[str]:
    """Terms that are not found where they belong."""
    problems = []
    for term, place in FOUND.items():
        path = ROOT / place
        files = [path] if path.is_file() else [each for each in path.rglob("*") if each.suffix in (".py", ".yaml")]
        if not any(re.search(term.replace(" ", r"[\s_-]+"), each.read_text(), re.IGNORECASE) for each in files):
            problems.append(f"{place}: {term!r} is not found where it is implemented")
    return problems


def main() -> int:
    problems = [*avoided(), *missing()]
    print("\n".join(problems) or f"{len(AVOIDED)} groups of words are absent, {len(FOUND)} terms are found")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
