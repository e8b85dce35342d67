"""Adding samples to a sealed dataset, as its next version. Existing files are neither changed nor renamed."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from streamvid.dataset.manifest import read_manifest
from streamvid.dataset.reader import Dataset
from streamvid.dataset.versions.open import check_newest
from streamvid.dataset.versions.publish import Writing
from streamvid.errors import ConfigError
from streamvid.sharder.options import ShardOptions
from streamvid.sharder.planning.base import Base
from streamvid.sharder.planning.plan import Build
from streamvid.sharder.probing import Progress
from streamvid.sharder.report import ShardReport, report_known, summarize
from streamvid.sharder.sharder import (
    OnInput,
    Sources,
    build_facts,
    check_apart,
    check_engine,
    ignore_input,
    no_progress,
    plan_build,
    read_input,
    run_build,
    work_on_ray,
)
from streamvid.sharder.source.records import RecordSet
from streamvid.sharder.stored_options import options_like
from streamvid.sharder.work.destination import find_destination
from streamvid.sharder.work.staging import BASE, EMBEDDED, end_tasks, leased, locked_staging
from streamvid.storage import StorageOptions, open_store


def append(
    dataset: str | Path,
    source: Sources,
    options: Mapping[str, Any] | None = None,
    *,
    dry_run: bool = False,
    progress: Progress | None = None,
    on_input: OnInput | None = None,
) -> ShardReport:
    """Add the rows of one or more sources to a sealed dataset. Return the report.

    Rows that are already recorded in the dataset are skipped without opening their files, so a source may contain old
    and new rows. A row is recognized by the name of its file, its time range, its captions and its conditioning inputs.
    A row that was rejected is tried again if the size of its file has changed. If samples from a row's file were
    removed from the dataset, the row is rejected with kind "removed". New samples are stored in new shards, which a
    new version of the dataset lists in addition to the existing shards. If all new rows are rejected, the new version
    only records the rejections. If there is nothing to add or to record, no version is published.

    options: fields of `ShardOptions` as nested mappings, such as {"work": {"workers": 8}}. Options that determine the
        content of a dataset keep the values with which it was built, and cannot be changed.
    dry_run: True to run all stages up to the shard plan without writing any files.

    This function is idempotent. After an interruption at any point, the same call resumes, and at any time the dataset
    is either the old or the new version. With `work.cluster.task`, it does one task's share of the work, as `shard`
    does. `status` and `abandon` of `streamvid.sharder.sharder` work as for `shard`.

    Raises the same errors as `shard`, except that the rejection of all rows is not an error. Also raises ConfigError
    if an option or the type of a column does not fit the dataset, and DatasetError if the dataset does not exist, or
    if another process changes it.
    """
    do = plan_append if dry_run else append_to
    return do(source, dataset, append_options(dataset, options or {}), progress, on_input)


def append_options(dataset: str | Path, given: Mapping[str, Any]) -> ShardOptions:
    """Return the options for adding samples to a dataset. Raises the same errors as `append`.

    given: nested fields of ShardOptions.
    """
    store = open_store(check_newest(dataset), StorageOptions.of(given.get("storage")))
    options = options_like(read_manifest(store).build["options"], given, store.url)
    if options.work.overwrite:
        raise ConfigError(
            "overwrite=True cannot be combined with append, which never replaces a dataset; omit overwrite"
        )
    if options.curation.dedup is not None:
        raise ConfigError(
            f"cannot append to the dataset at {store.url}, because it was built with curation.dedup="
            f"{options.curation.dedup!r}, and near-duplicates can be found only if all rows are compared with each "
            "other. Build a new dataset from the old and new sources together: streamvid shard OLD NEW DEST --dedup "
            f"{options.curation.dedup}. Or, to accept near-duplicates of old rows, build a dataset from the new source "
            f"alone, and merge it: streamvid shard NEW DEST, then streamvid merge {store.url} DEST"
        )
    return options


def append_to(
    source: Sources,
    dataset: str | Path,
    options: ShardOptions,
    progress: Progress | None = None,
    on_input: OnInput | None = None,
) -> ShardReport:
    """Add samples with the options that `append_options` returned. See `append`."""
    check_engine(options)
    dataset = check_newest(dataset)
    place, progress, on_input = find_destination(dataset, options), progress or no_progress, on_input or ignore_input
    read_manifest(place.store)  # raises an error if there is no dataset, before anything is written
    check_apart(source, place.store, options)
    uses_ray, share = options.work.cluster.engine == "ray", options.work.share
    with contextlib.ExitStack() as held:
        lease = held.enter_context(leased(place, share, admits_tasks=uses_ray))
        if uses_ray:
            work_on_ray(append_to, source, dataset, options, lease, progress)
            end_tasks(place, lease)
        staging = held.enter_context(locked_staging(place, lease, share))
        staging.check_verb(is_append=True)
        base = Base(Dataset(place.store))
        if share.is_whole:
            writing = Writing(place.store, lease)
            base = Base(writing.dataset, writing)
        records, base = base.without_known(read_input(source, options, place.folder / EMBEDDED))
        progress("records", records.num_rows, records.num_rows)
        if records.num_rows:
            build = _build_facts(records, options, base)
            return run_build(source, records, build, staging, options, progress, on_input, base)
        if share.is_whole:
            staging.abandon()  # a run that was killed after it published may have left notes
        else:
            staging.leave()
        summary = summarize(records, options)
        on_input(summary)
        return replace(report_known(base), input=summary)


def plan_append(
    source: Sources,
    dataset: str | Path,
    options: ShardOptions,
    progress: Progress | None = None,
    on_input: OnInput | None = None,
) -> ShardReport:
    """Run all stages of `append_to` up to the shard plan without writing anything, and return the report."""
    place = find_destination(check_newest(dataset), options)
    return plan_build(source, place, options, progress, on_input, Base(Dataset(place.store)))


def _build_facts(records: RecordSet, options: ShardOptions, base: Base) -> Build:
    return {**build_facts(records, options), BASE: base.manifest.fingerprints.base}
