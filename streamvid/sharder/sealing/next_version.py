"""Publication of the new dataset version that an append creates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from streamvid.dataset.index import MAX_SHARDS_PER_FILE, USER_PREFIX, encode_row_groups, schema
from streamvid.dataset.integrity import read_shards
from streamvid.dataset.manifest import Change, ColumnGroup, Manifest, ManifestFiles, MediaInfo
from streamvid.dataset.passes import in_parallel
from streamvid.dataset.reader import Dataset
from streamvid.dataset.removed import Removals
from streamvid.dataset.versions.publish import described
from streamvid.sharder.media_columns import MediaColumn
from streamvid.sharder.planning.base import Base
from streamvid.sharder.planning.plan import PlannedShard, ShardPlan
from streamvid.sharder.sealing.facts import media_facts, quality_of
from streamvid.sharder.sealing.index_files import IndexFiles

_READS_AT_ONCE = 8


def publish_next(
    base: Base, plan: ShardPlan, files: ManifestFiles, index: IndexFiles, media: Sequence[MediaColumn]
) -> None:
    """Publish the next version of the dataset, to which the planned samples are added.

    files: index files of the planned samples. index: writer for additional index files.
    """
    assert base.writing is not None
    store, draft = base.dataset.store, _draft(base.manifest, plan, files, media)
    added = base.added_types(plan.user_types)
    if added:
        columns = [index.add("columns", data) for data in _column_files(plan.shards, added)]
        missing = (None,) * len(base.manifest.files.samples)
        types = {USER_PREFIX + name: kind for name, kind in added.items()}
        draft = draft.with_columns(ColumnGroup((*missing, *columns), types))
    table = read_shards(store, draft.files.shards).arranged([bucket.id for bucket in draft.buckets])
    table = Removals.read(store, draft.files.removed).applied(table)
    if draft.native is not None:
        quality = quality_of(_clips(Dataset(store, manifest=described(draft, table))))
        draft = replace(draft, native=replace(draft.native, quality=quality))
    base.writing.publish(draft, Change("append", num_added=plan.num_samples), table)


def _draft(old: Manifest, plan: ShardPlan, new: ManifestFiles, media: Sequence[MediaColumn]) -> Manifest:
    """Return the manifest of the next version, without the fields that `described` adds."""
    names = ("shards", "samples", "packets", "rejections", "records")
    files = replace(old.files, **{name: (*getattr(old.files, name), *getattr(new, name)) for name in names})
    known = {bucket.id for bucket in old.buckets}
    used = {shard.bucket.id: shard.bucket for shard in plan.shards}
    counts = replace(
        old.counts,
        records=old.counts.records + plan.num_records,
        rejections=old.counts.rejections + len(plan.rejections),
    )
    missing = (None,) * len(new.samples)
    facts = media_facts(plan, media)
    return replace(
        old,
        buckets=(*old.buckets, *(bucket for name, bucket in used.items() if name not in known)),
        counts=counts,
        files=files,
        draws=(*old.draws, *plan.draws),
        media={name: _merged(info, facts[name]) for name, info in old.media.items()},
        columns=tuple(replace(group, files=(*group.files, *missing)) for group in old.columns),
    )


def _merged(old: MediaInfo, new: MediaInfo) -> MediaInfo:
    """Merge the descriptions of a conditioning input for old and for new samples."""
    return replace(
        old,
        is_still=old.is_still and new.is_still,
        is_list=old.is_list or new.is_list,
        max_items=max(old.max_items, new.max_items),
    )


def _column_files(shards: Sequence[PlannedShard], types: Mapping[str, str]) -> Iterator[bytes]:
    """Yield each column file as Parquet bytes. Column files store the columns that the sample files cannot store.

    Their row groups and rows correspond to the row groups and rows in the sample files.
    """
    import pyarrow as pa

    target = schema({"key": "string", **{USER_PREFIX + name: kind for name, kind in types.items()}})

    def table(shard: PlannedShard) -> pa.Table:
        rows = [(sample.key, sample.record.columns) for sample in shard.samples]
        columns = {USER_PREFIX + name: [values.get(name) for _, values in rows] for name in types}
        return pa.table({"key": [key for key, _ in rows], **columns}, schema=target)

    for start in range(0, len(shards), MAX_SHARDS_PER_FILE):
        yield encode_row_groups(map(table, shards[start : start + MAX_SHARDS_PER_FILE]), target)


def _clips(dataset: Dataset) -> Iterator[tuple[str, float | None]]:
    """Yield (bucket id, PSNR-Y in decibels) for each sample."""
    tables = in_parallel(lambda shard, _: dataset.samples(shard, ["psnr_y"]), dataset.shards, _READS_AT_ONCE)
    for shard, table in zip(dataset.shards, tables, strict=True):
        yield from ((shard.bucket_id, psnr_y) for psnr_y in table.column("psnr_y").to_pylist())
