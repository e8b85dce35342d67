"""Facts about the samples of a build, for the manifest."""

from __future__ import annotations

import statistics
from array import array
from collections.abc import Iterable, Sequence

from streamvid.dataset.manifest import MediaInfo
from streamvid.sharder.media_columns import MediaColumn
from streamvid.sharder.planning.plan import ShardPlan


def media_facts(plan: ShardPlan, columns: Sequence[MediaColumn]) -> dict[str, MediaInfo]:
    """Return the description of each conditioning input for the manifest; see dataset/README.md."""
    found: dict[str, MediaInfo] = {}
    for column in columns:
        counts, stills, is_list = [0], [True], False
        for (media,) in plan.samples.tuples("media"):
            mine = [medium for medium in media if medium.column == column]
            counts.append(len(mine))
            stills += [medium.is_still for medium in mine]
            is_list = is_list or any(medium.file.item is not None for medium in mine)
        found[column.name] = MediaInfo(
            column=column.column,
            is_still=all(stills) and not column.is_audio,
            is_mask=column.is_mask,
            is_optional=column.is_optional,
            is_list=is_list,
            max_items=max(1, *counts),
            is_audio=column.is_audio,
        )
    return found


def quality_of(clips: Iterable[tuple[str, float | None]]) -> dict[str, object]:
    """Return PSNR-Y statistics (in decibels) for native clips, overall and per bucket.

    clips: (bucket id, PSNR-Y) pairs.
    """
    found: dict[str, array[float]] = {}
    for bucket_id, psnr_y in clips:
        found.setdefault(bucket_id, array("d")).append(psnr_y or 0.0)
    of_all = [value for values in found.values() for value in values]
    buckets = {bucket_id: _spread(values) for bucket_id, values in found.items()}
    return {"psnr_y": _spread(of_all), "psnr_y_by_bucket": buckets}


def _spread(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "min": ordered[0],
        "p5": ordered[(len(ordered) - 1) // 20],
        "median": round(statistics.median(ordered), 4),
        "mean": round(statistics.fmean(ordered), 4),
    }
