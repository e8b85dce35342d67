"""Device stage that copies the next batch to the device while the caller works on the current one.

host batch ──side stream──► device batch ──event──► the caller's stream
    └── its memory in the ring is free again when that copy is done, independently of the caller's stream
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeVar

from streamvid.errors import ConfigError
from streamvid.loader.batch.batch import Batch
from streamvid.loader.batch.contents import profiled

if TYPE_CHECKING:
    import torch

P = TypeVar("P")

_PIN_BYTES = 2**20  # smaller tensors are pinned first: a copy from unpinned memory waits for earlier copies


class DeviceStage:
    """Stage that moves a loader's batches to a device.

    device: torch device or its name; "cuda" is the current CUDA device. None leaves batches in the ring.
    Batches on a device do not occupy memory in the ring. On CUDA, the stage needs device memory for two
    batches in addition to the batches that the caller keeps. Raises ConfigError for a device that is not available.
    """

    def __init__(self, device: torch.device | str | None) -> None:
        self.device = check_device(device)
        self._stream: Any = None

    def batches(
        self,
        next_pending: Callable[[], P | None],
        is_ready: Callable[[], bool],
        make: Callable[[P], Batch],
        hand_over: Callable[[P, float, float], None],
    ) -> Iterator[Batch]:
        """Yield the batches of one run, in order.

        next_pending: function that waits for the next complete batch and returns it, or None at the end.
        is_ready: function that returns whether `next_pending` would return immediately. It raises an error if the run
            is over, so that no batch copied ahead is delivered.
        make: function that returns the host batch for a pending batch.
        hand_over: function that is called just before a batch is handed to the caller, with (pending, seconds that the
            caller waited for it, seconds spent building it). A batch that was only copied ahead does not count as
            handed over.
        """

        def wait() -> P | None:
            with profiled("streamvid.wait"):
                return next_pending()

        pendings = iter(wait, None)
        ahead: deque[tuple[P, Batch, Any, float]] = deque()
        while True:
            since = perf_counter()
            if not ahead:
                ahead.extend(self._made(pending, make) for pending in islice(pendings, 1))
                if not ahead:
                    return
            if self.device is not None and is_ready():
                ahead.extend(self._made(pending, make) for pending in islice(pendings, 1))
            # No variable here holds the batch, or it would keep the memory until the caller requests the next batch.
            yield self._handed_over(*ahead.popleft(), since, hand_over)

    def _made(self, pending: P, make: Callable[[P], Batch]) -> tuple[P, Batch, Any, float]:
        before = perf_counter()
        batch, event = self._copied(pending, make)
        return pending, batch, event, perf_counter() - before

    def _copied(self, pending: P, make: Callable[[P], Batch]) -> tuple[Batch, Any]:
        if self.device is None:
            return make(pending), None
        if self.device.type != "cuda":
            host = make(pending)
            with profiled("streamvid.copy"):
                is_host = self.device.type == "cpu"
                return (host.clone() if is_host else host.to(self.device, non_blocking=False)), None
        if self._stream is None:  # one stream for all epochs, because each has its own part of torch's memory pool
            self._stream = torch_cuda().Stream(self.device)
        stream = self._stream
        # The host batch is created and freed on the side stream, so that its memory waits only for that stream.
        with torch_cuda().stream(stream):
            host = make(pending)
            with profiled("streamvid.copy"):
                batch = host.map_tensors(lambda tensor: _send(tensor, stream.device))
            event = stream.record_event()
            del host
        return batch, event

    def _handed_over(
        self,
        pending: P,
        batch: Batch,
        event: Any,
        seconds: float,
        since: float,
        hand_over: Callable[[P, float, float], None],
    ) -> Batch:
        if event is not None:
            current = torch_cuda().current_stream(self._stream.device)
            current.wait_event(event)
            # It was allocated on the side stream, which must not reuse the memory while the caller's stream uses it.
            for tensor in batch.tensors():
                tensor.record_stream(current)
        hand_over(pending, perf_counter() - since, seconds)
        return batch


def _send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if tensor.nbytes <= _PIN_BYTES and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def check_device(device: torch.device | str | None) -> torch.device | None:
    """Return `device` as a torch device, or None if `device` is None. Raises ConfigError for an unavailable device."""
    if device is None:
        return None
    import torch  # importing torch takes seconds, and planning alone does not need it

    cuda = torch_cuda()
    try:
        found = torch.device(device)
        if found.type == "cuda":
            if (found.index or 0) >= cuda.device_count():
                raise RuntimeError("the CUDA device does not exist on this machine, or torch was built without CUDA")
        else:
            torch.empty(0, device=found)
    except (RuntimeError, TypeError, AssertionError, NotImplementedError) as error:
        there = ["cpu", *(f"cuda:{number}" for number in range(cuda.device_count()))]
        why = str(error).splitlines()[0]
        raise ConfigError(
            f"device={device!r} cannot be used: {why}. Available: {', '.join(there)}; use one of them, or omit device "
            "to keep batches in host memory"
        ) from error
    return found


def torch_cuda() -> Any:
    """Import torch and return the `torch.cuda` module."""
    import torch

    return torch.cuda  # untyped in torch's stubs
