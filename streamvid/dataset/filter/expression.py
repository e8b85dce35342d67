"""Compiler that turns the text of a condition on columns into a checked tree and then into pyarrow calls.

No text is executed (SAFE-1): Python's parser reads it, and this module accepts only a small subset of the syntax. Every
part of a condition has one of four kinds, which the schema determines before any row is read:

    int, float    numbers; arithmetic and mixed comparisons use doubles
    str           text, compared by code point
    bool          truth values
"""

from __future__ import annotations

import ast
import re
import unicodedata
from collections.abc import Callable
from typing import Any, NoReturn

from streamvid.dataset.filter.nodes import (
    NUMBERS,
    Node,
    as_float,
    call,
    column,
    junction,
    literal,
    membership,
    negation,
)
from streamvid.errors import ConfigError

MAX_CHARACTERS = 65536
MAX_DEPTH = 30
MAX_NODES = 10000
_SHOWN = 120
_CANONICAL = 3  # factor by which a canonical text may exceed the limits on a user's text

_TOKEN = re.compile(
    r"(?P<string>'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\")|(?P<name>`[^`]*`)|(?P<word>[^\W0-9]\w*)"
    r"|(?P<number>\.?[0-9](?:[eE][+-](?=[0-9])|[\w.])*)|(?P<space>\s+)|(?P<other>.)",
    re.DOTALL,
)
_NUMBER = re.compile(r"(?:[0-9]+(?:_[0-9]+)*)?\.?(?:[0-9]+(?:_[0-9]+)*)?(?:[eE][+-]?[0-9]+)?")
_STRANGE_ESCAPE = re.compile(r"(?:[^\\]|^)(?:\\\\)*\\[^\\'\"ntrxuU]")
_FIRST_STAND_IN = 0x4E00

_ORDER: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "less"),
    ast.LtE: ("<=", "less_equal"),
    ast.Gt: (">", "greater"),
    ast.GtE: (">=", "greater_equal"),
    ast.Eq: ("==", "equal"),
    ast.NotEq: ("!=", "not_equal"),
}
_ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "add"),
    ast.Sub: ("-", "subtract"),
    ast.Mult: ("*", "multiply"),
    ast.Div: ("/", "divide"),
}
_TEXT_TESTS = {"contains": "match_substring", "startswith": "starts_with", "endswith": "ends_with"}


def compile_condition(text: str, resolve: Callable[[str], tuple[str, str]], is_canonical: bool = False) -> Node:
    """Compile the condition `text`.

    resolve: function that returns (index column, kind) for a name.
    is_canonical: True if `text` is a canonical spelling, which may be longer than a user's condition.

    Raises ConfigError with the text, the position and a remedy if `text` is not a valid condition, or contains a name
    for which `resolve` raises LookupError.
    """
    return _Compiler(text, resolve, _CANONICAL if is_canonical else 1).condition()


class _Compiler:
    def __init__(self, text: str, resolve: Callable[[str], tuple[str, str]], slack: int) -> None:
        self._text, self._resolve, self._slack = text, resolve, slack
        self._num_nodes = self._depth = 0
        self._quoted: dict[str, str] = {}
        self._makers: dict[type[ast.expr], Callable[[Any], Node]] = {
            ast.Name: self._column,
            ast.Constant: self._constant,
            ast.BoolOp: self._joined,
            ast.UnaryOp: self._unary,
            ast.BinOp: self._arithmetic,
            ast.Compare: self._comparison,
            ast.Call: self._call,
        }

    def condition(self) -> Node:
        if not isinstance(self._text, str):
            raise ConfigError(f"where={self._text!r} must be text; write a condition such as 'aesthetic > 5'")
        if not self._text.strip():
            raise ConfigError(
                f"where={self._text!r} is empty; write a condition such as 'aesthetic > 5', or omit the filter"
            )
        if len(self._text) > MAX_CHARACTERS * self._slack:
            self._fail(0, f"the condition has {len(self._text)} characters; shorten it to at most {MAX_CHARACTERS}")
        self._source = self._as_python()
        tree = self._parse()
        node = self._node(tree)
        if node.kind != "bool":
            self._fail(0, f"this is {_a(node.kind)}, not a condition; compare it, as in {_compared(node)}")
        if not node.columns:
            self._fail(0, "the condition does not refer to a column; write a condition such as 'aesthetic > 5'")
        return node

    # Text to tree.

    def _as_python(self) -> str:
        """Replace each backquoted name with a letter and spaces, so that positions in the text stay the same."""
        parts, letters = [], (chr(c) for c in range(_FIRST_STAND_IN, 0x9F00) if chr(c) not in self._text)
        for match in _TOKEN.finditer(self._text):
            part, kind, place = match[0], match.lastgroup, match.start()
            if kind == "name":
                letter = next(letters, None)
                if letter is None or len(part) == 2:
                    empty = "a name in backquotes is empty; write a name between the backquotes"
                    self._fail(place, empty if letter else "too many names are in backquotes; shorten the condition")
                self._quoted[letter] = part[1:-1]
                part = letter + " " * (len(part) - 1)
            elif kind == "string":
                self._check_string(part, place)
            elif kind == "number" and not _NUMBER.fullmatch(part):
                self._fail(place, f"{part[:_SHOWN]!r} is not a number; write a number such as 5, 0.5 or 1e-3")
            elif kind == "word" and unicodedata.normalize("NFKC", part) != part:
                self._fail(place, f"Python would normalize the name {part!r}; enclose it in backquotes: `{part}`")
            elif kind == "space":
                part = " " * len(part)
            elif part == "`":
                self._fail(place, "the second backquote is missing; write it at the end of the name")
            elif part in "#;:":
                self._fail(place, f"{part!r} is not allowed here; enclose names that contain it in backquotes")
            parts.append(part)
        return "".join(parts)

    def _check_string(self, part: str, place: int) -> None:
        if len(part) == 2 and self._text[place + 2 : place + 3] == part[0]:
            self._fail(place, "triple-quoted text is not allowed; use one quotation mark on each side")
        if "\0" in part:
            self._fail(place, "quoted text must not contain a NUL character; remove it")
        if "\n" in part or "\r" in part:
            self._fail(place, r"quoted text must not continue on the next line; write \n for a line break")
        if _STRANGE_ESCAPE.search(part):
            self._fail(place, r"the text contains an unknown escape sequence; write a backslash as \\")

    def _parse(self) -> ast.expr:
        leading = len(self._source) - len(self._source.lstrip())
        self._leading = leading
        try:
            tree = ast.parse(self._source[leading:], mode="eval").body
        except SyntaxError as error:
            self._fail(leading + max(0, (error.offset or 1) - 1), f"this is not a valid condition: {error.msg}")
        except (ValueError, RecursionError, MemoryError, OverflowError) as error:
            self._fail(0, f"the condition cannot be parsed ({type(error).__name__}); it may be nested too deeply")
        return tree

    # Tree to nodes.

    def _node(self, tree: ast.expr) -> Node:
        # Parts are counted here, not in the tree, because the middle operand of a chained comparison is built twice.
        self._num_nodes += 1
        self._depth += 1
        if self._num_nodes > MAX_NODES * self._slack:
            self._fail(tree, f"the condition has more than {MAX_NODES} parts; shorten it")
        if self._depth > MAX_DEPTH * self._slack:
            self._fail(0, f"the condition is nested more than {MAX_DEPTH} levels deep; simplify it")
        node = self._makers.get(type(tree), self._refuse)(tree)
        self._depth -= 1
        return node

    def _constant(self, tree: ast.Constant) -> Node:
        return self._literal(tree, tree.value)

    def _refuse(self, tree: ast.expr) -> NoReturn:
        remedies: dict[type[ast.expr], str] = {
            ast.Attribute: "a name with a dot; enclose it in backquotes, as in `user.score`",
            ast.Tuple: "a list, which is only allowed after 'in'",
            ast.List: "a list, which is only allowed after 'in'",
        }
        what = remedies.get(type(tree), f"{type(tree).__name__}, which conditions do not support")
        self._fail(
            tree,
            f"found {what}; use only columns, numbers, text, True, False, + - * /, < <= > >= == !=, in, "
            f"is None, and, or, not, {', '.join(_TEXT_TESTS)}",
        )

    def _column(self, tree: ast.Name) -> Node:
        name = self._quoted.get(tree.id, tree.id)
        try:
            return column(*self._resolve(name))
        except LookupError as error:
            self._fail(tree, str(error.args[0]))

    def _literal(self, tree: ast.expr, value: object) -> Node:
        if value is None:
            self._fail(tree, "None is only allowed after 'is': write 'score is None' or 'score is not None'")
        if not isinstance(value, (bool, int, float, str)):
            self._fail(tree, f"{type(value).__name__} is not allowed; write a number, text, True or False")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            self._fail(tree, "the integer does not fit in 64 bits; write it as a float, such as 1e30")
        if isinstance(value, float) and value == float("inf"):
            self._fail(tree, "the number is too large for a double; write a smaller number")
        if isinstance(value, str) and any(0xD800 <= ord(c) < 0xE000 for c in value):
            self._fail(tree, "the text contains a lone surrogate, which is not a valid character; remove it")
        return literal(value)

    def _joined(self, tree: ast.BoolOp) -> Node:
        word = "and" if isinstance(tree.op, ast.And) else "or"
        return junction(word, [self._truth(value, word) for value in tree.values])

    def _truth(self, tree: ast.expr, word: str) -> Node:
        node = self._node(tree)
        if node.kind != "bool":
            self._fail(tree, f"'{word}' requires conditions, not {_a(node.kind)}; compare it, as in {_compared(node)}")
        return node

    def _unary(self, tree: ast.UnaryOp) -> Node:
        if isinstance(tree.op, ast.Not):
            return negation(self._truth(tree.operand, "not"))
        if isinstance(tree.op, ast.Invert):
            self._fail(tree, "'~' is not allowed; write 'not (...)'")
        node = self._number(tree.operand, tree)
        if isinstance(tree.op, ast.UAdd):
            return node
        if isinstance(node.literal, (int, float)):
            return self._literal(tree, -node.literal)
        return call("negate", "float", f"-({node.text})", as_float(node))

    def _number(self, tree: ast.expr, whole: ast.expr) -> Node:
        node = self._node(tree)
        if node.kind not in NUMBERS:
            self._fail(whole, f"arithmetic requires numbers, but {_short(node)} is {_a(node.kind)}")
        return node

    def _arithmetic(self, tree: ast.BinOp) -> Node:
        if type(tree.op) not in _ARITHMETIC:
            self._fail(tree, f"the operator {type(tree.op).__name__} is not allowed; use + - * /, and, or, not")
        sign, function = _ARITHMETIC[type(tree.op)]
        left, right = self._number(tree.left, tree), self._number(tree.right, tree)
        return call(function, "float", f"({left.text}) {sign} ({right.text})", as_float(left), as_float(right))

    def _comparison(self, tree: ast.Compare) -> Node:
        parts, left = [], tree.left
        for operator, right in zip(tree.ops, tree.comparators, strict=True):
            parts.append(self._pair(tree, left, operator, right))
            left = right
        return junction("and", parts)

    def _pair(self, tree: ast.expr, left: ast.expr, operator: ast.cmpop, right: ast.expr) -> Node:
        if isinstance(operator, (ast.Is, ast.IsNot)):
            if not (isinstance(right, ast.Constant) and right.value is None):
                self._fail(tree, "'is' is only allowed before None; write == to compare")
            node = self._node(left)
            missing = call("is_null", "bool", f"({node.text}) is None", node)
            return missing if isinstance(operator, ast.Is) else negation(missing)
        if isinstance(operator, (ast.In, ast.NotIn)):
            member = self._member(self._node(left), right)
            return member if isinstance(operator, ast.In) else negation(member)
        return self._ordered(tree, self._node(left), operator, self._node(right))

    def _ordered(self, tree: ast.expr, a: Node, operator: ast.cmpop, b: Node) -> Node:
        sign, function = _ORDER[type(operator)]
        if a.kind != b.kind and not (a.kind in NUMBERS and b.kind in NUMBERS):
            self._fail(tree, f"{_short(a)} is {_a(a.kind)} and {_short(b)} is {_a(b.kind)}; they cannot be compared")
        if a.kind == "bool" and sign not in ("==", "!="):
            self._fail(tree, f"truth values have no order ({sign}); use ==, !=, and, or, not")
        if a.kind != b.kind:
            a, b = as_float(a), as_float(b)
        return call(function, "bool", f"({a.text}) {sign} ({b.text})", a, b)

    def _member(self, node: Node, right: ast.expr) -> Node:
        if not isinstance(right, (ast.Tuple, ast.List, ast.Set)) or not right.elts:
            self._fail(right, "'in' requires a list of values: place in ['a', 'b']; to search for text, use contains")
        items = [self._node(item) for item in right.elts]
        for tree, item in zip(right.elts, items, strict=True):
            if item.literal is None:
                self._fail(tree, "a list may contain only numbers, text, True and False, not columns or expressions")
            if item.kind != node.kind and not {item.kind, node.kind} <= set(NUMBERS):
                self._fail(
                    tree,
                    f"{_short(node)} is {_a(node.kind)} and {_short(item)} is {_a(item.kind)}; they cannot be compared",
                )
        return membership(node, items)

    def _call(self, tree: ast.Call) -> Node:
        name = tree.func.id if isinstance(tree.func, ast.Name) else None
        if name not in _TEXT_TESTS or len(tree.args) != 2 or tree.keywords:
            self._fail(tree, f"the only allowed calls are {', '.join(f'{n}(column, text)' for n in _TEXT_TESTS)}")
        value, pattern = (self._node(argument) for argument in tree.args)
        if value.kind != "str" or not isinstance(pattern.literal, str):
            self._fail(tree, f"{name}(column, text) requires a text column and quoted text, as in {name}(place, 'a')")
        text = f"{name}({value.text}, {pattern.text})"
        return call(_TEXT_TESTS[name], "bool", text, value, pattern=pattern.literal)

    def _fail(self, place: ast.expr | int, message: str) -> NoReturn:
        if not isinstance(place, int):
            # Python counts columns in bytes of UTF-8.
            line = self._source[self._leading :].encode()[: place.col_offset]
            place = self._leading + len(line.decode(errors="ignore"))
        start = max(0, place - _SHOWN // 2)
        shown = self._text if len(self._text) <= _SHOWN else f"…{self._text[start : start + _SHOWN]}…"
        raise ConfigError(f"where={shown!r}, character {place + 1}: {message}")


def _compared(node: Node) -> str:
    """Return an example comparison that uses the node, for error messages."""
    return f"{_short(node)} == 'a'" if node.kind == "str" else f"{_short(node)} > 5"


def _a(kind: str) -> str:
    return {"int": "a number", "float": "a number", "str": "text", "bool": "a truth value"}[kind]


def _short(node: Node) -> str:
    return node.text if len(node.text) <= _SHOWN else f"{node.text[:_SHOWN]}…"
