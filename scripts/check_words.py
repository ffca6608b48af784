"""Do code and docs speak the field's language? Run by `.ci/run`; the exit code is 1 where they do not.

    python scripts/check_words.py

Two lists: words that hide what the code does from whoever greps for the usual one, which appear in no identifier (names
of tests, classes and files included), comment, docstring, message or page; and terms of the field that are found where
the thing is implemented.
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
    "early stopping": "toolrl/analysis/collapse",
    "clip ratio": "verl/algorithms/losses/policy_loss.py",
    "hyperparameter": "verl/config/recipe",
    "TIS": "verl/algorithms/correction.py",
    "loss mask": "verl/batch/token_batch.py",
    "micro batch": "verl/workers/fsdp_engine.py",
    "gradient accumulation": "verl/workers/fsdp_engine.py",
    "gradient clipping": "verl/workers/fsdp_engine.py",
    "KL loss": "verl/workers/policy_worker.py",
    "entropy bonus": "verl/workers/policy_worker.py",
    "tool call parser": "verl/formats/base.py",
    "stop string": "verl/formats/base.py",
    "chat template": "verl/chat/template.py",
    "SFT": "verl/sft",
    "GAE": "verl/algorithms/estimators/advantage.py",
    "dual clip": "verl/algorithms/losses/policy_loss.py",
    "KL penalty": "verl/algorithms/kl.py",
    "partial rollout": "verl/rollout",
    "dynamic sampling": "verl/episodes/manager.py",
    "staleness": "verl/episodes/manager.py",
    "packing": "verl/batch/packing.py",
    "shared prompt": "verl/workers/attention.py",
    "learning rate schedule": "verl/workers/optim.py",
    "placement group": "verl/single_controller/ray.py",
    "sleep mode": "verl/rollout",
    "reward timeout": "verl/scoring/process.py",
    "resume": "verl/checkpoint/state.py",
    "validation": "verl/trainer/validate.py",
}
# Other people's texts: prompts and data of published systems, protocols' words, names of other packages' keys.
ALLOWED = "words: allowed"
# Files that are about words, or full of another package's names: a path, or the folder of such files.
FOREIGN = ("scripts/check_prose.py", "scripts/check_words.py", "tests/toolrl/envs/verifiers/environments")
FOLDERS = ("verl", "toolrl", "docs", "tests", "scripts", "bench", "examples")
PAGES = ("README.md", "CONTRIBUTING.md", "AGENTS.md", "CHANGELOG.md")


def lines() -> Iterator[tuple[Path, int, str]]:
    """Every line of code and pages with its place; number 0 is the path itself."""
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*"))]
    for path in [*(ROOT / name for name in PAGES), *files]:
        name = path.relative_to(ROOT)
        if path.suffix not in (".py", ".md", ".yaml") or "mini" in name.parts or str(name).startswith(FOREIGN):
            continue
        yield name, 0, str(name)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            yield name, number, line.replace("scripts/check_words.py", "")


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
