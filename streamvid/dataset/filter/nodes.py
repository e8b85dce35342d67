"""Nodes of a condition: pyarrow calls over arrays of int64, float64, string or bool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

NUMBERS = ("int", "float")
_TYPES = {"int": pa.int64(), "float": pa.float64(), "str": pa.string(), "bool": pa.bool_()}


@dataclass(frozen=True, slots=True)
class Node:
    """Part of a condition.

    kind: "int", "float", "str" or "bool".
    text: canonical spelling.
    columns: index columns that the part reads.
    run: function that computes the values of the part from a table, as an array or a scalar. Missing values and NaN are
        null.
    literal: value of a literal, or None for other parts.
    """

    kind: str
    text: str
    columns: frozenset[str]
    run: Callable[[Any], Any]
    literal: bool | int | float | str | None = None


def kind_of(kind: Any) -> str | None:
    """Return the kind that values of a pyarrow type have in conditions, or None if the type is not supported."""
    if types.is_boolean(kind):
        return "bool"
    if types.is_uint64(kind) or types.is_floating(kind):
        return "float"
    if types.is_integer(kind):
        return "int"
    return "str" if types.is_string(kind) or types.is_large_string(kind) else None


def column(name: str, kind: str) -> Node:
    """Return a node for the values of an index column."""

    def run(table: Any) -> Any:
        values = pc.cast(table.column(name), _TYPES[kind], safe=False)
        return _without_nan(values) if kind == "float" else values

    return Node(kind, f"`{name}`", frozenset((name,)), run)


def literal(value: bool | int | float | str) -> Node:
    """Return a node for a literal value."""
    kind = {bool: "bool", int: "int", float: "float", str: "str"}[type(value)]
    scalar = pa.scalar(value, _TYPES[kind])
    # `ascii`, because the characters that `repr` escapes differ between versions of Python.
    return Node(kind, ascii(value), frozenset(), lambda _: scalar, value)


def call(function: str, kind: str, text: str, *parts: Node, **options: Any) -> Node:
    """Return a node that calls a pyarrow.compute function with the values of `parts`."""

    def run(table: Any) -> Any:
        result = getattr(pc, function)(*(part.run(table) for part in parts), **options)
        return _without_nan(result) if kind == "float" else result

    return Node(kind, text, _columns(parts), run)


def negation(part: Node) -> Node:
    """Return a node that negates a condition."""
    return call("invert", "bool", f"not ({part.text})", part)


def junction(word: str, parts: Sequence[Node]) -> Node:
    """Return a node that joins conditions with `and` or `or`. Null means unknown, so `null or True` is True."""
    if len(parts) == 1:
        return parts[0]

    def run(table: Any) -> Any:
        return reduce(pc.and_kleene if word == "and" else pc.or_kleene, [part.run(table) for part in parts])

    return Node("bool", f" {word} ".join(f"({part.text})" for part in parts), _columns(parts), run)


def membership(part: Node, items: Sequence[Node]) -> Node:
    """Return a node for `part in items`, where the items are literals of the same kind as `part`.

    If integers and floats are mixed, all values are compared as doubles. The result for a missing value is null.
    """
    is_float = any(node.kind == "float" for node in (part, *items))
    value = as_float(part) if is_float else part
    literals = [float(item.literal) if is_float and item.literal is not None else item.literal for item in items]
    text = f"({part.text}) in ({', '.join(sorted({item.text for item in items}))},)"

    def run(table: Any) -> Any:
        values = value.run(table)
        found = pc.is_in(values, value_set=pa.array(literals, _TYPES[value.kind]))
        return pc.if_else(pc.is_valid(values), found, pa.scalar(None, pa.bool_()))

    return Node("bool", text, part.columns, run)


def as_float(part: Node) -> Node:
    """Return a node that converts numbers to doubles. Integers beyond 2**53 are rounded."""
    if part.kind == "float":
        return part

    def run(table: Any) -> Any:
        return pc.cast(part.run(table), pa.float64(), safe=False)

    return Node("float", part.text, part.columns, run)


def _columns(parts: Sequence[Node]) -> frozenset[str]:
    return frozenset[str]().union(*(part.columns for part in parts))


def _without_nan(values: Any) -> Any:
    return pc.if_else(pc.is_nan(values), pa.scalar(None, pa.float64()), values)
