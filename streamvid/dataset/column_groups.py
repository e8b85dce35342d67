"""Lookup and joining of columns that were added to a sealed samples index."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING

from streamvid.dataset.index import schema
from streamvid.dataset.manifest import ColumnGroup, Manifest

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class ColumnGroups:
    """Column groups of a dataset. If several groups contain the same column, the last group takes precedence.

    places: path of a samples file → its index, which is also the index of the matching file in each group.
    """

    groups: tuple[ColumnGroup, ...]
    places: Mapping[str, int]

    @staticmethod
    def of(manifest: Manifest) -> ColumnGroups:
        places = {file.path: number for number, file in enumerate(manifest.files.samples)}
        return ColumnGroups(manifest.columns, places)

    def files_of(self, samples_path: str, columns: Sequence[str]) -> list[tuple[str, list[str]]]:
        """Return (path, columns to read) for each file that contains some of `columns`, with the samples file first."""
        wanted: dict[int, list[str]] = {}
        for name in columns:
            wanted.setdefault(self._owner(name), []).append(name)
        place = self.places[samples_path]
        return [
            (samples_path if owner < 0 else self.groups[owner].files[place].path, names)
            for owner, names in sorted(wanted.items())
        ]

    def _owner(self, column: str) -> int:
        """Return the index of the last group that contains a column, or -1 if no group contains it."""
        numbers = (number for number in reversed(range(len(self.groups))) if column in self.groups[number].columns)
        return next(numbers, -1)

    def schema(self, base: pa.Schema) -> pa.Schema:
        """Return the schema of all columns, including those added later. base: schema of the samples files."""
        for group in self.groups:
            for field in schema(group.columns):
                number = base.get_field_index(field.name)
                base = base.append(field) if number < 0 else base.set(number, field)
        return base

    def digest(self, columns: Iterable[str]) -> str | None:
        """Return a digest of the values that groups add to `columns`, or None if no group contains any of them."""
        files = [
            f"{name} {file.sha256}\n"
            for name in sorted(set(columns))
            if (owner := self._owner(name)) >= 0
            for file in self.groups[owner].files
        ]
        return hashlib.sha256("".join(files).encode()).hexdigest() if files else None


def join(parts: Sequence[pa.Table], names: Sequence[str]) -> pa.Table:
    """Join tables that have the same rows. Columns follow the order of `names`, and later tables take precedence."""
    import pyarrow as pa

    columns = {name: table.column(name) for table in parts for name in table.column_names}
    return pa.table({name: columns[name] for name in names if name in columns})


def nearest(name: str, names: Iterable[str]) -> str:
    """Return a hint such as "; did you mean 'motion'?" if one of `names` is similar to `name`, else ""."""
    near = get_close_matches(name, sorted(set(names)), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""
