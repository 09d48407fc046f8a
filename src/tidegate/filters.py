"""A filter: constraints on attributes that must all hold for a notification to match.

`Filter.parse` reads the language of docs/filters.md; subscriptions, queue bindings and triple masks are all filters.
`Filter.matches` defines the meaning of the language: the index of the Matcher must agree with it on every notification.

Values fall into three classes: number, string and boolean. A comparison holds only for values of a class that occurs
among its operands. An absent attribute satisfies no comparison, not even `!=`; nor does NaN, which belongs to no class.
Filters are equal if they hold the same constraints, in any order. `str()` of equal filters is one canonical text,
and parsing it gives an equal filter again.
"""

from __future__ import annotations

import operator as compare
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Literal, TypeAlias

import msgspec

from tidegate.errors import FilterError, NotificationError
from tidegate.notification import INTEGER_MAX, NAME_BYTES_MAX, Value, describe_type, is_number, parse_value

FILTER_CHARACTERS_MAX: Final = 4096
CONSTRAINTS_MAX: Final = 32
VALUES_MAX: Final = 256

ValueClass: TypeAlias = Literal["number", "string", "boolean"]
_Holds: TypeAlias = Callable[[Any], bool]

_SHOWN_CHARACTERS_MAX: Final = 60


class Operator(StrEnum):
    """How a constraint tests an attribute. `==` and `!=` take one or more operands, `..` two, presence tests none, the
    others one."""

    EQUAL = "=="
    NOT_EQUAL = "!="
    BELOW = "<"
    AT_MOST = "<="
    ABOVE = ">"
    AT_LEAST = ">="
    RANGE = ".."
    PREFIX = "^="
    SUFFIX = "$="
    CONTAINS = "*="
    EXISTS = "exists"
    ABSENT = "absent"


_ORDERINGS: Final[dict[Operator, Callable[[Any, Any], bool]]] = {
    Operator.BELOW: compare.lt,
    Operator.AT_MOST: compare.le,
    Operator.ABOVE: compare.gt,
    Operator.AT_LEAST: compare.ge,
}
_PATTERNS: Final[dict[Operator, Callable[[str, str], bool]]] = {
    Operator.PREFIX: str.startswith,
    Operator.SUFFIX: str.endswith,
    Operator.CONTAINS: str.__contains__,
}


@dataclass(frozen=True, slots=True)
class Constraint:
    """One condition of a filter. The parser validates and normalises the operands: equal numbers have one form (1.0
    becomes 1), the operands of `==` and `!=` are sorted and distinct, those of a pattern are strings.

    Constraints are equal if their canonical texts are. Their fields are not compared, because Python considers True
    equal to 1 and filters do not."""

    name: str = field(compare=False)
    operator: Operator = field(compare=False)
    operands: tuple[Value, ...] = field(compare=False, default=())
    text: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", _write_constraint(self.name, self.operator, self.operands))

    def __str__(self) -> str:
        return self.text


class ConstraintExplanation(msgspec.Struct, frozen=True):
    """Whether one constraint holds for a notification, and the reason as a sentence."""

    text: str
    holds: bool
    reason: str


class Explanation(msgspec.Struct, frozen=True):
    """Why a filter matches a notification or not. The constraints are in the order of the filter's text."""

    matches: bool
    constraints: tuple[ConstraintExplanation, ...]


@dataclass(frozen=True, slots=True, repr=False)
class Filter:
    """A conjunction of constraints; without any, it matches everything. Immutable, hashable and picklable.

    Matching never raises: values that no filter can compare (a list, NaN) satisfy no comparison, and None counts as
    absent."""

    constraints: tuple[Constraint, ...] = field(compare=False)
    text: str = field(init=False)
    _tests: tuple[tuple[str, _Holds], ...] | None = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", ";".join(sorted(c.text for c in self.constraints)) or "*")
        object.__setattr__(self, "_tests", None)

    @classmethod
    def parse(cls, text: str, context: Mapping[str, Value] | None = None) -> Filter:
        """Returns the filter that `text` describes. `$name` in it stands for that value of the subscriber's `context`.
        Raises FilterError with the column and the remedy."""
        parsed = cls(tuple(dict.fromkeys(_Parser(text, context or {}).parse())))
        if len(parsed.text) > FILTER_CHARACTERS_MAX:
            raise _too_long(f"the filter written in full has {len(parsed.text)} characters", column=1)
        return parsed

    def matches(self, notification: Mapping[str, Any]) -> bool:
        """Returns whether every constraint holds for the notification."""
        for name, holds in self._tests or self._compile():  # noqa: SIM110 - the generator of all() costs a fifth more
            if not holds(notification.get(name)):
                return False
        return True

    def explain(self, notification: Mapping[str, Any]) -> Explanation:
        """Returns the same verdict as `matches`, with a reason for each constraint."""
        explained = tuple(
            _explain(constraint, notification.get(name), holds)
            for constraint, (name, holds) in zip(self.constraints, self._compile(), strict=True)
        )
        return Explanation(all(constraint.holds for constraint in explained), explained)

    def _compile(self) -> tuple[tuple[str, _Holds], ...]:
        """Compiles the tests of the constraints at first use: a client never matches most of its filters."""
        tests = tuple((constraint.name, _compile(constraint)) for constraint in self.constraints)
        object.__setattr__(self, "_tests", tests)
        return tests

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Filter.parse({self.text!r})"

    def __reduce__(self) -> tuple[type[Filter], tuple[tuple[Constraint, ...]]]:
        return Filter, (self.constraints,)


def class_of(value: object) -> ValueClass | None:
    """Returns the class of a value for comparisons; None for NaN and for values that a notification may not hold."""
    if isinstance(value, str):
        return "string"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)) and value == value:
        return "number"
    return None


def pattern_text(value: Any) -> str | None:
    """Returns the text that `^=`, `$=` and `*=` test: a string, or the decimal digits of a whole number."""
    if isinstance(value, str):
        return value
    if is_number(value) and abs(value) <= INTEGER_MAX and value == int(value):
        return str(int(value))
    return None


def quote(text: str) -> str:
    """Returns `text` as a quoted string of the language, for programs that write filters."""
    return "'" + text.replace("'", "''") + "'"


def _compile(constraint: Constraint) -> _Holds:
    operator, operands = constraint.operator, constraint.operands
    if operator in _ORDERINGS:
        return _compile_ordering(_ORDERINGS[operator], operands[0])
    if operator in _PATTERNS:
        return _compile_pattern(_PATTERNS[operator], str(operands[0]))
    match operator:
        case Operator.EQUAL:
            return _compile_one_of(_by_class(operands))
        case Operator.NOT_EQUAL:
            return _compile_none_of(_by_class(operands))
        case Operator.RANGE:
            return _compile_range(*operands)
        case Operator.EXISTS:
            return lambda value: value is not None
    assert operator is Operator.ABSENT, operator
    return lambda value: value is None


def _compile_ordering(ordered: Callable[[Any, Any], bool], bound: Value) -> _Holds:
    if isinstance(bound, str):
        return lambda value: isinstance(value, str) and ordered(value, bound)
    return lambda value: is_number(value) and ordered(value, bound)


def _compile_range(low: Any, high: Any) -> _Holds:
    if isinstance(low, str):
        return lambda value: isinstance(value, str) and low <= value <= high
    return lambda value: is_number(value) and low <= value <= high


def _compile_one_of(named: dict[ValueClass | None, frozenset[Value]]) -> _Holds:
    return lambda value: value in named.get(class_of(value), ())


def _compile_none_of(named: dict[ValueClass | None, frozenset[Value]]) -> _Holds:
    def holds(value: Any) -> bool:
        excluded = named.get(class_of(value))
        return excluded is not None and value not in excluded

    return holds


def _compile_pattern(fits: Callable[[str, str], bool], part: str) -> _Holds:
    def holds(value: Any) -> bool:
        text = pattern_text(value)
        return text is not None and fits(text, part)

    return holds


def _by_class(operands: Iterable[Value]) -> dict[ValueClass | None, frozenset[Value]]:
    # One set for each class: in a common set Python would find True where only 1 is.
    classes = {class_of(operand) for operand in operands}
    return {each: frozenset(operand for operand in operands if class_of(operand) == each) for each in classes}


_PHRASES: Final = {
    Operator.EQUAL: "equal to",
    Operator.NOT_EQUAL: "equal to",
    Operator.BELOW: "below",
    Operator.AT_MOST: "at most",
    Operator.ABOVE: "above",
    Operator.AT_LEAST: "at least",
    Operator.RANGE: "between",
    Operator.PREFIX: "starting with",
    Operator.SUFFIX: "ending with",
    Operator.CONTAINS: "containing",
}


def _explain(constraint: Constraint, value: Any, test: _Holds) -> ConstraintExplanation:
    holds = test(value)
    reason = f"{_write_name(constraint.name)} is {_describe(constraint, value, holds)}"
    return ConstraintExplanation(constraint.text, holds, reason)


def _describe(constraint: Constraint, value: Any, holds: bool) -> str:
    operator, operands = constraint.operator, constraint.operands
    if value is None:
        return "absent"
    if operator not in _PHRASES:
        return f"present, with the value {_show(value)}"
    if class_of(value) is None:
        return f"{_show(value)}, which satisfies no comparison"
    if operator in _PATTERNS:
        if pattern_text(value) is None:
            return f"{_show(value)}, and patterns look at strings and whole numbers up to 2^53"
    elif class_of(value) not in {class_of(operand) for operand in operands}:
        verb = f"is a {class_of(operands[0])}" if len(operands) == 1 else f"hold no {class_of(value)}"
        return f"the {class_of(value)} {_show(value)}, and {_show_operands(constraint)} {verb}"
    negated = holds == (operator is Operator.NOT_EQUAL)
    phrase = "one of" if _PHRASES[operator] == "equal to" and len(operands) > 1 else _PHRASES[operator]
    return f"{_show(value)}, {'not ' if negated else ''}{phrase} {_show_operands(constraint)}"


def _show_operands(constraint: Constraint) -> str:
    separator = " and " if constraint.operator is Operator.RANGE else ", "
    return _shorten(separator.join(_show(operand) for operand in constraint.operands))


def _show(value: Any) -> str:
    if class_of(value) is None:
        return "NaN" if isinstance(value, float) else describe_type(value)
    return _shorten(_write_value(_normal(value)))


def _shorten(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS_MAX else text[:_SHOWN_CHARACTERS_MAX] + "…"


def _write_constraint(name: str, operator: Operator, operands: tuple[Value, ...]) -> str:
    values = [_write_value(operand) for operand in operands]
    match operator:
        case Operator.EXISTS:
            return _write_name(name)
        case Operator.ABSENT:
            return "!" + _write_name(name)
        case Operator.RANGE:
            return f"{_write_name(name)}=={values[0]}..{values[1]}"
    return _write_name(name) + operator + ",".join(values)


def _write_name(name: str) -> str:
    return name if _BARE_NAME.fullmatch(name) else quote(name)


def _write_value(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return quote(value) if isinstance(value, str) else str(value)


def _normal(value: Value) -> Value:
    """Returns one form for equal numbers, so that equal filters have equal texts: 1.0 becomes 1, and -0.0 becomes 0."""
    if isinstance(value, float) and abs(value) <= INTEGER_MAX and value.is_integer():
        return int(value)
    return value


_BARE_NAME: Final = re.compile(r"\$?[^\s'\"();,|&=!<>^$*~]+")
_BARE_VALUE: Final = re.compile(r"(?:(?!\.\.)[^\s'\"();,|&=<>*])+")
# Possessive (*+), so that a quote which is never closed is scanned once instead of backtracking.
_QUOTED: Final = re.compile(r"'([^']*+(?:''[^']*+)*+)'")
_OPERATOR: Final = re.compile(r"[=!<>^$*]=|[<>]")
_FOREIGN_OPERATOR: Final = re.compile(r"[=!]==|=[<>~]|<>|~=?|=(?!=)")
_NO_VALUE: Final = re.compile(r"[+-]?(?:nan|inf|infinity|null|none)", re.IGNORECASE)
_SURROGATE: Final = re.compile(r"[\ud800-\udfff]")

_REPLACEMENTS: Final = {"=": "==", "===": "==", "!==": "!=", "<>": "!=", "=>": ">=", "=<": "<="}
_CONJUNCTION: Final = "filters do not nest: put ; between constraints that must all hold, write alternatives as a==1,2"
_WILDCARD: Final = "write * alone for everything, a where a exists, a^=x for a prefix, or quote the text"
_QUOTE: Final = "quote the whole string, and double a quote inside it: 'it''s'"
_SPACED: Final = "quote names and values that contain white space, and put ; between constraints"
# Syntax of other languages that people try: its pattern, the error code, the message ({0} is the text that they wrote)
# and the remedy.
_FOREIGN: Final = (
    (re.compile(r'"'), "F105", "double quotes have no meaning here", "use single quotes, as in room=='kitchen'"),
    (re.compile(r"[()]|\|\|?|&&?|(?:and|or)\b", re.IGNORECASE), "F107", "{0} is not an operator here", _CONJUNCTION),
    (re.compile(r"\*"), "F108", "* is not a wildcard", _WILDCARD),
    (re.compile(rf"'|(?<='){_BARE_NAME.pattern}"), "F104", "the string near {0} is only partly quoted", _QUOTE),
    (re.compile(rf"(?<=\s){_BARE_NAME.pattern}"), "F109", "unexpected {0} after white space", _SPACED),
)
_NUMBERS: Final = {
    "N207": ("F113", "beyond 2^53", "quote it, and publish it as a string"),
    "N208": ("F114", "not a finite number", "use numbers up to 1.7e308"),
}
_EXPECTED: Final = {
    "a name": "start a constraint with a name, as in NO2>200, and quote a name that contains other characters",
    "an operator": "use == != < <= > >= ^= $= or *=, put ; between constraints, and quote names with other characters",
    "a value": "put one after the operator, and quote it if it has other characters; open ranges are a>=10 and a<=10",
    "; or the end": "put ; between constraints, quote values that contain other characters, and negate with !=",
}


class _Parser:
    """Parses in one pass, without backtracking. `at` is where the next token starts; columns are `at` + 1."""

    def __init__(self, text: str, context: Mapping[str, Value]) -> None:
        self.text = text
        self.context = context
        self.at = 0
        self.values = 0

    def parse(self) -> list[Constraint]:
        self._check_text()
        if self.text.strip() == "*":
            return []
        constraints = [self._constraint()]
        while self._take(";"):
            if len(constraints) == CONSTRAINTS_MAX:
                raise self._error(
                    "F121", f"more than {CONSTRAINTS_MAX} constraints", "use one-of lists, or several filters"
                )
            constraints.append(self._constraint())
        if self.at < len(self.text):
            raise self._unexpected("; or the end")
        return constraints

    def _check_text(self) -> None:
        if len(self.text) > FILTER_CHARACTERS_MAX:
            raise _too_long(f"the filter has {len(self.text)} characters", column=FILTER_CHARACTERS_MAX + 1)
        if surrogate := _SURROGATE.search(self.text):
            self.at = surrogate.start()
            raise self._error("F123", f"{surrogate[0]!r} is half a character", "send Unicode text, encoded as UTF-8")
        if not self.text.strip():
            raise self._error("F101", "the filter is empty", "write * for everything")

    def _constraint(self) -> Constraint:
        self._skip_space()
        if self.at == len(self.text) or self.text[self.at] == ";":
            raise self._error("F103", "a constraint is empty", "put ; between constraints only")
        if self._take("!"):
            return Constraint(self._name(), Operator.ABSENT)
        name = self._name()
        operator = self._operator()
        if operator is None:
            return Constraint(name, Operator.EXISTS)
        start = self.at
        first = self._value(operator)
        if self._take(".."):
            return Constraint(name, Operator.RANGE, self._range(operator, first, start))
        return Constraint(name, operator, self._list(operator, first))

    def _name(self) -> str:
        self._skip_space()
        start = self.at
        name = self._quoted()
        if name is None:
            name = self._bare(_BARE_NAME, "a name")
        if name.startswith("$"):
            raise self._error(
                "F110", f"{_show(name)} is reserved", "filters cannot read payloads; use attributes", start
            )
        if not 0 < len(name.encode()) <= NAME_BYTES_MAX:
            raise self._error("F111", f"the name has {len(name.encode())} bytes", f"use 1 to {NAME_BYTES_MAX}", start)
        return name

    def _operator(self) -> Operator | None:
        self._skip_space()
        if foreign := _FOREIGN_OPERATOR.match(self.text, self.at):
            instead = _REPLACEMENTS.get(foreign[0], "^= (prefix), $= (suffix) or *= (contains)")
            raise self._error("F106", f"{foreign[0]} is not an operator", f"write {instead}")
        if found := _OPERATOR.match(self.text, self.at):
            self.at = found.end()
            self._skip_space()
            return Operator(found[0])
        if self.at < len(self.text) and self.text[self.at] != ";":
            raise self._unexpected("an operator")
        return None

    def _range(self, operator: Operator, low: Value, start: int) -> tuple[Value, Value]:
        if operator is not Operator.EQUAL:
            raise self._error("F118", f"{operator} takes no range", "use ==, or two filters, a<10 and a>20", start)
        high = self._value(Operator.AT_MOST)
        shown = f"{_show(low)}..{_show(high)}"
        if class_of(low) != class_of(high):
            raise self._error("F116", f"{shown} mixes two types", "use two numbers, or two quoted strings", start)
        if low > high:  # type: ignore[operator]
            raise self._error("F117", f"the range {shown} is empty", "put the lower end first", start)
        self._end_values()
        return low, high

    def _list(self, operator: Operator, first: Value) -> tuple[Value, ...]:
        values = {_write_value(first): first}
        while self._take(","):
            if operator not in (Operator.EQUAL, Operator.NOT_EQUAL):
                raise self._error("F119", f"{operator} takes one value", "only == and != take a list", self.at - 1)
            value = self._value(operator)
            values[_write_value(value)] = value
        self._end_values()
        return tuple(sorted(values.values(), key=lambda value: (str(class_of(value)), value)))

    def _end_values(self) -> None:
        if self.text.startswith(("..", ","), self.at):
            raise self._error(
                "F118", "a range cannot be combined with other values", "use several filters, or list the values"
            )

    def _value(self, operator: Operator) -> Value:
        self._skip_space()
        start = self.at
        self.values += 1
        if self.values > VALUES_MAX:
            raise self._error("F122", f"more than {VALUES_MAX} values", "use a range, a prefix, or several filters")
        quoted = self._quoted()
        if quoted is not None:
            return quoted
        word = self._bare(_BARE_VALUE, "a value")
        if word.startswith("$"):
            return self._from_context(word[1:], operator, start)
        if operator in _PATTERNS:
            return word
        if _NO_VALUE.fullmatch(word):
            remedy = f"quote it for the string {quote(word)}, or write !a where a is absent"
            raise self._error("F112", f"{word} is not a value", remedy, start)
        return self._ordered(self._parse_word(word, start), operator, start)

    def _from_context(self, name: str, operator: Operator, start: int) -> Value:
        value = self.context.get(name)
        if class_of(value) is None:
            known = ", ".join(f"${each}" for each in self.context) or "nothing"
            raise self._error(
                "F124",
                f"${name} has no value in the subscriber's context, which has {known}",
                "give it a string, a number or a boolean with the subscription, or quote a text that begins with $",
                start,
            )
        assert value is not None
        if operator not in _PATTERNS:
            return self._ordered(_normal(value), operator, start)
        text = pattern_text(value)
        if text is None:
            raise self._error(
                "F115", f"${name} is {_show(value)}, which is not text", "give a string for a pattern", start
            )
        return text

    def _ordered(self, value: Value, operator: Operator, start: int) -> Value:
        if isinstance(value, bool) and operator in _ORDERINGS:
            raise self._error("F115", f"{_show(value)} has no order", "compare booleans with == or !=", start)
        return value

    def _parse_word(self, word: str, start: int) -> Value:
        try:
            return _normal(parse_value(word))
        except NotificationError as error:
            code, fault, remedy = _NUMBERS[error.code]
            raise self._error(code, f"{_shorten(word)} is {fault}", remedy, start) from None

    def _quoted(self) -> str | None:
        if not self.text.startswith("'", self.at):
            return None
        quoted = _QUOTED.match(self.text, self.at)
        if quoted is None:
            raise self._error("F104", "the quote is not closed", "end the string with '; inside, double it: 'it''s'")
        self.at = quoted.end()
        return quoted[1].replace("''", "'")

    def _bare(self, words: re.Pattern[str], expected: str) -> str:
        word = words.match(self.text, self.at)
        if word is None:
            raise self._unexpected(expected)
        self.at = word.end()
        return word[0]

    def _take(self, token: str) -> bool:
        self._skip_space()
        if not self.text.startswith(token, self.at):
            return False
        self.at += len(token)
        return True

    def _skip_space(self) -> None:
        while self.text[self.at : self.at + 1].isspace():
            self.at += 1

    def _unexpected(self, expected: str) -> FilterError:
        for pattern, code, message, remedy in _FOREIGN:
            if found := pattern.match(self.text, self.at):
                return self._error(code, message.format(_shorten(found[0])), remedy)
        here = repr(self.text[self.at]) if self.at < len(self.text) else "the end"
        return self._error("F102", f"expected {expected}, found {here}", _EXPECTED[expected])

    def _error(self, code: str, message: str, remedy: str, at: int | None = None) -> FilterError:
        return FilterError(code, message, remedy, column=(self.at if at is None else at) + 1)


def _too_long(message: str, column: int) -> FilterError:
    return FilterError("F120", message, f"use at most {FILTER_CHARACTERS_MAX}, or several filters", column=column)
