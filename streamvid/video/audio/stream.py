"""Description of an audio stream, and decoders for it: with its container, or from the description alone."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, cast

from streamvid.errors import DecodeError, ProbeError
from streamvid.video.audio.codecs import AUDIO_CODECS, DECODER_OPTIONS, DECODERS, INDEXED_CODECS
from streamvid.video.audio.frames import check_layout
from streamvid.video.audio.grid import MAX_CHANNELS, MAX_RATE, MIN_RATE
from streamvid.video.container import VideoFile

if TYPE_CHECKING:
    from av.audio.codeccontext import AudioCodecContext
    from av.audio.stream import AudioStream

_MAX_ALAC_SAMPLES = 1 << 16  # FFmpeg allocates them before it decodes; writers use 4096
MAX_EXTRADATA_BYTES = 1 << 16  # Vorbis stores its code books there


@dataclass(frozen=True, slots=True)
class AudioStreamInfo:
    """Description of an audio stream, sufficient to decode the stream's packets without a container.

    - codec: FFmpeg's name for the codec.
    - extradata: the codec header as stored in the container.
    - sample_rate: sample rate of the decoded samples, in Hz.
    - num_channels, layout: number of channels, and FFmpeg's name for their layout, as declared by the container.
    - preroll: measured number of samples to decode before the first wanted packet; None to use the codec's preroll.

    Raises DecodeError for impossible values.
    """

    codec: str
    extradata: bytes
    sample_rate: int
    num_channels: int
    layout: str
    preroll: int | None = None

    def __post_init__(self) -> None:
        if (
            not all(isinstance(name, str) and len(name) < 256 for name in (self.codec, self.layout))
            or not all(isinstance(number, int) for number in (self.sample_rate, self.num_channels))
            or not MIN_RATE <= self.sample_rate <= MAX_RATE
            or not 1 <= self.num_channels <= MAX_CHANNELS
            or not (self.preroll is None or (isinstance(self.preroll, int) and 0 <= self.preroll <= MAX_RATE))
            or len(self.extradata) > MAX_EXTRADATA_BYTES
            or "(" in self.layout.partition(" channels ")[2]  # see check_layout
            or "+" in self.layout
        ):
            raise DecodeError(
                f"the index describes an impossible audio stream: {str(self)[:200]}; copy the dataset again"
            )

    def to_json(self) -> str:
        """Return the description as one line of JSON."""
        return _to_json(self)

    @staticmethod
    @lru_cache(256)
    def from_json(text: str) -> AudioStreamInfo:
        """Build a description from the result of `to_json`. Raises DecodeError for any other text."""
        try:
            value = json.loads(text)
            value["extradata"] = bytes.fromhex(value["extradata"])
            return AudioStreamInfo(**value)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise DecodeError(
                f"the index has an invalid audio description: {text[:200]!r}; copy the dataset again"
            ) from error


@lru_cache(256)
def _to_json(info: AudioStreamInfo) -> str:
    return json.dumps({**asdict(info), "extradata": info.extradata.hex()}, sort_keys=True)


def audio_stream(video: VideoFile) -> AudioStream | None:
    """Return the file's default audio stream (FFmpeg's choice of the best stream), or None if there is no audio.

    The stream is set up for decoding. Raises ProbeError if its codec or its channel order is not allowed.
    """
    if not video.has_audio:
        return None
    best = video.container.streams.best("audio", related=video.pictures)
    stream = video.container.streams.audio[0] if best is None else cast("AudioStream", best)
    context: AudioCodecContext | None = stream.codec_context
    if context is None:
        raise ProbeError(f"the file's audio codec is unknown to FFmpeg; {_remedy()}", kind="codec")
    codec = context.codec.canonical_name
    if codec not in AUDIO_CODECS:
        raise ProbeError(f"the audio codec {codec} is not allowed; {_remedy()}", kind="codec")
    if len(context.extradata or b"") > MAX_EXTRADATA_BYTES:
        raise ProbeError(
            (f"the audio's codec header is larger than {MAX_EXTRADATA_BYTES} bytes; {_remedy()}"), kind="limit"
        )
    check_layout(context.layout)
    if codec == "alac" and int.from_bytes((context.extradata or b"")[12:16], "big") > _MAX_ALAC_SAMPLES:
        raise ProbeError(f"the audio has more than {_MAX_ALAC_SAMPLES} samples per packet; {_remedy()}", kind="limit")
    _set_up(context, codec)
    return stream


def info_of(stream: AudioStream) -> AudioStreamInfo:
    """Return the description of a stream that `audio_stream` returned. Raises ProbeError if a value is impossible."""
    context = stream.codec_context
    layout = context.layout
    try:
        return AudioStreamInfo(
            codec=context.codec.canonical_name,
            extradata=context.extradata or b"",
            sample_rate=context.sample_rate,
            num_channels=layout.nb_channels,
            layout=layout.name,
        )
    except DecodeError as error:
        raise ProbeError(
            f"the audio has {layout.nb_channels} channels and a sample rate of {context.sample_rate} Hz; allowed: "
            f"up to {MAX_CHANNELS} channels and {MIN_RATE} to {MAX_RATE} Hz",
            kind="limit",
        ) from error


def stream_decoder(stream: AudioStream) -> AudioCodecContext:
    """Return a decoder for a stream.

    For an indexed codec, the decoder is set up in the same way as for packets without a container.
    """
    if stream.codec_context.codec.canonical_name not in INDEXED_CODECS:
        return stream.codec_context
    try:
        return open_audio_decoder(info_of(stream))
    except DecodeError as error:
        raise ProbeError(str(error), kind="damaged") from error


def open_audio_decoder(info: AudioStreamInfo) -> AudioCodecContext:
    """Return a decoder for packets without a container. Raises DecodeError if the stream is not allowed."""
    import av
    from av.audio.codeccontext import AudioCodecContext
    from av.codec.context import CodecContext

    if info.codec not in INDEXED_CODECS:
        raise DecodeError(f"the audio codec {info.codec} in the index is not allowed; copy the dataset again")
    decoder = CodecContext.create(DECODERS.get(info.codec, info.codec), "r")
    assert isinstance(decoder, AudioCodecContext)
    _set_up(decoder, info.codec)
    if info.extradata:
        decoder.extradata = info.extradata
    try:
        decoder.sample_rate = info.sample_rate
        decoder.layout = info.layout
        decoder.open()
    except (av.FFmpegError, ValueError) as error:
        raise DecodeError(
            f"the audio cannot be decoded: its {info.codec} codec header is invalid; "
            "re-encode the file, or copy the dataset again"
        ) from error
    return decoder


def _set_up(decoder: AudioCodecContext, codec: str) -> None:
    from av.codec.context import Flags2, ThreadType

    decoder.thread_count, decoder.thread_type = 1, ThreadType(0)
    decoder.skip_frame = "DEFAULT"
    if codec in INDEXED_CODECS:
        # Priming and padding are cut by samples.py, in the same way with and without a container.
        decoder.flags2 |= Flags2.skip_manual
    decoder.options = DECODER_OPTIONS.get(codec, {})


def _remedy() -> str:
    return "re-encode the audio (ffmpeg -i IN -c:v copy -c:a aac OUT.mp4) or remove it (-an)"
