"""Audio tracks of clips that are encoded or cut: the window's samples, encoded once and verified.

A track contains the samples of the grid at its own sample rate, from the clip's time zero to its end (see
video/audio/). Sample 0 is the sample nearest to the presentation time of the clip's first frame, so the offset of a
track is at most half a sample. Samples are decoded and encoded in blocks, so that memory does not grow with the clip.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from streamvid.errors import DecodeError, ProbeError
from streamvid.video.audio.grid import LAYOUTS, AudioFormat, first_sample_at, round_half_up
from streamvid.video.audio.stream import audio_stream
from streamvid.video.container import Source, VideoFile
from streamvid.video.encode.audio_profiles import AUDIO_PROFILES, MadeAudioCodec
from streamvid.video.encode.audio_source import read_blocks
from streamvid.video.encode.timeline import Timeline
from streamvid.video.limits import Limits

if TYPE_CHECKING:
    from av.audio.codeccontext import AudioCodecContext
    from av.audio.frame import AudioFrame
    from av.audio.stream import AudioStream
    from av.container import OutputContainer
    from av.packet import Packet

Samples: TypeAlias = NDArray[np.float32]
"""Array of shape (channels, samples), with values from -1 to 1."""

_BLOCK_SECONDS = 20
_LOSSLESS_FRAME = 4096
_FULL_SCALE = 1 << 15


class AudioWindow:
    """Audio samples from a source, starting at `first_time`, for a clip's audio track.

    first_time: presentation time of the clip's first frame, in seconds.
    seconds: duration of the clip.
    codec: codec of the track.
    format: sample rate and number of channels of the track.
    sizes: number of samples in each block.
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
        num_samples, most = max(1, round_half_up(seconds * format.sample_rate)), _BLOCK_SECONDS * format.sample_rate
        self.sizes = [min(most, num_samples - start) for start in range(0, num_samples, most)]
        self._source, self._limits = source, limits
        self._first_sample = first_sample_at(first_time, format.sample_rate)
        self._only: tuple[Samples, bool] | None = None  # of a window with a single block

    @property
    def is_present(self) -> bool:
        """True if the source has audio at any time in the window."""
        return any(is_present for _, is_present in self.blocks())

    def blocks(self) -> Iterator[tuple[Samples, bool]]:
        """Yield (samples, has_audio) for each block. `has_audio` is True if the source has any audio in the block.

        Raises ProbeError of kind "audio" if the audio does not decode.
        """
        if self._only is None:
            found = self.blocks_of(self._source, self._first_sample)
            if len(self.sizes) > 1:
                yield from found
                return
            self._only = next(found)
        yield self._only

    def blocks_of(self, source: Source, first_sample: int) -> Iterator[tuple[Samples, bool]]:
        """Yield audio from another source, starting at `first_sample`, in blocks of the same sizes as `blocks`."""
        try:
            for samples, found in read_blocks(source, first_sample, self.sizes, self.format, self._limits):
                yield samples, found.is_present
        except DecodeError as error:
            raise ProbeError(f"the audio is damaged: {error}", kind="audio") from error


def find_window(
    source: Source, video: VideoFile, first_time: Fraction, timeline: Timeline, codec: MadeAudioCodec | None
) -> AudioWindow | None:
    """Return the audio for part of a video, or None if the video has no audio or `codec` is None.

    Audio in a codec that is not allowed is ignored. Raises ProbeError if the audio does not decode.

    video: the opened source.
    first_time: presentation time of the clip's first frame, in seconds.
    timeline: timeline of the clip's frames.
    """
    if codec is None:
        return None
    try:
        stream = audio_stream(video)
    except ProbeError:  # probing reported it
        return None
    if stream is None:
        return None
    form = track_format(stream, codec)
    window = AudioWindow(source, first_time, timeline.duration_seconds, codec, form, video.limits)
    return window if window.is_present else None


def track_format(stream: AudioStream, codec: MadeAudioCodec) -> AudioFormat:
    """Return the format of a track that stores a stream's audio. Lossy tracks have at most two channels."""
    profile, decoder = AUDIO_PROFILES[codec], stream.codec_context
    num_channels = next((count for count in LAYOUTS if count >= decoder.layout.nb_channels), max(LAYOUTS))
    return AudioFormat(profile.sample_rate(decoder.sample_rate), min(num_channels, profile.max_channels))


def muxer_options(sound: AudioWindow | None) -> dict[str, str]:
    """Return FFmpeg's options for a clip's MP4 file. The bitexact flag keeps dates and version numbers out of the file.

    The pictures begin at time 0 and are not reordered. Only the packets of an audio track may begin before time 0,
    because lossy decoders need some packets to start. An edit list hides the samples of these packets, and ends exactly
    where the clip ends.
    """
    if sound is None:
        return {"fflags": "+bitexact", "use_editlist": "0"}
    exact = {"avoid_negative_ts": "disabled", "movie_timescale": str(sound.format.sample_rate)}
    return {"fflags": "+bitexact", "use_editlist": "1", **exact}


class AudioTrack:
    """Audio track of an MP4 or QuickTime file. The track's bytes depend only on the window's samples."""

    def __init__(self, container: OutputContainer, window: AudioWindow, codec: MadeAudioCodec | None = None) -> None:
        from av.codec.context import Flags

        profile = AUDIO_PROFILES[codec or window.codec]
        self._container, self._window, self._profile = container, window, profile
        self._blocks = window.blocks()
        self._held: Samples = np.empty((window.format.num_channels, 0), np.float32)
        self._packets: list[Packet[AudioStream]] = []
        self._num_encoded, self._is_ended = 0, False
        rate = window.format.sample_rate
        self._stream = cast(
            "AudioStream", container.add_stream(profile.encoder, rate=rate, options=dict(profile.options))
        )
        self._layout = LAYOUTS[window.format.num_channels]
        encoder: AudioCodecContext = self._stream.codec_context
        encoder.layout, encoder.format = self._layout, profile.sample_format
        if profile.bits_per_second is not None:
            encoder.bit_rate = profile.bits_per_second * window.format.num_channels
        encoder.time_base = self._stream.time_base = Fraction(1, rate)
        encoder.thread_count = 1
        encoder.flags |= Flags.bitexact

    def write_until(self, seconds: Fraction | None) -> None:
        """Write the packets that begin before `seconds` on the clip's timeline, or all packets if `seconds` is None."""
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
        while self._held.shape[1] < size and (block := next(self._blocks, None)) is not None:
            self._held = np.concatenate([self._held, block[0]], axis=1)
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
    """Return samples as 16-bit integers, rounded and clipped to the 16-bit range."""
    return np.clip(np.rint(samples * _FULL_SCALE), -_FULL_SCALE, _FULL_SCALE - 1).astype(np.int16)


def check_track(data: bytes, window: AudioWindow) -> None:
    """Raise DecodeError unless the file `data` contains the window's audio at the expected position.

    A lossless track must have identical samples. A lossy track must correlate with the window, most strongly at zero
    shift.
    """
    second = 0
    for (wanted, _), (found, is_present) in zip(window.blocks(), window.blocks_of(data, 0), strict=True):
        if AUDIO_PROFILES[window.codec].bits_per_second is None:
            is_right = np.array_equal(as_integers(found), as_integers(wanted))
        else:
            is_right = is_alike(found, wanted, window.format.sample_rate)
        if not (is_right and is_present):
            raise DecodeError(
                f"the audio in the written clip from second {second} onward differs from what was encoded; report "
                "this as a bug, and use --audio-codec flac until the bug is fixed"
            )
        second += _BLOCK_SECONDS


_QUIET = 1e-3
_LEAST_CORRELATION, _CORRELATION_NOISE = 0.5, 0.02
_CUTOFF_HZ = 6000


def is_alike(found: Samples, wanted: Samples, sample_rate: int) -> bool:
    """Return True if two blocks are similar and not shifted in time.

    Only the loudest second is compared, at frequencies below about 6 kHz."""
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
    """Split the values into blocks of length `size`, and return the start of the block with the most energy."""
    starts = range(0, max(1, len(values) - size // 2), size)
    return max(starts, key=lambda start: float(np.square(values[start : start + size]).sum()))


def _rms(values: NDArray[np.float64]) -> float:
    return float(np.sqrt(np.square(values).mean())) if len(values) else 0.0
