"""Decoding of a clip's audio in a decode worker, after its pictures."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np

from streamvid.loader.workers.messages import AudioTask, DecodedAudio
from streamvid.video.audio.file import decode_audio_file, own_zero
from streamvid.video.audio.grid import AudioFormat, first_sample_at, offset_seconds
from streamvid.video.audio.stored import decode_audio_packets
from streamvid.video.audio.stream import AudioStreamInfo
from streamvid.video.limits import STORED_LIMITS


def decode_audio(
    task: AudioTask, table: memoryview, data: memoryview, seconds: Fraction | None, ring: Any
) -> DecodedAudio:
    """Decode the audio of a task into `ring`. Return whether the clip has audio, and the time of its first sample.

    table, data: packet table of the audio, and the bytes of the clip.
    seconds: presentation time of the first delivered frame; None if the task contains the first sample, or if `data`
        is a separate file.
    ring: any writable buffer.
    Raises DecodeError if the audio does not decode.
    """
    out = np.ndarray((task.num_channels, task.num_samples), np.float32, ring, task.out_offset)
    if task.stream is None:
        out[:] = 0
        return False, 0.0
    audio = AudioFormat(task.sample_rate, task.num_channels)
    if task.first_sample is None:
        assert seconds is not None
        number = first_sample_at(seconds, task.sample_rate)
        found = decode_audio_file(data, number, out, audio, STORED_LIMITS)
        return found.is_present, offset_seconds(seconds, number, task.sample_rate)
    if not task.stream:
        zero = own_zero(data, STORED_LIMITS)
        found = decode_audio_file(data, task.first_sample, out, audio, STORED_LIMITS, zero)
        return found.is_present, task.offset_seconds
    packets = np.ndarray(task.table, np.int64, table)
    info = AudioStreamInfo.from_json(task.stream)
    found = decode_audio_packets(info, packets, data, task.first_sample, out, audio)
    return found.is_present, task.offset_seconds
