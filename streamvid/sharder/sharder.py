"""records → probe → assign (→ encode) → shard plan → build → seal."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from streamvid.dataset.manifest import MANIFEST, offsets_path
from streamvid.dataset.reader import Dataset
from streamvid.errors import ConfigError, DatasetError, SealedError, SourceError, StreamvidError
from streamvid.sharder.assign import assign
from streamvid.sharder.build import build_all
from streamvid.sharder.encode import encode_all
from streamvid.sharder.journal import Journal
from streamvid.sharder.options import ShardOptions
from streamvid.sharder.plan import make_plan
from streamvid.sharder.probing import Progress, journal_header, probe_all
from streamvid.sharder.records import RecordSet, Rejection, read_records
from streamvid.sharder.report import BUILT, DRY_RUN, ShardReport, report_dataset, report_plan
from streamvid.sharder.seal import planned_paths, seal
from streamvid.sharder.staging import STAGING, Staging, has_staging, locked_staging
from streamvid.storage import LocalStore, open_store

_REASONS_SHOWN = 5
_logger = logging.getLogger(__name__)


def shard(source: str | Path, dest: str | Path, options: ShardOptions, progress: Progress | None = None) -> ShardReport:
    """Build the dataset at `dest` out of a folder of media or a metadata file; idempotent.

    Killed at any point and run again, it goes on where it was and ends with the same bytes (SHARD-1). A dataset that
    is sealed already and would be built the same is left as it is.

    Raises SourceError (input that cannot be read, nothing accepted, a file that changes while it is read), SealedError
    (another dataset stands there), DatasetError (`dest` holds something else, or another sharder), StorageError.
    """
    root, progress = _destination(dest), progress or _no_progress
    records = read_records(source, options)
    progress("records", records.num_rows, records.num_rows)
    build = _build_facts(records, options)
    report = _sealed_report(root, build, options.overwrite)
    if report is not None and not has_staging(root):
        return report
    with locked_staging(root) as staging:
        # Once more, now that nobody else is at it.
        report = _sealed_report(root, build, options.overwrite)
        if report is not None:
            staging.remove()
            return report
        try:
            return _build(records, build, staging, options, progress)
        except BaseException:
            _logger.info("unfinished: what is done so far stays in %s, and the same command goes on from there", root)
            raise


def dry_run(
    source: str | Path, dest: str | Path, options: ShardOptions, progress: Progress | None = None
) -> ShardReport:
    """Everything up to the shard plan; writes nothing to `dest`, and takes over what an unfinished run there probed.

    Native clips are not encoded: the report has neither their bytes nor how many shards they make.

    Raises as `shard` does, but for what stands at `dest` and for nothing being accepted: the report tells why.
    """
    root, progress = _destination(dest, must_be_free=False), progress or _no_progress
    records = read_records(source, options)
    progress("records", records.num_rows, records.num_rows)
    journal = Journal(root / STAGING / "probes.jsonl", journal_header(options), writable=False)
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123 — os.devnull is no path to look at
        probes = probe_all(records.records, options, journal, nothing.fileno(), progress)
    assignment = assign(records.records, probes, options)
    return report_plan(make_plan(records, assignment, options, _build_facts(records, options)), DRY_RUN)


def _build(
    records: RecordSet, build: dict[str, Any], staging: Staging, options: ShardOptions, progress: Progress
) -> ShardReport:
    journal = Journal(staging.journal, journal_header(options))
    probes = probe_all(records.records, options, journal, staging.lock_fd, progress)
    assignment = assign(records.records, probes, options)
    if options.is_native:
        assignment = encode_all(assignment, options, staging, progress)
    plan = make_plan(records, assignment, options, build)
    if not plan.shards:
        raise SourceError(_nothing_accepted(plan.rejections))
    _condemn_old(staging)
    staging.open_plan(plan.sha256, planned_paths(plan))
    build_all(plan, staging, options, progress)
    seal(plan, staging, options, progress)
    return report_plan(plan, BUILT)


def _destination(dest: str | Path, must_be_free: bool = True) -> Path:
    """The folder that the dataset is to be in; DatasetError where something else is in it."""
    store = open_store(dest)
    if not isinstance(store, LocalStore):
        raise ConfigError(f"dest {store.url!r} is not on this machine; build locally and copy the dataset")
    root = Path(os.path.abspath(store.root))  # noqa: PTH100 — links stay as the user wrote them
    if root.exists() and not root.is_dir():
        raise DatasetError(f"dest {root} is a file; give a folder that is empty or not there yet")
    is_ours = (root / MANIFEST).exists() or has_staging(root)
    if must_be_free and root.is_dir() and not is_ours and any(root.iterdir()):
        raise DatasetError(
            f"dest {root} is not empty and holds no dataset; give a folder that is empty or not there yet"
        )
    return root


def _build_facts(records: RecordSet, options: ShardOptions) -> dict[str, Any]:
    """What decides the dataset's content; equal facts are the same dataset."""
    return {"options": options.to_json(), "num_records": records.num_rows, "input_sha256": records.sha256()}


def _sealed_report(root: Path, build: Mapping[str, Any], overwrite: bool) -> ShardReport | None:
    """The report on a dataset that is there and is what was asked for; None where there is none, or it is to go.

    Raises SealedError, naming the difference, where it is another one and `overwrite` is not set.
    """
    if not (root / MANIFEST).exists():
        return None
    try:
        dataset = Dataset(LocalStore(root))
        difference = _difference(dataset.manifest.build, build)
        if difference is None:
            return report_dataset(dataset)
    except StreamvidError as error:
        difference = str(error)
    if overwrite:
        return None
    raise SealedError(
        f"{root} holds a sealed dataset, and another would be built ({difference}); give another dest, "
        "or overwrite=True (--overwrite) to replace it"
    )


def _difference(there: Mapping[str, Any], asked: Mapping[str, Any]) -> str | None:
    old, new = dict(there.get("options", {})), asked["options"]
    for name in [*new, *(name for name in old if name not in new)]:
        before, now = old.get(name), new.get(name)
        if before != now:
            if isinstance(before, dict) and isinstance(now, dict):  # an encoding: what of it differs
                part = next(part for part in [*now, *before] if before.get(part) != now.get(part))
                return f"{name}.{part}: {_short(before.get(part))} there, {_short(now.get(part))} asked"
            return f"{name}: {_short(before)} there, {_short(now)} asked"
    if there.get("num_records") != asked["num_records"]:
        return f"input: {there.get('num_records')} rows there, {asked['num_records']} now"
    if there.get("input_sha256") != asked["input_sha256"]:
        return f"input: {asked['num_records']} rows as there, but with other files, sizes, captions or columns"
    return None


def _short(value: object) -> str:
    text = f"{len(value)}: {', '.join(map(str, value))}" if isinstance(value, list) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _condemn_old(staging: Staging) -> None:
    """Give an old dataset's files up for removal, its manifest first."""
    store = LocalStore(staging.root)
    if store.size(MANIFEST) is None:
        return
    try:
        old = Dataset(store)
        paths = [file.path for file in old.manifest.files]
        paths += [path for info in old.shards for path in (info.path, offsets_path(info.path))]
    except StreamvidError as error:
        raise DatasetError(
            f"{staging.root} holds a damaged dataset, so that its files cannot be told from yours ({error}); "
            "delete the folder yourself"
        ) from error
    staging.condemn(paths)


def _nothing_accepted(rejections: tuple[Rejection, ...]) -> str:
    shown = "; ".join(f"row {row.row} {row.source}: {row.reason}" for row in rejections[:_REASONS_SHOWN])
    more = f"; and {len(rejections) - _REASONS_SHOWN} more" if len(rejections) > _REASONS_SHOWN else ""
    return f"all {len(rejections)} records are rejected, nothing is built. {shown}{more}"


def _no_progress(phase: str, done: int, total: int) -> None:
    """Told to nobody."""
