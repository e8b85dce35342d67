"""What the caller gets: one uniform batch over memory of the ring.

Legend: B samples, C = 3 channels (RGB), T frames, H rows, W columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from streamvid.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from streamvid.buckets.bucket import Bucket

STANDARD_FIELDS = ("video", "text", "sample_keys", "bucket", "fps", "is_repeat", "loss_weight")


class Batch(Mapping[str, Any]):
    """A read-only mapping with attributes; `**batch` works.

    - `video`: uint8 (B, C, T, H, W), RGB, 0..255, pinned where there is CUDA; channels lie last in memory
      (torch's channels_last_3d). Its memory is the caller's until its last tensor dies.
    - `text`: B captions, "" where there is none.   - `sample_keys`: B keys.
    - `bucket`: the Bucket that all samples are of.  - `fps`: float32 (B,), frames a second, NaN for images.
    - `is_repeat`: bool (B,), True for a sample that the tail policy repeats.
    - `loss_weight`: float, the weight of this batch's mean loss in the step; 1.0 while all ranks have equal batches.
    - and one entry for each of the loader's `columns`: float64 (B,) where numeric (NaN where missing), else a list.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        object.__setattr__(self, "_fields", dict(fields))

    _fields: dict[str, Any]
    if TYPE_CHECKING:
        video: torch.Tensor
        text: list[str]
        sample_keys: list[str]
        bucket: Bucket
        fps: torch.Tensor
        is_repeat: torch.Tensor
        loss_weight: float

    def __getitem__(self, name: str) -> Any:
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        """Number of fields, as of any mapping; the number of samples is `len(batch.sample_keys)`."""
        return len(self._fields)

    def __getattr__(self, name: str) -> Any:
        fields = object.__getattribute__(self, "_fields")
        if name in fields:
            return fields[name]
        raise AttributeError(f"batch has no field {name!r}; it has {', '.join(fields)}")

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a batch is read-only: cannot set {name!r}; make a dict of it first: dict(batch)")

    def __repr__(self) -> str:
        return f"Batch({self.bucket.id}, video={tuple(self.video.shape)} {self.video.dtype} on {self.video.device})"

    def normalized(self, dtype: torch.dtype, range: tuple[float, float] = (-1.0, 1.0)) -> torch.Tensor:
        """`video` as `dtype` (B, C, T, H, W), contiguous, 0..255 mapped linearly onto `range`, where `video` lies."""
        import torch

        low, high = range
        if not dtype.is_floating_point:
            raise ConfigError(f"dtype={dtype} is no floating point type; use torch.float32, torch.bfloat16 or float16")
        video = self.video.to(torch.float32)
        return video.mul_((high - low) / 255.0).add_(low).to(dtype).contiguous()

    def to(self, device: torch.device | str, non_blocking: bool = True) -> Batch:
        """The batch with its tensors on `device`; from pinned memory the copy is asynchronous."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def clone(self) -> Batch:
        """The batch in memory of its own: what to keep when batches are kept, so that the ring's is free again."""
        return self._map(lambda tensor: tensor.clone())

    def _map(self, function: Any) -> Batch:
        import torch

        return Batch({k: function(v) if isinstance(v, torch.Tensor) else v for k, v in self._fields.items()})


def column_values(values: list[Any], is_numeric: bool) -> Any:
    """A user column of one batch: float64 (B,) where numeric, NaN where missing; else the list."""
    import torch

    if not is_numeric:
        return values
    # One dtype whatever a batch holds: integers are exact up to 2**53, and a missing one has a NaN.
    return torch.tensor([float("nan") if value is None else float(value) for value in values], dtype=torch.float64)
