"""Audio tracks of clips that are encoded or cut: the window's samples, encoded once and verified.

A track holds the samples of the grid at its own sample rate from the clip's time zero to its end (see video/audio/).
Sample 0 is the one nearest to the presentation time of the clip's first frame, so a track is at most half a sample from
its place. Samples are decoded and encoded in blocks, so that memory does not grow with the clip.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from streamvid.errors import DecodeError, ProbeError
from streamvid.video.audio.file import decode_audio_file
from streamvid.video.audio.grid import LAYOUTS, AudioFormat, first_sample_at, round_half_up
from streamvid.video.audio.stream import audio_stream
from streamvid.video.container import Source, VideoFile
from streamvid.video.encode.audio_profiles import AUDIO_PROFILES, MadeAudioCodec
from streamvid.video.limits import Limits

if TYPE_CHECKING:
    from av.audio.codeccontext import AudioCodecContext
    from av.audio.frame import AudioFrame
    from av.audio.stream import AudioStream
    from av.container import OutputContainer
    from av.packet import Packet

Samples: TypeAlias = NDArray[np.float32]
"""Samples of shape (channels, samples), from -1 to 1."""

_BLOCK_SECONDS = 20
_LOSSLESS_FRAME = 4096
_FULL_SCALE = 1 << 15


class AudioWindow:
    """Samples of a source from `first_time` on, for the audio track of a clip.

    first_time: presentation time of the clip's first frame, in seconds.
    seconds: duration of the clip.
    codec: codec of the track.
    format: sample rate and number of channels of the track.
    """

    def __init__(
        self,
        source: Source,
        first_time: Fraction,
        seconds: Fraction,
        codec: MadeAudioCodec,
        format: AudioFormat,
        limits: Limits,
    ) -> None:
        self.codec, self.format = codec, format
        self.num_samples = max(1, round_half_up(seconds * format.sample_rate))
        self._source, self._limits = source, limits
        self._first_sample = first_sample_at(first_time, format.sample_rate)
        self._latest: tuple[int, Samples, bool] | None = None

    @property
    def starts(self) -> range:
        """Number of the first sample of each block."""
        return range(0, self.num_samples, _BLOCK_SECONDS * self.format.sample_rate)

    @property
    def is_present(self) -> bool:
        """True if the source has audio at any time of the window."""
        return any(self._read(start)[1] for start in self.starts)

    def block(self, start: int) -> Samples:
        """Return the samples of a block. Raises DecodeError or ProbeError if they do not decode."""
        return self._read(start)[0]

    def _read(self, start: int) -> tuple[Samples, bool]:
        if self._latest is None or self._latest[0] != start:
            out, is_present = self.decode(self._source, self._first_sample + start, start)
            self._latest = start, out, is_present
        return self._latest[1:]

    def decode(self, source: Source, first_sample: int, start: int) -> tuple[Samples, bool]:
        """Decode as many samples of `source` as the block at `start` has. Return them, and whether there are any."""
        size = min(self.starts.step, self.num_samples - start)
        out = np.zeros((self.format.num_channels, size), np.float32)
        with _position_kept(source):
            try:
                return out, decode_audio_file(source, first_sample, out, self.format, self._limits).is_present
            except DecodeError as error:
                raise ProbeError(f"its sound is damaged: {error}", kind="audio") from error


@contextmanager
def _position_kept(source: Source) -> Iterator[None]:
    """Restore the position of an open file, from which a video is being read."""
    if isinstance(source, str | os.PathLike | bytes | bytearray | memoryview):
        yield
        return
    position = source.tell()
    try:
        yield
    finally:
        source.seek(position)


def find_window(
    source: Source, video: VideoFile, first_time: Fraction, seconds: Fraction, codec: MadeAudioCodec | None
) -> AudioWindow | None:
    """Return the sound of a part of a video, or None if it has none or `codec` is None. See AudioWindow.

    Sound in a codec that is not allowed counts as none. Raises ProbeError if the sound does not decode.

    video: the opened source. Lossy tracks have at most two channels.
    """
    if codec is None:
        return None
    try:
        stream = audio_stream(video)
    except ProbeError:  # probing reported it
        return None
    if stream is None:
        return None
    profile, decoder = AUDIO_PROFILES[codec], stream.codec_context
    num_channels = next((count for count in LAYOUTS if count >= decoder.layout.nb_channels), max(LAYOUTS))
    form = AudioFormat(profile.sample_rate(decoder.sample_rate), min(num_channels, profile.max_channels))
    window = AudioWindow(source, first_time, seconds, codec, form, video.limits)
    return window if window.is_present else None


class AudioTrack:
    """Track of an MP4 or QuickTime file that holds the samples of a window. Its bytes depend only on the samples."""

    def __init__(self, container: OutputContainer, window: AudioWindow, codec: MadeAudioCodec | None = None) -> None:
        from av.codec.context import Flags

        profile = AUDIO_PROFILES[codec or window.codec]
        self._container, self._window, self._profile = container, window, profile
        self._starts: Iterator[int] = iter(window.starts)
        self._held: Samples = np.empty((window.format.num_channels, 0), np.float32)
        self._packets: list[Packet[AudioStream]] = []
        self._num_encoded, self._is_ended = 0, False
        rate = window.format.sample_rate
        self._stream = cast("AudioStream", container.add_stream(profile.encoder, rate=rate))
        self._layout = LAYOUTS[window.format.num_channels]
        encoder: AudioCodecContext = self._stream.codec_context
        encoder.layout, encoder.format = self._layout, profile.sample_format
        if profile.bits_per_second is not None:
            encoder.bit_rate = profile.bits_per_second * window.format.num_channels
        encoder.time_base = self._stream.time_base = Fraction(1, rate)
        encoder.thread_count = 1
        encoder.flags |= Flags.bitexact

    def write_until(self, seconds: Fraction | None) -> None:
        """Write the packets that begin before a time of the clip; None: all of them."""
        end = None if seconds is None else seconds * self._window.format.sample_rate
        while not self._is_ended and (end is None or not self._packets or cast("int", self._packets[-1].pts) < end):
            self._encode_frame()
        while self._packets and (end is None or cast("int", self._packets[0].pts) < end):
            packet = self._packets.pop(0)
            packet.stream = self._stream
            self._container.mux_one(packet)

    def _encode_frame(self) -> None:
        encoder = self._stream.codec_context
        size = encoder.frame_size or _LOSSLESS_FRAME
        while self._held.shape[1] < size and (start := next(self._starts, None)) is not None:
            self._held = np.concatenate([self._held, self._window.block(start)], axis=1)
        part, self._held = self._held[:, :size], self._held[:, size:]
        self._is_ended = not part.shape[1]
        frame = None if self._is_ended else self._frame(part)
        # FLAC ends with an empty packet.
        self._packets += [packet for packet in encoder.encode(frame) if packet.size]

    def _frame(self, part: Samples) -> AudioFrame:
        import av

        name = self._profile.sample_format
        values: NDArray[np.int16] | Samples = as_integers(part) if name == "s16" else part
        planes = values if name.endswith("p") else np.ascontiguousarray(values.T).reshape(1, -1)
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(planes), format=name, layout=self._layout)
        frame.sample_rate, frame.time_base = (
            self._window.format.sample_rate,
            Fraction(1, self._window.format.sample_rate),
        )
        frame.pts = self._num_encoded
        self._num_encoded += part.shape[1]
        return frame


def as_integers(samples: Samples) -> NDArray[np.int16]:
    """Return samples as 16-bit integers: rounded, and limited to their range."""
    return np.clip(np.rint(samples * _FULL_SCALE), -_FULL_SCALE, _FULL_SCALE - 1).astype(np.int16)


def check_track(data: bytes, window: AudioWindow) -> None:
    """Raise DecodeError unless the audio of the file `data` is that of the window, and at the same place.

    A lossless track must have equal samples. A lossy one must correlate with the window, and best without any shift.
    """
    for start in window.starts:
        wanted = window.block(start)
        found, is_present = window.decode(data, start, start)
        if not is_present:
            raise DecodeError("the written clip has no audio; report this as a bug")
        if AUDIO_PROFILES[window.codec].bits_per_second is None:
            is_right = np.array_equal(as_integers(found), as_integers(wanted))
        else:
            is_right = is_alike(found, wanted, window.format.sample_rate)
        if not is_right:
            second = start / window.format.sample_rate
            raise DecodeError(
                f"the audio of the written clip from second {second:g} on differs from what was encoded; "
                "report this as a bug, and choose --audio-codec flac"
            )


_QUIET = 1e-3
_LEAST_CORRELATION, _CORRELATION_NOISE = 0.5, 0.02
_CUTOFF_HZ = 6000


def is_alike(found: Samples, wanted: Samples, sample_rate: int) -> bool:
    """Return True if two blocks are alike and not shifted, judged by the loudest second below about 6 kHz."""
    width = max(1, sample_rate // _CUTOFF_HZ)
    channel = int(np.square(wanted).sum(axis=1).argmax())
    before, after = (_smoothed(samples[channel], width) for samples in (wanted, found))
    first = _loudest(before, sample_rate)
    before, after = (values[first : first + sample_rate] for values in (before, after))
    if _rms(before) < _QUIET:
        return _rms(after) < 10 * _QUIET
    size = 2 * len(before)
    spectra = np.fft.rfft(before, size), np.fft.rfft(after, size)
    by_shift = np.fft.irfft(spectra[1] * spectra[0].conj(), size)
    by_shift /= max(1e-12, float(np.linalg.norm(before) * np.linalg.norm(after)))
    return bool(by_shift[0] >= max(_LEAST_CORRELATION, by_shift.max() - _CORRELATION_NOISE))


def _smoothed(values: NDArray[np.float32], width: int) -> NDArray[np.float64]:
    sums = np.cumsum(np.concatenate([np.zeros(width), values, np.zeros(width)]), dtype=np.float64)
    smooth: NDArray[np.float64] = (sums[width:] - sums[:-width]) / width
    return smooth


def _loudest(values: NDArray[np.float64], size: int) -> int:
    """Return the index at which the `size` values with the largest energy begin, in steps of `size`."""
    starts = range(0, max(1, len(values) - size // 2), size)
    return max(starts, key=lambda start: float(np.square(values[start : start + size]).sum()))


def _rms(values: NDArray[np.float64]) -> float:
    return float(np.sqrt(np.square(values).mean())) if len(values) else 0.0
