"""Clips as they are stored, for a decoder of the caller's own: what `output.decode=False` delivers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from streamvid.video.stream_info import StreamInfo

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False, slots=True)
class StoredClip:
    """One sample's video as it is stored, proved by its checksum.

    - data: uint8 (n,), in the loader's ring. With `packets` the range of the clip's bytes that the wanted frames need;
      without, the whole clip, a file of its container's format.
    - packets: int64 (k, 4): timestamp, start in `data`, size in bytes, and the place among the wanted frames, -1 for a
      packet that only others need; in the order of decoding, from a key frame on, whose frame has the first timestamp.
      None for a whole clip.
    - stream_json: what a decoder must be told, see `stream`; "" for a whole clip.
    - start, num_frames: the first wanted frame's number in the clip, and how many are wanted.
    - numbers: of all of them, ascending. One that repeats, where a frame rate above the clip's was asked for, has one
      packet, with its first place: a place that no packet has shows the frame of the place before.
    """

    data: torch.Tensor
    packets: torch.Tensor | None
    stream_json: str
    start: int
    num_frames: int
    numbers: tuple[int, ...] = ()

    @property
    def stream(self) -> StreamInfo | None:
        """Codec, headers, size and colours; None for a whole clip, whose container says them."""
        return StreamInfo.from_json(self.stream_json) if self.stream_json else None

    def map_tensors(self, function: Callable[[torch.Tensor], torch.Tensor]) -> StoredClip:
        """The same with `function` of its tensors."""
        packets = None if self.packets is None else function(self.packets)
        return replace(self, data=function(self.data), packets=packets)

    def __reduce__(self) -> Any:
        # A tensor is pickled with all of the memory that it is a part of: the whole batch's, for each of its clips.
        own = self.map_tensors(lambda tensor: tensor.clone())
        return StoredClip, (own.data, own.packets, self.stream_json, self.start, self.num_frames, self.numbers)
