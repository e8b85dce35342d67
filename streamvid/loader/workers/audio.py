"""Audio decoding in a decode worker, after a clip's pictures are decoded."""

from __future__ import annotations

from typing import Any

import numpy as np

from streamvid.loader.view.audio import TimeRange, num_decoded
from streamvid.loader.workers.messages import AudioTask, DecodedAudio
from streamvid.video.audio.file import decode_audio_file, own_zero
from streamvid.video.audio.frames import Float32s
from streamvid.video.audio.grid import AudioFormat, first_sample_at, offset_seconds
from streamvid.video.audio.resample import stretch
from streamvid.video.audio.stored import decode_audio_packets
from streamvid.video.audio.stream import AudioStreamInfo
from streamvid.video.limits import STORED_LIMITS


def decode_audio(
    task: AudioTask, table: memoryview, data: memoryview, shown: TimeRange | None, ring: Any
) -> DecodedAudio:
    """Decode a task's audio into `ring`. Return whether the clip has audio, and the time of the first sample.

    table: packet table of the audio.
    data: bytes of the clip.
    shown: presentation times of the first and the last delivered frame; None if the task contains the first sample, or
        if `data` is a separate file.
    ring: any writable buffer.
    Raises DecodeError if the audio does not decode.
    """
    out = np.ndarray((task.num_channels, task.num_samples), np.float32, ring, task.out_offset)
    if task.stream is None:
        out[:] = 0
        return False, 0.0
    audio = AudioFormat(task.sample_rate, task.num_channels)
    if task.first_sample is None:
        assert shown is not None
        number = first_sample_at(shown[0], task.sample_rate)
        count = num_decoded(*shown, task.num_frames, task.num_samples, task.sample_rate)
        room = _room(out, count)
        found = decode_audio_file(data, number, room, audio, STORED_LIMITS)
        offset = offset_seconds(shown[0], number, task.sample_rate)
    elif not task.stream:
        room, offset = _room(out, task.num_decoded), task.offset_seconds
        zero = own_zero(data, STORED_LIMITS)
        found = decode_audio_file(data, task.first_sample, room, audio, STORED_LIMITS, zero)
    else:
        packets = np.ndarray(task.table, np.int64, table)
        room = _room(out, task.num_decoded)
        info = AudioStreamInfo.from_json(task.stream)
        found = decode_audio_packets(info, packets, data, task.first_sample, room, audio)
        offset = task.offset_seconds
    if room is not out:
        out[:] = stretch(room, task.num_samples, task.sample_rate)
    return found.is_present, offset


def _room(out: Float32s, num_decoded: int) -> Float32s:
    """Return an array for the samples to decode. It is `out` unless the samples will be stretched."""
    return np.empty((len(out), num_decoded), np.float32) if num_decoded else out
