"""Decoding selected frames of a video file, found by timestamp, into the caller's memory.

This works for every file: it opens the container and reads all packets once. Clips whose packets are in a dataset's
index are decoded by stored.py, which is faster and returns the same frames.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from streamvid.errors import ConfigError, DecodeError, ProbeError
from streamvid.video.container import Source, VideoFile, open_video
from streamvid.video.decode.convert import FrameConverter, PictureColor
from streamvid.video.decode.window import Take, can_skip, decode_window, repeat_frames
from streamvid.video.frame_format import read_frame_format
from streamvid.video.limits import LIMITS, Limits
from streamvid.video.packets import PacketTable, packets_from, read_packets
from streamvid.video.picture import Accuracy, PictureFormat
from streamvid.video.stream_info import declare_x264, set_reorder_depth
from streamvid.video.transform import Crop, Transform

if TYPE_CHECKING:
    from av.video.frame import VideoFrame

_Result = TypeVar("_Result")
Choose: TypeAlias = Callable[[PacketTable], Sequence[int]]


def decode_into(
    source: Source,
    start: int,
    out: NDArray[np.uint8],
    *,
    num_frames: int | None = None,
    stride: int = 1,
    accuracy: Accuracy = "exact",
    limits: Limits = LIMITS,
) -> None:
    """Decode len(out) frames into `out`, starting at frame number `start` and taking every `stride`-th frame.

    Frames are counted in presentation order.

    source: bytes or a buffer (read in place), a path, or a seekable binary file. An image is a video of one frame.
    out: C-contiguous, writable uint8 array of shape (T, H, W, 3), with T >= 1. It receives upright RGB frames, scaled
        to cover (H, W) and center-cropped (`Transform.cover`).
    accuracy: as in PictureFormat.
    num_frames: expected number of frames in the video; None to skip the check.

    Raises DecodeError if the source does not have the expected frames or a frame does not decode (the contents of
    `out` are then undefined), and ConfigError for invalid `start`, `stride` or `out`. Damage that a codec cannot detect
    (VP9, AV1 and HEVC detect little) causes damaged pixels; checksums guard against that. Decoding uses one thread and
    keeps nothing between calls.
    """
    _check_arguments(start, stride, out)
    picture = PictureFormat(out.shape[1], out.shape[2], accuracy=accuracy)
    pictures = out.reshape(len(out), -1)
    decode_pictures(source, start, pictures, picture, num_frames=num_frames, stride=stride, limits=limits)


def decode_pictures(
    source: Source,
    start: int,
    out: NDArray[np.uint8],
    picture: PictureFormat,
    *,
    num_frames: int | None = None,
    stride: int = 1,
    limits: Limits = LIMITS,
    choose: Choose | None = None,
    crop: Crop | None = None,
) -> PictureColor:
    """Decode frames as `decode_into` does, but in any picture format. Return the pictures' color properties.

    out: uint8 array of shape (T, picture.num_bytes). Each row receives one picture.
    choose: function that selects frames from the packet table; `start` and `stride` are then ignored. It returns
        len(out) ascending frame numbers, which may repeat.
    crop: part of each frame to keep; None to keep the largest centered part with the picture's aspect ratio.
    """
    try:
        with open_video(source, limits) as video:
            table = read_packets(video)
            _check_length(table, num_frames)
            numbers = range(start, start + len(out) * stride, stride) if choose is None else choose(table)
            return _decode_window(video, table, numbers, out, picture, crop)
    except ProbeError as error:
        raise DecodeError(str(error)) from error


def _check_arguments(start: int, stride: int, out: NDArray[np.uint8]) -> None:
    if out.dtype != np.uint8 or out.ndim != 4 or out.shape[3] != 3 or not out.size:
        raise ConfigError(
            f"out has dtype {out.dtype} and shape {out.shape}; it must be a non-empty uint8 array of shape (T, H, W, 3)"
        )
    if not (out.flags.c_contiguous and out.flags.writeable):
        raise ConfigError("out must be C-contiguous and writable")
    if start < 0:
        raise ConfigError(f"start is {start}; it must be at least 0")
    if stride < 1:
        raise ConfigError(f"stride is {stride}; it must be at least 1")


def _check_length(table: PacketTable, num_frames: int | None) -> None:
    if num_frames is not None and num_frames != len(table.timestamps):
        raise DecodeError(f"the video has {len(table.timestamps)} frames, but {num_frames} were expected")


def _decode_window(
    video: VideoFile,
    table: PacketTable,
    numbers: Sequence[int],
    out: NDArray[np.uint8],
    picture: PictureFormat,
    crop: Crop | None,
) -> PictureColor:
    converters: list[FrameConverter] = []

    def take(frame: VideoFrame, slot: int) -> None:
        if not converters:
            frame_format = read_frame_format(video, frame)
            transform = Transform.cover(frame_format, picture.height, picture.width, crop)
            converters.append(FrameConverter(frame, frame_format, transform, picture))
        converters[0].convert(frame, out[slot])

    from_key_frame(table, numbers, lambda key: decode_from(video, table, key, numbers, take))
    slots = _first_places(numbers)
    if len(slots) < len(out):
        repeat_frames(out, sorted(slots.values()))
    return converters[0].color


def from_key_frame(table: PacketTable, numbers: Sequence[int], decode: Callable[[tuple[int, int]], _Result]) -> _Result:
    """Call `decode` with the (timestamp, ordinal) of the key packet at which to start, and return its result.

    If `decode` raises an error, the previous key packet is tried, because the first key packet may not be a true entry
    point. If the second attempt fails too, the first error is raised. Raises DecodeError if `numbers` includes a frame
    beyond the end of the video.
    """
    if numbers[-1] >= len(table.timestamps):
        raise DecodeError(
            f"frames {numbers[0]} to {numbers[-1]} were requested, but the video has {len(table.timestamps)} frames"
        )
    problem: DecodeError | ProbeError | None = None
    try:
        for key in table.decode_starts(numbers[0], numbers[-1]):
            try:
                return decode(key)
            except (DecodeError, ProbeError) as error:
                problem = problem or error
        raise problem or DecodeError(f"no key frame precedes frame {numbers[0]}; re-encode the video")
    finally:
        # An error and the variable that holds it reference each other, which keeps the decoder and its pictures alive.
        del problem


def decode_from(video: VideoFile, table: PacketTable, key: tuple[int, int], numbers: Sequence[int], take: Take) -> None:
    """Decode the frames `numbers`, starting at a key packet. Pass each frame and its first index to `take`.

    The index is the frame's first place in `numbers`.

    Raises DecodeError if a frame does not decode or the file no longer matches `table`, and ProbeError if the file
    cannot be read.
    """
    packets = packets_from(video, table, key[1])
    decoder = video.decoder
    declare_x264(decoder, table.x264_core)
    set_reorder_depth(decoder, video.codec_name, max(decoder.reorder_depth, table.reorder_depth))
    slots = _first_places(numbers)
    ordinals = {table.ordinals[number] for number in slots}
    decode_window(
        decoder,
        ((packet, ordinal in ordinals) for ordinal, packet in packets),
        {table.timestamps[number]: slot for number, slot in slots.items()},
        take,
        key_time=key[0],
        numbers=numbers,
        may_skip=can_skip(video.codec_name, decoder.extradata or b""),
    )


def _first_places(numbers: Sequence[int]) -> dict[int, int]:
    return {number: place for place, number in reversed(list(enumerate(numbers)))}
