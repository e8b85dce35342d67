"""Measurement of how soon packets decode correctly if decoding starts in the middle of a stream.

Opus predicts the energies of a frame from those of earlier frames, so decoding must begin 0.8 s before a window.
Encoders can omit this prediction, as ours does, but containers do not record that. The preroll is therefore measured.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from streamvid.errors import ProbeError
from streamvid.video.audio.frames import Float32s, samples_of
from streamvid.video.audio.samples import decode_packet, packet_of
from streamvid.video.audio.stream import AudioStreamInfo, open_audio_decoder

#: Codecs whose need is measured → number of samples that suffices for many streams.
SHORT_PREROLLS = {"opus": 5760}
_TOLERANCE = 1e-6


def short_preroll(info: AudioStreamInfo, packets: Iterable[memoryview]) -> int | None:
    """Return the codec's entry in SHORT_PREROLLS if that preroll is long enough for every packet in the stream.

    Return None if the preroll is too short for at least one packet, or if SHORT_PREROLLS does not list the codec. The
    measurement stops at the first packet that decodes incorrectly.
    """
    wanted = SHORT_PREROLLS.get(info.codec)
    if wanted is None:
        return None
    decoder, before, num_before = open_audio_decoder(info), deque[tuple[memoryview, int]](), 0
    for data in packets:
        frames = [samples_of(frame) for frame in decode_packet(decoder, packet_of(data))]
        while before and num_before - before[0][1] >= wanted:
            num_before -= before.popleft()[1]
        if num_before >= wanted and not _is_right(info, [*(packet for packet, _ in before), data], frames):
            return None
        before.append((data, sum(part.shape[1] for part in frames)))
        num_before += before[-1][1]
    return wanted


def _is_right(info: AudioStreamInfo, packets: list[memoryview], expected: list[Float32s]) -> bool:
    """Return whether a new decoder that receives all packets decodes the last packet to the expected samples."""
    decoder = open_audio_decoder(info)
    try:
        found = [decode_packet(decoder, packet_of(data)) for data in packets][-1]
    except ProbeError:
        return False
    parts = [samples_of(frame) for frame in found]
    return len(parts) == len(expected) and all(
        part.shape == other.shape and np.allclose(part, other, rtol=0, atol=_TOLERANCE)
        for part, other in zip(parts, expected, strict=True)
    )
