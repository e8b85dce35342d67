"""Which bytes of a clip a delivery needs, how they are read, and what proves them: the same wherever it is done."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from streamvid.errors import DecodeError, IntegrityError, StorageError
from streamvid.storage import ShortFileError

if TYPE_CHECKING:
    from streamvid.buckets.pick import Pick
    from streamvid.storage import Ranges, Store
    from streamvid.video.clip_index import ClipIndex, PacketWindow
    from streamvid.video.stream_info import StreamInfo

WRONG_BYTES = "its stored bytes differ from the checksum in the index"

MAX_READS = 5
"""Of one part: as long as each read gives other wrong bytes, the way to the store is what is wrong."""

TABLE_BYTES = 64 * 2**10
"""Room for a table of packets beside the largest clip; a clip with a larger one is read whole."""


@dataclass(frozen=True, slots=True)
class ClipPart:
    """What is read of a clip for one delivery, and what its bytes are proved by.

    - pick: the frames wanted, and numbers: theirs in the clip; None where that takes the timestamps of its container.
    - first_byte, num_bytes: the range, counted in the clip. checks: (start, end, checksum) of its pieces, counted in
      the range; a checksum is the first bytes of a SHA-256.
    - window, stream: its packets, and what their decoder is told; None: it is the whole clip, with its container.
    """

    pick: Pick
    numbers: Sequence[int] | None
    first_byte: int
    num_bytes: int
    checks: tuple[tuple[int, int, bytes], ...]
    window: PacketWindow | None = None
    stream: StreamInfo | None = None

    @property
    def table_bytes(self) -> int:
        """Of the packets' table, which lies before the range."""
        return 0 if self.window is None else self.window.packets.nbytes

    @property
    def block_bytes(self) -> int:
        """Memory for both."""
        return self.table_bytes + self.num_bytes


def clip_part(
    row: Mapping[str, Any],
    packets: ClipIndex | None,
    pick: Pick,
    *,
    room: int | None = None,
    max_pieces: int | None = None,
) -> ClipPart:
    """What the frames of `pick` need of a clip. Raises IntegrityError, ConfigError.

    row: its "clip_bytes", "clip_sha256" and "window_num_frames", which were checked. packets: its index; None: all of
    the clip is read, and decoded by way of its container, as where a part has more than `max_pieces` or would not fit
    into `room`, which is the clip's size and TABLE_BYTES where it is None.
    """
    num_bytes, num_clip_frames = row["clip_bytes"], row["window_num_frames"]
    if packets is None:
        known = None if pick.needs_times else pick.numbers(num_clip_frames)
        return _whole(row, pick, known)
    if packets.num_frames != num_clip_frames or packets.num_bytes > num_bytes:
        raise IntegrityError(
            f"the index says that the clip has {num_clip_frames} frames in {num_bytes} bytes, and its packets are "
            f"{packets.num_frames} in {packets.num_bytes}; copy the dataset again"
        )
    try:
        if pick.way == "step":
            numbers = pick.numbers(num_clip_frames)
            window = packets.window(pick.start, pick.count, pick.stride)
        else:
            numbers = pick.numbers(num_clip_frames, packets.frame_times if pick.needs_times else None)
            window = packets.window_of(numbers)
    except DecodeError as error:
        raise IntegrityError(str(error)) from error
    part = ClipPart(pick, numbers, window.first_byte, window.num_bytes, window.pieces, window, packets.info)
    fits = part.block_bytes <= (num_bytes + TABLE_BYTES if room is None else room)
    is_short = max_pieces is None or len(window.pieces) <= max_pieces
    return part if fits and is_short else _whole(row, pick, numbers)


def _whole(row: Mapping[str, Any], pick: Pick, numbers: Sequence[int] | None) -> ClipPart:
    return ClipPart(pick, numbers, 0, row["clip_bytes"], ((0, row["clip_bytes"], row["clip_sha256"]),))


def read_ranges(store: Store, path: str, ranges: Ranges, read: Callable[[], None]) -> str | None:
    """Fill the buffers by `read`; why the stored bytes are proved bad where the file ends before one of them does, None
    where they may be right.

    Raises StorageError where the store cannot tell what is stored: that is no proof of bad bytes.
    """
    try:
        read()
    except StorageError as error:
        # A store that is not there would be asked for its size as long again.
        if not (store.is_local or isinstance(error, ShortFileError)):
            raise
        size = store.size(path)
        if size is None or all(size >= offset + len(data) for offset, data in ranges):
            raise
        return f"its tar ends at byte {size}, before the clip does"
    return None


def wrong_bytes(data: memoryview, checks: Sequence[tuple[int, int, bytes]]) -> str | None:
    """What is wrong with the bytes of a part, None if each piece has its checksum."""
    for start, end, checksum in checks:
        if hashlib.sha256(data[start:end]).digest()[: len(checksum)] != checksum:
            # Two reads with the same text have read the same bytes, and only then is it known what is stored.
            return f"{WRONG_BYTES} (read as {hashlib.sha256(data).hexdigest()[:16]})"
    return None
