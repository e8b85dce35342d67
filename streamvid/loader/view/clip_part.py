"""Bytes of a clip that a delivery needs, and their checksums, for both the loader and its workers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from streamvid.errors import DecodeError, IntegrityError, StorageError

if TYPE_CHECKING:
    from streamvid.buckets.pick import Pick
    from streamvid.loader.view.index_row import SampleFile
    from streamvid.storage import Ranges, Store
    from streamvid.video.clip_index import ClipIndex, PacketWindow
    from streamvid.video.stream_info import StreamInfo

WRONG_BYTES = "its stored bytes do not match the checksum in the index"

TABLE_BYTES = 64 * 2**10
"""Memory for a packet table in addition to the largest clip; a clip with a larger table is read whole."""


@dataclass(frozen=True, slots=True)
class ClipPart:
    """Bytes of a clip to read for one delivery, with their checksums.

    - pick: frames to deliver.
    - numbers: indices of these frames in the clip; None if they depend on timestamps that only the container holds.
    - first_byte, num_bytes: byte range to read, relative to the start of the clip.
    - checks: (start, end, checksum) of each piece of the range, as offsets in the range. A checksum is a prefix of a
      SHA-256 digest.
    - window, stream: packets of the range, and the description that their decoder needs; None for a whole clip, which
      is decoded through its container.
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
        """Size in bytes of the packet table, which precedes the range in memory."""
        return 0 if self.window is None else self.window.packets.nbytes

    @property
    def block_bytes(self) -> int:
        """Size in bytes of the memory for the packet table and the range."""
        return self.table_bytes + self.num_bytes


def clip_part(
    clip: SampleFile, packets: ClipIndex | None, pick: Pick, *, room: int | None = None, max_pieces: int | None = None
) -> ClipPart:
    """Return the part of a clip to read for the frames of `pick`: the whole clip if no smaller part is possible.

    packets: the clip's packet index, if it has one.
    room: size of the memory for a smaller part in bytes; by default, the clip's size plus TABLE_BYTES.
    max_pieces: maximum number of pieces of a smaller part; None for no limit.
    Raises IntegrityError if the packet index is invalid, and ConfigError if the clip lacks requested frames.
    """
    if packets is None:
        return whole_clip(clip, pick, None if pick.needs_times else pick.numbers(clip.num_frames))
    if packets.num_frames != clip.num_frames or packets.num_bytes > clip.num_bytes:
        raise IntegrityError(
            f"the index lists {clip.num_frames} frames in {clip.num_bytes} bytes for the clip, but its packet table "
            f"lists {packets.num_frames} frames in {packets.num_bytes} bytes; copy the dataset again"
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
    fits = part.block_bytes <= (clip.num_bytes + TABLE_BYTES if room is None else room)
    is_short = max_pieces is None or len(window.pieces) <= max_pieces
    return part if fits and is_short else whole_clip(clip, pick, numbers)


def whole_clip(clip: SampleFile, pick: Pick, numbers: Sequence[int] | None) -> ClipPart:
    """Return the part that covers the whole clip. numbers: indices of the frames to deliver, or None."""
    return ClipPart(pick, numbers, 0, clip.num_bytes, ((0, clip.num_bytes, clip.sha256),))


def read_ranges(store: Store, path: str, content: tuple[str, int], ranges: Ranges, *, is_again: bool) -> str | None:
    """Fill buffers as `storage.read_content` does. Return the problem if the stored file is too short, else None.

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
    """Return the problem with the bytes of a part; None if every piece matches its checksum."""
    for start, end, checksum in checks:
        if hashlib.sha256(data[start:end]).digest()[: len(checksum)] != checksum:
            # The checksum makes two reads comparable: equal messages mean equal bytes.
            return f"{WRONG_BYTES} (read as {hashlib.sha256(data).hexdigest()[:16]})"
    return None
