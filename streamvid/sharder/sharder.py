"""Stages of the sharder: records → probe (→ curate) → assign (→ encode) → shard plan → build → seal."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from streamvid.cluster.lease import Lease
from streamvid.cluster.options import ClusterOptions
from streamvid.cluster.ray import TaskNeeds, run_on_ray
from streamvid.cluster.share import WHOLE, Share
from streamvid.dataset.reader import Dataset
from streamvid.dataset.sealed_json import MANIFEST
from streamvid.dataset.tabular.rows import Rows
from streamvid.dataset.versions.open import kept_files
from streamvid.dataset.versions.publish import Writing
from streamvid.errors import ConfigError, DatasetError, SealedError, SourceError, StorageError, StreamvidError
from streamvid.sharder.build import build_all, remaining_shards
from streamvid.sharder.curating import curate, declare_columns, figures_header
from streamvid.sharder.encode import encode_all
from streamvid.sharder.options import ShardOptions
from streamvid.sharder.planning.assign import Assignment, assign, assign_audio, assign_texts
from streamvid.sharder.planning.base import Base, known_rows
from streamvid.sharder.planning.duplicates import group_duplicates
from streamvid.sharder.planning.plan import Build, ShardPlan, make_plan
from streamvid.sharder.planning.trusted import StatedFacts, confirm, look_up
from streamvid.sharder.planning.where import apply_where
from streamvid.sharder.probing import Probed, Progress, journal_header, probe_all
from streamvid.sharder.rejections import REMEDIES
from streamvid.sharder.report import (
    ALREADY_THERE,
    APPENDED,
    BUILT,
    DRY_RUN,
    ShardReport,
    damaged_audio,
    report_dataset,
    report_plan,
    report_task,
    summarize,
)
from streamvid.sharder.seal import planned_paths, seal
from streamvid.sharder.source.records import Record, RecordSet, Rejection, read_records
from streamvid.sharder.source.summary import InputSummary
from streamvid.sharder.stored_options import options_difference
from streamvid.sharder.work.destination import Destination, find_destination
from streamvid.sharder.work.shared_journal import SharedJournal
from streamvid.sharder.work.staging import EMBEDDED, FIGURES, PROBES, Staging, end_tasks, leased, locked_staging
from streamvid.sharder.work.status import ShardStatus, StatusFile, read_status, read_task_phases
from streamvid.sharder.work.tasks import Remaining, TasksUnfinished, task_phases
from streamvid.storage import Store, open_store

Sources: TypeAlias = str | Path | Sequence[str | Path]
"""One source, or several sources that are read one after the other."""
OnInput: TypeAlias = Callable[[InputSummary], None]
"""Callback that is called once with a summary of the input, before clips are encoded or stored."""

_REASONS_SHOWN = 5
_NOT_SUBMITTED = (
    "work.cluster.engine='slurm': only the command `streamvid shard` submits jobs; run that command, or omit "
    "the engine and set work.cluster.task='I/N' in each job"
)
_logger = logging.getLogger(__name__)


def shard(
    source: Sources,
    dest: str | Path,
    options: ShardOptions,
    progress: Progress | None = None,
    on_input: OnInput | None = None,
) -> ShardReport:
    """Build the dataset at `dest` from a folder of media, a metadata file, tars or sealed datasets.

    Several sources are read one after the other. Sources and `dest` may be in object stores.

    If `options.work.cluster.task` is set, this function does only that task's share of the current phase. It continues
    with the next phase if all other tasks have finished theirs. Run all tasks again until `report.remaining` is None.
    Then call this function without a task to do any remaining work and seal the dataset.

    This function is idempotent. After an interruption at any point, the same call resumes and produces the same bytes
    (SHARD-1). If an equal dataset is already sealed at `dest`, it is left unchanged. `on_input` is called once, before
    clips are encoded or stored, with a summary of how the input was interpreted.

    Raises ConfigError if an option does not suit the input, `dest` or this function; SourceError if the input cannot
    be read or changes while it is being read, or if every row is rejected; SealedError if `dest` contains a different
    dataset; DatasetError if `dest` contains other files or another sharder is using `dest`; and StorageError if a
    store fails.
    """
    check_engine(options)
    place, progress, on_input = find_destination(dest, options), progress or no_progress, on_input or ignore_input
    place.check_free()
    check_apart(source, place.store, options)
    records = read_input(source, options, place.folder / EMBEDDED)
    progress("records", records.num_rows, records.num_rows)
    build = build_facts(records, options)
    report = _sealed_report(place.store, build, options.work.overwrite)
    if report is not None and not place.is_begun:
        return _with_input(report, summarize(records, options), on_input)
    uses_ray = options.work.cluster.engine == "ray"
    with contextlib.ExitStack() as held:
        lease = held.enter_context(leased(place, options.work.share, admits_tasks=uses_ray))
        if uses_ray:
            work_on_ray(shard, source, dest, options, lease, progress)
            end_tasks(place, lease)
        staging = held.enter_context(locked_staging(place, lease, options.work.share))
        staging.check_verb(is_append=False)
        # Check again, now that the lease and the lock exclude other sharders.
        report = _sealed_report(place.store, build, options.work.overwrite)
        if report is not None:
            staging.remove()
            return _with_input(report, summarize(records, options), on_input)
        return run_build(source, records, build, staging, options, progress, on_input)


def run_build(
    source: Sources,
    records: RecordSet,
    build: Build,
    staging: Staging,
    options: ShardOptions,
    progress: Progress,
    on_input: OnInput,
    base: Base | None = None,
) -> ShardReport:
    """Build and seal the dataset, or do one task's share of the work. Return the report.

    base: dataset to which the samples are added.
    """
    embedded = staging.folder / EMBEDDED
    try:
        staging.announce(build)
        progress = StatusFile(staging, progress)
        with staging.exclusive():
            if _lacks_embedded(records, embedded):
                read_records(source, options, embedded, extracts=True)
        try:
            report = _build(records, build, staging, options, progress, on_input, base)
        except TasksUnfinished as unfinished:
            report = report_task(records.num_rows, options, unfinished.remaining)
        staging.leave()
        return report
    except StorageError as error:
        if staging.store.is_local:
            raise
        raise StorageError(f"{error}. {_REMEDY}") from error
    except BaseException:
        _logger.info(
            "stopped before the dataset at %s was complete; finished work is kept, so run the same command again to "
            "resume",
            staging.store.url,
        )
        raise


def check_engine(options: ShardOptions) -> None:
    """Raise ConfigError if the options request jobs that only the command line can submit."""
    if options.work.cluster.engine == "slurm":
        raise ConfigError(_NOT_SUBMITTED)


def read_input(source: Sources, options: ShardOptions, folder: Path, *, extracts: bool = False) -> RecordSet:
    """Read the input, and reject the rows that fail a condition on metadata alone."""
    records = read_records(source, options, folder, extracts=extracts)
    return apply_where(declare_columns(records, options), options)


_REMEDY = (
    "Finished work is kept. Run the same command again to resume, or run it with --abandon "
    "(streamvid.sharder.sharder.abandon) to remove all unfinished work, including incomplete uploads"
)


def _lacks_embedded(records: RecordSet, folder: Path) -> bool:
    """Return True if a file that is embedded in the metadata has not been written to `folder` yet."""
    rows = records.records.tuples("path", "extra")
    paths = (path for own, extra in rows for path in (own, *(file.path for file in extra)))
    return any(path.startswith(f"{folder}/") and not Path(path).exists() for path in paths)


Work: TypeAlias = Callable[[Sources, str | Path, ShardOptions], ShardReport]
"""`shard`, or the function that adds samples to a dataset."""


def work_on_ray(
    do: Work, source: Sources, dest: str | Path, options: ShardOptions, lease: Lease, progress: Progress
) -> None:
    """Run the tasks of a build on a Ray cluster and report their progress."""
    place = find_destination(dest, options)

    def report() -> None:
        lease.check()
        with contextlib.suppress(StorageError, OSError):  # the build does not depend on its progress report
            for phase in read_task_phases(place):
                progress(phase.name, phase.done, phase.total)

    task, work = partial(_do_share, do, source, dest, options), options.work
    needs = TaskNeeds(work.workers, "workers", num_phases=len(task_phases(options)))
    run_on_ray(task, _is_nothing, needs, work.cluster, report)


def _do_share(
    do: Work, source: Sources, dest: str | Path, options: ShardOptions, share: Share, num_cpus: int
) -> Remaining | None:
    work = replace(options.work, workers=num_cpus, cluster=ClusterOptions(task=str(share)))
    return do(source, dest, replace(options, work=work)).remaining


def _is_nothing(remaining: Remaining | None) -> bool:
    return remaining is None


def abandon(dest: str | Path, options: ShardOptions) -> bool:
    """Remove unfinished work at `dest`, in the store and on this machine. Return False if there was no unfinished work.

    A sealed dataset is kept. Raises DatasetError if a sharder is running at `dest`, on any machine.
    """
    place = find_destination(dest, options)
    if not place.is_begun:
        return False
    with leased(place) as lease, locked_staging(place, lease) as staging:
        staging.abandon()
    return True


def status(dest: str | Path, options: ShardOptions) -> ShardStatus:
    """Return the status of the build at `dest`, which may be running in other processes and on other machines.

    Raises DatasetError if there is neither a dataset nor an unfinished build at `dest`.
    """
    return read_status(find_destination(dest, options))


def dry_run(
    source: Sources,
    dest: str | Path,
    options: ShardOptions,
    progress: Progress | None = None,
    on_input: OnInput | None = None,
) -> ShardReport:
    """Run all stages up to the shard plan without writing to `dest`. Results of earlier probing at `dest` are reused.

    No clips are encoded or cut. If the build would encode or cut clips, the report contains neither the sizes of the
    clips nor the number of shards.

    Raises the same errors as `shard`, except that an occupied `dest` and the rejection of all rows are not errors. The
    report lists the reasons for all rejections.
    """
    return plan_build(source, find_destination(dest, options), options, progress, on_input)


def plan_build(
    source: Sources,
    place: Destination,
    options: ShardOptions,
    progress: Progress | None,
    on_input: OnInput | None,
    base: Base | None = None,
) -> ShardReport:
    """Run all stages up to the shard plan without writing to `place`. base: dataset to which the samples are added."""
    progress, on_input = progress or no_progress, on_input or ignore_input
    if not options.work.share.is_whole:
        raise ConfigError(
            f"work.cluster.task={options.work.cluster.task!r} cannot be combined with a dry run, which plans all "
            "work; omit the task (--task)"
        )
    check_apart(source, place.store, options)
    journals = partial(SharedJournal, place.folder, store=place.store, share=WHOLE, writable=False)
    with tempfile.TemporaryDirectory(prefix="streamvid-") as folder, Path(os.devnull).open("rb") as nothing:
        records = read_input(source, options, Path(folder), extracts=True)
        if base is not None:
            records, base = base.without_known(records)
        progress("records", records.num_rows, records.num_rows)
        found = _assigned(records, options, journals, nothing.fileno(), progress, base=base)
    plan = make_plan(found.records, found.assignment, options, {"options": options.to_json()}, base)
    report = replace(
        _with_input(report_plan(plan, DRY_RUN), found.summary, on_input), probe_bytes_read=found.bytes_read
    )
    return report if base is None else replace(report, num_known=base.num_known)


def check_apart(source: Sources, dest: Store, options: ShardOptions) -> None:
    """Raise SourceError if a source is `dest` or inside it. A `dest` inside a source is allowed."""
    for one in [source] if isinstance(source, str | Path) else source:
        store = open_store(one, options.storage)
        if _real(store) == _real(dest):
            raise SourceError(
                f"source {store.url} is also the destination and would be overwritten while it is being read; choose "
                "another destination"
            )
        if _real(store).startswith(_real(dest)):
            raise SourceError(
                f"source {store.url} is inside the destination {dest.url}, whose own files cannot be used as input; "
                "choose another source, or move the source elsewhere"
            )


def _real(store: Store) -> str:
    """Return a store's URL, with symbolic links resolved and with a trailing slash."""
    url = os.path.realpath(store.url) if store.is_local else store.url
    return f"{url.rstrip('/')}/"


def _with_input(report: ShardReport, summary: InputSummary, on_input: OnInput) -> ShardReport:
    on_input(summary)
    return replace(report, input=summary)


def _build(
    records: RecordSet,
    build: Build,
    staging: Staging,
    options: ShardOptions,
    progress: Progress,
    on_input: OnInput,
    base: Base | None,
) -> ShardReport:
    found = _assigned(records, options, staging.journal, staging.lock_fd, progress, staging.folder, base)
    on_input(found.summary)
    assignment = found.assignment
    if options.makes_clips:
        assignment = encode_all(assignment, options, staging, progress)
    plan = make_plan(found.records, assignment, options, build, base)
    _check_accepted(plan, base)
    bytes_read = found.bytes_read
    if options.trust_metadata:
        journal = staging.journal(PROBES, journal_header(options))
        plan, bytes_read = _with_probed_facts(plan, options, journal, staging, progress)
        _check_accepted(plan, base)
    if staging.share.is_whole and base is None:
        _condemn_old(staging)
    staging.open_plan(plan.sha256, planned_paths(plan))
    build_all(plan, staging, options, progress)
    if not staging.share.is_whole:
        return report_task(records.num_rows, options, remaining_shards(plan, staging))
    staging.lease.renew()  # the last check before the manifest
    seal(plan, known_rows(records, plan.rejections, plan.samples), staging, options, progress, base)
    damaged = damaged_audio(Dataset(staging.store))
    report = replace(report_plan(plan, BUILT), probe_bytes_read=bytes_read, input=found.summary, damaged_audio=damaged)
    if base is None:
        return report
    return replace(report, state=APPENDED if report.num_samples else ALREADY_THERE, num_known=base.num_known)


def _check_accepted(plan: ShardPlan, base: Base | None) -> None:
    """Raise SourceError if a new dataset would have no samples.

    An append without new samples is allowed, because it records the rejections.
    """
    if not plan.num_samples and base is None:
        raise SourceError(_nothing_accepted(plan.rejections))


class _Assigned(NamedTuple):
    """Records that match `where`, with their buckets.

    bytes_read: number of bytes that were read to probe remote files; None if no file is remote.
    """

    records: RecordSet
    assignment: Assignment
    bytes_read: int | None
    summary: InputSummary


def _assigned(
    records: RecordSet,
    options: ShardOptions,
    journals: Callable[[str, Mapping[str, Any]], SharedJournal],
    held_fd: int,
    progress: Progress,
    folder: Path | None = None,
    base: Base | None = None,
) -> _Assigned:
    """Probe, curate and assign all records. journals: function that opens a journal, given its name and its header."""
    earlier, media = ({}, {}) if base is None else (base.earlier, base.manifest.media)
    if options.clips.is_text:
        return _Assigned(records, assign_texts(records.records, options, earlier), None, summarize(records, options))
    probes: Probed | StatedFacts
    if options.trust_metadata:
        probes = StatedFacts.of(list(records.user_types))
    else:
        journal = journals(PROBES, journal_header(options))
        probes = probe_all(records.records, options, journal, held_fd, progress, folder, options.work.share)
    if options.curation.is_on:
        journal = journals(FIGURES, figures_header(options))
        records = apply_where(records, options, probes, is_curated=False)
        records = curate(records, probes, options, journal, held_fd, progress, folder)
    records = apply_where(records, options, probes)
    if options.clips.is_audio:
        assignment = assign_audio(records.records, probes, options, earlier)
    else:
        assignment = group_duplicates(assign(records.records, probes, options, earlier, media), options)
    summary = summarize(records, options, assignment)
    return _Assigned(records, assignment, probes.bytes_read, summary)


def _with_probed_facts(
    plan: ShardPlan, options: ShardOptions, journal: SharedJournal, staging: Staging, progress: Progress
) -> tuple[ShardPlan, int | None]:
    """Probe the files of this task's shards.

    Return (plan with probed facts, number of bytes read from remote files).
    """
    plan = look_up(plan, staging.share.of(plan.shards), options)
    shards = staging.share.of(plan.shards)
    records = Rows.of(Record, (sample.record for shard in shards for sample in shard.samples))
    probes = probe_all(records, options, journal, staging.lock_fd, progress, staging.folder)
    return confirm(plan, shards, probes, options), probes.bytes_read


def build_facts(records: RecordSet, options: ShardOptions) -> Build:
    """Return everything that determines the content of a new dataset."""
    return {"options": options.to_json(), "num_records": records.num_rows, "input_sha256": records.sha256()}


def _sealed_report(store: Store, build: Mapping[str, Any], overwrite: bool) -> ShardReport | None:
    """Return the report of the sealed dataset in `store`, or None if the build should proceed.

    Raises SealedError if `store` contains a different or unreadable dataset, unless `overwrite` is True. The message
    states the difference.
    """
    if store.size(MANIFEST) is None:
        return None
    try:
        dataset = Dataset(store)
        difference = _difference(dataset.manifest.build, build)
        if difference is None:
            return report_dataset(dataset)
    except StreamvidError as error:
        if overwrite:
            return None
        raise SealedError(
            f"{store.url} contains a sealed dataset that cannot be read ({error}); choose another destination"
        ) from error
    if overwrite:
        return None
    raise SealedError(
        f"{store.url} contains another sealed dataset ({difference}); to add new rows to it, use `streamvid "
        "append`; otherwise, choose another destination, or set work.overwrite=True (--overwrite) to replace it"
    )


def _difference(there: Mapping[str, Any], asked: Mapping[str, Any]) -> str | None:
    difference = options_difference(there.get("options", {}), asked["options"])
    if difference is not None:
        return difference
    if there.get("num_records") != asked["num_records"]:
        return (
            f"input: the dataset was built from {there.get('num_records')} rows, but the input now has "
            f"{asked['num_records']} rows"
        )
    if there.get("input_sha256") != asked["input_sha256"]:
        return (
            f"input: the number of rows is still {asked['num_records']}, but files, sizes, captions or columns have "
            "changed"
        )
    return None


def _condemn_old(staging: Staging) -> None:
    """Record the old dataset's files for removal, and remove its manifest."""
    store = staging.store
    if store.size(MANIFEST) is None:
        return
    try:
        paths = kept_files(store, Writing(store, staging.lease).newest) - {MANIFEST}
    except StreamvidError as error:
        raise DatasetError(
            f"{store.url} contains a dataset that cannot be read ({error}), so its files cannot be distinguished from "
            "files that do not belong to it; choose another destination or, if the dataset is damaged, delete "
            "everything at that location"
        ) from error
    staging.condemn(paths)


def _nothing_accepted(rejections: tuple[Rejection, ...]) -> str:
    shown = "; ".join(f"row {row.row} {row.source}: {row.reason}" for row in rejections[:_REASONS_SHOWN])
    more = f"; and {len(rejections) - _REASONS_SHOWN} more" if len(rejections) > _REASONS_SHOWN else ""
    known = (REMEDIES[row.kind] for row in rejections[:_REASONS_SHOWN] if row.kind in REMEDIES)
    remedies = "; ".join(dict.fromkeys(known)) or "fix the input as the reasons describe"
    return f"all records were rejected, so nothing was built. Reasons: {shown}{more}. Remedies: {remedies}"


def ignore_input(summary: InputSummary) -> None:
    """Ignore the summary of the input."""


def no_progress(phase: str, done: int, total: int) -> None:
    """Ignore progress reports."""
