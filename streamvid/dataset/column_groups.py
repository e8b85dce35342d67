"""Columns that were put beside a sealed samples index: which file each column is read from, and rows joined again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from streamvid.errors import DatasetError

if TYPE_CHECKING:
    import pyarrow as pa

    from streamvid.dataset.manifest import FileInfo


@dataclass(frozen=True, slots=True)
class ColumnGroup:
    """Columns that were put beside the samples index later: new ones, or other values of those there are.

    files: one for each of the samples files, in their order, with the same row groups and rows; each has the samples'
    keys too. columns: index column → type, as `index.schema` names types. source_sha256: of what they were made of.
    """

    files: tuple[FileInfo, ...]
    columns: Mapping[str, str]
    source_sha256: str = ""


def columns_digest(base_fingerprint: str, groups: Iterable[ColumnGroup]) -> str:
    """The content fingerprint of a dataset with groups of columns; `base_fingerprint` is that without them."""
    digest = hashlib.sha256(f"{base_fingerprint}\n".encode())
    for group in groups:
        for file in group.files:
            digest.update(f"{file.path} {file.sha256}\n".encode())
    return digest.hexdigest()


def groups_to_json(groups: Iterable[ColumnGroup]) -> list[dict[str, Any]]:
    """The manifest's field `columns`."""
    return [
        {
            "columns": dict(group.columns),
            "files": [file.path for file in group.files],
            "source_sha256": group.source_sha256,
        }
        for group in groups
    ]


def groups_from_json(
    value: Sequence[Mapping[str, Any]], sample_files: Sequence[FileInfo], files: Sequence[FileInfo], where: str
) -> tuple[ColumnGroup, ...]:
    """What `groups_to_json` wrote; `files`: those that its paths name. KeyError, DatasetError for what cannot be."""
    known = {file.path: file for file in files}
    groups = tuple(
        ColumnGroup(
            tuple(known[path] for path in group["files"]),
            {str(name): str(kind) for name, kind in group["columns"].items()},
            str(group["source_sha256"]),
        )
        for group in value
    )
    for group in groups:
        if len(group.files) != len(sample_files) or not group.columns or set(group.columns.values()) - COLUMN_TYPES:
            raise DatasetError(
                f"{where}: a group of columns has {len(group.files)} files of {group.columns}; there is one for each "
                f"of {len(sample_files)} samples files, and types are {', '.join(sorted(COLUMN_TYPES))}; copy it again"
            )
    return groups


COLUMN_TYPES = frozenset(("bool", "double", "int64", "sha256", "string"))
"""What later columns may be."""


@dataclass(frozen=True)
class ColumnGroups:
    """The groups of a dataset, the last of which counts where several have a column.

    places: path of a samples file → its number, which is that of its files in each group.
    """

    groups: tuple[ColumnGroup, ...]
    places: Mapping[str, int]

    @staticmethod
    def of(groups: tuple[ColumnGroup, ...], sample_files: Sequence[FileInfo]) -> ColumnGroups:
        return ColumnGroups(groups, {file.path: number for number, file in enumerate(sample_files)})

    def files_of(self, samples_path: str, columns: Sequence[str]) -> list[tuple[str, list[str]]]:
        """(path, columns to read of it) for the rows of a samples file; the samples file itself first."""
        wanted: dict[int, list[str]] = {}
        for name in columns:
            wanted.setdefault(self._owner(name), []).append(name)
        place = self.places[samples_path]
        return [
            (samples_path if owner < 0 else self.groups[owner].files[place].path, names)
            for owner, names in sorted(wanted.items())
        ]

    def _owner(self, column: str) -> int:
        """Number of the last group that has a column, -1 where the samples index itself counts."""
        numbers = (number for number in reversed(range(len(self.groups))) if column in self.groups[number].columns)
        return next(numbers, -1)

    def schema(self, base: pa.Schema) -> pa.Schema:
        """All columns and their types; `base` is that of the samples files."""
        from streamvid.dataset.index import schema  # it needs the manifest, which needs this module

        for group in self.groups:
            for field in schema(dict(group.columns)):
                number = base.get_field_index(field.name)
                base = base.append(field) if number < 0 else base.set(number, field)
        return base

    def digest(self, columns: Iterable[str]) -> str | None:
        """What tells values of these columns from those of another annotation; None where no group has one of them."""
        files = [
            f"{name} {file.sha256}\n"
            for name in sorted(set(columns))
            if (owner := self._owner(name)) >= 0
            for file in self.groups[owner].files
        ]
        return hashlib.sha256("".join(files).encode()).hexdigest() if files else None


def join(parts: Sequence[pa.Table], names: Sequence[str]) -> pa.Table:
    """Tables of the same rows side by side, their columns in the order of `names`."""
    import pyarrow as pa

    columns = {name: table.column(name) for table in parts for name in table.column_names}
    return pa.table({name: columns[name] for name in names if name in columns})


def nearest(name: str, names: Iterable[str]) -> str:
    """ "; did you mean 'motion'?" where a name is much like another, else nothing."""
    near = get_close_matches(name, sorted(set(names)), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""
