"""What the caller gets: one uniform batch over memory of the ring.

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
    *("sample_seeds", "layout"),
)

_CHUNK_ELEMENTS = 1 << 19
_DIGEST_PIXELS = 4096
_DIGEST_STEP = 2654435761  # a prime near 2**32 / golden ratio: places spread evenly over clips of any shape


class Batch(Mapping[str, Any]):
    """A read-only mapping with attributes; `**batch` works.

    - `video`: uint8, RGB, 0..255, its dimensions in the order that `layout` says: (B, C, T, H, W) by default. Channels
      lie last in memory, whatever the layout. On the loader's `device`; without one in the loader's ring, pinned where
      there is CUDA, and the caller's until its last tensor dies and the copies queued by `to` have finished.
      With the loader's pixels="yuv420p" it is made of the planes when it is first asked for, where the batch then is.
    - with the loader's `features` and instead of `video` and `layout`: the tensors that were made of each sample once,
      by their names, stacked (B, …). Of one whose first size differs from sample to sample: padded with zeros,
      (B, L, …), and `<name>_mask`, bool (B, L). Where `text` is "", those that the sidecar has for no text.
    - `clips`, with the loader's decode=False and instead of `video` and `layout`: B StoredClips. A batch of a dataset
      of texts has neither: its bucket is TEXT_BUCKET.
    - `layout`: "BCTHW", "BTCHW" or "BTHWC".
    - `media`, with the loader's media=(...): uint8 by name, in the layout and place of the video, cut and scaled as it
      is. What follows the clip has its shape: frame i goes with the video's frame i. One picture a clip has T = 1, a
      list (B, N, …) with the dataset's longest N, a mask C = 1. Zeros where a sample has none.
    - `media_present`, with it: bool (B,) by name, or (B, N) of a list: whether the sample has it.
    - `text`: B captions, "" where there is none.   - `sample_keys`: B keys.
    - `bucket`: the Bucket that all samples are of.  - `fps`: float32 (B,), frames a second, NaN for images.
    - `is_repeat`: bool (B,), True for a sample that the tail policy repeats, or that takes the place of a bad one.
    - `loss_weight`: float, the weight of this batch's mean loss: its share of the samples that all ranks take in one
      step of the optimizer, times that step's number of batches (ranks x `accumulate`); 1.0 where they are equal.
    - `sample_seeds`: B ints, 0 … 2**63 - 1, drawn from (seed, dataset, key, visit) as every other choice is (SAMPLE-1):
      noise and timesteps that are drawn from these are the same whatever rank, batch or resume they come in.
    - with the loader's `tokenizer`: `text_tokens`, int64 (B, L), and `text_mask`, bool (B, L), True where it is no
      padding; anything else that it gives under the name x as `text_x`.
    - and one entry for each of the loader's `columns`: float64 (B,) where numeric (NaN where missing), else a list.
    """

    def __init__(self, fields: Mapping[str, Any], on_copy: Callable[[torch.device], None] | None = None) -> None:
        """`on_copy` is told the device whenever `to` has queued copies from this batch's memory to it."""
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
        """Number of fields, as of any mapping; the number of samples is `len(batch.sample_keys)`."""
        return len(self._fields)

    def __getattr__(self, name: str) -> Any:
        fields = object.__getattribute__(self, "_fields")
        if name in fields:
            return self[name]
        why = ""
        if name == "video" and "bucket" in fields:
            why = "; precomputed features have none"
            if "clips" in fields:
                why = "; decode=False hands over clips as they are stored"
        raise AttributeError(f"batch has no field {name!r}; it has {', '.join(fields)}{why}")

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a batch is read-only: cannot set {name!r}; make a dict of it first: dict(batch)")

    def __repr__(self) -> str:
        device = next(self.tensors()).device
        return f"Batch({self.bucket.id}, {len(self.sample_keys)} samples of {self.bucket.shape} on {device})"

    def __copy__(self) -> Batch:
        return Batch(self._fields, self._on_copy)

    def __reduce__(self) -> Any:
        return Batch, (self._fields,)

    def normalized(
        self, dtype: torch.dtype, range: tuple[float, float] = (-1.0, 1.0), medium: str | None = None
    ) -> torch.Tensor:
        """`video`, or `media[medium]`, as `dtype`, contiguous in its layout, 0..255 mapped linearly onto `range`, where
        it lies.

        Computed in float64 and rounded once, so that every device gives the same numbers (Apple's: in float32).
        Raises ConfigError for a dtype that is no floating point type.
        """
        import torch

        if not dtype.is_floating_point:
            raise ConfigError(f"dtype={dtype} is no floating point type; use torch.float32, torch.bfloat16 or float16")
        video, (low, high) = self.video if medium is None else self.media[medium], range
        exact = torch.float32 if video.device.type == "mps" else torch.float64
        offset, scale = torch.full((), low, dtype=exact, device=video.device), (high - low) / 255.0
        out = torch.empty(video.shape, dtype=dtype, device=video.device)
        first = video.ndim - len(self.layout)  # a list's items stand behind its samples
        axes = [0, *(first + self.layout.index(name) for name in "TH")]
        for pixels, numbers in _chunks(video, out, axes):
            torch.add(offset, pixels, alpha=scale, out=numbers)
        return out

    def digest(self) -> int:
        """64 bits, signed as torch.int64 is, of `sample_keys`, `bucket` and 4096 pixel values of each sample; without
        video of texts and some of each tensor.

        Cheap enough for every step: ranks that should have the same batch compare it. Equal for equal batches in any
        layout and on any device; two batches with one digest can differ in pixels that were not looked at.
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
        )  # in memory, from a sample's first value on; advanced indexing takes twice as long
        for size, stride in zip(reversed(shape), reversed(frames.stride()), strict=False):
            place += rest % size * stride
            rest = rest // size
        num_between = sum((size - 1) * stride for size, stride in zip(shape, frames.stride()[1:], strict=True))
        memory = frames.as_strided((num_samples, num_between + 1), (frames.stride(0), 1))
        pixels = memory.gather(1, place.expand(num_samples, -1)).cpu()
        head = json.dumps([list(self.sample_keys), self.bucket.id, num_samples, *shape])
        return _signed_hash(head.encode() + b"\0" + pixels.numpy().tobytes())

    def to(self, device: torch.device | str, non_blocking: bool = True) -> Batch:
        """The batch with its tensors on `device`; from pinned memory the copy is asynchronous, on the current stream.

        The loader does not use the memory again before that copy is done, whatever the stream (BATCH-1).
        """
        import torch

        # A copy to the CPU has nobody who waits for it: asynchronous, it would be read before it is there.
        non_blocking = non_blocking and torch.device(device).type != "cpu"
        moved = self.map_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking))
        if self._on_copy is not None:
            mine, theirs = next(self.tensors()), next(moved.tensors())
            if theirs is mine:
                object.__setattr__(moved, "_on_copy", self._on_copy)
            self._on_copy(theirs.device)
        return moved

    def with_fields(self, fields: Mapping[str, Any]) -> Batch:
        """The batch with more fields, or others in the place of those of the same names; over the same memory."""
        return Batch({**self._fields, **fields}, self._on_copy)

    def clone(self) -> Batch:
        """The batch in memory of its own: what to keep when batches are kept, so that the ring's is free again."""
        return self.map_tensors(lambda tensor: tensor.clone())

    def map_tensors(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """The batch with `function` of each of its tensors in the tensor's place."""
        return Batch(map_tensors(self._fields, function))

    def tensors(self) -> Iterator[torch.Tensor]:
        """All tensors as they are held, the video's first: nothing is made for it."""
        return tensors_of(self._fields)


def _some_bytes(tensor: torch.Tensor) -> bytes:
    """Its shape, and about 4096 of its bytes."""
    import torch

    data = tensor.contiguous().reshape(-1).view(torch.uint8)
    values: bytes = data[:: max(1, len(data) // _DIGEST_PIXELS)].cpu().numpy().tobytes()
    return f"{tensor.dtype} {tuple(tensor.shape)} ".encode() + values


def _signed_hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big", signed=True)


def _chunks(video: torch.Tensor, out: torch.Tensor, axes: Sequence[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Parts of `video` and `out` that belong together, cut along `axes` where they are large; whole but on the CPU."""
    # torch's CPU kernels convert a whole operand before they work on it: in chunks that stays in the cache.
    if video.device.type != "cpu" or video.numel() <= _CHUNK_ELEMENTS or not axes:
        yield video, out
        return
    import torch

    axis, *later = axes
    length = max(1, _CHUNK_ELEMENTS * video.shape[axis] // video.numel())
    for pixels, numbers in zip(torch.split(video, length, axis), torch.split(out, length, axis), strict=True):
        yield from _chunks(pixels, numbers, later)


def column_values(values: list[Any], is_numeric: bool) -> Any:
    """A user column of one batch: float64 (B,) where numeric, NaN where missing; else the list."""
    import torch

    if not is_numeric:
        return values
    # One dtype whatever a batch holds: integers are exact up to 2**53, and a missing one has a NaN.
    return torch.tensor([float("nan") if value is None else float(value) for value in values], dtype=torch.float64)
