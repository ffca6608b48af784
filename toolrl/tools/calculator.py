"""A calculator that walks the syntax tree: numbers only, with bounded size."""

import ast
import math
import operator
from collections.abc import Callable, Mapping

from verl.envs.tools.base import ToolError
from verl.envs.tools.function import tool

Number = int | float

MAX_CHARS = 1000  # per expression
MAX_BITS = 4096  # per integer, about 1,200 digits
MAX_FACTORIAL = 500
MAX_DIGITS = 100  # second argument of `round`


def _bounded(value: Number) -> Number:
    if isinstance(value, complex):
        raise ToolError("the result is not a real number")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ToolError("the numbers grow too large")
    if isinstance(value, float) and not math.isfinite(value):
        raise ToolError("the result is not finite")
    return value


def _power(base: Number, exponent: Number) -> Number:
    """Bounds the result before computing it: 9**9**9 would take years."""
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > 2 * MAX_BITS:
        raise ToolError("the numbers grow too large")
    return base**exponent


def _factorial(number: Number) -> int:
    if not isinstance(number, int) or not 0 <= number <= MAX_FACTORIAL:
        raise ToolError(f"factorial needs a whole number from 0 to {MAX_FACTORIAL}")
    return math.factorial(number)


def _round(number: Number, digits: Number = 0) -> Number:
    if not isinstance(digits, int) or abs(digits) > MAX_DIGITS:
        raise ToolError(f"round needs a whole number of digits of at most {MAX_DIGITS}")
    return round(number, digits) if digits else round(number)


OPERATORS: Mapping[type[ast.AST], Callable[..., Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_OF_MATH = "sqrt exp log log2 log10 sin cos tan asin acos atan floor ceil gcd"
FUNCTIONS: dict[str, Callable[..., Number]] = {name: getattr(math, name) for name in _OF_MATH.split()}
FUNCTIONS |= {"abs": abs, "min": min, "max": max, "round": _round, "factorial": _factorial}
CONSTANTS: Mapping[str, float] = {"pi": math.pi, "e": math.e}


def _value(node: ast.AST) -> Number:
    match node:
        case ast.Constant(value=bool() | str() | bytes()):
            raise ToolError(f"{node.value!r} is not a number")
        case ast.Constant(value=int() | float() as number):
            return _bounded(number)
        case ast.Name(id=name) if name in CONSTANTS:
            return CONSTANTS[name]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return _bounded(OPERATORS[type(op)](_value(left), _value(right)))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in FUNCTIONS:
            return _bounded(FUNCTIONS[name](*map(_value, args)))
    known = f"numbers, pi, e, + - * / // % **, parentheses, and {', '.join(FUNCTIONS)}"
    raise ToolError(f"cannot work out {ast.unparse(node)!r}; there are {known}")


def value_of(expression: str) -> Number:
    """The value of an expression. Raises ToolError for an invalid one, or if a number grows too large."""
    if len(expression) > MAX_CHARS:
        raise ToolError(f"the expression has more than {MAX_CHARS} characters")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError as error:
        raise ToolError(f"this is not an expression: {error.msg}") from error
    except (RecursionError, MemoryError) as error:  # the parser raises either for deep nesting
        raise ToolError("the expression is nested too deeply") from error
    except OverflowError as error:
        raise ToolError("the numbers grow too large") from error
    except (ZeroDivisionError, ValueError, TypeError) as error:  # 1 / 0, sqrt(-1), max()
        raise ToolError(str(error)) from error


@tool
async def calculator(expression: str) -> str:
    """Works out an arithmetic expression, such as "2 * (3 + 4) ** 2 / sqrt(2)".

    Args:
        expression: Numbers, pi, e, + - * / // % ** and parentheses, and functions such as sqrt, log, round or max.
    """
    value = value_of(expression)
    return str(value) if isinstance(value, int) else f"{value:.15g}"
