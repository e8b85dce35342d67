"""Plans from metadata that states the size of each clip, so that no file is opened before its shard is built.

The files of a shard are probed when it is built. A row whose file would be stored differently is rejected, and
all other samples keep their shard. If the metadata is correct, the shards are the same as if all files had been probed
first.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import ClassVar, TypeAlias

from streamvid.dataset.tabular.columns import FACT_COLUMNS, usual_column
from streamvid.dataset.tabular.rows import Rows
from streamvid.errors import Rejected, SourceError
from streamvid.sharder.options import ShardOptions
from streamvid.sharder.planning.assign import PlannedSample, samples_of
from streamvid.sharder.planning.plan import PlannedShard, ShardPlan
from streamvid.sharder.probing import Probes
from streamvid.sharder.source.extra_media import MediaFile
from streamvid.sharder.source.folder import IMAGE_EXTENSIONS
from streamvid.sharder.source.media import MISSING, UNKNOWN, file_state, is_remote, object_state
from streamvid.sharder.source.place import concurrently
from streamvid.sharder.source.records import Record, Rejection, check_size
from streamvid.sharder.units.probe_unit import Probe, extension_of_name

_MAX_NUMBER = 2**31
_SHOWN = ("width", "height", "num_frames", "fps")
_STORED = tuple(map(attrgetter, ("bucket", "split", "window.start", "window.num_frames", "clip.extension", "draw_set")))


@dataclass(frozen=True)
class StatedFacts:
    """Reads facts about clips from the metadata. These facts replace the results of probing.

    Each field is the name of the metadata column that contains the fact. Either fps or seconds may be "" if
    the metadata has no such column.
    """

    num_frames: str
    height: str
    width: str
    fps: str
    seconds: str
    bytes_read: ClassVar[None] = None

    @staticmethod
    def of(names: Sequence[str]) -> StatedFacts:
        """Find the columns that contain the facts. names: columns with no other use.

        Raises SourceError if a fact has no column.
        """
        facts = ("num_frames", "height", "width", "fps", "seconds")
        found = {fact: usual_column(names, FACT_COLUMNS[fact]) or "" for fact in facts}
        missing = [fact for fact in facts[:3] if not found[fact]]
        if not (found["fps"] or found["seconds"]):
            missing.append("fps (or duration)")
        if missing:
            raise SourceError(
                f"trust_metadata=True: the metadata lacks the columns {', '.join(missing)}; its other columns: "
                f"{', '.join(names) or 'none'}; add the missing columns, or omit trust_metadata to probe all files "
                "first"
            )
        return StatedFacts(**found)

    def __call__(self, file: Record | MediaFile) -> Probe | Rejected:
        """Return the facts that the metadata states about a file, or a rejection if a fact is missing or invalid."""
        values: Mapping[str, object] = file.columns if isinstance(file, Record) else {}
        value = values.get
        num_frames = _count(value(self.num_frames))
        height, width = _count(value(self.height)), _count(value(self.width))
        if not (num_frames and height and width):
            return _unusable("num_frames, height and width must be whole numbers above 0")
        suffix = posixpath.splitext(file.source)[1].lower().lstrip(".")
        is_image = num_frames == 1 and suffix in IMAGE_EXTENSIONS
        fps, seconds = (0.0, 0.0) if is_image else (_number(value(self.fps)), _number(value(self.seconds)))
        if not (is_image or fps or seconds):
            return _unusable("fps or duration must be a number above 0")
        fps = fps or (num_frames / seconds if seconds else 0.0)
        seconds = seconds or (num_frames / fps if fps else 0.0)
        return Probe(width, height, num_frames, fps, seconds, "", extension_of_name(suffix), is_image)


def _unusable(allowed: str) -> Rejected:
    return Rejected(f"the metadata for the row is incomplete or invalid: {allowed}", kind="stated-facts")


def _number(value: object) -> float:
    """Return the value as a float if it is a number above 0; otherwise, return 0."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return 0.0
    return number if 0 < number < _MAX_NUMBER else 0.0


def _count(value: object) -> int:
    if isinstance(value, int):
        return value if 0 < value < _MAX_NUMBER else 0
    number = _number(value)
    return int(number) if number == int(number) else 0


def look_up(plan: ShardPlan, shards: Sequence[PlannedShard], options: ShardOptions) -> ShardPlan:
    """Add the sizes and versions of the files in these shards to the plan. Return the new plan.

    Samples whose files are missing are rejected.
    """

    def found(sample: PlannedSample) -> PlannedSample | Rejection:
        record = sample.record
        if record.version != UNKNOWN:
            return sample
        try:
            num_bytes, version = _state(record.path, options)
            check_size(num_bytes, options)
        except Rejected as error:
            return Rejection(record.row, record.source, str(error), error.kind)
        return replace(sample, record=replace(record, num_bytes=num_bytes, version=version))

    return _changed(plan, shards, lambda samples: [one for _, one in concurrently(found, samples)])


def _state(path: str, options: ShardOptions) -> tuple[int, str]:
    if not is_remote(path):
        return file_state(path)
    state = object_state(path, options.storage)
    if state is None:
        raise Rejected(MISSING, kind="missing-file")
    return state.num_bytes, state.version


def confirm(plan: ShardPlan, shards: Sequence[PlannedShard], probes: Probes, options: ShardOptions) -> ShardPlan:
    """Replace stated facts with probed facts for the samples in these shards. Return the new plan.

    Other shards do not change. A sample whose file cannot be used, or would be stored differently, is rejected.
    Shards keep their names, and a shard can become empty.

    probes: results of probing the files of `shards`.
    """
    return _changed(plan, shards, lambda samples: [_confirmed(sample, probes, options) for sample in samples])


_Change: TypeAlias = Callable[[Sequence[PlannedSample]], Sequence[PlannedSample | Rejection]]


def _changed(plan: ShardPlan, shards: Sequence[PlannedShard], change: _Change) -> ShardPlan:
    """Return the plan with `change` applied to the samples in these shards."""
    wanted = {shard.path for shard in shards}
    rejections, counts, sizes = list(plan.rejections), list[int](), list[int]()

    def samples() -> Iterator[PlannedSample]:
        for shard in plan.shards:
            found = change(list(shard.samples)) if shard.path in wanted else shard.samples
            kept = [one for one in found if isinstance(one, PlannedSample)]
            rejections.extend(one for one in found if isinstance(one, Rejection))
            counts.append(len(kept))
            sizes.append(sum(sample.num_bytes for sample in kept))
            yield from kept

    rows = Rows.of(PlannedSample, samples())
    bounds = pairwise(accumulate(counts, initial=0))
    changed = [
        replace(shard, samples=rows[start:end], clip_bytes=num_bytes)
        for shard, (start, end), num_bytes in zip(plan.shards, bounds, sizes, strict=True)
    ]
    ordered = sorted(rejections, key=lambda rejection: rejection.row)
    return replace(plan, shards=tuple(changed), samples=rows, rejections=tuple(ordered))


def _confirmed(sample: PlannedSample, probes: Probes, options: ShardOptions) -> PlannedSample | Rejection:
    record, stated = sample.record, sample.probe
    try:
        probe = probes(record)
        if isinstance(probe, Rejected):
            raise probe
        found = next((one for one in samples_of(record, probes, options) if _is_same(one, sample)), None)
        if found is None:
            raise Rejected(_difference(stated, probe), kind="stated-facts")
    except Rejected as error:
        return Rejection(record.row, record.source, str(error), error.kind)
    return replace(found, key=sample.key)


def _difference(stated: Probe, probe: Probe) -> str:
    names = [name for name in _SHOWN if getattr(stated, name) != getattr(probe, name)]
    if not names and stated.extension == probe.extension:
        stated_seconds, seconds = stated.duration_seconds, probe.duration_seconds
        return f"the metadata implies a duration of {stated_seconds:.6g} s, but the file lasts {seconds:.6g} s"
    if not names:
        return f"the name indicates a .{stated.extension} file, but the content indicates a .{probe.extension} file"
    said = " and ".join(f"{name} {getattr(stated, name):.6g}" for name in names)
    found = " and ".join(f"{getattr(probe, name):.6g}" for name in names)
    return f"the metadata states {said}, but the file has {found}"


def _is_same(found: PlannedSample, planned: PlannedSample) -> bool:
    """Return True if the sample with probed facts is stored in the same way as the planned sample."""
    return all(one(found) == one(planned) for one in _STORED)
