"""The main loop of decoding: from packets to the wanted frames, by their timestamps.

A frame is accepted only if its timestamp equals the one that the packets promise: "the first at or after" would
silently deliver shifted frames if some do not decode. Pictures that no picture refers to are skipped, and reading
stops at the packet of the last frame wanted.
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

#: Codecs in which each picture states that no other refers to it. HEVC states it only within a temporal layer; AV1's
#: decoder loses frames when told to skip.
_SKIPPING_CODECS = frozenset({"h264", "mpeg4", "mpeg2video", "mpeg1video", "vp8"})

Take = Callable[["VideoFrame", int], None]
"""Called with each wanted frame and its slot, in the order in which frames are decoded."""


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
    """Feed packets, each with a flag for a wanted picture, until all of `wanted` (timestamp → slot) have come out.

    key_time: timestamp of the key frame that decoding starts at; numbers: of each slot's frame in the clip, for
    messages; None if unknown.
    Raises DecodeError if a wanted frame does not come out, or is damaged.
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
        which = f"frames {names}" if numbers is not None else f"of the requested frames, those at places {names}"
        raise DecodeError(f"{which} do not decode: damaged data or wrong timestamps")


def repeat_frames(out: NDArray[np.uint8], slots: Sequence[int]) -> None:
    """Fill the slots of `out` between these, which ascend from 0, with the frame of the given slot before them."""
    for slot, following in pairwise([*slots, len(out)]):
        out[slot + 1 : following] = out[slot]


def _take(
    decoder: VideoCodecContext, packet: Packet[Any] | None, missing: dict[int, int], take: Take, key_time: int
) -> None:
    import av

    try:
        for frame in decoder.decode(packet):
            time = frame.pts
            # Frames shown before the key frame may refer to pictures before it: broken, but not wanted here.
            if frame.is_corrupt and (time is None or time >= key_time):
                raise DecodeError(f"the video is damaged: the frame at timestamp {time} does not decode cleanly")
            if time in missing:
                take(frame, missing.pop(time))
    except av.FFmpegError as error:
        place = "its end" if packet is None else f"timestamp {packet.pts}"
        raise DecodeError(f"the video does not decode near {place} ({error.strerror})") from error


def _brief(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return f"{shown} and {len(numbers) - 8} more" if len(numbers) > 8 else shown
