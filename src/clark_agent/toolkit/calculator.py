"""calculator: evaluates arithmetic expressions, exactly where possible.

Integers, decimals and quotients are computed as fractions: ``0.1 + 0.2`` is ``0.3``, and no
intermediate result is rounded. Roots, logarithms and the like use floating point if the result is
not exact. Such results are shown with ``≈``.

It accepts what people write: ``×``, ``÷``, ``^``, ``1,234.5``, ``$3``, ``15% of 80``, ``5!``, and a
final ``=``. It refuses ambiguous input and says how to write each meaning: ``100 + 5%``, ``10 %
-3``, ``log(8)`` and ``max(1,234, 5)``.

The text is never passed to Python. A tokenizer and a parser with a fixed set of operators and
functions compute it. Length, nesting and the size of every intermediate number are bounded, so that
every expression is fast.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from decimal import Context
from fractions import Fraction
from typing import Final, NoReturn, TypeAlias

from msgspec import Struct

from clark_agent.errors import ToolExecutionError
from clark_agent.tools import ToolResult, tool
from clark_agent.tools.repair import close_match

__all__ = ["CalculationError", "Number", "calculator", "evaluate", "shown"]

Number: TypeAlias = int | Fraction | float
"""Exact, unless it is a float."""

_MAX_CHARACTERS = 2_000
_MAX_DEPTH = 40
_MAX_BITS = 10_000  # about 3,000 digits; Python itself refuses to format more than 4,300
_MAX_EXPONENT = 3_000
_EXACT_DIGITS = 60
_APPROXIMATE = Context(prec=15)


class CalculationError(ToolExecutionError, ValueError):
    """The expression cannot be computed; the message says why and what to write instead."""


@tool(idempotent=True, reads_only=True)
async def calculator(expression: str) -> ToolResult:
    """Compute an arithmetic expression, exactly where possible.

    Operators: + - * / // (whole quotient) % (remainder, or percent) ^ or ** (power) ! (factorial).
    Functions: abs, round(x, digits), floor, ceil, min, max, sum, mean, gcd, lcm, factorial, sqrt,
    exp, ln, log(x, base), log10, log2, sin, cos, tan, asin, acos, atan (in radians), degrees,
    radians. Constants: pi, e, tau. There are no variables. "≈" marks a result that is rounded.

    Args:
        expression: What to compute, such as "(1,299.95 - 15% * 1,299.95) / 12".
    """
    try:
        return ToolResult.text(shown(evaluate(expression)))
    except CalculationError as error:
        return ToolResult.error(str(error))


def evaluate(expression: str) -> Number:
    """Return the value of an expression. Raises only `CalculationError`."""
    if len(expression) > _MAX_CHARACTERS:
        raise CalculationError(
            f"the expression has {len(expression):,} characters and may have {_MAX_CHARACTERS:,}; "
            "compute it in parts"
        )
    try:
        return _Parser(_tokens(expression)).value()
    except ZeroDivisionError:
        raise CalculationError("division by zero") from None
    except OverflowError:
        raise _too_large() from None


def _too_large() -> CalculationError:
    return CalculationError(
        "a number gets too large: exact ones may have about 3,000 digits, rounded ones about 300"
    )


# --- tokens -----------------------------------------------------------------------------------


class _Token(Struct, frozen=True):
    kind: str
    """``number``, ``name``, ``end``, or the operator itself."""
    text: str
    at: int
    is_tight: bool = False
    """Whether it is a comma that could also group thousands."""


_GROUPED = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])")
_NUMBER = re.compile(r"(?:[0-9]+(?:_[0-9]+)*(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_TAIL = re.compile(r"(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?")
_NAME = re.compile(r"[^\W\d]\w*")
_OPERATOR = re.compile(r"\*\*|//|[-+*/%^!(),]")
_SPELLINGS = {
    **dict.fromkeys("×·⋅∙∗", "*"),
    **dict.fromkeys("÷∕⁄", "/"),
    **dict.fromkeys("−–—", "-"),
    **dict.fromkeys("[{", "("),
    **dict.fromkeys("]}", ")"),
    "**": "^",
    "√": "√",
    "π": "pi",
    "²": "²",
    "³": "³",
}
_IGNORED = "$€£¥₹"
_TRAILING = re.compile(r"\s*=[\s?=]*\Z")


def _tokens(text: str) -> list[_Token]:
    text = _TRAILING.sub("", text)
    at = len(text) - len(text.lstrip(" \t\r\n="))  # spreadsheet formulas begin with "="
    tokens: list[_Token] = []
    calls: list[bool] = []
    while at < len(text):
        if text[at].isspace() or text[at] in _IGNORED:
            at += 1
            continue
        token, at = _token(text, at, in_call=bool(calls) and calls[-1])
        if token.kind == "(":
            calls.append(bool(tokens) and tokens[-1].kind == "name")
        elif token.kind == ")" and calls:
            del calls[-1]
        tokens.append(token)
    tokens.append(_Token("end", "", at))
    return tokens


def _token(text: str, at: int, *, in_call: bool) -> tuple[_Token, int]:
    """Return the next token and its end. Between the arguments of a call, a comma separates."""
    if not in_call and (grouped := _GROUPED.match(text, at)):
        tail = _TAIL.match(text, grouped.end())
        end = grouped.end() if tail is None else tail.end()
        return _Token("number", text[at:end].replace(",", ""), at), end
    if found := _NUMBER.match(text, at):
        return _Token("number", found[0].replace("_", ""), at), found.end()
    character = text[at]
    if character in _SPELLINGS:
        meant = _SPELLINGS[character]
        kind = "name" if meant == "pi" else meant
        return _Token(kind, meant, at), at + 1
    if found := _NAME.match(text, at):
        name = found[0].lower()
        if name in ("x", "of"):
            return _Token("*", found[0], at), found.end()
        return _Token("name", name, at), found.end()
    if found := _OPERATOR.match(text, at):
        kind = _SPELLINGS.get(found[0], found[0])
        is_tight = kind == "," and _could_group(text, at)
        return _Token(kind, found[0], at, is_tight), found.end()
    raise CalculationError(f"{character!r} at character {at + 1} means nothing in arithmetic")


def _could_group(text: str, comma: int) -> bool:
    before = re.search(r"(?<![0-9.])[0-9]{1,3}(?:,[0-9]{3})*\Z", text[max(0, comma - 30) : comma])
    return before is not None and re.match(r"[0-9]{3}(?![0-9])", text[comma + 1 :]) is not None


# --- the parser -------------------------------------------------------------------------------

_STARTS_OPERAND = ("number", "name", "(", "√")


class _Parser:
    """Computes while it parses: sums of products of powers, as in mathematics and in Python."""

    def __init__(self, tokens: Sequence[_Token]) -> None:
        self._tokens = tokens
        self._at = 0
        self._depth = 0
        self._is_percent = False
        """Whether the last operand is just a percentage."""

    def value(self) -> Number:
        """Return the value of the whole expression."""
        if self._next.kind == "end":
            raise CalculationError("the expression is empty; write one such as '2 * (3 + 4)'")
        value = self._sum()
        if self._next.kind != "end":
            self._refuse_rest()
        return value

    @property
    def _next(self) -> _Token:
        return self._tokens[self._at]

    def _take(self, *kinds: str) -> _Token | None:
        token = self._next
        if token.kind not in kinds:
            return None
        self._at += 1
        return token

    def _refuse_rest(self) -> NoReturn:
        token = self._next
        where = f"at character {token.at + 1}"
        if token.kind in _STARTS_OPERAND:
            raise CalculationError(
                f"an operator is missing before {token.text!r} {where}; write '*' to multiply"
            )
        if token.kind == ",":
            raise CalculationError(
                f"the comma {where} means nothing: decimals have a point, thousands groups of "
                "three digits, and only functions have several values"
            )
        raise CalculationError(f"{token.text!r} {where} is out of place")

    def _sum(self) -> Number:
        left = self._product()
        while operator := self._take("+", "-"):
            of_percents = self._is_percent
            right = self._product()
            if self._is_percent and not of_percents and left != 1:  # for 1 both meanings agree
                raise CalculationError(
                    "adding or taking off a percentage has two meanings; write 100 * (1 + 5%) for "
                    "5% more, or 100 + 0.05"
                )
            left = _checked(left + right if operator.kind == "+" else left - right)
        return left

    def _product(self) -> Number:
        left = self._signed()
        while operator := self._take("*", "/", "//", "%"):
            left = _OPERATIONS[operator.kind](left, self._signed())
            self._is_percent = False
        return left

    def _signed(self) -> Number:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise CalculationError(
                f"the expression is nested more than {_MAX_DEPTH} levels deep; compute it in parts"
            )
        sign = self._take("+", "-")
        value = self._power() if sign is None else self._signed()
        self._depth -= 1
        return -value if sign is not None and sign.kind == "-" else value

    def _power(self) -> Number:
        base = self._with_suffixes(self._operand())
        if self._take("^"):
            base = _power(base, self._signed())
            self._is_percent = False
        return base

    def _with_suffixes(self, value: Number) -> Number:
        self._is_percent = False
        while True:
            if self._take("!"):
                value = _factorial(value)
            elif squared := self._take("²", "³"):
                value = _power(value, 2 if squared.kind == "²" else 3)
            elif self._is_percent_here():
                self._at += 1
                value = _divide(value, 100)
                self._is_percent = True
            else:
                return value

    def _is_percent_here(self) -> bool:
        if self._next.kind != "%":
            return False
        follows = self._tokens[self._at + 1].kind
        if follows == "-":
            raise CalculationError(
                "'%' before a minus has two meanings; write 10 % (-3) for the remainder, or "
                "(10%) - 3 for the percentage"
            )
        return follows not in _STARTS_OPERAND

    def _operand(self) -> Number:
        token = self._next
        self._at += 1
        if token.kind == "number":
            return _number(token.text)
        if token.kind == "√":
            return _square_root(self._signed_root())
        if token.kind == "(":
            value = self._sum()
            self._close(token)
            return value
        if token.kind == "name":
            return self._named(token)
        where = "at the end" if token.kind == "end" else f"before {token.text!r}"
        raise CalculationError(f"a number is missing {where} (character {token.at + 1})")

    def _signed_root(self) -> Number:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise CalculationError("the expression is nested too deep; compute it in parts")
        value = self._operand()
        self._depth -= 1
        return value

    def _close(self, opened: _Token) -> None:
        if not self._take(")"):
            if self._next.kind != "end":
                self._refuse_rest()
            raise CalculationError(f"the '(' at character {opened.at + 1} is never closed")

    def _named(self, token: _Token) -> Number:
        name = token.text
        if name in _CONSTANTS:
            return _CONSTANTS[name]
        function = _FUNCTIONS.get(name)
        if function is None:
            meant = close_match(name, [*_FUNCTIONS, *_CONSTANTS])
            hint = "." if meant is None else f"; did you mean {meant!r}?"
            raise CalculationError(
                f"{name!r} at character {token.at + 1} is not known{hint} The functions "
                f"are {', '.join(_FUNCTIONS)}; the constants are {', '.join(_CONSTANTS)}; there "
                "are no variables"
            )
        opened = self._take("(")
        if opened is None:
            raise CalculationError(f"{name!r} is a function: write {name}(…)")
        return _call(name, function, self._arguments(name, function, opened))

    def _arguments(self, name: str, function: _Function, opened: _Token) -> list[Number]:
        values = [self._sum()]
        commas: list[bool] = []
        while comma := self._take(","):
            commas.append(comma.is_tight)
            values.append(self._sum())
        self._close(opened)
        if any(commas) and not (function.most is None and all(commas)):
            raise CalculationError(
                f"a comma in {name}(…) may separate values or group thousands; put a space behind "
                "those that separate, and write thousands without commas"
            )
        return values


# --- operations on numbers --------------------------------------------------------------------


def _plain(value: Number) -> Number:
    """Turn a whole number into an int."""
    if isinstance(value, Fraction) and value.denominator == 1:
        return value.numerator
    return value


def _bits(value: int | Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _checked(value: Number) -> Number:
    """Return the value if it is finite and not too large; raise otherwise."""
    value = _plain(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise _too_large()
    elif _bits(value) > _MAX_BITS:
        raise _too_large()
    return value


def _number(text: str) -> Number:
    mantissa, _, exponent = text.lower().partition("e")
    if abs(int(exponent or 0)) > _MAX_EXPONENT:
        raise _too_large()
    return _checked(Fraction(mantissa.rstrip(".") or "0") * Fraction(10) ** int(exponent or 0))


def _divide(left: Number, right: Number) -> Number:
    if isinstance(left, float) or isinstance(right, float):
        return _checked(left / right)
    return _checked(Fraction(left) / right)


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(exponent, Fraction) and exponent.denominator == 2 and base >= 0:
        return _power(_square_root(base), exponent.numerator)
    if isinstance(base, float) or isinstance(exponent, (float, Fraction)):
        if base < 0 and float(exponent) != int(exponent):
            raise CalculationError("a negative number has no such power among the real numbers")
        return _checked(float(base) ** float(exponent))
    if base not in (0, 1, -1) and abs(exponent) * (_bits(base) - 1) > _MAX_BITS:
        raise _too_large()
    if base in (1, -1):
        exponent %= 2
    return _checked(Fraction(base) ** exponent if exponent < 0 else base**exponent)


_OPERATIONS: dict[str, Callable[[Number, Number], Number]] = {
    "*": lambda left, right: _checked(left * right),
    "/": _divide,
    "//": lambda left, right: _checked(left // right),
    "%": lambda left, right: _checked(left % right),
}


def _whole(value: Number, what: str) -> int:
    if not isinstance(value, int):
        raise CalculationError(f"{what} needs a whole number, not {shown(value)}")
    return value


def _factorial(value: Number) -> Number:
    number = _whole(value, "a factorial")
    if number < 0:
        raise CalculationError("a negative number has no factorial")
    if number > 1_200:  # just above what fits
        raise _too_large()
    return _checked(math.factorial(number))


def _square_root(value: Number) -> Number:
    if value < 0:
        raise CalculationError("a negative number has no square root among the real numbers")
    if not isinstance(value, float):
        numerator, denominator = math.isqrt(value.numerator), math.isqrt(value.denominator)
        if numerator**2 == value.numerator and denominator**2 == value.denominator:
            return _plain(Fraction(numerator, denominator))
    return math.sqrt(value)


def _logarithm(value: Number, base: Number = math.e) -> Number:
    """Exact if the base is exact and the value is an integer power of it."""
    if value <= 0 or base <= 0 or base == 1:
        raise CalculationError(
            "a logarithm needs a number above 0, and a base above 0 that is not 1"
        )
    if value == 1:
        return 0
    result = _natural(value) / (1.0 if base == math.e else _natural(base))
    power = round(result)
    if not isinstance(value, float) and not isinstance(base, float) and abs(power) < _MAX_BITS:
        near = _bits(base) * abs(power) < 2 * _MAX_BITS
        if near and Fraction(base) ** power == value:
            return power
    return result


def _natural(value: Number) -> float:
    if isinstance(value, float):
        return math.log(value)
    return math.log(value.numerator) - math.log(value.denominator)


def _log(value: Number, *base: Number) -> Number:
    if not base:
        raise CalculationError(
            "log without a base has two meanings; write ln(x), log10(x) or log(x, base)"
        )
    return _logarithm(value, base[0])


def _round(value: Number, digits: Number = 0) -> Number:
    """Round half away from zero, as in school and in spreadsheets."""
    places = _whole(digits, "the second value of round")
    if abs(places) > 300:
        raise CalculationError("round takes at most 300 digits")
    scaled = Fraction(repr(value) if isinstance(value, float) else value) * Fraction(10) ** places
    rounded = math.floor(abs(scaled) + Fraction(1, 2))
    return _plain(Fraction(-rounded if scaled < 0 else rounded) / Fraction(10) ** places)


def _total(*values: Number) -> Number:
    total: Number = 0
    for value in values:
        total = _checked(total + value)
    return total


def _common_multiple(*values: Number) -> Number:
    multiple = 1
    for value in values:
        multiple = math.lcm(multiple, _whole(value, "lcm"))
        _ = _checked(multiple)  # check each time: a product of many would take long
    return multiple


def _real(function: Callable[[float], float]) -> Callable[..., Number]:
    return lambda value: function(float(value))


class _Function(Struct, frozen=True):
    compute: Callable[..., Number]
    most: int | None = 1
    """The maximum number of arguments; None for any number."""


_CONSTANTS: Final[dict[str, float]] = {"pi": math.pi, "e": math.e, "tau": math.tau}
_FUNCTIONS: Final[dict[str, _Function]] = {
    "abs": _Function(lambda value: abs(value)),
    "round": _Function(_round, 2),
    "floor": _Function(math.floor),
    "ceil": _Function(math.ceil),
    "min": _Function(lambda *values: min(values), None),
    "max": _Function(lambda *values: max(values), None),
    "sum": _Function(_total, None),
    "mean": _Function(lambda *values: _divide(_total(*values), len(values)), None),
    "gcd": _Function(lambda *v: math.gcd(*[_whole(value, "gcd") for value in v]), None),
    "lcm": _Function(_common_multiple, None),
    "factorial": _Function(_factorial),
    "sqrt": _Function(_square_root),
    "exp": _Function(_real(math.exp)),
    "ln": _Function(_logarithm),
    "log": _Function(_log, 2),
    "log10": _Function(lambda value: _logarithm(value, 10)),
    "log2": _Function(lambda value: _logarithm(value, 2)),
    "sin": _Function(_real(math.sin)),
    "cos": _Function(_real(math.cos)),
    "tan": _Function(_real(math.tan)),
    "asin": _Function(_real(math.asin)),
    "acos": _Function(_real(math.acos)),
    "atan": _Function(_real(math.atan)),
    "degrees": _Function(_real(math.degrees)),
    "radians": _Function(_real(math.radians)),
}


def _call(name: str, function: _Function, values: Sequence[Number]) -> Number:
    if function.most is not None and len(values) > function.most:
        most = "one value" if function.most == 1 else f"at most {function.most} values"
        raise CalculationError(
            f"{name} takes {most}, not {len(values)}; write thousands without commas in a function"
        )
    try:
        return _checked(function.compute(*values))
    except CalculationError:
        raise
    except ValueError:  # outside of the domain of a function of the standard library
        raise CalculationError(f"{name} has no value for {shown(values[0])}") from None


# --- numbers as text --------------------------------------------------------------------------


def shown(value: Number) -> str:
    """Format the number as people write it, with ``≈`` before a rounded one."""
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return f"≈ {value + 0.0:.15g}"  # no negative zero
    exact = _decimal(value)
    if exact is not None:
        return exact
    rounded = _APPROXIMATE.divide(
        _APPROXIMATE.create_decimal(value.numerator), _APPROXIMATE.create_decimal(value.denominator)
    )
    fraction = f"{value.numerator}/{value.denominator}" if _bits(value) <= 64 else None
    return f"≈ {rounded:.15g}" + (f" (exactly {fraction})" if fraction else "")


def _decimal(value: Fraction) -> str | None:
    """Return all decimal digits, or None if they do not end or are too many."""
    for places in range(1, _EXACT_DIGITS):
        if 10**places % value.denominator == 0:
            break
    else:
        return None
    digits = str(abs(value.numerator) * 10**places // value.denominator).rjust(places + 1, "0")
    return f"{'-' if value < 0 else ''}{digits[:-places]}.{digits[-places:]}"
