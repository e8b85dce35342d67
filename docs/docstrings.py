"""Griffe extension that reads the package's docstrings: a line "name: text" documents the argument of that name."""

from __future__ import annotations

import re
from typing import Any

import griffe

_LINE = re.compile(r"^(?P<names>\*{0,2}\w+(?:, \*{0,2}\w+)*): (?P<text>.*)$")


class ArgumentLines(griffe.Extension):
    """Turn argument lines into the "Args:" section that the Google style knows."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Rewrite the docstring of a function."""
        self._rewrite(func, [parameter.name for parameter in func.parameters])

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        """Rewrite the docstring of a class: its arguments are those of its constructor, or its fields."""
        names = [parameter.name for parameter in cls.parameters] or [*cls.attributes]
        self._rewrite(cls, names)

    def _rewrite(self, documented: griffe.Function | griffe.Class, names: list[str]) -> None:
        if documented.docstring is None:
            return
        prose: list[str] = []
        arguments: list[str] = []
        place = prose
        for line in documented.docstring.value.splitlines():
            match = _LINE.match(line)
            if match and all(name.strip("*") in names for name in match["names"].split(", ")):
                place = arguments
                for name in match["names"].split(", "):
                    arguments.append(f"    {name.strip('*')}: {match['text']}")
            elif line.startswith("    ") and place is arguments:
                arguments.append(f"        {line.strip()}")
            else:
                place = prose
                prose.append(line)
        if arguments:
            documented.docstring.value = "\n".join([*prose, "", "Args:", *arguments])
