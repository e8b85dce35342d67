"""Rows that do not fit in memory: dataclass values stored as Arrow columns in a temporary file."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from operator import attrgetter
from typing import Any, Generic, TypeVar, get_type_hints, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streamvid.dataset.arrow import array_of
from streamvid.errors import StorageError

BLOCK_ROWS = 1 << 14
_MEMORY_BYTES = 1 << 22
_PART_MEMORY_BYTES = 1 << 16
_MAX_PARTS = 512
#: Size of the rows that are distributed to parts at once. Many small batches would be slow to write and read.
_GATHERED_BYTES = 1 << 25
_Row = TypeVar("_Row")
#: Compression costs less time than writing and reading the bytes that it saves.
_STORED = pa.ipc.IpcWriteOptions(compression="lz4" if pa.Codec.is_available("lz4") else None, use_threads=False)
_TYPES = {int: pa.int64(), float: pa.float64(), bool: pa.bool_(), str: pa.string()}


class Spill:
    """Arrow record batches in a temporary file. Small data stays in memory.

    The file is in the system's temporary directory (TMPDIR). It is unlinked, so it disappears when the process ends.

    Methods raise StorageError if the file cannot be written or read.
    """

    def __init__(self, memory_bytes: int = _MEMORY_BYTES) -> None:
        self.num_rows = 0
        self._file = tempfile.SpooledTemporaryFile(memory_bytes)  # noqa: SIM115 — closed with this object
        weakref.finalize(self, self._file.close)
        self._bounds = [0]
        self._last: tuple[int, Any] = (-1, None)

    def append(self, batch: pa.RecordBatch) -> None:
        """Write a batch."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema, options=_STORED) as writer:
            writer.write_batch(batch)
        data = sink.getvalue()
        with _naming("write"):
            self._file.seek(self._bounds[-1])
            self._file.write(data)
        self._bounds.append(self._bounds[-1] + data.size)
        self.num_rows += len(batch)

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def __getitem__(self, number: int) -> pa.RecordBatch:
        """Read a batch. Reading the same batch again is fast."""
        if self._last[0] != number:
            self._last = number, self.read(number)
        return self._last[1]

    def read(self, number: int, columns: Sequence[int] | None = None) -> pa.RecordBatch:
        """Read some columns of a batch. columns: numbers of the columns; None reads all."""
        start, stop = self._bounds[number : number + 2]
        with _naming("read"):
            self._file.seek(start)
            data = self._file.read(stop - start)
        options = pa.ipc.IpcReadOptions(included_fields=columns, use_threads=False)
        with pa.ipc.open_stream(pa.py_buffer(data), options=options) as reader:
            return reader.read_next_batch()


@contextlib.contextmanager
def _naming(verb: str) -> Iterator[None]:
    """Convert operating system errors about a temporary file to StorageErrors with a remedy."""
    try:
        yield
    except OSError as error:
        remedy = "free disk space there" if verb == "write" else "check the disk"
        raise StorageError(
            f"cannot {verb} a temporary file in {tempfile.gettempdir()}: {error.strerror or error}; {remedy}, or set "
            "TMPDIR to another folder"
        ) from error


class Rows(Sequence[_Row], Generic[_Row]):
    """Immutable, disk-backed sequence of instances of one dataclass. Instances are created when they are read.

    Fields with numbers, booleans or text, including fields of nested dataclasses, are Arrow columns. All other fields
    are stored as pickles, which is safe because only this process can write the file. Sequential reads are fast; random
    reads are slow.
    """

    def __init__(self, cls: type[_Row], spill: Spill, start: int = 0, stop: int | None = None) -> None:
        self._form = _form_of(cls)
        self._spill = spill
        self._range = range(start, spill.num_rows if stop is None else stop)
        self._cached: tuple[int, list[_Row]] = (-1, [])

    @staticmethod
    def of(kind: type[_Row], values: Iterable[_Row]) -> Rows[_Row]:
        """Store the values, and return them as rows.

        Errors raised while iterating over `values` propagate unchanged.
        """
        form, spill, values = _form_of(kind), Spill(), iter(values)
        while block := list(islice(values, BLOCK_ROWS)):
            spill.append(form.encode(block))
        return Rows(kind, spill)

    def __len__(self) -> int:
        return len(self._range)

    def __iter__(self) -> Iterator[_Row]:
        for batch in self._blocks():
            yield from self._form.decode(batch)

    @overload
    def __getitem__(self, index: int) -> _Row: ...
    @overload
    def __getitem__(self, index: slice) -> Rows[_Row]: ...
    def __getitem__(self, index: int | slice) -> _Row | Rows[_Row]:
        found = self._range[index]
        if isinstance(found, range):
            if found.step != 1:
                raise ValueError(f"slice step {found.step}: must be 1; use `arranged()` for another order")
            return Rows(self._form.cls, self._spill, found.start, max(found.start, found.stop))
        number, place = divmod(found, BLOCK_ROWS)
        if self._cached[0] != number:
            self._cached = number, list(self._form.decode(self._spill[number]))
        return self._cached[1][place]

    def tuples(self, *names: str) -> Iterator[tuple[Any, ...]]:
        """For each row, yield a tuple with the values of these fields.

        Fields of nested dataclasses have names like "clip.path".
        """
        fields = {field.name: (number, field) for number, field in enumerate(self._form.fields)}
        wanted = [fields[name][1] for name in names]
        for batch in self._blocks(sorted({fields[name][0] for name in names})):
            yield from zip(*(field.decode(batch.column(field.name)) for field in wanted), strict=True)

    def arranged(self, order: npt.NDArray[np.int64]) -> Rows[_Row]:
        """Return rows in another order: the row with index `order[i]` becomes row i.

        The rows are first distributed among parts that fit in memory, so that files are read and written sequentially.
        """
        places = np.empty(len(order), np.int64)
        places[order] = np.arange(len(order))
        part_rows = BLOCK_ROWS * max(1, -(-len(order) // (BLOCK_ROWS * _MAX_PARTS)))
        parts = [_Part() for _ in range(0, len(order), part_rows)]
        start = 0
        for batch in _gathered(self._blocks()):
            targets = places[start : start + len(batch)]
            start += len(batch)
            in_parts = np.argsort(targets // part_rows, kind="stable")
            by_part, targets = batch.take(array_of(in_parts)), targets[in_parts]
            bounds = np.searchsorted(targets // part_rows, np.arange(len(parts) + 1))
            for part, first, stop in zip(parts, bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
                if first < stop:
                    part.add(by_part.slice(first, stop - first), targets[first:stop])
        spill = Spill()
        for part in parts:
            rows = part.in_order()
            for first in range(0, len(rows), BLOCK_ROWS):
                spill.append(rows.slice(first, BLOCK_ROWS))
        return Rows(self._form.cls, spill)

    def _blocks(self, columns: Sequence[int] | None = None) -> Iterator[pa.RecordBatch]:
        wanted = self._range
        for number in range(wanted.start // BLOCK_ROWS, -(-wanted.stop // BLOCK_ROWS)):
            first = max(0, wanted.start - number * BLOCK_ROWS)
            batch = self._spill[number] if columns is None else self._spill.read(number, columns)
            yield batch.slice(first, min(len(batch), wanted.stop - number * BLOCK_ROWS) - first)


def _gathered(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Join consecutive batches into batches of at least _GATHERED_BYTES bytes."""
    held: list[pa.RecordBatch] = []
    for batch in batches:
        held.append(batch)
        if sum(one.nbytes for one in held) >= _GATHERED_BYTES:
            yield _joined(held)
            held = []
    if held:
        yield _joined(held)


def _joined(batches: Iterable[pa.RecordBatch]) -> pa.RecordBatch:
    return pa.Table.from_batches(batches).combine_chunks().to_batches()[0]


class _Part:
    """Temporary storage for a part of the reordered rows, and the position of each row in the new order."""

    def __init__(self) -> None:
        self._spill = Spill(_PART_MEMORY_BYTES)
        self._targets: list[npt.NDArray[np.int64]] = []

    def add(self, batch: pa.RecordBatch, targets: npt.NDArray[np.int64]) -> None:
        self._spill.append(batch)
        self._targets.append(targets.copy())

    def in_order(self) -> pa.RecordBatch:
        """Return the rows in the new order, and remove them from disk."""
        spill, self._spill = self._spill, Spill()
        rows = _joined(map(spill.read, range(len(spill))))
        return rows.take(array_of(np.argsort(np.concatenate(self._targets))))


# --------------------------------------------------------------------------------------------- dataclasses as columns


@dataclass(frozen=True)
class _Field:
    """Arrow column that stores one field.

    name: dotted name of the field.
    kind: Arrow type, or None for pickles.
    default: value that is stored as null instead of a pickle.
    """

    name: str
    kind: pa.DataType | None
    default: Any = None

    @property
    def attribute(self) -> str:
        return self.name.rpartition(".")[2]

    def encode(self, values: Sequence[Any]) -> pa.Array:
        if self.kind is None:
            known: dict[int, bytes] = {}
            cells: list[bytes | None] = []
            for value in values:
                if value is self.default:
                    cells.append(None)
                    continue
                if (cell := known.get(id(value))) is None:
                    cell = known[id(value)] = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
                cells.append(cell)
            return pa.array(cells, pa.binary())
        try:
            return pa.array(values, self.kind)
        except UnicodeEncodeError:  # a path that is not valid Unicode
            encoded = [None if text is None else text.encode("utf-8", "surrogatepass") for text in values]
            return pa.array(encoded, pa.binary()).view(pa.string())

    def decode(self, cells: pa.Array) -> list[Any]:
        if self.kind is None:
            known: dict[bytes | None, Any] = {None: self.default}
            found = []
            for cell in cells.to_pylist():
                if cell not in known:
                    known[cell] = pickle.loads(cell)  # noqa: S301 — written by this process to a file without a name
                found.append(known[cell])
            return found
        try:
            return cells.to_pylist()  # type: ignore[no-any-return]
        except UnicodeDecodeError:
            encoded = cells.view(pa.binary()).to_pylist()
            return [None if cell is None else cell.decode("utf-8", "surrogatepass") for cell in encoded]


@dataclass(frozen=True)
class _Form(Generic[_Row]):
    """Arrow columns that store a dataclass.

    parts: for each argument of the class, a column or a nested form.
    attribute: for a nested form, the name of its field in the outer class.
    """

    cls: type[_Row]
    parts: tuple[_Field | _Form[Any], ...]
    attribute: str = ""

    @cached_property
    def fields(self) -> list[_Field]:
        return [field for part in self.parts for field in ([part] if isinstance(part, _Field) else part.fields)]

    @cached_property
    def schema(self) -> pa.Schema:
        return pa.schema([(one.name, pa.binary() if one.kind is None else one.kind) for one in self.fields])

    def encode(self, rows: Sequence[_Row]) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays(list(self._arrays(rows)), schema=self.schema)

    def _arrays(self, rows: Sequence[Any]) -> Iterator[pa.Array]:
        for part in self.parts:
            values = list(map(attrgetter(part.attribute), rows))
            yield from part._arrays(values) if isinstance(part, _Form) else [part.encode(values)]

    def decode(self, batch: pa.RecordBatch) -> Iterator[_Row]:
        make: Callable[..., _Row] = self.cls
        values = [
            part.decode(batch.column(part.name)) if isinstance(part, _Field) else part.decode(batch)
            for part in self.parts
        ]
        return map(make, *values)


_forms: dict[type, _Form[Any]] = {}


def _form_of(cls: type[_Row]) -> _Form[_Row]:
    if cls not in _forms:
        _forms[cls] = _make_form(cls, "")
    return _forms[cls]


def _make_form(cls: Any, prefix: str) -> _Form[Any]:
    hints = get_type_hints(cls)
    parts = tuple(_part(field, hints[field.name], prefix) for field in dataclasses.fields(cls))
    return _Form(cls, parts, prefix[:-1].rpartition(".")[2])


def _part(field: dataclasses.Field[Any], hint: Any, prefix: str) -> _Field | _Form[Any]:
    name = f"{prefix}{field.name}"
    kind = next((kind for known, kind in _TYPES.items() if hint in (known, known | None)), None)
    # Values of a class that checks its fields are shared by many rows, so they are not created for each row.
    if kind is None and dataclasses.is_dataclass(hint) and not hasattr(hint, "__post_init__"):
        return _make_form(hint, f"{name}.")
    return _Field(name, kind, None if field.default is dataclasses.MISSING else field.default)
