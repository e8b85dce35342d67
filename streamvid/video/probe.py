"""Probing of a file: frames are counted from packets, and one key frame is decoded for its size and colors.

If a format is known for unreliable timestamps (AVI, MPEG-TS, MPEG-PS, FLV, AVI-style Matroska, MPEG-4 with packed
pictures, interlaced video with one packet per field, B-frames with timestamps in storage order), every frame is decoded
once, and the file is accepted only if the frames have exactly the timestamps that the packets declare, in the same
order. `decode_into` then finds the same frames later.
"""

from __future__ import annotations

from dataclasses import asdict
from itertools import pairwise

from streamvid.errors import ProbeError
from streamvid.video.container import Source, VideoFile, open_video
from streamvid.video.frame_format import FrameFormat, read_frame_format
from streamvid.video.info import VideoInfo
from streamvid.video.limits import LIMITS, Limits
from streamvid.video.packets import PacketTable, decoded, read_packets, remedy

#: Codecs for which AVI files may store a picture inside a neighboring packet.
_LOOSE_CODECS = frozenset({"mpeg4", "msmpeg4v3"})


def probe(source: Source, limits: Limits = LIMITS, *, verify: bool = False) -> VideoInfo:
    """Read the properties of a video or an image from a path, bytes, a buffer, or a seekable binary file.

    Only the containers and codecs listed in `limits` are allowed. JPEG, PNG, WebP, BMP and TIFF files are images with
    one frame (other pictures in the file are ignored), as is a GIF with one picture. A GIF with several pictures is a
    video; an animated WebP is rejected.
    verify: True to decode every frame and compare the frames with the packets.

    Raises ProbeError, whose message contains no path, if the file is not a video, is truncated, exceeds a limit, is
    HDR, has timestamps that do not identify each frame or, with `verify`, has damaged frames or several frame sizes.
    """
    with open_video(source, limits) as video:
        table = read_packets(video)
        seconds = float((table.timestamps[-1] - table.timestamps[0]) * table.time_base)
        if seconds > limits.max_seconds:
            raise ProbeError(
                f"the video lasts {seconds:.0f} s; the limit is max_seconds={limits.max_seconds:g}",
                kind="limit",
            )
        has_audio = video.has_audio
        frame, is_interlaced = first_frame(video, table)
        is_one_packet_a_frame = video.is_exact and video.codec_name not in _LOOSE_CODECS and not is_interlaced
        # The stream reorders its pictures, but the timestamps do not: a muxer confused decode and presentation times.
        is_order_doubtful = table.reorder_depth == 0 < video.decoder.reorder_depth
        if verify or not (is_one_packet_a_frame or video.is_image) or is_order_doubtful:
            _compare_with_decode(video, table)
        return _make_info(video, table, frame, is_interlaced=is_interlaced, has_audio=has_audio)


def first_frame(video: VideoFile, table: PacketTable) -> tuple[FrameFormat, bool]:
    """Return the format of the first key frame, and whether it is interlaced."""
    first = table.keys[0][1]
    problem = (
        "the first key frame cannot be decoded: it is damaged, or has more pixels than the limit "
        f"max_pixels={video.limits.max_pixels}"
    )
    # An edit list may hide the key frame itself; the first displayed frame then provides the format.
    for stop in (first + 1, len(table.rows)):
        for frame in decoded(video, problem, first, stop):
            if frame.is_corrupt:
                raise ProbeError(
                    "the first key frame of the video is damaged; copy or download the file again", kind="damaged"
                )
            return read_frame_format(video, frame), frame.interlaced_frame
    raise ProbeError(problem, kind="damaged")


def _compare_with_decode(video: VideoFile, table: PacketTable) -> None:
    first_time, first_ordinal = table.keys[0]
    shown: list[int | None] = []
    formats: set[tuple[int, int, str]] = set()
    for frame in decoded(video, "the video cannot be decoded", first_ordinal):
        if frame.pts is None or frame.pts >= first_time:
            if frame.is_corrupt:
                raise ProbeError(
                    (f"the video is damaged: frame {len(shown)} cannot be decoded without errors"), kind="damaged"
                )
            shown.append(frame.pts)
            formats.add((frame.width, frame.height, frame.format.name))
    if tuple(shown) != table.timestamps:
        raise ProbeError(
            f"the packets declare {len(table.timestamps)} frames and {len(shown)} frames can be decoded, but their "
            f"timestamps do not match (the file is damaged, or the writer of this {video.container_name} "
            f"file mixed up the timestamps); {remedy()}",
            kind="damaged",
        )
    if len(formats) > 1:
        found = ", ".join(f"{width}x{height} {pixels}" for width, height, pixels in sorted(formats))
        raise ProbeError(
            f"the video changes size or pixel format ({found}); re-encode it to a single size and pixel format",
            kind="changes-size",
        )


def _make_info(
    video: VideoFile, table: PacketTable, frame: FrameFormat, *, is_interlaced: bool, has_audio: bool
) -> VideoInfo:
    times, keyframes = table.timestamps, table.keyframes
    num_frames = len(times)
    span = float((times[-1] - times[0]) * table.time_base)
    fps = (num_frames - 1) / span if span > 0 else float(video.stream.average_rate or 0)
    last = float(table.last_duration * table.time_base) or (1 / fps if fps else 0.0)
    starts = [*keyframes, num_frames]
    width, height = frame.display_size
    return VideoInfo(
        width=width,
        height=height,
        num_frames=num_frames,
        fps=0.0 if video.is_image else fps,
        duration_seconds=0.0 if video.is_image else span + last,
        time_base=table.time_base,
        codec=video.codec_name,
        container=video.container_name,
        is_interlaced=is_interlaced,
        num_keyframes=len(keyframes),
        max_keyframe_distance=max((b - a for a, b in pairwise(starts)), default=num_frames),
        has_audio=has_audio,
        is_image=video.is_image,
        timestamps=times,
        keyframes=keyframes,
        last_duration=table.last_duration,
        **asdict(frame),
    )
