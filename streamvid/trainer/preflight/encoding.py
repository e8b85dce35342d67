"""Memory that a batch and its encoding need: measured on a CUDA device, counted elsewhere."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from streamvid.trainer.preflight.memory import EncodedBatch

if TYPE_CHECKING:
    from streamvid.loader.batch.batch import Batch
    from streamvid.trainer.preflight.trial import TrialRun


def measure_encoding(trial: TrialRun, batch: Batch) -> EncodedBatch:
    """Encode a batch as a step does, and return the memory that encoding takes in addition to the weights.

    On a CUDA device, the memory is measured. On a CPU, the bytes of tensors are counted, without the memory that
    kernels use internally; for the VAEs of Wan, LTX-Video and CogVideoX, the count is 18 to 29 % below the measurement
    on an H200. If a batch does not fit, the result is the total memory of the device.
    """
    device = trial.accelerator.device
    if device.type != "cuda":
        parameters = {one.untyped_storage().data_ptr() for one in trial.module.parameters()}
        with _LiveBytes(parameters) as live:
            encoded = trial.module.encoded(batch)
        size = _bytes_of(encoded)
        return EncodedBatch(size, max(size, live.peak + _bytes_of(batch)))
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    try:
        size = _bytes_of(trial.module.encoded(batch.to(device)))
    except torch.cuda.OutOfMemoryError:
        return EncodedBatch(_bytes_of(batch), torch.cuda.get_device_properties(device).total_memory)
    return EncodedBatch(size, torch.cuda.max_memory_allocated(device) - before)


def _bytes_of(batch: Batch) -> int:
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in batch.tensors()}
    return sum(storages.values())


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counter for the bytes of all live tensors that operations have returned.

    known: data pointers of storages that are not counted.
    """

    def __init__(self, known: Collection[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._now = 0
        self._known = known
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for one in tree_leaves(found):
            if isinstance(one, Tensor):
                self._add(one.untyped_storage())
        return found

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage in self._seen or storage.data_ptr() in self._known:
            return
        self._seen.add(storage)
        self._now += storage.nbytes()
        self.peak = max(self.peak, self._now)
        weakref.finalize(storage, self._remove, storage.nbytes())

    def _remove(self, size: int) -> None:
        self._now -= size
