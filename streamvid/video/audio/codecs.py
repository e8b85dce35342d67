"""Audio codecs that may be decoded (SAFE-1), and how to start decoding each of them in the middle of a stream."""

from __future__ import annotations

PCM_CODECS = frozenset(
    {
        *("pcm_u8", "pcm_s8", "pcm_alaw", "pcm_mulaw", "pcm_f32le", "pcm_f32be", "pcm_f64le", "pcm_f64be"),
        *("pcm_s16le", "pcm_s16be", "pcm_s24le", "pcm_s24be", "pcm_s32le", "pcm_s32be"),
    }
)

#: Codecs whose packets decode without a container.
INDEXED_CODECS = PCM_CODECS | {"aac", "ac3", "eac3", "alac", "flac", "mp2", "mp3", "opus", "vorbis"}

#: Codecs whose decoders need fields of the container that PyAV does not expose.
_CONTAINER_CODECS = frozenset(
    {
        *("adpcm_ima_qt", "adpcm_ima_wav", "adpcm_ms", "adpcm_swf", "amr_nb", "amr_wb", "dts", "mp1", "nellymoser"),
        *("pcm_bluray", "pcm_dvd", "wmav1", "wmav2", "wmapro"),
    }
)

AUDIO_CODECS = INDEXED_CODECS | _CONTAINER_CODECS
"""FFmpeg's names for the codecs that may be decoded (SAFE-1)."""

#: Codecs whose decoders return the encoder's samples. Windows of all others equal the whole track within a tolerance.
EXACT_CODECS = PCM_CODECS | {"alac", "flac"}

#: Decoders that do not have the codec's name. These compute in floating point, without dither.
DECODERS = {"mp3": "mp3float", "mp2": "mp2float"}

_CHECK = {"err_detect": "crccheck+explode"}  # damage would be concealed otherwise
#: Options of decoders. AC-3's noise depends on the packet alone, not on where decoding started.
DECODER_OPTIONS: dict[str, dict[str, str]] = {
    "flac": _CHECK,
    "ac3": {**_CHECK, "cons_noisegen": "1"},
    "eac3": {**_CHECK, "cons_noisegen": "1"},
}

#: Codecs whose first packet returns no audio, because each packet is half of what its samples are computed from.
OPENED_BY_FIRST_PACKET = frozenset({"vorbis"})

#: Samples (at the stream's rate) and packets to decode before the first wanted one; the larger of the two counts.
_PREROLLS: dict[str, tuple[int, int]] = {
    "aac": (0, 3),  # each frame overlaps with the one before
    "ac3": (0, 2),
    "eac3": (0, 2),
    "mp2": (0, 2),
    "mp3": (0, 12),  # up to 511 bytes of a frame are stored in frames before
    "opus": (38400, 1),  # its filters forget the start by a factor of 50 per 100 ms
    "vorbis": (0, 3),
}
#: HE-AAC repeats the header of its upper band about twice per second, and is wrong until the first.
_HE_AAC_PREROLL = (48000, 3)
_SAMPLE_RATES = (96000, 88200, 64000, 48000, 44100, 32000, 24000, 22050, 16000, 12000, 11025, 8000, 7350)
_HE_AAC_TYPES = (5, 29)
_ESCAPE = 31  # object types such as xHE-AAC, whose packets depend on far earlier ones


def preroll(codec: str, extradata: bytes, sample_rate: int) -> tuple[int, int]:
    """Return (number of samples, number of packets) to decode before the first wanted packet.

    sample_rate: sample rate of the decoded samples, in Hz.
    """
    if codec == "aac" and len(extradata) >= 2:
        # ISO/IEC 14496-3, AudioSpecificConfig: 5 bits for the object type, 4 for the index of the sample rate.
        place = int.from_bytes(extradata[:2], "big") >> 7 & 0b1111
        is_doubled = place < len(_SAMPLE_RATES) and _SAMPLE_RATES[place] * 2 == sample_rate
        if extradata[0] >> 3 in _HE_AAC_TYPES or is_doubled:
            return _HE_AAC_PREROLL
    return _PREROLLS.get(codec, (0, 0))


def can_start_anywhere(codec: str, extradata: bytes) -> bool:
    """Return whether audio in an indexed codec can be decoded from any packet if the preroll is decoded first."""
    return codec != "aac" or not extradata or extradata[0] >> 3 != _ESCAPE
