"""Bytes of a clip that a delivery needs, and their checksums, for both the loader and its workers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from streamvid.errors import DecodeError, IntegrityError, StorageError

if TYPE_CHECKING:
    from fractions import Fraction

    import numpy as np
    import numpy.typing as npt

    from streamvid.buckets.pick import Pick
    from streamvid.loader.view.index_row import SampleFile
    from streamvid.storage import Ranges, Store
    from streamvid.video.clip_index import ClipIndex, PacketWindow
    from streamvid.video.stream_info import StreamInfo

WRONG_BYTES = "its stored bytes do not match the checksum in the index"

TABLE_BYTES = 64 * 2**10
"""Memory for a packet table in addition to the largest clip; a clip with a larger table is read whole."""


@dataclass(frozen=True, eq=False, slots=True)
class AudioPart:
    """Audio packets that a delivery reads, and the position of the audio samples in them.

    - stream: AudioStreamInfo as JSON; "" if the audio is decoded through the clip's container, which is read whole.
    - packets: packet table, with offsets relative to the start of the part's bytes; None for a whole clip.
    - first_sample: number of the first sample; None for a whole clip, whose timestamps are in the container.
    - offset_seconds: time from the first frame to the first sample.
    - num_decoded: number of samples to decode and stretch to the bucket's number of samples; 0 to decode exactly the
        bucket's number, or for a whole clip.
    - own_range: (first byte, size) of the byte range to read for the audio. In memory, this range follows the
      part's first range. None if the packets are within the first range.
    """

    stream: str = ""
    packets: npt.NDArray[np.int64] | None = None
    first_sample: int | None = None
    offset_seconds: float = 0.0
    num_decoded: int = 0
    own_range: tuple[int, int] | None = None

    @property
    def table_bytes(self) -> int:
        """Size in bytes of the packet table."""
        return 0 if self.packets is None else self.packets.nbytes


@dataclass(slots=True)
class ClipPart:
    """Bytes of a clip to read for one delivery, with their checksums.

    - pick: frames to deliver.
    - numbers: indices of these frames in the clip; None if they depend on timestamps that are only in the container.
    - first_byte: start of the first byte range to read, relative to the start of the clip.
    - num_bytes: number of bytes to read.
    - checks: (start, end, checksum) of each piece of these bytes, with start and end as offsets within them. A checksum
      is a prefix of a SHA-256 digest.
    - window, stream: packets of the range, and the description that their decoder needs; None for a whole clip, which
      is decoded through its container, and for audio without pictures.
    - audio: audio to deliver; None if the clip has none, or if audio is not delivered.
    - start_seconds: time of the first delivered frame minus the time of the clip's first frame; None if only the
      container has the timestamps, or if no audio input is delivered.
    """

    pick: Pick
    numbers: Sequence[int] | None
    first_byte: int
    num_bytes: int
    checks: tuple[tuple[int, int, bytes], ...]
    window: PacketWindow | None = None
    stream: StreamInfo | None = None
    audio: AudioPart | None = None
    start_seconds: Fraction | None = None

    @property
    def is_whole(self) -> bool:
        """True if the part is the whole clip, which is decoded through its container."""
        return self.window is None and (self.audio is None or not self.audio.stream)

    @property
    def video_table_bytes(self) -> int:
        """Size in bytes of the video's packet table."""
        return 0 if self.window is None else self.window.packets.nbytes

    @property
    def table_bytes(self) -> int:
        """Size in bytes of the packet tables for video and audio, which precede the clip's bytes in memory."""
        return self.video_table_bytes + (0 if self.audio is None else self.audio.table_bytes)

    @property
    def block_bytes(self) -> int:
        """Size in bytes of the memory for the packet tables and the clip's bytes."""
        return self.table_bytes + self.num_bytes

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """Byte ranges to read, each as (first byte, size), in the order of their bytes in memory."""
        own = None if self.audio is None else self.audio.own_range
        if own is None:
            return ((self.first_byte, self.num_bytes),)
        return ((self.first_byte, self.num_bytes - own[1]), own)


def clip_part(
    clip: SampleFile, packets: ClipIndex | None, pick: Pick, *, room: int | None = None, max_pieces: int | None = None
) -> ClipPart:
    """Return the part of a clip to read for the frames in `pick`, or the whole clip if no smaller part is possible.

    packets: the clip's packet index, if it has one.
    room: size in bytes of the memory for a smaller part; by default, the clip's size plus TABLE_BYTES.
    max_pieces: maximum number of pieces in a smaller part; None for no limit.
    Raises IntegrityError if the packet index is invalid, and ConfigError if the clip lacks requested frames.
    """
    if packets is None:
        return whole_clip(clip, pick, None if pick.needs_times else pick.numbers(clip.num_frames))
    if packets.num_frames != clip.num_frames or packets.num_bytes > clip.num_bytes:
        raise IntegrityError(
            f"the index lists {clip.num_frames} frames in {clip.num_bytes} bytes for the clip, but the clip's packet "
            f"table lists {packets.num_frames} frames in {packets.num_bytes} bytes; copy the dataset again"
        )
    try:
        if pick.way == "step":
            numbers = pick.numbers(clip.num_frames)
            window = packets.window(pick.start, pick.count, pick.stride)
        else:
            numbers = pick.numbers(clip.num_frames, packets.frame_times if pick.needs_times else None)
            window = packets.window_of(numbers)
    except DecodeError as error:
        raise IntegrityError(str(error)) from error
    part = ClipPart(pick, numbers, window.first_byte, window.num_bytes, window.pieces, window, packets.info)
    return part if fits(part, clip, room, max_pieces) else whole_clip(clip, pick, numbers)


def fits(part: ClipPart, clip: SampleFile, room: int | None, max_pieces: int | None) -> bool:
    """Return True if a part fits into its memory and its checks fit into a message. See `clip_part`."""
    has_room = part.block_bytes <= (clip.num_bytes + TABLE_BYTES if room is None else room)
    return has_room and (max_pieces is None or len(part.checks) <= max_pieces)


def whole_clip(clip: SampleFile, pick: Pick, numbers: Sequence[int] | None) -> ClipPart:
    """Return the part that covers the whole clip.

    numbers: indices of the frames to deliver; None if they depend on timestamps that are only in the container.
    """
    return ClipPart(pick, numbers, 0, clip.num_bytes, ((0, clip.num_bytes, clip.sha256),))


def read_ranges(store: Store, path: str, content: tuple[str, int], ranges: Ranges, *, is_again: bool) -> str | None:
    """Fill buffers as `storage.read_content` does. Return a message if the stored file is too short, otherwise None.

    Raises StorageError if the bytes cannot be read for another reason; the stored bytes may be intact.
    """
    from streamvid.storage import ShortFileError, read_content  # decode workers start faster without it

    try:
        read_content(store, path, content, ranges, is_again=is_again)
    except StorageError as error:
        # Requesting the file size from a store that does not answer would take as long again.
        if not (store.is_local or isinstance(error, ShortFileError)):
            raise
        size = store.size(path)
        if size is None or all(size >= offset + len(data) for offset, data in ranges):
            raise
        return f"its tar ends at byte {size}, before the end of the clip"
    return None


def wrong_bytes(data: memoryview, checks: Sequence[tuple[int, int, bytes]]) -> str | None:
    """Return a description of the problem with a part's bytes, or None if every piece matches its checksum."""
    for start, end, checksum in checks:
        if hashlib.sha256(data[start:end]).digest()[: len(checksum)] != checksum:
            # The checksum makes two reads comparable: equal messages mean equal bytes.
            return f"{WRONG_BYTES} (SHA-256 of the bytes: {hashlib.sha256(data).hexdigest()[:16]}…)"
    return None
