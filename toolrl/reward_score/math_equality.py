r"""Whether two mathematical answers are the same: numbers, lists, sets, tuples, texts, expressions.

math-verify parses LaTeX and compares expressions with sympy. It rounds to six decimals, takes letters for a product of
variables and a list for a set, and drops units and bases. What it would confuse so is decided here:

    numbers       by value: exactly for integers and fractions; decimals to five significant digits, but at most 5e-6.
                  1,000 and 12\,345 have separators of thousands, 1 1/4 is a mixed number, 0.\overline{3} is 1/3
    lists         1,2 may be in any order, but repeats count; \{1,2\} is a set; (1,2) and [1,2) are ordered, and differ.
                  \varnothing and \{\} are \emptyset
    texts         names, and letters with a capital, are the same letters, whatever their case: "BA" is not "AB"
    units, bases  ignored if only one answer has them; different ones make different answers. 3 ft 4 in is a list of two
    equations     x=5, (x,y)=(5,6) and m+n=5 are their right sides, but x^2=5, which is still to be solved, is not 5;
                  2+3=5 is 5, but 3=2 is not 2
    degrees       \sin 30^\circ is 1/2; as a unit, it may be missing in one answer
    code          pi/2, -2*pi, x**2, 1e-05 and 3+4j are read as Python prints them

A few harmless-looking pairs make sympy run forever (e.g. log 2 / (log 2 - log 3) and a wrong integer), and so do deep
nesting and large numbers. An answer not proven equal within a fixed time counts as different. The limit is CPU time, so
that results do not depend on the machine's load. The timer works only in the main thread, where scoring runs
(verl/scoring/pool.py); the few computations it cannot interrupt, such as a power tower of decimals, end at the
scoring process's own deadline.
"""

import ast
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from fractions import Fraction
from functools import cache, lru_cache
from itertools import accumulate
from math import log10
from typing import Any, NamedTuple
from zlib import crc32

from verl.errors import ConfigError
from verl.host.timer import PROCESSOR, raising_after

_LONGEST_ANSWER = 300  # characters
_DEEPEST_ANSWER = 20  # brackets in brackets
_ANSWER_S = 0.8  # CPU time per answer
_GOLD_S = 10.0  # CPU time to parse a gold answer, once
_AGAIN_S = 0.1  # timer interval after the first signal, for code that swallows the exception
_WARM_UP = (r"\frac{\sqrt{2}}{3}", "(-1, 2]", r"x^2 + \pi", r"\{1, 2\}")

_FIVE_DIGITS = 5e-5  # largest relative error of rounding to five significant digits
_LARGEST_ERROR = 5e-6
_NOISE = 1e-12  # relative error of arithmetic in double precision
_DIGITS = 30  # to which constants are evaluated
_MOST_DIGITS = 400  # likewise, to distinguish large integers

_SPACES = re.compile(r"(?:(?<!\\)\\(?:[;:, ]|q?quad(?![A-Za-z]))|~|\s)+")
_NO_MEANING = re.compile(r"(?<!\\)\\(?:!\s*|(?:left|right)(?![A-Za-z])\.?|displaystyle(?![A-Za-z]))|\\?\$")
_SPELLINGS = (
    (re.compile(r"\\varnothing(?![A-Za-z])|\\\{ ?\\\}|\u2205"), r"\\emptyset "),
    (re.compile(r"\\backslash(?![A-Za-z])"), r"\\setminus "),
    (re.compile(r"\\mathbb ([A-Z])"), r"\\mathbb{\1}"),
    (re.compile(r"\\(?:mathbf|boldsymbol|bm)\s*\{([^{}]*)\}"), r" \1"),
    (re.compile(r"\^ ?\{ ?\\circ ?\}|\\degree(?![A-Za-z])|\u00b0"), r"^\\circ "),
)
_THOUSANDS = re.compile(r"(?<![\d.,/])\d{1,3}(?: \d{3})+(?![\d/])")  # 12 345
_QUANTITY = re.compile(  # m+n = 1,000 cm
    r"([^,;=]+= ?-?|-?)([1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?)((?: ?(?:\\[a-z]|[A-Za-z]).*)?)"
)
_AND = re.compile(r",?\s*(?:\\(?:text|mbox)\s*\{\s*,?\s*(?:and|or)\s*\}|(?<![\\A-Za-z])(?:and|or)(?![A-Za-z]))")
_TEXT = re.compile(r"\\(?:text(?:bf|it|rm|normal)?|mbox|mathrm)\s*\{([^{}]*)\}")
_ELEMENT_OF = re.compile(r"[A-Za-z]\s*\\in(?![A-Za-z])")
_NUMBER = re.compile(r"[+-]?(?:[1-9]\d{0,2}(?:,\d{3})+(?:\.\d*)?|\d+\.?\d*|\.\d+)")
_DATE = re.compile(r"\d{4}-\d\d-\d\d")  # no difference
_FRACTION = re.compile(r"[+-]?\d+/0*[1-9]\d*")
_MIXED = re.compile(r"(?<![\w.^/}])(\d+) (\d+)/(\d+)(?![\d/])")
_REPEATING = re.compile(  # 0.1\overline{6}, 0.\dot{1}4\dot{2}, 0.(3)
    r"(?<![\w.])(\d*)\.(\d*)(?:\\(?:overline|bar)\s*(?:\{(\d+)\}|(\d))"
    r"|\\dot\s*\{?(\d)\}?(?:(\d*)\\dot\s*\{?(\d)\}?)?|\((\d+)\))"
)
_FLOAT = re.compile(r"(?<![\w.])(\d+\.?\d*|\.\d+)[eE]([+-]?\d+)(?![\w.])")
_LETTERS = re.compile(r"\(?([A-Za-z]+(?: [A-Za-z]+)*)\)?")
_BASED = re.compile(r"([+-]?)\(?([A-Za-z\d./]*\d[A-Za-z\d./]*?)\)?_\{?(?:base)?([^\W_]+)\}?")
_FRACTION_OF_DIGITS = re.compile(r"\\[dt]?frac\{(\w+)\}\{(\w+)\}")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_UNIT = re.compile(r"(.*(?:[\d})]|\\circ)) ?(?:(square|sq\.?|cubic|cu\.?) )?([A-Za-z]+) ?(?:\^\{?(\d)\}?)?\.?")
_AFTER_UNIT = re.compile(r"(?<=[A-Za-z.}]) ?(?=\d)")
_RELATION = re.compile(r"[<>]|\\[lg]eq?(?![A-Za-z])")
_VARIABLE = re.compile(
    r"(?<![\\A-Za-z])[A-Za-z]|\\(?:var)?(?:alpha|beta|gamma|delta|epsilon|zeta|eta|theta|iota|kappa|lambda|mu|nu|xi|rho|"
    r"sigma|tau|upsilon|phi|chi|psi|omega)(?![A-Za-z])"
)
_NAME = re.compile(  # x, a_{n+1}, f'(-2), g(f(1)), AB, |AB|, [ABC], \overline{AB}, \cos A, \angle ABC
    r"\\?[A-Za-z]\w*'*(?:_\{[^{}]+\}|_\w+)?(?:\^\{-1\})?\s*(?:\(-?(?:[^()+-]|\([^()+-]*\))*\))?"
    r"|\|[A-Z]{2}\||\[[A-Z]{3,}\]|\\(?:overline|vec|hat|mathbf) ?\{\w+\}"
    r"|(?:\\(?:sin|cos|tan|cot|sec|csc) ?)?(?:\\angle ?)?[A-Z]+"
)
_KNOWN = re.compile(  # no name, but for functions of an angle that has one
    r"\\?(?:sqrt|(?:arc)?(?:sin|cos|tan|cot|sec|csc)|log|ln|lg|exp|pi)(?! ?[A-Z\\]|[a-z])"
)
_OF_ANGLE = re.compile(  # \sin^2(90^\circ - 30^\circ)
    r"(?<![A-Za-z])(?:sin|cos|tan|cot|sec|csc)(?:\^\{?\d\}?)? ?(?:\([^()]*\)|\{[^{}]*\}|[^ ,]*\^\\circ)"
)
_CIRCLE = re.compile(r" ?\^\\circ(?![A-Za-z])")
_DEGREES = re.compile(r"(\d+(?:\.\d*)?|\\frac\{\d+\}\{\d+\}) ?\^\\circ")

_UNITS = {
    name: names.split()[0]
    for names in (
        "mm millimeter millimetre",
        "cm centimeter centimetre",
        "m meter metre",
        "km kilometer kilometre",
        "in inch inche",  # inches without its s
        "ft foot feet",
        "yd yard",
        "mi mile",
        "mg milligram",
        "g gram",
        "kg kilogram",
        "lb pound",
        "s sec second",
        "min minute",
        "h hr hour",
        "day",
        "week",
        "month",
        "year",
        "cent",
        "dollar",
        "euro",
        "degree",
        "radian",
        "am",
        "pm",
    )
    for name in names.split()
}
_BASES = {"two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9"} | {
    "ten": "10",
    "twelve": "12",
    "sixteen": "16",
}
_POWERS = {"": "1", "sq": "2", "square": "2", "cu": "3", "cubic": "3"}

# Python's names in LaTeX
_CONSTANTS = {"pi": r"\pi ", "E": "e", "I": "i", "oo": r"\infty ", "inf": r"\infty "}
_FUNCTIONS = {name: rf"\{name}" for name in ("sqrt", "sin", "cos", "tan", "log", "ln", "exp")} | {
    "asin": r"\arcsin",
    "acos": r"\arccos",
    "atan": r"\arctan",
}
_OPERATORS: Mapping[type[ast.operator], str] = {
    ast.Add: "{}+{}",
    ast.Sub: "{}-{}",
    ast.Mult: r"{}\cdot {}",
    ast.Div: r"\frac{{{}}}{{{}}}",
    ast.Pow: "{}^{{{}}}",
}


def same_answer(answer: str, gold: str) -> bool:
    """Whether two texts, LaTeX or plain, denote the same answer. Raises ConfigError without math-verify."""
    answer, gold = _bare(answer), _bare(gold)
    if answer == gold:
        return bool(gold)
    depths = accumulate((letter in "([{") - (letter in ")]}") for letter in answer)  # bracket depth, closed or not
    if len(answer) > _LONGEST_ANSWER or max(depths, default=0) > _DEEPEST_ANSWER:
        return False
    with _time_limit(_GOLD_S):
        for each in (gold, *_read(gold).items):
            _parsed(_plain(each))
    try:
        with _time_limit(_ANSWER_S):
            return _same(answer, gold)
    except _OutOfTimeError:
        return False


class _OutOfTimeError(BaseException):
    """A BaseException, because the answer parser catches every Exception."""


def _time_limit(seconds: float) -> AbstractContextManager[None]:
    """Raises _OutOfTimeError in the block after this CPU time of the process; only in the main thread."""
    return raising_after(seconds, _OutOfTimeError, PROCESSOR, _AGAIN_S)


def _bare(text: str) -> str:
    """Strips a full stop, enclosing dollar signs and a percent sign, which math-verify does not parse in a box."""
    text = text.strip().removesuffix(".")
    if text.count("$") == 2 and text[0] == text[-1] == "$":
        text = text[1:-1].rstrip()
    return text.removesuffix("%").removesuffix("\\").rstrip() if text.endswith("%") else text


def _plain(text: str) -> str:
    """The text without what changes only its looks, with commas for "and" and "or", and code as LaTeX."""
    text = _NO_MEANING.sub("", _bare(text)).replace("{,}", ",").replace("\u2212", "-")
    for spelling, usual in _SPELLINGS:
        text = spelling.sub(usual, text)
    text = _AND.sub(", ", _SPACES.sub(" ", text)).strip()
    if text[:2] in ("- ", "+ "):
        text = text[0] + text[2:]
    text = _THOUSANDS.sub(lambda match: match.group().replace(" ", ""), text)
    if (quantity := _QUANTITY.fullmatch(text)) and (quantity[1] + quantity[3]).strip("-"):
        text = f"{quantity[1]}{quantity[2].replace(',', '')}{quantity[3]}"
    text = _ELEMENT_OF.sub("", text, 1).strip() if _ELEMENT_OF.match(text) else text
    if whole := _TEXT.fullmatch(text):
        return whole[1].strip()
    return text if _number(text) else _from_code(text)


def _from_code(text: str) -> str:
    if "\\" in text or "_" in text:
        return text
    code = _FLOAT.sub(lambda match: f"({match[1]}*10**{int(match[2])})", text).replace("^", "**")
    try:
        return _as_latex(ast.parse(code, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return text


def _as_latex(node: ast.expr) -> str:
    """Raises ValueError for anything but arithmetic with one-letter variables and known names."""
    match node:
        case ast.Constant(value=int() | float() | complex() as value) if not isinstance(value, bool):
            return str(value).replace("j", "i")
        case ast.Name(id=name) if len(name) == 1 or name in _CONSTANTS:
            return _CONSTANTS.get(name, name)
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return f"-{_operand(inner)}"
        case ast.BinOp(left=left, op=ast.Div() as op, right=right):
            return _OPERATORS[type(op)].format(_as_latex(left), _as_latex(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)].format(_operand(left), _operand(right))
        case ast.Call(func=ast.Name(id=name), args=[inner], keywords=[]) if name in _FUNCTIONS:
            opening, closing = "{}" if name == "sqrt" else "()"
            return f"{_FUNCTIONS[name]}{opening}{_as_latex(inner)}{closing}"
    raise ValueError("not arithmetic")


def _operand(node: ast.expr) -> str:
    text = _as_latex(node)
    return f"({text})" if isinstance(node, ast.BinOp | ast.UnaryOp) else text


class _Answer(NamedTuple):
    """delimiters: of a set or a tuple; empty for a list and for a single value"""

    delimiters: str
    items: tuple[str, ...]


def _read(text: str, splits_thousands: bool = False) -> _Answer:
    """splits_thousands: 81,256 is a list of two numbers"""
    text = _plain(text)
    for opening, closing in ((r"\{", r"\}"), ("{", "}"), ("(", ")"), ("[", "]"), ("(", "]"), ("[", ")")):
        if text.startswith(opening) and text.endswith(closing):
            inner = text[len(opening) : -len(closing)]
            items = _split(inner, ",;")
            if _is_balanced(inner) and (len(items) > 1 or opening == r"\{"):
                is_list = opening + closing == "[]" and len(items) != 2  # no interval, but Python's list
                return _Answer("" if is_list else (opening + closing).replace("\\", ""), _expanded(items))
            if _is_balanced(inner) and opening + closing == "()":
                return _read(inner)
    measures = _AFTER_UNIT.split(text)
    if len(measures) > 1 and all(unit and unit[0] in _UNITS.values() for _, unit in map(_measure, measures)):
        return _Answer("", tuple(measures))  # 3 ft 4 in
    is_number = _NUMBER.fullmatch(text) and (",0" in text or not splits_thousands)
    return _Answer("", _expanded([text] if is_number else _split(text, ",;")))


def _split(text: str, separators: str) -> list[str]:
    """The parts between separators outside all brackets: "221,$8$" gives "221" and "$8$"."""
    parts, depth, start = [], 0, 0
    for place, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter in separators and depth == 0:
            parts.append(text[start:place])
            start = place + 1
    return [part.strip() for part in (*parts, text[start:])]


def _is_balanced(text: str) -> bool:
    depths = list(accumulate((letter in "([{") - (letter in ")]}") for letter in text))
    return not depths or (min(depths) >= 0 and depths[-1] == 0)


def _expanded(items: Sequence[str]) -> tuple[str, ...]:
    """Items with a plus-minus sign are two."""
    signs = ((r"\pm", "+", r"\mp", "-"), (r"\pm", "-", r"\mp", "+"))
    both = ([item.replace(pm, one).replace(mp, other) for pm, one, mp, other in signs] for item in items)
    return tuple(each for item, two in zip(items, both, strict=True) for each in (two if r"\pm" in item else [item]))


def _same(answer: str, gold: str) -> bool:
    answer, gold = _plain(answer), _plain(gold)
    if answer == gold or _DATE.fullmatch(gold):
        return answer == gold
    numbers = _number(answer), _number(gold)
    if numbers[0] and numbers[1]:
        return numbers[0].equals(numbers[1])
    if (verdict := _same_equation(_sides(answer), _sides(gold))) is not None:
        return verdict
    given = _read(answer, splits_thousands=len(_read(gold).items) > 1)
    wanted = _read(gold, splits_thousands=len(given.items) > 1)
    if len(given.items) == len(wanted.items) == 1:
        return _same_value(*given.items, *wanted.items)
    if 1 in (len(given.items), len(wanted.items)):  # an interval may be written as a relation
        return bool(_RELATION.search(answer) or _RELATION.search(gold)) and _library_equal(answer, gold)
    match sorted({given.delimiters, wanted.delimiters}):
        case ["{}"]:
            return _subset(given.items, wanted.items) and _subset(wanted.items, given.items)
        case [""] | ["", "{}"]:
            return _same_list(given.items, wanted.items)
        case [_] | ["", "()"]:
            pairs = zip(given.items, wanted.items, strict=False)
            return len(given.items) == len(wanted.items) and all(_same(one, other) for one, other in pairs)
    return False


def _same_list(answers: Sequence[str], golds: Sequence[str]) -> bool:
    """In any order."""
    left = list(answers)
    for gold in golds:
        match = next((each for each in left if _same(each, gold)), None)
        if match is None:
            return False
        left.remove(match)
    return not left


def _subset(answers: Sequence[str], golds: Sequence[str]) -> bool:
    return all(any(_same(answer, gold) for gold in golds) for answer in answers)


class _Number(NamedTuple):
    value: Fraction
    is_decimal: bool

    def equals(self, other: "_Number") -> bool:
        if not (self.is_decimal or other.is_decimal):
            return self.value == other.value
        return _is_small(abs(self.value - other.value), max(abs(self.value), abs(other.value)))


def _number(text: str) -> _Number | None:
    if _NUMBER.fullmatch(text):
        text = text.replace(",", "")
        return _Number(Fraction(text), not text.lstrip("+-").isdecimal())
    return _Number(Fraction(text), is_decimal=False) if _FRACTION.fullmatch(text) else None


def _is_small(distance: Any, size: Any) -> bool:
    """Whether two decimals of this size and distance differ by rounding alone."""
    return bool(distance <= max(_NOISE * size, min(_FIVE_DIGITS * size, _LARGEST_ERROR)))


def _same_value(answer: str, gold: str) -> bool:
    """Equality of single values."""
    letters = _letters(answer), _letters(gold)
    if all(letters) and any(map(_is_word, letters)):
        return letters[0].replace(" ", "").lower() == letters[1].replace(" ", "").lower()
    (answer, base), (gold, gold_base) = _based(answer), _based(gold)
    if base and gold_base:
        return (answer.lower(), base) == (gold.lower(), gold_base)
    (answer, unit), (gold, wanted) = _measure(answer), _measure(gold)
    if unit is not None and wanted is not None and unit != wanted:
        return False
    if _library_equal(answer, gold):
        return True
    bare = [_CIRCLE.sub("", each) for each in (answer, gold)]  # \tan 15 is \tan 15^\circ, and no other number
    return (bare[0] == answer) != (bare[1] == gold) and _library_equal(*bare)


def _letters(text: str) -> str:
    match = _LETTERS.fullmatch(_TEXT.sub(r"\1", text).strip())
    return match[1] if match else ""


def _is_word(letters: str) -> bool:
    """Not a variable or a product of variables."""
    return not letters.islower() or max(map(len, letters.split())) > 2


def _based(text: str) -> tuple[str, str | None]:
    """(the digits with their sign, their base); (the text, None) if it has none."""
    match = _BASED.fullmatch(_FRACTION_OF_DIGITS.sub(r"\1/\2", _TEXT.sub(r"\1", text).replace(" ", "")))
    if match is None:
        return text, None
    digits = match[2].rstrip("0").rstrip(".") if "." in match[2] else match[2]
    return match[1].removeprefix("+") + (digits.lstrip("0") or "0"), _BASES.get(match[3], match[3])


def _measure(text: str) -> tuple[str, tuple[str, str] | None]:
    """(the number, its unit or the variable behind it, with the power); (the text, None) if it has none.

    A single letter stays in the text, for it may be a variable.
    """
    match = _UNIT.fullmatch(
        _SPACES.sub(" ", _TEXT.sub(r" \1", text)).strip().replace("p.m.", "pm").replace("a.m.", "am")
    )
    if match is None or re.search("[A-Za-z]", _COMMAND.sub("", match[1])):
        return text, None
    name = match[3].lower()
    name = next((each for each in (name, name.removesuffix("s")) if each in _UNITS), name)
    if name not in _UNITS and len(name) > 1:
        return text, None
    unit = _UNITS.get(name, name), match[4] or _POWERS[(match[2] or "").removesuffix(".")]
    return (text if len(match[3]) == 1 else match[1]), unit


def _sides(text: str) -> list[str]:
    """The sides of an equation; the text itself if it is none, or a list."""
    if re.search(r"[<>!:]=|==|\\[lgn]eq?(?![A-Za-z])", text) or len(_split(text, ",;")) > 1:
        return [text]
    return _split(text, "=")


def _same_equation(given: Sequence[str], wanted: Sequence[str]) -> bool | None:
    """Equality of two equations' sides, or of an equation and a value; None if the library has to decide."""
    if len(given) == 1 < len(wanted) and not _is_constant(wanted[0]):
        return _is_name(wanted[0]) and _same(given[0], wanted[-1])
    if len(given) > 1 == len(wanted):
        first, *others, last = given
        is_solved = _is_name(first) or _is_constant(first) or all(map(_is_name, re.split("[+-]", first)))
        constants = [_TEXT.sub("", side) for side in (first, *others) if _is_constant(side)]
        return is_solved and all(_same(side, wanted[0]) for side in (*constants, last))
    if len(given) == len(wanted) == 2 and given[0].replace(" ", "") == wanted[0].replace(" ", ""):
        return _same(given[1], wanted[1])
    return None


def _is_name(side: str) -> bool:
    """Whether this side of an equation is only a name for the other."""
    side = _TEXT.sub(r"\1", side).strip()
    if side[:1] + side[-1:] == "()" and "," in side:  # (x, y)
        return all(map(_is_name, _split(side[1:-1], ",")))
    return bool(_NAME.fullmatch(side) or _LETTERS.fullmatch(side)) and not _KNOWN.match(side)


def _is_constant(side: str) -> bool:
    """Without variables."""
    return not _VARIABLE.search(_TEXT.sub("", side)) and not _is_name(side)


def _library_equal(answer: str, gold: str) -> bool:
    _, verify = _math_verify()
    given, wanted = _parsed(answer), _parsed(gold)
    if not given or not wanted:
        return False
    equal = _equal_values(given[0], wanted[0])
    if equal is False or (equal and not _variables(given[0], wanted[0])):
        return equal
    return bool(verify(wanted, given, timeout_seconds=None)) and not _differ(given[0], wanted[0])


def _differ(one: Any, other: Any) -> bool:
    """Whether two containers of the same form have elements with different values, which rounding may hide."""
    from sympy import MatrixBase, Set

    if isinstance(one, MatrixBase) and isinstance(other, MatrixBase):
        pairs = zip(one.flat(), other.flat(), strict=False)
    elif isinstance(one, Set) and type(one) is type(other):
        pairs = zip(one.args, other.args, strict=False)
    else:
        return _equal_values(one, other) is False
    return any(_differ(*pair) for pair in pairs)


def _equal_values(one: Any, other: Any, digits: int = _DIGITS) -> bool | None:
    """Whether two expressions have equal values: constants, or at one point; None if that is not known."""
    from mpmath import mag
    from sympy import Float

    first, second = _value(one, digits), _value(other, digits)
    if first is None or second is None:
        return None
    distance = sum(abs(a - b) for a, b in zip(first, second, strict=True))
    size = max(sum(map(abs, first)), sum(map(abs, second)))
    if one.has(Float) or other.has(Float):
        return _is_small(distance, size)
    if distance > size * Float(10) ** (5 - digits):
        return False
    needed = _DIGITS + max(0, int(mag(size) * log10(2))) if size else digits  # integers of that size differ by 1
    if needed <= digits:
        return True
    return _equal_values(one, other, needed) if needed <= _MOST_DIGITS else None


def _value(expression: Any, digits: int) -> tuple[Any, Any] | None:
    """Real and imaginary part; None for what is no number, is not finite or is not known to one digit.

    A variable has a value between 1 and 2 that depends on its name. Nothing is evaluated exactly, which may take
    for ever.
    """
    from sympy import Expr, I, Integer, Rational

    if not isinstance(expression, Expr):
        return None
    point = {
        symbol: I if symbol.name == "i" else 1 + Rational(crc32(symbol.name.encode()), 2**32)
        for symbol in expression.free_symbols
    }
    try:
        parts = expression.evalf(digits, subs=point).as_real_imag()
    except Exception:  # noqa: BLE001  sympy raises exceptions of many types
        return None
    if not all(part.is_Number and part.is_finite for part in parts):
        return None
    known = [part.is_Rational or part._prec > 1 for part in parts]  # a part of one bit is zero, or rounding
    if not any(is_known and part for is_known, part in zip(known, parts, strict=True)) and not all(known):
        return None
    real, imaginary = (part if is_known else Integer(0) for is_known, part in zip(known, parts, strict=True))
    return real, imaginary


def _variables(*expressions: Any) -> set[str]:
    """Names. The letter i is the imaginary unit."""
    return {symbol.name for each in expressions for symbol in each.free_symbols} - {"i"}


@lru_cache(maxsize=4096)  # a gold answer is compared with all responses of its group
def _parsed(text: str) -> Any:
    parse, _ = _math_verify()
    text = _MIXED.sub(lambda match: rf"({match[1]}+\frac{{{match[2]}}}{{{match[3]}}})", text)
    text = _REPEATING.sub(_as_fraction, text)
    text = _OF_ANGLE.sub(lambda match: _DEGREES.sub(r"(\1\\cdot\\frac{\\pi}{180})", match.group()), text)
    return parse(f"\\boxed{{{text}}}", parsing_timeout=None)


def _as_fraction(match: re.Match[str]) -> str:
    """A repeating decimal in LaTeX, exactly."""
    before, after, *repeating = (digits or "" for digits in match.groups())
    again = "".join(repeating)
    nines = "9" * len(again) + "0" * len(after)
    return rf"\frac{{{int(before + after + again) - int(before + after or '0')}}}{{{nines}}}"


@cache
def _math_verify() -> tuple[Any, Any]:
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise ConfigError(f"math rewards need math-verify ({error}): pip install math-verify") from error
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at every call without its own timeout
    one = parse("$1$", parsing_timeout=None)
    for text in _WARM_UP:  # the first calls in a process take seconds, which must not count against an answer
        verify(parse(f"\\boxed{{{text}}}", parsing_timeout=None), one, timeout_seconds=None)
    return parse, verify
