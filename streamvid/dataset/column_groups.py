"""Lookup and joining of columns that were added to the samples index of a sealed dataset."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING

from streamvid.dataset.index import schema
from streamvid.dataset.manifest import ColumnGroup, FileInfo, Manifest

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class ColumnGroups:
    """Column groups of a dataset. If several groups contain the same column, the last group takes precedence.

    places: maps the path of each sample file to its position. The matching file in each group has the same position.
    """

    groups: tuple[ColumnGroup, ...]
    places: Mapping[str, int]

    @property
    def is_partial(self) -> bool:
        """True if some samples have no value in a column because they were added after the column."""
        return any(None in group.files for group in self.groups)

    @staticmethod
    def of(manifest: Manifest) -> ColumnGroups:
        places = {file.path: number for number, file in enumerate(manifest.files.samples)}
        return ColumnGroups(manifest.columns, places)

    def files_of(self, samples_path: str, columns: Sequence[str]) -> list[tuple[str, list[str]]]:
        """Return a (path, columns to read) tuple for each file with any of `columns`; the sample file is first."""
        wanted: dict[str, list[str]] = {samples_path: []}
        place = self.places[samples_path]
        for name in columns:
            owner = self._owner(name, place)
            wanted.setdefault(samples_path if owner is None else owner.path, []).append(name)
        return [(path, names) for path, names in wanted.items() if names]

    def _owner(self, column: str, place: int) -> FileInfo | None:
        """Return the last file that contains `column` for the sample file at position `place`, or None."""
        files = (group.files[place] for group in reversed(self.groups) if column in group.columns)
        return next((file for file in files if file is not None), None)

    def schema(self, base: pa.Schema) -> pa.Schema:
        """Return the schema of all columns, including columns added later. base: schema of the sample files."""
        for group in self.groups:
            for field in schema(group.columns):
                number = base.get_field_index(field.name)
                base = base.append(field) if number < 0 else base.set(number, field)
        return base

    def digest(self, columns: Iterable[str]) -> str | None:
        """Return a digest of the values that groups add to `columns`, or None if no group contains any of them."""
        owners = ((name, self._owner(name, place)) for name in sorted(set(columns)) for place in self.places.values())
        files = [f"{name} {file.sha256}\n" for name, file in owners if file is not None]
        return hashlib.sha256("".join(files).encode()).hexdigest() if files else None


def join(parts: Sequence[pa.Table], names: Sequence[str]) -> pa.Table:
    """Join tables that have the same rows. Columns follow the order of `names`, and later tables take precedence."""
    import pyarrow as pa

    columns = {name: table.column(name) for table in parts for name in table.column_names}
    return pa.table({name: columns[name] for name in names if name in columns})


def typed(table: pa.Table, names: Sequence[str], schema: pa.Schema) -> pa.Table:
    """Return the columns in `names` with the types of `schema`. Columns missing from `table` are filled with nulls."""
    import pyarrow as pa

    def column(name: str) -> pa.ChunkedArray:
        kind = schema.field(name).type
        if name not in table.column_names:
            return pa.chunked_array([pa.nulls(table.num_rows, kind)])
        return table.column(name).cast(kind)

    return pa.table({name: column(name) for name in names if name in schema.names})


def nearest(name: str, names: Iterable[str]) -> str:
    """Return a hint such as "; did you mean 'motion'?" if one of `names` is similar to `name`; otherwise ""."""
    near = get_close_matches(name, sorted(set(names)), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""
