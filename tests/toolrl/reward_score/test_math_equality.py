r"""Equality of mathematical answers: a table of pairs by their source, and properties.

Threads are of huggingface/Math-Verify (MV) and Khan/khan-exercises (KE). Answers of MATH, GSM8K, AIME and OlympiadBench
are gold answers of these data sets, beside a spelling of a policy.
"""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolrl.reward_score.math_equality import same_answer

pytestmark = pytest.mark.usefixtures("small_heap")

SAME: dict[str, list[tuple[str, str]]] = {  # (answer, gold)
    "MV#14": [(r"19, 46, \text{ and } 82", "82, 19, 46"), (r"\pm 2021", "2021, -2021"), (r"n=2, 3, 4", "n = 2,3,4")],
    "MV#34, mixed numbers": [
        ("1 1/4", "5/4"),
        (r"1\frac14", "5/4"),
        ("-2 1/3", r"-\frac{7}{3}"),
        ("5 123/200", "5.615"),
    ],
    "MV#35": [(r"\frac12", r"\frac{1}{2}"), (r"\dfrac{1}{2}", "0.5")],
    "MV#56": [(r"\left( 3, \frac{\pi}{2} \right)", r"(3, \frac{\pi}{2})")],
    "MV#69, as Python and sympy print": [
        ("pi/2", r"\frac{\pi}{2}"),
        ("-2*pi", r"-2\pi"),
        ("14-1.0i", "14-i"),
        ("(3+4j)", "3+4i"),
        ("-7/25 + 24*I/25", r"-\frac{7}{25}+\frac{24}{25}i"),
        ("1e-05", "0.00001"),
        ("6.63e-34", r"6.63 \times 10^{-34}"),
        ("x**2 + 1", "x^2+1"),
        ("sqrt(5 + 2*sqrt(6))", r"\sqrt{2}+\sqrt{3}"),
        ("2*sqrt(3)/3", r"\frac{2}{\sqrt{3}}"),
        ("-6*x**2 + 36*x - 48", "-6x^2+36x-48"),
        ("exp(2)", "e^2"),
        ("sin(pi/3)", r"\frac{\sqrt{3}}{2}"),
        ("0.30000000000000004", "0.3"),
        ("2.0", "2"),
        ("[3, 5, 7]", "3, 5, 7"),
    ],
    "KE#117321, #145581": [("158/19", "8 6/19"), ("10/9", "1+1/9")],
    "open-instruct#1530, signs": [("-5/5", "-1"), ("\u22125", "-5"), ("+5", "5"), (r"\frac{-1}{2}", "-0.5")],
    "ISO 80000-1, digits in groups of three": [
        (r"12\,345", "12345"),
        ("1 234 567", "1234567"),
        ("12{,}345", "12345"),
        (r"12\ 345.5", "12345.5"),
    ],
    "MATH": [
        ("10080", r"10,\!080"),
        ("x = 45,045", r"45,\!045"),
        ("m+n = 45,045", r"45,\!045"),
        (r"f(2) = 45,\!045", "45045"),
        ("81,256", "81, 256"),
        ("D and E", "D, E"),
        ("Evelyn", r"\text{Evelyn}"),
        ("friday", r"\text{Friday}"),
        ("CBAD", r"\text{CBAD}"),
        ("C", r"\text{(C)}"),
        ("B, E", r"\text{B,E}"),
        ("52", "52_8"),
        ("52_{8}", "52_8"),
        ("8 cm", r"8\text{ cm}"),
        ("8", r"8\text{ cm}"),
        (r"32 \text{ cm}^2", r"32\text{ square cm}"),
        ("147 centimeters", r"147\text{ cm}"),
        ("60", r"60\text{ inches}"),
        ("-12, -2", r"-2 \text{ or } -12"),
        ("1", "x=1"),
        ("r = 6.2", "r=6.2"),
        ("y = 1 - 2x", "y=-2x+1"),
        ("-2x+1", "y=-2x+1"),
        (r"1 + \sqrt{19}, 1 - \sqrt{19}", r"1 \pm \sqrt{19}"),
        (r"\{-2, 1-\sqrt{5}, 1+\sqrt{5}\}", r"\{1\pm\sqrt{5},-2\}"),
        ("[-2,7]", r"x \in [-2,7]"),
        (r"[8, 9) \cup [3, 7]", r"[3,7] \cup [8,9)"),
        ("(2, 15), (-4, 27)", "(-4, 27);(2, 15)"),
        ("9,4", "9, 4"),
        (r"\begin{pmatrix} 0.5 \\ -1 \end{pmatrix}", r"\begin{pmatrix} \frac{1}{2} \\ -1 \end{pmatrix}"),
        ("yx", "xy"),
        ("23a + 39b", "39b+23a"),
        ("90", r"90^\circ"),
        ("83", r"83\%"),
        (r"\frac{4}{9}", r"\frac49"),
    ],
    "GSM8K": [
        ("1,600", "1600"),
        (r"\$18", "18"),
        ("18.00", "18"),
        (r"2,400 \text{ dollars}", "2400"),
    ],
    "AIME": [("25", "025"), ("809.0", "809"), ("m+n = 113", "113"), ("100+13 = 113", "113")],
    "OlympiadBench": [
        ("84, 69", "$69$,$84$"),
        ("2", "$k=2$"),
        (r"f(x) = 2x", "$f(x)=2 x$"),
        ("-2, -2", "-2,-2"),
        (r"\frac{9}{32}\sqrt{2}", r"$M=\frac{9}{32} \sqrt{2}$"),
    ],
    "rounding to five digits or more": [
        ("0.333333", r"\frac13"),
        ("0.0113636", r"\frac{1}{88}"),
        ("3.14159", r"\pi"),
        ("1.2676506002282294e+30", "2^{100}"),
        ("2357.142857", r"\frac{16500}{7}"),
    ],
    "textbooks": [
        (r"\sqrt{12}", r"2\sqrt{3}"),
        (r"\frac{1+\sqrt5}{2}", r"\frac{2}{\sqrt5-1}"),
        ("(x-1)(x+1)", "x^2-1"),
        (r"\{2, 1, 1\}", r"\{1, 2\}"),
        (r"\infty", "infinity"),
        ("20!", "2432902008176640000"),
        (r"\binom{10}{5}", "252"),
        ("2:3", "2/3"),
    ],
    "MATH, equations that name what was asked for": [
        ("f(2) = 5", "5"),
        ("f(g(2)) = 5", "5"),
        ("f^{-1}(3) = 5", "5"),
        ("a_{n+1} = 5", "5"),
        (r"\cos A = \frac45", r"\frac45"),
        (r"\angle ABC = 30^\circ", "30"),
        ("[ABC] = 84", "84"),
        (r"\overline{AB} = 5", "5"),
        (r"\text{Area} = 24", "24"),
        (r"A = \frac{1}{2} b h = 24", "24"),
        (r"\frac{48}{2} = 24", "24"),
        (r"8\text{ cm}+2\text{ cm}=10\text{ cm}", "10"),
    ],
    "MATH, bases": [
        ("(101)_2", "101_2"),
        ("101", "(101)_2"),
        (r"101_{\text{two}}", "101_2"),
        ("10.10_2", "10.1_2"),
        (r"\frac{1}{10}_2", "1/10_2"),
    ],
    "amsmath, symbols with several spellings": [
        (r"\varnothing", r"\emptyset"),
        (r"\{\}", r"\varnothing"),
        (r"x \in \varnothing", r"\{ \}"),
        (r"\mathbb R", r"\mathbb{R}"),
        (r"\mathbb{R} \backslash \{0\}", r"\mathbb{R} \setminus \{0\}"),
        ("30\u00b0", r"30^{\circ}"),
    ],
    "textbooks, angles in degrees": [
        (r"\sin 30^\circ", r"\frac{1}{2}"),
        (r"\sin(90^{\circ} - 60^{\circ})", "1/2"),
        (r"2\cos^2 15^\circ - 1", r"\frac{\sqrt{3}}{2}"),
        ("\\tan 60\u00b0", r"\sqrt{3}"),
        (r"(\sin 30^\circ, 60^\circ)", r"(1/2, 60^\circ)"),
    ],
    "textbooks, repeating decimals": [
        (r"0.\overline{3}", "1/3"),
        (r"0.1\overline{6}", r"\frac16"),
        (r"-2.\overline{45}", r"-\frac{27}{11}"),
        (r"0.\dot{1}4285\dot{7}", r"\frac17"),
        (r"0.\bar3", "0.333333"),
        ("0.(3)", r"\frac13"),
        (r"2 + 0.\overline{3}", "7/3"),
    ],
    "textbooks, points and vectors by name": [
        ("(x,y)=(2,3)", "(2,3)"),
        ("(2,3)", "(p,q)=(2,3)"),
        ("(x, y) = (1, 2), (3, 4)", "(1,2), (3,4)"),
        ("(x_1,x_2)=(1,2)", "(1,2)"),
        (r"\mathbf{v} = (1,2)", "(1,2)"),
        (r"\boldsymbol{\frac12}", "0.5"),
        (r"\pi\mathbf{x}", r"\pi x"),
    ],
    "textbooks, a missing degree sign": [
        (r"\tan 15", r"\tan 15^\circ"),
        (r"\tan 15^\circ", r"\tan(15)"),
        (r"2\sin 40", r"2\sin 40^{\circ}"),
        (r"\tan 15^\circ", r"2-\sqrt{3}"),
        (r"5^\circ\text{C}", "5"),
    ],
    "textbooks, quantities of two units": [
        ("3 feet 4 inches", r"3 \text{ ft } 4 \text{ in}"),
        ("2 h 30 min", r"2 \text{ hours } 30 \text{ minutes}"),
        ("2 hours and 30 minutes", r"2\text{ hours }30\text{ minutes}"),
    ],
    "mixed numbers beside a sign, a unit and others": [
        ("- 1 1/2", "-3/2"),
        ("+ 1 1/2", "3/2"),
        ("x = - 1 1/2", r"-\frac32"),
        (r"1 1/2 \text{ cm}", "1.5"),
        ("(- 1 1/2, 2)", "(-1.5, 2)"),
        ("- 1,000", "-1000"),
    ],
}
DIFFERENT: dict[str, list[tuple[str, str]]] = {
    "MV#14": [
        (r"\frac{1}{2006!}", r"\frac{1}{2004!}"),
        (r"\frac{1}{2^{98}}", r"\frac{1}{2^{99}}"),
        ("n=1, 2, 3", "n=2, 3, 4"),
        ("D = (0, 1.5)", "D = (0, 1)"),
        ("21, 36, and 82", r"19, 46, \text{ and } 82"),
        (r"\frac{1}{3 \cdot 2^{2006}}", r"\frac{2^{2005}+1}{3 \cdot 2^{2006}}"),
        (r"1 + \frac{1}{\mathrm{e}}", r"1 - \frac{1}{\mathrm{e}}"),
        ("2021", r"\pm 2021"),
        ("1:00", "12:00"),
        ("1/(10^9+7)", "1/(10^9+9)"),
        ("0.0000004", "0.0000003"),
    ],
    "MV#41": [(r"4\sqrt{2}", "4")],
    "MV#56": [(r"(3, \frac{2\pi}{3})", r"\left( 3, \frac{\pi}{2} \right)")],
    "MV#60": [("3*x-1*y+13=0", "3x + 4y + 14=0")],
    "KE#152096, a third is not three digits": [("333.33", "333 1/3")],
    "CODATA, Planck's constant": [
        (r"6.63 \times 10^{-34}", r"6.64 \times 10^{-34}"),
        ("6.63e-34", "6.64e-34"),
        ("6.63e-34", "0"),
        ("1e400", r"\infty"),
        ("1e-400", "0"),
        (r"6.63 \cdot 10^{-34} x", r"6.64 \cdot 10^{-34} x"),
        (r"(0, 6.63 \times 10^{-34})", r"(0, 6.64 \times 10^{-34})"),
        (r"\begin{pmatrix} 10^{-9} \\ 1 \end{pmatrix}", r"\begin{pmatrix} 10^{-8} \\ 1 \end{pmatrix}"),
    ],
    "MATH": [
        ("ABCD", r"\text{CBAD}"),
        ("DC", "CD"),
        ("listen", "silent"),
        ("B", r"\text{(C)}"),
        ("101_3", "101_2"),
        ("53_8", "52_8"),
        ("8 m", r"8\text{ cm}"),
        (r"32\text{ cm}", r"32\text{ square cm}"),
        ("8:34 a.m.", r"8\!:\!34 \text{ p.m.}"),
        ("2t", "2s"),
        ("4", "9,4"),
        ("9,4,4", "9,4"),
        ("1,1,2", "1,2,2"),
        ("3,3", "3"),
        ("0, 1", "1,000"),
        ("123,345", "345,123"),
        ("(15,-29)", "(-29,15)"),
        ("[0, 3]", "[0,3)"),
        (r"\{6, 31\}", "(6,31)"),
        ("2x+1", "y=-2x+1"),
        ("x=2, y=1", "x=1, y=2"),
        (r"(1, 2) \cup (2, 3)", "(1, 3)"),
    ],
    "GSM8K": [("3=2", "2"), ("16 - 3 = 18", "18"), ("180", "18"), ("18.001", "18"), ("1,60", "160"), ("2.400", "2400")],
    "AIME": [("809.05", "809"), ("809, 809", "809"), ("-809", "809"), ("809/2", "809"), ("2^{200}+1", "2^{200}")],
    "MATH, a guess beside the answer": [
        ("5, 6", "5"),
        ("5 or 6", "5"),
        (r"\pm 5", "5"),
        (r"\{5, 6\}", "5"),
        ("(5, 6)", "5"),
    ],
    "equations that are still to be solved": [
        ("x^2=4", "4"),
        ("2x = 4", "4"),
        ("-x = 4", "4"),
        (r"\sqrt{x} = 4", "4"),
        ("|x| = 4", "4"),
        (r"\log x = 2", "2"),
        ("sin(x) = 1/2", "1/2"),
        ("x(x-1) = 6", "6"),
        (r"\frac{x}{2} = 4", "4"),
        ("0", "x + y + z = 0"),
        ("0", "y^2 - 4x - 6y + 9 = 0"),
        (r"2\theta", r"\tan \theta = 2\theta"),
        (r"\frac{3}{2}=2", "2"),
        (r"\pi = 3", "3"),
    ],
    "bases": [
        ("0.1_2", "0.1_3"),
        ("-101_2", "-101_3"),
        (r"\frac{1}{10}_2", r"\frac{1}{10}_3"),
        ("(101)_2", "(101)_3"),
        (r"101_\text{two}", r"101_\text{three}"),
        ("0_2", "0_3"),
        ("x_1", "x_2"),
    ],
    "points by name": [
        ("(x,y)=(3,2)", "(2,3)"),
        ("(x,y)=(2,3)", "(2,3,4)"),
        ("(x,2)=(1,2)", "(1,2)"),
        ("(x+1,y)=(1,2)", "(1,2)"),
        ("(x-1)(y)=6", "6"),
        (r"3\mathbf{i}+2\mathbf{j}", r"2\mathbf{i}+3\mathbf{j}"),
    ],
    "degrees": [
        (r"\tan 16", r"\tan 15^\circ"),
        (r"\sin 30", r"\cos 30^\circ"),
        ("30", r"\sin 30^\circ"),
        (r"5^\circ\text{C}", r"5^\circ\text{F}"),
    ],
    "quantities of two units, formulas, dates": [
        (r"3 \text{ ft } 4 \text{ in}", r"3 \text{ ft } 5 \text{ in}"),
        (r"2 \text{ hours } 30 \text{ minutes}", r"2 \text{ hours } 45 \text{ minutes}"),
        ("3 feet 4 inches", "3"),
        ("30 minutes", "2 hours 30 minutes"),
        ("H_2O", "H_2O_2"),
        ("2020-02-01", "2020-01-02"),
        ("2017", "2020-01-02"),
    ],
    "spellings of other values": [
        (r"\emptyset", r"\{0\}"),
        (r"\varnothing", "0"),
        (r"\sin 30", r"\frac12"),
        (r"\tan 60^\circ", "60"),
        (r"0.\overline{3}", "0.3"),
        (r"0.1\overline{6}", r"0.\overline{16}"),
        ("- 1 1/2", "-1/2"),
        ("- 1 1/2", "3/2"),
    ],
}
PAIRS = [
    (*pair, same) for same, table in ((True, SAME), (False, DIFFERENT)) for pairs in table.values() for pair in pairs
]


@pytest.mark.parametrize(("answer", "gold", "same"), PAIRS)
def test_published_pairs(answer: str, gold: str, same: bool) -> None:
    assert same_answer(answer, gold) is same


def test_there_are_enough_pairs() -> None:
    assert len(PAIRS) >= 120 and len(set(PAIRS)) == len(PAIRS)


SMALL = st.integers(-20, 20)


@settings(max_examples=60, deadline=None)
@given(SMALL, st.integers(1, 20), SMALL, st.integers(1, 20))
def test_fractions_are_equal_if_their_values_are(a: int, b: int, c: int, d: int) -> None:
    spelled = (f"{a}/{b}", rf"\frac{{{a}}}{{{b}}}", f"x = {a}/{b}", repr(a / b))
    same = Fraction(a, b) == Fraction(c, d)
    assert [same_answer(each, rf"\frac{{{c}}}{{{d}}}") for each in spelled] == [same] * 4


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=2, max_size=4), st.lists(st.integers(1, 4), min_size=2, max_size=4))
def test_lists_sets_and_tuples_are_what_they_are_in_python(one: list[int], other: list[int]) -> None:
    first, second = (", ".join(map(str, each)) for each in (one, other))
    assert same_answer(first, second) is (sorted(one) == sorted(other))
    assert same_answer(rf"\{{{first}\}}", rf"\{{{second}\}}") is (set(one) == set(other))
    assert same_answer(f"({first})", f"({second})") is (one == other)


@settings(max_examples=60, deadline=None)
@given(st.floats(1e-300, 1e300), st.sampled_from([1e-3, -1e-3, 1e-14, -1e-14]))
def test_decimals_are_compared_relatively(value: float, change: float) -> None:
    assert same_answer(repr(value * (1 + change)), repr(value)) is (abs(change) < 1e-12)
