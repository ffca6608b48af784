"""Writes the generated parts of pages, such as the table of docs/metrics.md.

A part reaches from the line `<!-- written by scripts/pages.py: NAME -->` to the line END, or to the end of the page.

python scripts/pages.py [--check]    --check: writes nothing; the exit code is 1 if a page is out of date
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from textwrap import shorten
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from bench.gpu.measurements import OK, SESSIONS, measured  # noqa: E402
from bench.gpu.table import ASSET, place, shown  # noqa: E402
from scripts import families as known  # noqa: E402
from toolrl.algorithms import COLUMNS, presets, row  # noqa: E402
from toolrl.analysis.collapse.collapse import COLLAPSE_RULES  # noqa: E402
from toolrl.cli import GROUPS  # noqa: E402
from verl.algorithms import ALGORITHMS  # noqa: E402
from verl.config.commands import TRAIN  # noqa: E402
from verl.config.show import described  # noqa: E402
from verl.tracking.names import METRICS  # noqa: E402
from verl.verl_compat.metric_names import ABSENT, COMPUTED, EQUAL, RENAMED  # noqa: E402
from verl.verl_compat.published import COMMANDS, SOURCES, VERSIONS  # noqa: E402
from verl.verl_compat.verl_keys import (  # noqa: E402
    ABSENT_FEATURES,
    ALIASES,
    INTERPRETED,
    MOVED,
    OBSOLETE,
    REFUSED,
    SAME_AS,
    Only,
    spelled,
)

END = "<!-- end of what scripts/pages.py writes -->\n"
PART = re.compile(rf"(?P<mark><!-- written by scripts/pages.py: (?P<name>\w+) -->\n).*?(?P<end>{END}|\Z)", re.DOTALL)
README = ROOT / "README.md"
OUTCOME = 100  # characters of a failure's reason
CARDS = "docs/gpu.md#what-only-a-card-can-show"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def algorithms() -> str:
    """The components of every preset, and the docstring of its module."""
    modules = {name: import_module(location.partition(":")[0]) for name, location in ALGORITHMS.items()}
    sections = [f"\n## {name}\n\n{inspect.getdoc(module)}\n" for name, module in modules.items()]
    return "\n" + table(COLUMNS, map(row, presets())) + "".join(sections)


def metrics() -> str:
    """Name, unit and meaning of every metric, and veRL's names."""
    ours = table(("name", "unit", "meaning"), ((f"`{each.name}`", each.unit, each.meaning) for each in METRICS))
    logged = [(each, "yes") for each in (*RENAMED, *COMPUTED)] + [(each, "always") for each in EQUAL]
    rows = [
        (f"`{each.name}`", f"`{each.ours}`" if each.ours else "", when, each.why)
        for each, when in [*logged, *((each, "no") for each in ABSENT)]
    ]
    switch = "`trainer.logger=[console,verl_names]`, or `tracking.names=verl`"
    heading = f"\n## veRL's names\n\nWith {switch}, these are logged, too.\n\n"
    return f"\n{ours}{heading}{table(('veRL', 'here', 'logged', 'difference'), sorted(rows))}"


def verl_keys() -> str:
    """What becomes of veRL's keys."""
    ours = {
        **{key: f"`{our}`" for key, our in ALIASES.items()},
        **INTERPRETED,
        **{key: f"must equal `{our}`" for key, our in SAME_AS.items()},
    }
    return "\n".join(
        [
            "\n## Translated keys\n",
            table(("key", "here"), _of_keys(sorted(ours.items()))),
            "## Obsolete keys\n\nListed in one warning, by reason. A name includes all keys below it.\n",
            table(("key", "why"), _of_keys(sorted(OBSOLETE.items()))),
            "## Refused keys\n\nValues other than the given one or null are an error.\n",
            table(("key", "value", "why"), _only(REFUSED)),
            "## Absent features\n\nAny value but the given one, which is veRL's default, is an error.\n",
            table(("key", "value", "why"), _only(ABSENT_FEATURES)),
            "## Moved keys\n\nLater versions have these groups elsewhere.\n",
            table(("theirs", "above"), ((f"`{key}`", f"`{group}`") for key, group in MOVED.items())),
        ]
    )


def training() -> str:
    """Every setting of `toolrl train`, with its default and its meaning by the schema."""
    rows = ((f"`{key}`", f"`{default}`", meaning.replace("|", "\\|")) for key, _, default, meaning in described(TRAIN))
    defaults = ((key, "" if default == "`None`" else default, meaning) for key, default, meaning in rows)
    return "\n" + table(("key", "default", "meaning"), defaults)


def _only(keys: Mapping[str, Only]) -> Iterable[Sequence[str]]:
    return _of_keys((key, f"`{'null' if only.value is None else only.value}`", only.why) for key, only in keys.items())


def _of_keys(rows: Iterable[Sequence[str]]) -> Iterable[Sequence[str]]:
    return ((f"`{spelled(key)}`", *cells) for key, *cells in rows)


def migration() -> str:
    """What arguments of published commands, versions of veRL and data sources mean."""
    commands = [
        (
            line.system,
            f"`{spelled(line.key)}={line.value}`",
            f"`{line.recipe}`",
            ", ".join(f"`{part}`" for part in line.parts),
        )
        for line in COMMANDS
    ]
    versions = [
        (
            version.name,
            f"`{spelled(version.sign)}`",
            version.overlong,
            ", ".join(f"`{ours}={value}`" for ours, (_, value) in version.defaults.items()),
        )
        for version in VERSIONS
    ]
    sources = [
        (
            ", ".join(f"`{name}`" for name in source.names),
            f"`{source.reward}`" if source.reward else "refused",
            source.overlong,
            source.why,
        )
        for source in SOURCES
    ]
    return "\n".join(
        [
            "\n### Arguments of published commands\n",
            table(("command of", "argument", "recipe", "its settings"), commands),
            "### Versions of veRL\n",
            table(("version", "its key", "overlong prompts", "defaults"), versions),
            "### Data sources\n\nThe reward with `reward.name=auto`, and what `data.truncation=auto` does.\n",
            table(("`data_source`", "reward", "overlong prompts", "why"), sources),
        ]
    )


def collapse() -> str:
    """The rules that detect a collapse."""
    rows = []
    for rule in COLLAPSE_RULES:
        where = " or ".join(f"`{name}`" for name in rule.metrics) + (", without reward" if rule.without_reward else "")
        rows.append((rule.name, where, rule.threshold, str(rule.patience), rule.cause, rule.hint))
    return "\n" + table(("rule", "metric", "threshold", "patience", "likely cause", "hint"), rows)


def on_a_gpu() -> str:
    """One sentence: whether the code ran on a GPU, and on which."""
    rows = list(gpu_results().values())
    if not rows:
        return f"**Not yet run on a GPU**: the code for it was reviewed only ([what a card will show]({CARDS})). "
    cards = ", ".join(dict.fromkeys(row["device"] for row in rows))
    right = sum(row["state"] == OK for row in rows)
    return f"**Run on a GPU**: {cards}, {right} of {len(measured(SESSIONS))} [measurements]({CARDS}) as expected. "


def families() -> str:
    """What is known of every family of models with layers with state or with towers."""
    return "\n" + table(known.COLUMNS, known.rows()) + "\n"


def gpu() -> str:
    """Every measurement of bench/gpu/short.py, what it shows, and its outcome; below, the figures."""
    results = gpu_results()
    rows = [(f"`{each.name}`", each.shows, outcome(results.get(each.name))) for each in measured(SESSIONS)]
    text = "\n" + table(("measurement", "what it shows", "outcome"), rows)
    with_figures = {name: row for name, row in results.items() if row["figures"]}
    if not with_figures:
        return text
    figures = (
        (f"`{name}`", what, shown(value))
        for name, row in with_figures.items()
        for what, value in row["figures"].items()
    )
    places = dict.fromkeys(place(row) for row in with_figures.values())
    return f"{text}\n{table(('measurement', 'figure', 'value'), figures)}\n" + "".join(f"{each}  \n" for each in places)


def outcome(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "not yet run"
    return OK if row["state"] == OK else f"{row['state']}: {shown(shorten(row['reason'], OUTCOME))}"


def gpu_results() -> dict[str, Mapping[str, Any]]:
    """By measurement, as bench/gpu/table.py wrote them; none if nothing ran."""
    return {row["name"]: row for row in json.loads(ASSET.read_text())} if ASSET.exists() else {}


def commands() -> str:
    """The commands of `toolrl --help`, with the page of each."""
    rows = [
        (f"`toolrl {name}`", f"{command.summary}{f' ([{page}]({page}))' if (page := PAGE_OF.get(name)) else ''}")
        for group in GROUPS.values()
        for name, command in group.items()
    ]
    return table(("command", "purpose"), rows)


def folders() -> str:
    """The folders of `toolrl`: their commands by `toolrl --help`, and their purpose by their docstrings."""
    packages = [
        ".".join(path.parent.relative_to(ROOT).parts)
        for path in sorted((ROOT / "toolrl").glob("*/__init__.py")) + sorted((ROOT / "toolrl").glob("*/*/__init__.py"))
        if path.parent.name != "inside"  # of sandboxes
    ]
    commands: dict[str, list[str]] = {package: [] for package in packages}
    for name, command in [each for group in GROUPS.values() for each in group.items()]:
        if owners := [package for package in packages if f"{command.module}.".startswith(f"{package}.")]:
            commands[max(owners, key=len)].append(f"`toolrl {name}`")
    rows = (
        (
            f"`{package.replace('.', '/')}/`",
            ", ".join(commands[package]),
            str(inspect.getdoc(import_module(package))).partition("\n")[0],
        )
        for package in sorted(packages)
    )
    return table(("folder", "command", "purpose"), rows)


def diagram() -> str:
    """README's diagram."""
    text = README.read_text(encoding="utf-8").partition("```mermaid")[2].partition("```\n")[0]
    return f"```mermaid{text}```\n"


def your_own() -> str:
    """README's table of what a user has."""
    text = README.read_text(encoding="utf-8").partition("| I have |")[2].partition("\n\n")[0]
    return f"| I have |{text}\n".replace("](docs/", "](")


PAGE_OF: Mapping[str, str] = {  # command -> its page in docs/, beside training.md
    "probe": "evaluation.md",
    "lab": "reward.md",
    "report": "report.md",
    "explain": "report.md",
    "replay": "replay.md",
    "certify": "certify.md",
    "compare": "report.md",
    "eval": "evaluation.md",
    "serve": "serving.md",
    "export": "serving.md",
    "push": "serving.md",
    "env-server": "environments.md",
    "sandbox-server": "sandbox.md",
    "runtime-server": "swe.md",
    "retrieval-server": "tools.md",
    "algorithms": "algorithms.md",
    "metrics": "metrics.md",
}
PARTS: Mapping[str, Callable[[], str]] = {
    part.__name__: part
    for part in (
        algorithms,
        collapse,
        commands,
        diagram,
        families,
        folders,
        gpu,
        metrics,
        migration,
        on_a_gpu,
        training,
        verl_keys,
        your_own,
    )
}


def written(text: str) -> str:
    """A page with its parts generated anew."""
    return PART.sub(lambda part: part["mark"] + PARTS[part["name"]]() + part["end"], text)


def main(argv: Sequence[str]) -> int:
    """Write the pages, or check them."""
    stale = []
    for path in (README, *sorted((ROOT / "docs").rglob("*.md"))):
        text = path.read_text(encoding="utf-8")
        if (new := written(text)) == text:
            continue
        if "--check" in argv:
            stale.append(path)
        else:
            path.write_text(new, encoding="utf-8")
    for path in stale:
        print(f"{path.relative_to(ROOT)} is out of date: run python scripts/pages.py")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
