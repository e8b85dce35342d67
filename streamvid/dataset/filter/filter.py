"""Filters: conditions that select samples by their columns, and cached counts of the selected samples per shard."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from streamvid.dataset.manifest import ShardInfo
from streamvid.dataset.reader import Dataset
from streamvid.dataset.shard_table import rows_of
from streamvid.errors import ConfigError, DatasetError, IntegrityError, StorageError
from streamvid.host.lock import wait_for_lock
from streamvid.host.resources import user_cache
from streamvid.storage import LocalStore

if TYPE_CHECKING:
    import pyarrow as pa

    from streamvid.dataset.filter.nodes import Node

_log = logging.getLogger(__name__)

_ROWS_PER_REPORT = 1_000_000
_VERSION = 1  # version of the cached file and of the semantics of conditions
_DIGEST_BYTES = 32
_ITEM_BYTES = 8


@dataclass(frozen=True, slots=True)
class Filter:
    """A parsed condition.

    text: canonical spelling, so that equal conditions compare equal.
    columns: index columns that the condition reads.
    """

    text: str
    columns: tuple[str, ...]

    def matching(self, table: pa.Table) -> npt.NDArray[np.int32]:
        """Return the numbers of the rows that the condition selects, in ascending order.

        A row is not selected if the result is unknown because a value is null or NaN. Raises
        DatasetError if `table` does not contain all of `columns`, or if a column's type does not match the condition.
        """
        import pyarrow.compute as pc

        from streamvid.dataset.filter.nodes import kind_of

        kinds = tuple(
            (name, kind_of(table.schema.field(name).type)) for name in self.columns if name in table.schema.names
        )
        try:
            mask = _compiled(self.text, kinds).run(table)
        except ConfigError as error:
            raise DatasetError(
                f"the columns of an index file differ from the dataset's columns ({error}); copy or rebuild the dataset"
            ) from error
        return np.asarray(pc.indices_nonzero(pc.fill_null(mask, False))).astype(np.int32)


def parse_filter(text: str, dataset: Dataset) -> Filter:
    """Parse the condition `text` on the columns of `dataset`.

    - A name refers to a user column or, failing that, to a column of the index (`clip_width`, `fps`,
      `duration_seconds`, `record_key`, …). Enclose a name that is not a Python identifier in backquotes:
      `` `my col` > 5 ``.
    - Conditions can contain `< <= > >= == !=`, which can be chained; `in` and `not in` with a list; `is None` and
      `is not None`; `and`, `or` and `not`; `+ - * /`, computed in double precision; `contains(text, "a")`,
      `startswith(...)` and `endswith(...)`; and numbers, text, True and False.
    - A value that is null or NaN is missing. A condition on a missing value is neither true nor false, so `fps < 24`
      and `not (fps < 24)` both exclude the row. Only `is None` finds missing values.

    Raises ConfigError with the text, the position and a remedy for unknown columns, wrong types and invalid syntax.
    """
    from streamvid.dataset.filter.expression import compile_condition
    from streamvid.dataset.filter.nodes import kind_of

    schema = dataset.samples_schema

    def resolve(name: str) -> tuple[str, str]:
        try:
            column = dataset.column(name)
        except ConfigError as error:
            raise LookupError(str(error).removeprefix("columns: ")) from error
        kind = kind_of(schema.field(column).type)
        if kind is None:
            raise LookupError(
                f"{name!r} has type {schema.field(column).type}, which conditions do not support; use a column of "
                "numbers, text or Boolean values"
            )
        return column, kind

    node = compile_condition(text, resolve)
    found = Filter(node.text, tuple(sorted(node.columns)))
    try:
        found.matching(schema.empty_table())
    except (DatasetError, ValueError, TypeError) as error:  # including Arrow's errors
        raise ConfigError(f"where={text!r} cannot be evaluated ({error}); correct the condition") from error
    return found


def both(general: str | None, own: str | None) -> str | None:
    """Combine two conditions with `and`, and return the text. None stands for a condition that is always true."""
    return f"({general}) and ({own})" if general is not None and own is not None else general or own


def filter_of_view(dataset: Dataset) -> Filter | None:
    """Return the filter of the view through which `dataset` was opened, or None if it was opened without a view."""
    return None if dataset.where is None else parse_filter(dataset.where, dataset)


@lru_cache(maxsize=64)
def _compiled(text: str, kinds: tuple[tuple[str, str | None], ...]) -> Node:
    from streamvid.dataset.filter.expression import compile_condition

    known = dict(kinds)

    def resolve(name: str) -> tuple[str, str]:
        kind = known.get(name)
        if kind is None:
            raise LookupError(f"{name!r} is missing, or has a type that conditions do not support")
        return name, kind

    return compile_condition(text, resolve, is_canonical=True)


def count_matches(
    dataset: Dataset, shards: Sequence[ShardInfo], filter: Filter, cache_dir: str | Path | None = None
) -> npt.NDArray[np.int64]:
    """Return the number of samples that the filter selects in each of `shards`, as an int64 array.

    The first call scans the index columns that the filter reads, one shard at a time. The counts for all shards are
    cached in `cache_dir` (by default `$XDG_CACHE_HOME/streamvid/filters` or `~/.cache/streamvid/filters`). Later calls
    with the same content and filter read only 8 bytes per shard. If several processes on one machine call this function
    at the same time, only one of them scans the index. If the cache folder cannot be written, each call scans the
    index.
    """
    everything = dataset.shards
    cache = CountCache.of(cache_dir, dataset.manifest.fingerprints.content, filter.text)
    counts = cache.read(everything.num_samples)
    if counts is None:
        with cache.locked():
            counts = cache.read(everything.num_samples)  # another process may have written the counts meanwhile
            if counts is None:
                counts = _scan(dataset, filter)
                cache.write(counts)
    rows = rows_of(shards, everything)
    if rows is not None:
        return counts[rows]
    place = {shard.path: number for number, shard in enumerate(everything)}
    try:
        return counts[[place[shard.path] for shard in shards]] if shards else np.empty(0, np.int64)
    except KeyError as error:
        raise IntegrityError(
            f"{dataset.url}: shard {error.args[0]} is not in the dataset's shard table; pass shards of this dataset"
        ) from error


def _scan(dataset: Dataset, filter: Filter) -> npt.NDArray[np.int64]:
    counts = np.zeros(len(dataset.shards), np.int64)
    total, done = dataset.manifest.counts.samples, 0
    for number, shard in enumerate(dataset.shards):
        counts[number] = len(filter.matching(dataset.samples(shard, filter.columns)))
        reports = done // _ROWS_PER_REPORT
        done += shard.num_samples
        if done // _ROWS_PER_REPORT > reports:
            _log.info("filter: scanned %d of %d samples in %s", done, total, dataset.url)
    _log.info("filter %s selects %d of %d samples in %s", filter.text, counts.sum(), total, dataset.url)
    return counts


@dataclass(frozen=True, slots=True)
class CountCache:
    """Cache file for one filter. It stores how many samples the filter selects in each shard.

    The file contains a line of JSON, the counts as int64, and the SHA-256 of both.

    Methods do not raise file errors. Counts that cannot be read are computed again, and counts that cannot be written
    are not cached.
    """

    path: Path
    header: bytes

    @classmethod
    def of(cls, folder: str | Path | None, content_fingerprint: str, text: str) -> CountCache:
        """Return the cache entry for a filter and a dataset's content. folder: None uses the user's cache folder."""
        if folder is None:
            folder = user_cache("filters")
        fields = {"version": _VERSION, "content": content_fingerprint, "where": text}
        header = json.dumps(fields, sort_keys=True).encode() + b"\n"
        return cls(Path(folder) / f"{hashlib.sha256(header).hexdigest()[:32]}.counts", header)

    def read(self, most: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
        """Return the stored counts, or None if the file is missing or damaged. most: upper limit for each count."""
        num_bytes = len(self.header) + _ITEM_BYTES * len(most) + _DIGEST_BYTES
        try:
            with self.path.open("rb") as file:
                data = file.read(num_bytes + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            reason = error.strerror or error
            _log.warning("cannot read the filter's counts from %s (%s); scanning the index again", self.path, reason)
            return None
        body, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
        if len(data) == num_bytes and hashlib.sha256(body).digest() == digest and body.startswith(self.header):
            counts = np.frombuffer(body[len(self.header) :], "<i8").astype(np.int64)
            if ((counts >= 0) & (counts <= most)).all():
                return counts
        _log.warning("the file %s with the filter's counts is damaged; scanning the index again", self.path)
        return None

    def write(self, counts: npt.NDArray[np.int64]) -> None:
        """Store the counts atomically."""
        body = self.header + counts.astype("<i8").tobytes()
        try:
            LocalStore(self.path.parent).put(self.path.name, body + hashlib.sha256(body).digest())
        except StorageError as error:
            _log.warning("cannot store the filter's counts (%s); the next run will scan the index again", error)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock this entry during the `with` block. The lock excludes other processes on this machine."""
        with contextlib.ExitStack() as held:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                held.enter_context(wait_for_lock(self.path.with_suffix(".lock")))
            except (ImportError, OSError) as error:
                reason = error.strerror or error if isinstance(error, OSError) else error
                _log.info("cannot lock %s (%s); other processes may repeat the scan", self.path, reason)
            yield
