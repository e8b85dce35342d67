"""Implementation of the sharder option `where`. Rows that do not meet its condition are rejected.

Conditions have the same syntax as the loader's `where=`, and treat missing values in the same way
(dataset/filter/expression.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from streamvid.dataset.column_groups import nearest
from streamvid.dataset.filter.expression import compile_condition
from streamvid.dataset.filter.nodes import Node
from streamvid.dataset.tabular.rows import Rows
from streamvid.errors import ConfigError, Rejected
from streamvid.sharder.curation.options import GROUP
from streamvid.sharder.options import ShardOptions
from streamvid.sharder.probing import Probes
from streamvid.sharder.source.records import Record, RecordSet, Rejection
from streamvid.sharder.units.probe_unit import Probe

if TYPE_CHECKING:
    import pyarrow as pa

FACTS = {
    "width": "int",
    "height": "int",
    "num_frames": "int",
    "fps": "float",
    "duration_seconds": "float",
    "aspect_ratio": "float",
    "has_audio": "bool",
    "audio_start_seconds": "float",
}
"""Types of the facts that probing determines. Sizes are display sizes in pixels; aspect_ratio is width / height;
audio_start_seconds is the time at which the audio begins, minus the time of the first frame."""
_OF_AUDIO = frozenset(("has_audio", "audio_start_seconds"))
_OWN = {"text": "str", "source": "str"}
_USER_KINDS = {"int64": "int", "double": "float", "bool": "bool", "string": "str"}
_ARROW = {"int": "int64", "float": "float64", "bool": "bool", "str": "string"}
_ROWS_AT_ONCE = 1 << 14
_SHOWN = 60


@dataclass(frozen=True)
class Where:
    """Condition that selects records.

    text: the condition as the user wrote it.
    node: the parsed condition.
    kinds: maps the name of each available column to its type. The columns are the user's columns (such as
        `user.aesthetic`), FACTS, `text` and `source`.
    figures: names of the columns that curation adds, such as `user.motion`.
    """

    text: str
    node: Node
    kinds: Mapping[str, str]
    figures: frozenset[str]

    @property
    def needs_probe(self) -> bool:
        """True if the condition uses a fact that requires probing, or a figure that curation adds."""
        return bool(self.node.columns & (FACTS.keys() | self.figures))

    @property
    def can_fail_early(self) -> bool:
        """True if a row can fail the condition before its figures are known."""
        # Only this operator gives a result other than unknown for a missing value. A text that contains it is harmless.
        return bool(self.node.columns & self.figures) and " is None" not in self.node.text

    def keep(self, records: RecordSet, probes: Probes | None, *, is_final: bool = True) -> RecordSet:
        """Return the records for which the condition is true. Reject all other records with kind "where".

        is_final: False to keep records for which the result depends on figures that are not yet known.
        probes: results of probing all records, if the condition requires them. A record that was rejected by probing is
            kept, so that the original reason is reported.
        """
        rejections = list(records.rejections)

        def kept() -> Iterator[Record]:
            rows = iter(records.records)
            while part := list(islice(rows, _ROWS_AT_ONCE)):
                found = [None if probes is None else probes(record) for record in part]
                table = self._table(part, found)
                shown = table if is_final else table.drop_columns(sorted(self.figures & self.node.columns))
                admitted = self._mask(table, unknown=not is_final)
                for number, record in enumerate(part):
                    if admitted[number] or isinstance(found[number], Rejected):
                        yield record
                    else:
                        rejections.append(Rejection(record.row, record.source, self._reason(shown, number), "where"))

        return replace(records, records=Rows.of(Record, kept()), rejections=tuple(rejections))

    def _mask(self, table: pa.Table, unknown: bool) -> list[bool]:
        import pyarrow as pa
        import pyarrow.compute as pc

        found = pc.fill_null(self.node.run(table), unknown)
        return [bool(value) for value in (found.to_pylist() if not isinstance(found, pa.Scalar) else [found.as_py()])]

    def _table(self, records: Sequence[Record], probes: Sequence[Probe | Rejected | None]) -> pa.Table:
        import pyarrow as pa

        columns = {}
        for name in sorted(self.node.columns):
            values = [_value(name, record, probe) for record, probe in zip(records, probes, strict=True)]
            columns[name] = pa.array(values, pa.type_for_alias(_ARROW[self.kinds[name]]))
        return pa.table(columns)

    def _reason(self, table: pa.Table, number: int) -> str:
        names = {name: name.removeprefix("user.") for name in table.column_names}
        said = (f"{own}={_short(table.column(name)[number].as_py())}" for name, own in names.items())
        return f"the row does not meet where={_short(self.text)}: {', '.join(said)}"


def parse_where(text: str, user_types: Mapping[str, str], figures: Collection[str] = ()) -> Where:
    """Parse a condition on the user's columns, FACTS, `text` and `source`.

    user_types: maps each user column to its type in the index. figures: names of the columns that curation adds.
    Raises ConfigError if the condition is invalid; the message contains the condition, the position of the error and a
    remedy.
    """
    kinds = {**FACTS, **_OWN, **{f"user.{name}": _USER_KINDS[kind] for name, kind in user_types.items()}}

    def resolve(name: str) -> tuple[str, str]:
        for candidate in (f"user.{name}", name):
            if candidate in kinds:
                return candidate, kinds[candidate]
        known = [*user_types, *FACTS, *_OWN]
        raise LookupError(f"{name!r} is not a known column{nearest(name, known)}; use one of {', '.join(known)}")

    added = frozenset(f"user.{name}" for name in figures)
    return Where(text, compile_condition(text, resolve), kinds, added)


def apply_where(
    records: RecordSet, options: ShardOptions, probes: Probes | None = None, *, is_curated: bool = True
) -> RecordSet:
    """Reject the rows that do not match the `where` condition, if there is one.

    The sharder calls this function before probing (without `probes`), after probing, and after curation. A condition is
    evaluated as soon as everything that it requires is known. If curation follows (`is_curated` is False), rows that
    cannot match regardless of their figures are rejected before curation, so that their files are not decoded.
    Raises ConfigError if a condition that requires probes is applied to text rows, which are not probed.
    """
    text = options.source.where
    if text is None:
        return records
    where = parse_where(text, records.user_types, [column.name for column in options.curation.columns])
    if options.curation.dedup is not None and f"user.{GROUP}" in where.node.columns:
        raise ConfigError(
            f"source.where={text!r}: near-duplicates are grouped after the rows are selected, so {GROUP!r} is not "
            "known yet; remove this column from the condition, or use the condition as the loader's `where`"
        )
    if options.clips.is_text and where.needs_probe:
        names = sorted(where.node.columns & FACTS.keys())
        raise ConfigError(
            f"source.where={text!r}: {names[0]!r} describes videos, but a dataset with clips.kind='text' contains no "
            f"videos; use one of text, source{''.join(f', {name}' for name in records.user_types)}"
        )
    if options.trust_metadata and (names := sorted(where.node.columns & _OF_AUDIO)):
        raise ConfigError(
            f"source.where={text!r}: {names[0]!r} is known only after a file is probed, but with trust_metadata=True, "
            "rows are selected before files are probed; to require audio, set clips.audio='require' (--audio "
            "require), or omit trust_metadata"
        )
    if not is_curated:
        return where.keep(records, probes, is_final=False) if where.can_fail_early else records
    return where.keep(records, probes) if where.needs_probe == (probes is not None) else records


def _value(name: str, record: Record, probe: Probe | Rejected | None) -> Any:
    if name in _OWN:
        return record.caption if name == "text" else record.source
    if name not in FACTS:
        return record.columns.get(name.removeprefix("user."))
    if not isinstance(probe, Probe):
        return None
    if name == "aspect_ratio":
        return probe.width / probe.height if probe.height else None
    return getattr(probe, name)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
