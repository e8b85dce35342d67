"""Main decoding loop, which finds the wanted frames by timestamp.

A frame is accepted only if its timestamp equals the timestamp that its packet declares. Accepting the first frame at or
after the wanted time would silently deliver shifted frames if some frames do not decode. Unwanted pictures that no
other picture refers to are skipped, and reading stops at the packet of the last wanted frame.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from streamvid.errors import DecodeError

if TYPE_CHECKING:
    import numpy as np
    from av.packet import Packet
    from av.video.codeccontext import VideoCodecContext
    from av.video.frame import VideoFrame
    from numpy.typing import NDArray

#: Codecs in which each picture declares whether others refer to it. HEVC declares it only within a temporal layer;
#: AV1's decoder loses frames if it is asked to skip.
_SKIPPING_CODECS = frozenset({"h264", "mpeg4", "mpeg2video", "mpeg1video", "vp8"})

Take = Callable[["VideoFrame", int], None]
"""Function that is called with each wanted frame and its slot, in the order in which frames are decoded."""


def can_skip(codec: str, extradata: bytes) -> bool:
    """Return whether a decoder may skip pictures that no other picture refers to."""
    if codec == "hevc":
        # The hvcC header counts temporal layers; with a single one, "not referred to in the layer" covers everything.
        return len(extradata) > 21 and extradata[0] == 1 and extradata[21] >> 3 & 0b111 == 1
    return codec in _SKIPPING_CODECS


def decode_window(
    decoder: VideoCodecContext,
    packets: Iterable[tuple[Packet[Any], bool]],
    wanted: dict[int, int],
    take: Take,
    *,
    key_time: int,
    numbers: Sequence[int] | None,
    may_skip: bool,
) -> None:
    """Decode packets until all wanted frames are found, and call `take` with each wanted frame.

    packets: (packet, bool) pairs; the bool is True if the packet's picture is wanted.
    wanted: maps the timestamp of each wanted frame to its output slot.
    key_time: timestamp of the key frame at which decoding starts.
    numbers: number of each slot's frame within the clip, used in error messages; None if unknown.
    Raises DecodeError if a wanted frame does not decode or is damaged.
    """
    missing, to_feed = dict(wanted), len(wanted)
    skips: bool | None = None
    for packet, is_wanted in packets:
        if skips is not (may_skip and not is_wanted):
            skips = may_skip and not is_wanted
            decoder.skip_frame = "NONREF" if skips else "DEFAULT"
        _take(decoder, packet, missing, take, key_time)
        to_feed -= is_wanted
        if not to_feed:
            break
    if missing:
        _take(decoder, None, missing, take, key_time)
    if missing:
        slots = sorted(missing.values())
        names = _brief(slots if numbers is None else [numbers[slot] for slot in slots])
        which = f"frame numbers: {names}" if numbers is not None else f"positions in the request: {names}"
        raise DecodeError(f"the data is damaged or has wrong timestamps: some frames cannot be decoded ({which})")


def repeat_frames(out: NDArray[np.uint8], slots: Sequence[int]) -> None:
    """Copy the preceding frame into each slot of `out` that is not in `slots` (ascending, starting with 0)."""
    for slot, following in pairwise([*slots, len(out)]):
        out[slot + 1 : following] = out[slot]


def _take(
    decoder: VideoCodecContext, packet: Packet[Any] | None, missing: dict[int, int], take: Take, key_time: int
) -> None:
    import av

    try:
        for frame in decoder.decode(packet):
            time = frame.pts
            # Frames displayed before the key frame may refer to earlier pictures: they are broken, but not wanted.
            if frame.is_corrupt and (time is None or time >= key_time):
                raise DecodeError(
                    f"the video is damaged: the frame at timestamp {time} cannot be decoded without errors"
                )
            if time in missing:
                take(frame, missing.pop(time))
    except av.FFmpegError as error:
        place = "its end" if packet is None else f"timestamp {packet.pts}"
        raise DecodeError(f"the video cannot be decoded near {place} ({error.strerror})") from error


def _brief(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return f"{shown} and {len(numbers) - 8} more" if len(numbers) > 8 else shown
