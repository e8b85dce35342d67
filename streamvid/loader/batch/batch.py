"""Batch as the caller receives it: one uniform batch in ring memory.

Legend: B samples, C = 3 channels (RGB), T frames, H rows, W columns.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from streamvid.errors import ConfigError
from streamvid.loader.batch.contents import RING_LAYOUT, BatchMedia, Planes, map_tensors, tensors_of
from streamvid.loader.options import Layout

if TYPE_CHECKING:
    import torch

    from streamvid.buckets.bucket import Bucket

STANDARD_FIELDS = (
    *("video", "clips", "media", "media_present", "text", "sample_keys", "bucket", "fps", "is_repeat", "loss_weight"),
    *("sample_seeds", "layout", "audio", "audio_present", "audio_offset_seconds"),
)

_CHUNK_ELEMENTS = 1 << 19
_DIGEST_PIXELS = 4096
_DIGEST_STEP = 2654435761  # a prime near 2**32 / golden ratio: its multiples spread evenly over clips of any shape


class Batch(Mapping[str, Any]):
    """Uniform batch: a read-only mapping whose fields are also attributes. It can be unpacked with `**batch`.

    - `video`: uint8 RGB, 0..255, with dimensions in the order of `layout`: (B, C, T, H, W) by default. It is on the
      loader's `device` or, without a device, in the loader's ring, which is pinned if CUDA is available. Its memory is
      not reused until the batch's last tensor is freed and the copies queued by `to` have finished. Decoded RGB has its
      channels last in memory in every layout. With pixels="yuv420p", `video` is contiguous instead: it is computed
      from the planes on first use, on the batch's device.
    - with `features`, in place of `video` and `layout`: precomputed tensors by name, stacked as (B, …). Tensors whose
      first dimension varies between samples are padded with zeros to (B, L, …), with `<name>_mask`, bool (B, L), False
      for padding. Samples with an empty `text` have the tensors that the features store for an empty text.
    - `clips`, with decode=False, in place of `video` and `layout`: B StoredClips. A batch of texts has neither `video`
      nor `clips`, and its bucket is TEXT_BUCKET. A batch of audio files has only `audio` and the fields that describe
      it.
    - `layout`: "BCTHW", "BTCHW" or "BTHWC".
    - `media`, with media=(...): conditioning inputs by name, uint8, in the video's layout and on its device, cropped
      and scaled like the video. A control video has the shape of `video`, with matching frames. A still image has
      T = 1, a mask has C = 1, and a list is (B, N, …), where N is the largest item count. Audio is float32 like
      `audio`, and its time zero is the time of the clip's first frame. Missing inputs are zeros.
    - `media_present`, with `media`: bool (B,) by name, or (B, N) for a list; True for inputs that the sample has.
    - `audio`, with output.audio: float32 (B, channels, num_samples), on the device of the video. It begins with the
      sample nearest to the presentation time of the first frame, and lasts as long as the frames, rounded by the rule
      of AudioOptions. Clips without audio are silent (0.0).
    - `audio_present`, with output.audio: bool (B,), True for samples that have audio during some of their frames.
    - `audio_offset_seconds`, with output.audio: float64 (B,), seconds from the first frame to the first audio sample.
      The magnitude is at most half a sample; a positive value means that the audio sample is later than the frame. 0.0
      for clips without audio.
    - `text`: B captions, "" for a sample without a caption.
    - `sample_keys`: B keys.
    - `bucket`: the Bucket of all samples.
    - `fps`: float32 (B,), frames per second, NaN for images.
    - `is_repeat`: bool (B,), True for a sample that the tail policy repeats, or that replaces a bad sample.
    - `loss_weight`: float, weight of this batch's mean loss: the batch's share of all samples in an optimizer step,
      times the number of batches in that step (ranks x `accumulate`); 1.0 if these batches are of equal size.
    - `sample_seeds`: B ints from 0 to 2**63 - 1, drawn from (seed, dataset, key, visit) like all other choices
      (SAMPLE-1), so that noise and timesteps drawn from them do not depend on the rank, the batch or a resume.
    - with `tokenizer`: `text_tokens`, int64 (B, L), and `text_mask`, bool (B, L), False for padding; any other output x
      of the tokenizer is `text_x`.
    - one entry for each of the loader's `columns`: float64 (B,) if numeric, with NaN for missing values, else a list.
    """

    def __init__(self, fields: Mapping[str, Any], on_copy: Callable[[torch.device], None] | None = None) -> None:
        """Create a batch.

        on_copy: function that `to` calls with the target device after queuing the copies.
        """
        object.__setattr__(self, "_fields", dict(fields))
        if "video" in self._fields:
            self._fields.setdefault("layout", "BCTHW")
        object.__setattr__(self, "_on_copy", on_copy)

    _fields: dict[str, Any]
    _on_copy: Callable[[torch.device], None] | None
    if TYPE_CHECKING:
        layout: Layout
        video: torch.Tensor
        media: BatchMedia
        media_present: dict[str, torch.Tensor]
        audio: torch.Tensor
        audio_present: torch.Tensor
        audio_offset_seconds: torch.Tensor
        text: list[str]
        sample_keys: list[str]
        bucket: Bucket
        fps: torch.Tensor
        is_repeat: torch.Tensor
        loss_weight: float
        sample_seeds: list[int]
        text_tokens: torch.Tensor
        text_mask: torch.Tensor

    def __getitem__(self, name: str) -> Any:
        value = self._fields[name]
        if isinstance(value, Planes):
            value = self._fields[name] = value.rgb()
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        """Return the number of fields, as for any mapping. The number of samples is `len(batch.sample_keys)`."""
        return len(self._fields)

    def __getattr__(self, name: str) -> Any:
        fields = object.__getattribute__(self, "_fields")
        if name in fields:
            return self[name]
        why = "; set output.audio to deliver it, or data.audio in a training config" if name == "audio" else ""
        if name == "video" and "bucket" in fields:
            why = "; precomputed features replace it"
            if fields["bucket"].is_text:
                why = "; its samples contain only text"
            elif fields["bucket"].is_audio:
                why = "; its samples contain only audio"
            elif "clips" in fields:
                why = "; output.decode=False delivers stored clips without decoding them"
        raise AttributeError(f"batch has no {name!r} field; its fields are {', '.join(fields)}{why}")

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(
            f"a batch is read-only: cannot set {name!r}; use batch.with_fields({{{name!r}: …}}), or change a copy "
            "made with dict(batch)"
        )

    def __repr__(self) -> str:
        device = next(self.tensors()).device
        what = f"{len(self.sample_keys)} samples of {self.bucket.shape} on {device}"
        return f"Batch({self.bucket.id}, {what}; fields: {', '.join(self._fields)})"

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._fields]

    def _ipython_key_completions_(self) -> list[str]:
        return list(self._fields)

    def __copy__(self) -> Batch:
        return Batch(self._fields, self._on_copy)

    def __reduce__(self) -> Any:
        return Batch, (self._fields,)

    def normalized(
        self, dtype: torch.dtype, range: tuple[float, float] = (-1.0, 1.0), medium: str | None = None
    ) -> torch.Tensor:
        """Return `video` or `media[medium]` as a contiguous tensor of `dtype`, with 0..255 mapped linearly to `range`.

        Values are computed in float64 and rounded once, so that every device gives the same numbers; on Apple's MPS,
        they are computed in float32. Raises ConfigError for a dtype that is not a floating-point type, and for audio.
        """
        import torch

        if not dtype.is_floating_point:
            raise ConfigError(
                f"dtype={dtype} is not a floating-point type; use torch.float32, torch.bfloat16 or torch.float16"
            )
        video, (low, high) = self.video if medium is None else self.media[medium], range
        if video.dtype.is_floating_point:
            raise ConfigError(
                f"medium={medium!r} is audio, which needs no normalization: its values are already between -1 and "
                f"1; use batch.media[{medium!r}]"
            )
        exact = torch.float32 if video.device.type == "mps" else torch.float64
        offset, scale = torch.full((), low, dtype=exact, device=video.device), (high - low) / 255.0
        out = torch.empty(video.shape, dtype=dtype, device=video.device)
        first = video.ndim - len(self.layout)  # in a list, the items follow the samples
        axes = [0, *(first + self.layout.index(name) for name in "TH")]
        for pixels, numbers in _chunks(video, out, axes):
            torch.add(offset, pixels, alpha=scale, out=numbers)
        return out

    def digest(self) -> int:
        """Return a signed 64-bit hash of `sample_keys`, `bucket`, up to 4096 pixel values per sample, and some audio.

        For batches without video, the hash covers keys, texts and some bytes of each tensor. It is cheap enough to
        compute at every step, so that ranks can verify that they have the same batch. Equal batches have the same
        digest in any layout and on any device. Batches with the same digest can differ in pixels that are not sampled.
        """
        import torch

        if self.bucket.is_text:
            return _signed_hash(json.dumps([list(self.sample_keys), list(self.text)]).encode())
        if "video" not in self:
            head = json.dumps([list(self.sample_keys), list(self.text), self.bucket.id])
            return _signed_hash(b"\0".join([head.encode(), *map(_some_bytes, self.tensors())]))
        frames = self.video.permute(*(self.layout.index(name) for name in RING_LAYOUT))
        num_samples, *shape = frames.shape
        num_values = math.prod(shape)
        numbers = torch.arange(min(_DIGEST_PIXELS, num_values), device=frames.device)
        rest = numbers * _DIGEST_STEP % max(1, num_values)
        place = torch.zeros_like(
            rest
        )  # offset in memory from a sample's first value; advanced indexing takes twice as long
        for size, stride in zip(reversed(shape), reversed(frames.stride()), strict=False):
            place += rest % size * stride
            rest = rest // size
        num_between = sum((size - 1) * stride for size, stride in zip(shape, frames.stride()[1:], strict=True))
        memory = frames.as_strided((num_samples, num_between + 1), (frames.stride(0), 1))
        pixels = memory.gather(1, place.expand(num_samples, -1)).cpu()
        head = json.dumps([list(self.sample_keys), self.bucket.id, num_samples, *shape])
        audio = _some_bytes(self.audio) if "audio" in self else b""
        return _signed_hash(head.encode() + b"\0" + pixels.numpy().tobytes() + audio)

    def to(self, device: torch.device | str, non_blocking: bool = True) -> Batch:
        """Return the batch with its tensors on `device`. Pinned memory is copied asynchronously, on the current stream.

        The loader does not reuse the memory until the copy is complete, regardless of which stream the copy runs on
        (BATCH-1).
        """
        import torch

        # Nothing waits for a copy to the CPU: if it were asynchronous, it could be read before it is complete.
        non_blocking = non_blocking and torch.device(device).type != "cpu"
        moved = self.map_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking))
        if self._on_copy is not None:
            mine, theirs = next(self.tensors()), next(moved.tensors())
            if theirs is mine:
                object.__setattr__(moved, "_on_copy", self._on_copy)
            self._on_copy(theirs.device)
        return moved

    def with_fields(self, fields: Mapping[str, Any]) -> Batch:
        """Return a batch that shares the memory of this batch, with the given fields added or replaced."""
        return Batch({**self._fields, **fields}, self._on_copy)

    def clone(self) -> Batch:
        """Return a copy of the batch in separate memory. The copy does not occupy the ring."""
        return self.map_tensors(lambda tensor: tensor.clone())

    def map_tensors(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """Return the batch with `function` applied to each tensor."""
        return Batch(map_tensors(self._fields, function))

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield all stored tensors, starting with the video, without converting yuv420p to RGB."""
        return tensors_of(self._fields)


def _some_bytes(tensor: torch.Tensor) -> bytes:
    """Return a tensor's dtype and shape, and about 4096 bytes of its data, as one byte string."""
    import torch

    data = tensor.contiguous().reshape(-1).view(torch.uint8)
    values: bytes = data[:: max(1, len(data) // _DIGEST_PIXELS)].cpu().numpy().tobytes()
    return f"{tensor.dtype} {tuple(tensor.shape)} ".encode() + values


def _signed_hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big", signed=True)


def _chunks(video: torch.Tensor, out: torch.Tensor, axes: Sequence[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield pairs of corresponding parts of `video` and `out`.

    A large video on the CPU is split along `axes`. Any other video is yielded whole.
    """
    # torch's CPU kernels convert a whole operand before they use it; converted chunks stay in the cache.
    if video.device.type != "cpu" or video.numel() <= _CHUNK_ELEMENTS or not axes:
        yield video, out
        return
    import torch

    axis, *later = axes
    length = max(1, _CHUNK_ELEMENTS * video.shape[axis] // video.numel())
    for pixels, numbers in zip(torch.split(video, length, axis), torch.split(out, length, axis), strict=True):
        yield from _chunks(pixels, numbers, later)


def column_values(values: list[Any], is_numeric: bool) -> Any:
    """Return the values of a user column for a batch.

    Numbers become a float64 tensor with shape (B,), with NaN for missing values. Other values are returned unchanged.
    """
    import torch

    if not is_numeric:
        return values
    # One dtype for every batch: integers are exact up to 2**53, and missing values are NaN.
    return torch.tensor([float("nan") if value is None else float(value) for value in values], dtype=torch.float64)
