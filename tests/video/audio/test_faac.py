"""Test of priming that only the first AAC packet declares, and no container: FAAC."""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np

from streamvid.video.audio.grid import AudioFormat
from streamvid.video.audio.index import index_audio
from tests.video.audio.clips import ffmpeg_truth
from tests.video.audio.conftest import SoundClips
from tests.video.audio.windows import from_packets, whole_track

#: Muxer options that prevent shifted timestamps.
_AS_GIVEN = {"avoid_negative_ts": "disabled", "use_editlist": "0"}


def signed(packet: bytes, name: bytes) -> bytes:
    """Return an AAC packet that begins with a fill element with an encoder's name (ISO/IEC 14496-3, 4.4.2.7)."""
    payload = "0000" + "0" * 13 + "".join(f"{byte:08b}" for byte in name)
    payload += "0" * (-len(payload) % 8)
    size = len(payload) // 8
    assert size > 15
    bits = "110" + "1111" + f"{size - 14:08b}" + payload + "".join(f"{byte:08b}" for byte in packet)
    bits += "0" * (-len(bits) % 8)
    return int(bits, 2).to_bytes(len(bits) // 8, "big")


def test_priming_declared_by_faac_is_cut(sound: SoundClips, tmp_path: Path) -> None:
    plain, path, is_first = sound.copied("aac_mp4", "-use_editlist 0"), tmp_path / "faac.mp4", True
    with av.open(str(plain)) as given, av.open(str(path), "w", options=_AS_GIVEN) as made:
        streams = {one.index: made.add_stream_from_template(one) for one in given.streams}
        for packet in given.demux():
            if packet.dts is None:
                continue
            if packet.stream.type == "audio" and is_first:
                is_first, replaced = False, av.Packet(signed(bytes(packet), b"libfaac 1.28 (Feb 29 2012)"))
                replaced.pts, replaced.dts, replaced.time_base = packet.pts, packet.dts, packet.time_base
                replaced.duration, replaced.stream, packet = packet.duration, packet.stream, replaced
            packet.stream = streams[packet.stream.index]
            made.mux(packet)
    truth, data, audio = ffmpeg_truth(path), path.read_bytes(), AudioFormat(48000, 1)
    begin, heard = int(truth.sounds[0][0] * truth.rate), np.concatenate([samples for _, samples in truth.sounds])
    assert ffmpeg_truth(plain).sounds[0][0] == 0 and begin >= 1024  # the ffmpeg program omits the first frame
    index = index_audio(data)
    assert index is not None
    for out in (whole_track(path, audio, 0, begin + 48000), from_packets(data, index, audio, 0, begin + 48000)):
        assert not out[0, :begin].any()
        np.testing.assert_allclose(out[0, begin:], heard[:48000], atol=1e-6)
