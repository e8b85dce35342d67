"""Which samples of a dataset a condition on its columns admits, and how many of each shard."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from streamvid.dataset.filter.count_cache import CountCache
from streamvid.dataset.filter.expression import compile_condition
from streamvid.dataset.filter.nodes import Node, kind_of
from streamvid.dataset.manifest import ShardInfo
from streamvid.dataset.reader import Dataset
from streamvid.dataset.shard_table import rows_of
from streamvid.errors import ConfigError, DatasetError, IntegrityError

if TYPE_CHECKING:
    import pyarrow as pa

_log = logging.getLogger(__name__)

_ROWS_A_REPORT = 1_000_000


@dataclass(frozen=True, slots=True)
class Filter:
    """A parsed condition.

    text: the condition in one spelling, so that equal conditions are equal. columns: the index columns it reads.
    """

    text: str
    columns: tuple[str, ...]

    def matching(self, table: pa.Table) -> npt.NDArray[np.int32]:
        """Row numbers, ascending, of the rows that the condition admits; `table` has at least `columns`.

        Rows where it is unknown, because a value that decides is null or NaN, are not admitted.
        Raises DatasetError for a table without the columns, or with other types than the condition was parsed for.
        """
        import pyarrow.compute as pc

        kinds = tuple(
            (name, kind_of(table.schema.field(name).type)) for name in self.columns if name in table.schema.names
        )
        try:
            mask = _compiled(self.text, kinds).run(table)
        except ConfigError as error:
            raise DatasetError(f"the columns of an index file differ from those of the dataset: {error}") from error
        return np.asarray(pc.indices_nonzero(pc.fill_null(mask, False))).astype(np.int32)


def parse_filter(text: str, dataset: Dataset) -> Filter:
    """The condition that `text` states on the columns of `dataset`.

    - Names are the user's columns, else the index' own (`clip_width`, `fps`, `duration_seconds`, `record_key` …); one
      that is no Python name stands in backquotes: `` `my col` > 5 ``.
    - `< <= > >= == !=`, chained too; `in` and `not in` a list; `is None`, `is not None`; `and`, `or`, `not`;
      `+ - * /` in doubles; `contains(text, "a")`, `startswith(...)`, `endswith(...)`; numbers, texts, True, False.
    - A value that is null or NaN is missing. What it decides is neither true nor false, and such rows are left out:
      by `fps < 24` and by `not (fps < 24)` alike. Only `is None` tells.

    Raises ConfigError naming the text, the place and the remedy: unknown columns, wrong types, anything else.
    """
    schema = dataset.samples_schema

    def resolve(name: str) -> tuple[str, str]:
        try:
            column = dataset.column(name)
        except ConfigError as error:
            raise LookupError(str(error).removeprefix("columns: ")) from error
        kind = kind_of(schema.field(column).type)
        if kind is None:
            raise LookupError(
                f"{name!r} is of type {schema.field(column).type}, which cannot be in a condition; "
                "numbers, texts and truth values can"
            )
        return column, kind

    node = compile_condition(text, resolve)
    found = Filter(node.text, tuple(sorted(node.columns)))
    try:
        found.matching(schema.empty_table())
    except (DatasetError, ValueError, TypeError) as error:  # Arrow's errors are among them
        raise ConfigError(f"where={text!r} cannot be computed: {error}") from error
    return found


@lru_cache(maxsize=64)
def _compiled(text: str, kinds: tuple[tuple[str, str | None], ...]) -> Node:
    known = dict(kinds)

    def resolve(name: str) -> tuple[str, str]:
        kind = known.get(name)
        if kind is None:
            raise LookupError(f"{name!r} is missing, or of a type that cannot be in a condition")
        return name, kind

    return compile_condition(text, resolve, is_canonical=True)


def count_matches(
    dataset: Dataset, shards: Sequence[ShardInfo], filter: Filter, cache_dir: str | Path | None = None
) -> npt.NDArray[np.int64]:
    """How many samples of each of `shards` the filter admits: int64 (len(shards),).

    One scan of the index, a shard at a time and of the filter's columns only; the counts of all shards are kept in
    `cache_dir` (None: `$XDG_CACHE_HOME/streamvid/filters`, else `~/.cache/streamvid/filters`) under the dataset's
    content and the filter, so that whoever asks next reads some bytes a shard. Processes of one machine that ask at
    the same time scan once. A folder that cannot be written costs a scan each time, and no more.
    """
    everything = dataset.shards
    cache = CountCache.of(cache_dir, dataset.manifest.fingerprints.content, filter.text)
    counts = cache.read(everything.num_samples)
    if counts is None:
        with cache.locked():
            counts = cache.read(everything.num_samples)  # written by who held the lock
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
            f"{dataset.url}: shard {error.args[0]} is not in the shard table of the dataset"
        ) from error


def _scan(dataset: Dataset, filter: Filter) -> npt.NDArray[np.int64]:
    counts = np.zeros(len(dataset.shards), np.int64)
    total, done = dataset.manifest.counts.samples, 0
    for number, shard in enumerate(dataset.shards):
        counts[number] = len(filter.matching(dataset.samples(shard, filter.columns)))
        reports = done // _ROWS_A_REPORT
        done += shard.num_samples
        if done // _ROWS_A_REPORT > reports:
            _log.info("filter: looked at %d of %d samples of %s", done, total, dataset.url)
    _log.info("filter %s admits %d of %d samples of %s", filter.text, counts.sum(), total, dataset.url)
    return counts
