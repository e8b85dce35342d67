"""Datasets of texts: samples of captions and columns, without any file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from streamvid.buckets.bucket import TEXT_BUCKET
from streamvid.sharder.assign import Assignment, PlannedSample, record_key, sample_key, split_of
from streamvid.sharder.clip import TEXT_EXTENSION, Clip
from streamvid.sharder.options import ShardOptions
from streamvid.sharder.probing import Probe
from streamvid.sharder.source.records import Record
from streamvid.sharder.windows import Window

_NOTHING = Probe(0, 0, 0, 0.0, 0.0, "text", TEXT_EXTENSION, False)


def assign_texts(records: Sequence[Record], options: ShardOptions) -> Assignment:
    """A sample for each record. Equal texts share a record key, so that a split never parts them."""
    seen: Counter[str] = Counter()
    samples = []
    for record in records:
        own = record_key(record.source)
        key = sample_key(record.source, 0, 0, TEXT_BUCKET.id, seen[record.source])
        seen[record.source] += 1
        clip = Clip("", record.num_bytes, TEXT_EXTENSION, "text", 0, 0.0, 0.0, 0, 0)
        split = split_of(own, options.val_fraction)
        samples.append(PlannedSample(key, own, record, _NOTHING, TEXT_BUCKET, split, Window(0, 0, 0), clip))
    return Assignment(tuple(samples), ())
