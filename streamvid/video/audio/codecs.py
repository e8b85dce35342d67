"""Audio codecs that may be decoded (SAFE-1), and what each needs in order to start in the middle of a stream."""

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
        *("adpcm_ima_qt", "adpcm_ima_wav", "adpcm_ms", "adpcm_swf", "amrnb", "amrwb", "dca", "mp1", "nellymoser"),
        *("pcm_bluray", "pcm_dvd", "wmav1", "wmav2", "wmapro"),
    }
)

AUDIO_CODECS = INDEXED_CODECS | _CONTAINER_CODECS
"""FFmpeg's names of the decoders that may run (SAFE-1)."""

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
    "aac": (0, 3),
    "ac3": (0, 2),
    "eac3": (0, 2),
    "mp2": (0, 2),
    "mp3": (0, 12),
    "opus": (9600, 1),
    "vorbis": (0, 3),
}


def preroll(codec: str) -> tuple[int, int]:
    """Return the number of samples and of packets to decode before the first wanted packet."""
    return _PREROLLS.get(codec, (0, 0))
