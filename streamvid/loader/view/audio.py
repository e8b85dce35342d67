"""Audio in a delivery: its options, its samples on the clip's timeline, and the bytes to read for the samples.

Output sample k has the time k / sample_rate on the clip's presentation timeline, to which the frames' timestamps also
refer. The audio of a window begins with the sample nearest to the presentation time of the first delivered frame.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, TypeAlias

from streamvid.buckets.audio.rule import AUDIO_PRESETS, EXACT, SampleRule
from streamvid.buckets.bucket import TICKS_PER_SECOND
from streamvid.config import check_options, option
from streamvid.errors import ConfigError, DecodeError, IntegrityError
from streamvid.loader.view.clip_part import AudioPart, ClipPart, fits, whole_clip
from streamvid.video.audio.grid import LAYOUTS, MAX_SPEED, MIN_SPEED, first_sample_at, offset_seconds, round_half_up

if TYPE_CHECKING:
    from streamvid.buckets.pick import Pick
    from streamvid.loader.view.index_row import SampleFile
    from streamvid.video.audio.index import AudioIndex
    from streamvid.video.clip_index import ClipIndex, Int64s

Checks: TypeAlias = tuple[tuple[int, int, bytes], ...]
TimeRange: TypeAlias = tuple[Fraction, Fraction]
"""Presentation times of the first and the last frame."""

HAS_AUDIO = "has_audio"
"""Column in the samples index that records whether a clip has audio."""

MAX_SAMPLE_RATE = 192_000
_FLOAT_BYTES = 4
_MAX_STREAM_CHARS = 40_000  # of 65,536 bytes; the checks of 512 pieces take 22,000


@dataclass(frozen=True, slots=True)
class AudioOptions:
    """Options for the audio delivered with each clip as `batch.audio`. Set `sample_rate` or `preset`."""

    sample_rate: int | None = option(
        None, help="Samples per second per channel, such as 32000.", minimum=1000, maximum=MAX_SAMPLE_RATE
    )
    num_channels: int | None = option(
        None, help="Number of channels: 1, 2, 6 (5.1) or 8 (7.1).", shown_default="the preset's number, otherwise 2"
    )
    rule: str | None = option(
        None,
        help=(
            "Number of audio samples for each bucket: `exact` (the duration of the bucket's frames, rounded to a "
            "whole number of samples), or the nearest number that a rule such as 640k or 640k+1 allows."
        ),
        shown_default="the preset's rule, otherwise exact",
    )
    fps: Fraction | None = option(
        None,
        help="Frame rate from which the number of samples is computed, for datasets whose clips keep their "
        "original frame rates.",
        shown_default="the rate at which the dataset is read, otherwise the rate of each bucket's first clip",
        above=0.0,
    )
    stretch: bool = option(
        False,
        help="Stretch the audio in time, at the same pitch, if a view changes the speed of the frames.",
    )
    preset: str | None = option(
        None,
        help=f"Model whose audio format provides the defaults for these options. One of {', '.join(AUDIO_PRESETS)}.",
        choices=tuple(AUDIO_PRESETS),
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.sample_rate is None and self.preset is None:
            raise ConfigError(
                "sample_rate=None: set sample_rate to a number such as 32000, or set preset to one of "
                f"{', '.join(AUDIO_PRESETS)}"
            )
        if self.num_channels not in (None, *LAYOUTS):
            raise ConfigError(f"num_channels={self.num_channels}: must be one of {', '.join(map(str, LAYOUTS))}")
        if self.rule is not None:
            SampleRule.of(self.rule)

    @property
    def form(self) -> AudioForm:
        """Format of the delivered audio. Options that are not set take the preset's values."""
        preset = None if self.preset is None else AUDIO_PRESETS[self.preset]
        rate = self.sample_rate or (preset.sample_rate if preset else 0)
        channels = self.num_channels or (preset.num_channels if preset else 2)
        return AudioForm(rate, channels, SampleRule.of(self.rule or (preset.rule if preset else EXACT)))


@dataclass(frozen=True, slots=True)
class AudioForm:
    """Format of the delivered audio: sample rate, number of channels, and rule for the number of samples."""

    sample_rate: int
    num_channels: int
    rule: SampleRule


@dataclass(frozen=True, slots=True)
class AudioShape:
    """Amount of audio for a bucket: `num_samples` samples per channel, for frames at `fps` frames per second.

    stretch: True to stretch the audio for frames that are delivered at a different speed.
    """

    sample_rate: int
    num_channels: int
    num_samples: int
    num_frames: int
    fps: Fraction
    stretch: bool = False

    @property
    def num_bytes(self) -> int:
        """Size in bytes of a sample's audio, as float32."""
        return self.num_channels * self.num_samples * _FLOAT_BYTES

    def check_speed(self, part: ClipPart, video: ClipIndex | None) -> None:
        """Raise ConfigError if the frames of a part and their audio end more than half a frame apart.

        With `stretch`, raise ConfigError instead if the frames are delivered too fast or too slowly.

        video: packets of the clip; their timestamps give the duration of the frames even if the frame rate varies. If
            None, the clip's average rate is used. If frames are chosen by time, the rate of the grid is used.
        """
        ours = float(self.fps)
        fps, num_intervals, tolerance = _speed(part, video)
        if self.stretch:
            if fps > 0 and not MIN_SPEED <= ours / fps <= MAX_SPEED:
                raise ConfigError(
                    f"the frames are delivered {ours / fps:.3g} times as fast as recorded, but output.audio.stretch "
                    f"supports only {MIN_SPEED} to {MAX_SPEED} times the recorded speed; use a view that changes the "
                    "speed less, or leave output.audio out"
                )
            return
        if fps > 0 and abs(ours / fps - 1) * num_intervals > tolerance:
            raise ConfigError(
                f"the frames are delivered at {fps:.6g} fps, but output.audio delivers the audio for "
                f"{self.num_frames} frames at {ours:.6g} fps, so the frames and the audio would end more than half a "
                f"frame apart. Shard the dataset with --fps {ours:.6g} --fps-rule resample, or deliver only clips with "
                f"a single frame rate: set where='fps > {ours * 0.999:.6g} and fps < {ours * 1.001:.6g}' and "
                f"output.audio.fps={ours:.6g}"
            )


def _speed(part: ClipPart, video: ClipIndex | None) -> tuple[float, int, float]:
    """Return (frame rate of a part, number of frame intervals over which it is averaged, allowed error in frames).

    The frame rate is 0.0 for images.
    """
    pick, numbers = part.pick, part.numbers
    fps, count = pick.delivered_fps, pick.count
    if fps > 0 and count > 1 and numbers is not None and not pick.needs_times:
        seconds = _seconds_between(numbers[0], numbers[-1], video)
        if seconds > 0:
            found = (count - 1) / seconds
            # Numbers are rounded, so that the first and the last frame may each be half a frame of the clip off.
            return found, count - 1, 0.5 + (found / pick.clip_fps if pick.way == "number" else 0.0)
    return fps, count, 0.5


def _seconds_between(first: int, last: int, video: ClipIndex | None) -> float:
    """Return the seconds between two frames of a clip, or 0.0 if the packets do not contain the frames' times."""
    if video is None or video.time_base is None or not last < video.num_frames:
        return 0.0
    times = video.frame_times
    return float((int(times[last]) - int(times[first])) * video.time_base)


@dataclass(frozen=True, slots=True)
class AudioPlan:
    """Audio for all of a loader's deliveries.

    shapes: maps bucket ids to shapes, for all buckets with pictures.
    """

    form: AudioForm
    shapes: Mapping[str, AudioShape]

    def of(self, bucket_id: str) -> AudioShape:
        """Return the shape of a bucket's audio."""
        return self.shapes[bucket_id]


def with_audio(
    part: ClipPart, clip: SampleFile, index: tuple[ClipIndex, AudioIndex] | None, shape: AudioShape, max_pieces: int
) -> ClipPart:
    """Return `part` extended to include its frames' audio, or the whole clip if no smaller part contains the audio.

    index: packets of the clip's video and audio; None if the audio is decoded through the container.
    max_pieces: see `clip_part`.
    Raises IntegrityError if the index is invalid.
    """
    if index is not None and index[0].time_base is not None and part.window is not None:
        if index[1].num_bytes > clip.num_bytes:
            raise IntegrityError(
                f"the clip's packet table lists {index[1].num_bytes} bytes of audio, but the index lists only "
                f"{clip.num_bytes} bytes for the whole clip; copy the dataset again"
            )
        found = _with_packets(part, *index, shape)
        if fits(found, clip, None, max_pieces) and _are_short(found):
            return found
    return replace(whole_clip(clip, part.pick, part.numbers), audio=AudioPart())


def audio_only(clip: SampleFile, index: AudioIndex | None, pick: Pick, shape: AudioShape, max_pieces: int) -> ClipPart:
    """Return the part of an audio file to read for the ticks in `pick`, or the whole file if no smaller part suffices.

    index: packets of the file; None if the file is decoded through its container.
    max_pieces: see `clip_part`.
    Raises IntegrityError if the index is invalid.
    """
    numbers = pick.numbers(clip.num_frames)
    seconds = Fraction(numbers[0], TICKS_PER_SECOND)
    number = first_sample_at(seconds, shape.sample_rate)
    whole = whole_clip(clip, pick, numbers)
    mine = AudioPart(first_sample=number, offset_seconds=offset_seconds(seconds, number, shape.sample_rate))
    try:
        found = None if index is None else index.window(number, shape.num_samples, shape.sample_rate)
    except DecodeError as error:
        raise IntegrityError(str(error)) from error
    if index is None or found is None or not 0 < found.num_bytes <= clip.num_bytes - found.first_byte:
        return replace(whole, audio=mine)
    mine_in_part = replace(mine, stream=index.info.to_json(), packets=found.packets)
    part = ClipPart(pick, numbers, found.first_byte, found.num_bytes, found.pieces, audio=mine_in_part)
    is_short = len(mine_in_part.stream) <= _MAX_STREAM_CHARS
    return part if is_short and fits(part, clip, None, max_pieces) else replace(whole, audio=mine)


def _with_packets(part: ClipPart, video: ClipIndex, audio: AudioIndex, shape: AudioShape) -> ClipPart:
    """Return the part with the packets for its audio added. Overlapping byte ranges are joined and read only once."""
    assert part.window is not None and part.numbers is not None and video.time_base is not None
    seconds = int(video.frame_times[part.numbers[0]]) * video.time_base
    number = first_sample_at(seconds, shape.sample_rate)
    until = int(video.frame_times[part.numbers[-1]]) * video.time_base
    num_frames = shape.num_frames if shape.stretch else 0
    count = num_decoded(seconds, until, num_frames, shape.num_samples, shape.sample_rate)
    try:
        found = audio.window(number, count or shape.num_samples, shape.sample_rate)
    except DecodeError as error:
        raise IntegrityError(f"its audio: {error}") from error
    offset = offset_seconds(seconds, number, shape.sample_rate)
    mine = AudioPart(audio.info.to_json(), found.packets, number, offset, count)
    if not found.num_bytes:
        return replace(part, audio=mine)
    first, end = part.first_byte, part.first_byte + part.num_bytes
    last = found.first_byte + found.num_bytes
    if found.first_byte <= end and first <= last:
        start = min(first, found.first_byte)
        num_bytes, before, place = max(end, last) - start, first - start, found.first_byte - start
    else:
        start, num_bytes, before, place = first, part.num_bytes + found.num_bytes, 0, part.num_bytes
        mine = replace(mine, own_range=(found.first_byte, found.num_bytes))
    return replace(
        part,
        first_byte=start,
        num_bytes=num_bytes,
        checks=(*_shifted(part.checks, before), *_shifted(found.pieces, place)),
        window=replace(part.window, packets=_moved(part.window.packets, before)),
        audio=replace(mine, packets=_moved(found.packets, place)),
    )


def num_decoded(first: Fraction, last: Fraction, num_frames: int, num_samples: int, sample_rate: int) -> int:
    """Return the number of audio samples to decode and stretch to `num_samples`, or 0 if no stretching is needed.

    The decoded samples last as long as the frames. Audio that ends less than half a frame before or
    after the frames is not stretched.

    first, last: times of the first and the last frame, in seconds.
    num_frames: number of frames; 0 disables stretching.
    """
    if num_frames < 2:
        return 0
    duration = (last - first) * Fraction(num_frames, num_frames - 1)
    count = max(1, round_half_up(duration * sample_rate))
    return count if abs(Fraction(num_samples, count) - 1) * num_frames > Fraction(1, 2) else 0


def _are_short(part: ClipPart) -> bool:
    """Return True if a part's stream descriptions fit into a message to a worker."""
    assert part.stream is not None and part.audio is not None
    return len(part.stream.to_json()) + len(part.audio.stream) <= _MAX_STREAM_CHARS


def _moved(packets: Int64s, distance: int) -> Int64s:
    """Return a packet table whose offsets (column 1) are relative to a position `distance` bytes earlier."""
    if not distance:
        return packets
    moved = packets.copy()
    moved[:, 1] += distance
    return moved


def _shifted(checks: Checks, distance: int) -> Checks:
    if not distance:
        return checks
    return tuple((start + distance, end + distance, checksum) for start, end, checksum in checks)
