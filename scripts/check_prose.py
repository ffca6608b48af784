"""Are the pages easy to read? Run by `.ci/run`; the exit code is 1 where they are not.

    python scripts/check_prose.py            problems
    python scripts/check_prose.py --table    sentences and cells of every page

Measured in README.md, CONTRIBUTING.md and docs/: the words of a sentence, on average and at most, and the words of a
table's cell. Code counts as one word. Fenced blocks, headings and comments are not prose.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
MEAN_WORDS = 18  # of the sentences of a page, excluded
SENTENCE_WORDS = 40
CELL_WORDS = 25

_FENCE = re.compile(r"^( *)(```+)[^\n]*\n.*?^\1\2 *$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_CODE = re.compile(r"(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_END = re.compile(r"(?<=[.!?])[)\"*']*\s+(?=[A-Z0-9(*\"]|CODE)")
_ITEM = re.compile(r"\s*(?:[-*]|\d+\.)\s+(.*)")


@dataclass(frozen=True, slots=True)
class Prose:
    """The text of one page, as lists of words."""

    sentences: tuple[tuple[str, ...], ...]
    cells: tuple[tuple[str, ...], ...]

    @property
    def mean(self) -> float:
        """Words per sentence; 0 without any."""
        return sum(map(len, self.sentences)) / max(1, len(self.sentences))


def pages() -> list[Path]:
    """All pages for readers of the project."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def read_prose(text: str) -> Prose:
    """The sentences and the table cells of a page."""
    text = _COMMENT.sub("", _FENCE.sub("", text))
    text = _LINK.sub(r"\1", _CODE.sub("CODE", text))
    lines = text.splitlines()
    cells = [
        words
        for line in lines
        if line.lstrip().startswith("|")
        for cell in line.replace(r"\|", "/").strip().strip("|").split("|")
        if (words := split_words(cell))
    ]
    sentences = [
        words for paragraph in _paragraphs(lines) for part in _END.split(paragraph) if (words := split_words(part))
    ]
    return Prose(tuple(sentences), tuple(cells))


def split_words(text: str) -> tuple[str, ...]:
    """Text between white space that has a letter or a digit."""
    return tuple(word for word in text.split() if any(character.isalnum() for character in word))


def _paragraphs(lines: list[str]) -> Iterator[str]:
    """Paragraphs and list items, each on one line; headings, tables and indented code are left out."""
    current: list[str] = []
    in_list = False
    for line in [*lines, ""]:
        item = _ITEM.match(line)
        if item or not line.strip() or line.lstrip().startswith(("#", "|")):
            if current:
                yield " ".join(current)
            current = [item[1]] if item else []
            in_list = bool(item) or (in_list and not line.strip())
        elif line.startswith("    ") and not in_list and not current:
            continue  # code
        else:
            in_list = in_list and line.startswith(" ")
            current.append(line.strip())


def problems(path: Path) -> list[str]:
    """What is hard to read in a page."""
    prose = read_prose(path.read_text(encoding="utf-8"))
    name = path.relative_to(ROOT)
    found = [
        f"{name}: a {kind} of {len(words)} words, at most {most}: {' '.join(words[:8])} .."
        for kind, most, texts in (
            ("sentence", SENTENCE_WORDS, prose.sentences),
            ("table cell", CELL_WORDS, prose.cells),
        )
        for words in texts
        if len(words) > most
    ]
    if prose.mean >= MEAN_WORDS:
        found.append(f"{name}: {prose.mean:.1f} words a sentence on average, less than {MEAN_WORDS} expected")
    return found


def table() -> str:
    """A line per page: sentences, their mean and longest, and the longest cell."""
    lines = [f"{'page':34} {'sentences':>9} {'mean':>5} {'longest':>7} {'cell':>4}"]
    every: list[tuple[str, ...]] = []
    for path in pages():
        prose = read_prose(path.read_text(encoding="utf-8"))
        every += prose.sentences
        longest = max(map(len, prose.sentences), default=0)
        cell = max(map(len, prose.cells), default=0)
        lines.append(f"{path.relative_to(ROOT)!s:34} {len(prose.sentences):9} {prose.mean:5.1f} {longest:7} {cell:4}")
    lines.append(f"{'all':34} {len(every):9} {Prose(tuple(every), ()).mean:5.1f}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print the figures of every page")
    if parser.parse_args().table:
        print(table())
        return 0
    found = [problem for path in pages() for problem in problems(path)]
    print("\n".join(found) or f"{len(pages())} pages read easily")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
