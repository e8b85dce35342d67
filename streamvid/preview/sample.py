"""Facts about one sample: its index row, its captions, and its stored clip."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from streamvid.dataset.captions import captions_from_json
from streamvid.dataset.index import MEDIA_PREFIX
from streamvid.dataset.reader import Dataset
from streamvid.errors import DatasetError, IntegrityError
from streamvid.preview.find import SamplePlace
from streamvid.storage import WrongReads, read_content
from streamvid.video.clip_index import KEY, SHOWN

Checksum: TypeAlias = Literal["verified", "mismatch"]


@dataclass(frozen=True, slots=True)
class SampleFacts:
    """Index row and location of a sample.

    values: maps each index column to its value, in the order of the index. Checksums are hexadecimal.
    """

    place: SamplePlace
    values: Mapping[str, object]

    @property
    def key(self) -> str:
        """Key of the sample."""
        return str(self.values["key"])

    @property
    def captions(self) -> tuple[tuple[str, float], ...]:
        """All captions with their weights. Raises IntegrityError if the index contains invalid captions."""
        several = self.values.get("captions")
        if several is None:
            text = self.values.get("text")
            return () if text is None else ((str(text), 1.0),)
        try:
            return tuple((text, float(weight)) for text, weight in captions_from_json(str(several)))
        except ValueError as error:
            raise IntegrityError(
                f"the captions in the index cannot be read: {error}; copy the dataset again"
            ) from error

    @property
    def columns(self) -> dict[str, object]:
        """Values of the columns that come from the user's metadata."""
        return {name.removeprefix("user."): value for name, value in self.values.items() if name.startswith("user.")}

    def number(self, name: str) -> int:
        """Return the integer in column `name` of the index row.

        Raises IntegrityError if the value is not an integer.
        """
        value = self.values.get(name)
        if not isinstance(value, int):
            raise IntegrityError(
                f"the index lists {name}={value!r} for {self.key}, but the value must be an integer; copy the "
                "dataset again"
            )
        return value

    def to_json(self) -> dict[str, object]:
        """Return the location and all index columns as JSON-serializable values."""
        shard = self.place.shard
        return {**self.values, "shard_path": shard.path, "shard_sha256": shard.sha256, "shard_bytes": shard.num_bytes}


def sample_facts(dataset: Dataset, place: SamplePlace) -> SampleFacts:
    """Return the index row and location of a sample.

    Raises DatasetError or StorageError if the index cannot be read.
    """
    return facts_of_row(place, dataset.samples(place.shard).slice(place.index, 1).to_pylist()[0])


def facts_of_row(place: SamplePlace, row: Mapping[str, object]) -> SampleFacts:
    """Build a SampleFacts object from an index row."""
    return SampleFacts(place, {name: _plain(value) for name, value in row.items()})


def _plain(value: object) -> object:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list) else value


@dataclass(frozen=True, slots=True)
class ClipRange:
    """Location of one of a sample's files in its tar.

    content: (checksum, size) pair that identifies the tar in a cache.
    sha256: expected checksum in hexadecimal.
    """

    path: str
    content: tuple[str, int]
    offset: int
    num_bytes: int
    extension: str
    sha256: str


def clip_range(facts: SampleFacts) -> ClipRange:
    """Return the location of the sample's clip. Raises IntegrityError if this location is outside the tar (SAFE-1)."""
    values = facts.values
    return _range(facts, facts.number("clip_offset"), facts.number("clip_bytes"), values, "clip_")


def media_ranges(facts: SampleFacts) -> dict[str, tuple[ClipRange, ...]]:
    """Map each conditioning input to the locations of its files."""
    found: dict[str, tuple[ClipRange, ...]] = {}
    for name, items in facts.values.items():
        if name.startswith(MEDIA_PREFIX):
            kept = [item for item in items or () if isinstance(item, dict)] if isinstance(items, Sequence) else []
            found[name.removeprefix(MEDIA_PREFIX)] = tuple(
                _range(facts, int(item["offset"]), int(item["num_bytes"]), item, "") for item in kept
            )
    return found


def _range(facts: SampleFacts, offset: int, num_bytes: int, values: Mapping[str, object], prefix: str) -> ClipRange:
    shard = facts.place.shard
    if offset < 0 or num_bytes < 0 or offset + num_bytes > shard.num_bytes:
        raise IntegrityError(
            f"the index lists {num_bytes} bytes at offset {offset} for {facts.key}, but {shard.path} is "
            f"{shard.num_bytes} bytes long; copy the dataset again"
        )
    content = (shard.sha256, shard.num_bytes)
    return ClipRange(
        shard.path, content, offset, num_bytes, str(values[f"{prefix}extension"]), str(values[f"{prefix}sha256"])
    )


def read_clip(
    dataset: Dataset, part: ClipRange, start: int = 0, stop: int | None = None, *, is_again: bool = False
) -> bytes:
    """Return the bytes from `start` to `stop` in one of a sample's files, without verifying them.

    is_again: True if the previous read returned wrong bytes.
    """
    data = bytearray((part.num_bytes if stop is None else stop) - start)
    if data:
        ranges = [(part.offset + start, memoryview(data))]
        read_content(dataset.store, part.path, part.content, ranges, is_again=is_again)
    return bytes(data)


def read_verified_clip(dataset: Dataset, part: ClipRange) -> bytes:
    """Return the bytes of one of a sample's files. Raises IntegrityError if they do not match the index's checksum."""
    wrong = WrongReads()
    while True:
        data = read_clip(dataset, part, is_again=len(wrong) > 0)
        found = hashlib.sha256(data).hexdigest()
        if found == part.sha256:
            return data
        if wrong.judge(found) != "again":
            raise IntegrityError(
                f"{dataset.url}: {part.num_bytes} bytes at offset {part.offset} of {part.path} do not match the "
                "checksum in the index; copy the shard again"
            )


def checksum_of(dataset: Dataset, part: ClipRange) -> Checksum:
    """Read one of a sample's files, and report whether it matches its checksum."""
    try:
        read_verified_clip(dataset, part)
    except IntegrityError:
        return "mismatch"
    return "verified"


@dataclass(frozen=True, slots=True)
class ClipFrames:
    """Frames of a clip in presentation order.

    is_known: True if the dataset has an index of the clip's packets.
    seconds: time of each frame relative to the first frame; evenly spaced if the clip has no index.
    keyframes: numbers of the frames at which decoding can start.
    """

    seconds: tuple[float, ...]
    keyframes: tuple[int, ...]
    is_known: bool


_MAX_FRAMES = 100_000


def timeline_of(dataset: Dataset, facts: SampleFacts) -> ClipFrames:
    """Return the frame times and key frames of a sample's clip."""
    num_frames = min(_MAX_FRAMES, facts.number("window_num_frames"))
    fps = facts.values.get("fps")
    rate = float(fps) if isinstance(fps, int | float) and fps > 0 else 25.0
    even = ClipFrames(tuple(number / rate for number in range(num_frames)), (), False)
    names = ("packets_offset", "packets_bytes", "packets_sha256")
    offset, num_bytes, sha256 = (facts.values.get(name) for name in names)
    if not (isinstance(offset, int) and isinstance(num_bytes, int) and isinstance(sha256, str)):
        return even
    try:
        clip = dataset.packets(facts.place.shard, offset, num_bytes, bytes.fromhex(sha256)).clip(facts.place.index)
    except DatasetError:
        return even
    if clip is None or not num_frames:
        return even
    shown = [(int(time), bool(flag & KEY)) for time, flag in zip(clip.times, clip.flags, strict=True) if flag & SHOWN]
    shown.sort()
    span = shown[-1][0] - shown[0][0]
    duration = (len(shown) - 1) / rate
    scale = duration / span if span else 0.0
    seconds = tuple((time - shown[0][0]) * scale for time, _ in shown[:_MAX_FRAMES])
    return ClipFrames(seconds, tuple(number for number, (_, is_key) in enumerate(shown) if is_key), True)
