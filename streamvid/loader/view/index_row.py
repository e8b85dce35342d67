"""The samples index as the loader reads it: one typed row per sample, validated on construction (SAFE-1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from streamvid.errors import IntegrityError

if TYPE_CHECKING:
    from streamvid.dataset.features.tables import SidecarShard
    from streamvid.dataset.manifest import ShardInfo
    from streamvid.dataset.packets import PacketTables
    from streamvid.storage import Store

MAX_FRAMES = (1 << 31) - 1
_SHA256_BYTES = 32


class PacketsPlace(NamedTuple):
    """Location of a shard's packet table: file, first byte, size, hexadecimal SHA-256, and number of clips."""

    path: str
    offset: int
    num_bytes: int
    sha256: str
    num_clips: int

    def read(self, store: Store, tar_path: str) -> PacketTables:
        """Return the packet tables of a tar.

        Raises IntegrityError if the tables are damaged, and StorageError if the tables cannot be read.
        """
        from streamvid.dataset.integrity import read_range  # decode workers start faster without these
        from streamvid.dataset.packets import PacketTables

        sha256 = bytes.fromhex(self.sha256)
        data = read_range(store, self.path, self.offset, self.num_bytes, sha256)
        where = f"{store.url}: the packets of {tar_path} in {self.path}"
        return PacketTables(data, sha256, self.num_clips, where)


@dataclass(slots=True)
class SampleFile:
    """One of a sample's files (a clip, a conditioning input or features): its location in the tar and its checksum."""

    offset: int
    num_bytes: int
    sha256: bytes
    num_frames: int


@dataclass(slots=True)
class IndexRow:
    """Index row of one sample.

    - number: position of the sample in its tar file.
    - packets: the shard's packet table; None if the shard has no packet table.
    - fps, duration_seconds: frame rate and duration of the clip; 0.0 if unknown.
    - texts: maps index columns to values, for columns used in captions.
    - columns: maps the column names used by the caller to values, for requested columns.
    - media: maps the name of each conditioning input to its files.
    - is_missing: True if the features of this visit could not be computed.
    - tar: tar file that contains the sample; None if it is the one that the sample's dataset version lists.
    - has_audio: True if the clip has audio and audio is delivered.
    """

    key: str
    clip: SampleFile
    number: int = 0
    packets: PacketsPlace | None = None
    fps: float = 0.0
    duration_seconds: float = 0.0
    texts: Mapping[str, object] = field(default_factory=dict)
    columns: Mapping[str, object] = field(default_factory=dict)
    media: Mapping[str, tuple[SampleFile, ...]] = field(default_factory=dict)
    is_missing: bool = False
    tar: ShardInfo | None = None
    has_audio: bool = False


def sample_file(
    name: str,
    values: tuple[object, object, object, object],
    tar: ShardInfo | SidecarShard,
    *,
    num_frames: tuple[int, int],
    least_bytes: int = 1,
) -> SampleFile:
    """Return the SampleFile for index values (offset, size in bytes, SHA-256, number of frames).

    name: name of the file in messages.
    num_frames: minimum and maximum number of frames.
    Raises IntegrityError for invalid values.
    """
    offset, num_bytes, sha256, count = values
    end = tar.num_bytes - (num_bytes if isinstance(num_bytes, int) else 0)
    most_bytes = min(tar.max_clip_bytes, tar.num_bytes)
    if not isinstance(num_bytes, int) or not least_bytes <= num_bytes <= most_bytes:
        raise _wrong(name, "bytes", num_bytes, least_bytes, most_bytes)
    if not isinstance(offset, int) or not 0 <= offset <= end:
        raise _wrong(name, "offset", offset, 0, end)
    if not isinstance(count, int) or not num_frames[0] <= count <= num_frames[1]:
        raise _wrong(name, "frames", count, *num_frames)
    if not isinstance(sha256, bytes) or len(sha256) != _SHA256_BYTES:
        raise IntegrityError(
            f"the checksum {sha256!r} that the index lists for {name} is not a SHA-256 digest; copy the dataset again"
        )
    return SampleFile(offset, num_bytes, sha256, count)


def _wrong(name: str, what: str, value: object, least: int, most: int) -> IntegrityError:
    return IntegrityError(
        f"the index lists {what}={value!r} for {name}, but {least} to {most} is allowed; copy the dataset again"
    )
