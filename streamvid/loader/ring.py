"""The ring as torch sees it: pinned memory, and batches over it that give their place back when they die."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

from streamvid.loader.arena import Arena
from streamvid.loader.batch import Batch, column_values
from streamvid.loader.pipeline import PendingBatch

_log = logging.getLogger(__name__)


def pin(ring: Arena) -> bool:
    """Page-lock the ring for CUDA, so that copies to the device are direct and asynchronous; False without CUDA."""
    import numpy as np

    cuda = _cuda()
    if not cuda.is_available():
        return False
    address = np.frombuffer(ring.map, np.uint8).ctypes.data
    runtime = cuda.cudart()
    error = int(runtime.cudaHostRegister(address, ring.num_bytes, 0))
    if error != 0:
        _log.warning("cannot pin the ring of %d bytes (CUDA error %d); copies will be slower", ring.num_bytes, error)
        return False
    # The mapping outlives the loader while a batch of it lives; only then may the pages be let go.
    weakref.finalize(ring.map, runtime.cudaHostUnregister, address).atexit = False
    return True


def make_batch(pending: PendingBatch, ring: Arena, columns: Sequence[str], numeric: Collection[str]) -> Batch:
    """The Batch of a complete PendingBatch; its place in the ring is free again when its last tensor has died."""
    import numpy as np
    import torch

    request, rows = pending.request, pending.rows
    frames = np.ndarray((len(rows), *request.bucket.shape, 3), np.uint8, pending.memory, pending.ring_offset)
    weakref.finalize(frames, _release, ring, pending.ring_offset).atexit = False
    fields: dict[str, Any] = {
        "video": torch.from_numpy(frames).permute(0, 4, 1, 2, 3),
        "text": [row["text"] or "" for row in rows],
        "sample_keys": [row["key"] for row in rows],
        "bucket": request.bucket,
        "fps": torch.tensor([row["fps"] or float("nan") for row in rows], dtype=torch.float32),
        "is_repeat": torch.tensor([sample.is_repeat for sample in request.samples], dtype=torch.bool),
        "loss_weight": 1.0,
    }
    for name in columns:
        fields[name] = column_values([row["columns"][name] for row in rows], is_numeric=name in numeric)
    return Batch(fields)


def _release(ring: Arena, offset: int) -> None:
    ring.release(offset, _copies_done())


def _copies_done() -> Callable[[], None] | None:
    # A copy to the device may still read the pages when the last tensor over them dies: the ring waits for all that
    # this thread has queued on its stream until now.
    cuda = _cuda()
    if not cuda.is_initialized():
        return None
    event = cuda.Event()
    event.record()
    wait: Callable[[], None] = event.synchronize
    return wait


def _cuda() -> Any:
    import torch

    return torch.cuda  # untyped in torch's own stubs
