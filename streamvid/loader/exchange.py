"""Comparison of plans and shared batches between the processes of a run.

All communication uses the collectives of torch.distributed. Payloads are JSON in uint8 tensors, not pickled objects, so
data from a peer is parsed but never executed (SAFE-1). Processes are identified by their torch.distributed rank.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from streamvid.errors import ConfigError, LoaderError, SharedBatchError
from streamvid.loader.options import ProcessGroups
from streamvid.loader.world import is_initialised
from streamvid.plan.position import World

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

DEFAULT_TIMEOUT_SECONDS = 600.0
_END_OF_EPOCH = -1
_ABSENT = "absent"
_FOLLOW = "schedule.follow"
_NUM_VALUES_NAMED = 4
SHOWN_LENGTH = 160  # maximum number of characters of a value in an error message
_MASK = (1 << 64) - 1


def compare_plans(identity: Mapping[str, Any], world: World, groups: ProcessGroups) -> None:
    """Compare the plans of all processes collectively. All processes raise ConfigError if the plans differ."""
    processes_per_rank = None if groups.process_group is not None else 1
    if groups.shared_group is not None:
        processes_per_rank = groups.shared_group.size()
    check_equal_on_all_ranks(identity, world, groups.process_group, processes_per_rank=processes_per_rank)


def gather_values(value: Any, world: World, groups: ProcessGroups | None) -> list[tuple[int, Any]]:
    """In a collective operation, gather `value` from all processes that compare their plans.

    Return (rank, value) for each of these processes. Values must be JSON-serializable.

    groups: process groups whose plans are compared; None if this process does not compare its plan.
    Raises ConfigError if the ranks cannot communicate.
    """
    if groups is None or not is_initialised():
        if world.num_ranks > 1:
            raise ConfigError(
                f"schedule.follow=True with {world.num_ranks} ranks requires communication between the ranks, so that "
                "all of them continue with the same versions; call torch.distributed.init_process_group before the "
                "first loop and, if `world` differs from the ranks of torch.distributed, pass groups.process_group"
            )
        return [(world.rank, value)]
    import torch.distributed as dist

    group = groups.process_group or dist.group.WORLD
    assert group is not None
    told = _gather_json({"rank": world.rank, "value": value}, group, follows=True)
    return [(int(one["rank"]), one["value"]) for one in told]


def check_equal_on_all_ranks(
    identity: Mapping[str, Any],
    world: World,
    group: ProcessGroup | None = None,
    *,
    processes_per_rank: int | None = None,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
) -> None:
    """Compare `identity` across the processes in `group` (None: all processes), which must all call this function.

    The values of `identity` must be JSON-serializable. The function also compares num_ranks, and verifies that all
    ranks from 0 to num_ranks - 1 have the same number of processes (`processes_per_rank`, if given). It does nothing if
    torch.distributed is not initialized.

    Raises the same ConfigError in every process, naming the components that differ, their values and their processes.
    Raises LoaderError if a process does not arrive within `timeout_seconds`; `group` is unusable after that.
    """
    if not is_initialised():
        return
    import torch.distributed as dist

    group = group or dist.group.WORLD
    assert group is not None
    mine = {"rank": world.rank, "identity": {"num_ranks": world.num_ranks, **identity}}
    told = _gather_json(mine, group, follows=False, timeout_seconds=timeout_seconds)
    processes = dist.get_process_group_ranks(group)
    _require_equal(dict(zip(processes, (one["identity"] for one in told), strict=True)))
    _check_ranks(dict(zip(processes, (one["rank"] for one in told), strict=True)), world.num_ranks, processes_per_rank)


def _gather_json(
    mine: Mapping[str, Any], group: ProcessGroup, *, follows: bool, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
) -> list[dict[str, Any]]:
    """Return the messages of all members, in group order.

    follows: True for the exchange of versions, which precedes the comparison of plans only with `schedule.follow`.
        Raises ConfigError if some members exchange versions while others compare plans.
    """
    import torch.distributed as dist

    payload = json.dumps({_FOLLOW: follows, "message": mine}).encode()
    told = [json.loads(text) for text in _gather_bytes(payload, group, timeout_seconds)]
    processes = dist.get_process_group_ranks(group)
    _require_equal({process: {_FOLLOW: one[_FOLLOW]} for process, one in zip(processes, told, strict=True)})
    return [one["message"] for one in told]


def _require_equal(identities: Mapping[int, Mapping[str, Any]]) -> None:
    differing = _differing(identities)
    if differing:
        raise ConfigError(
            f"the loaders of the processes differ: {'; '.join(differing)}. Give every process the same arguments, "
            "dataset and state"
        )


def _differing(identities: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Return a description of each differing component, such as 'seed is 1 on processes 0-2, 2 on process 3'.

    Components are in the order of the identities, in which causes precede their effects.
    """
    lines = []
    for name in dict.fromkeys(name for identity in identities.values() for name in identity):
        values = [_shown(identity[name]) if name in identity else _ABSENT for identity in identities.values()]
        if len(set(values)) > 1:
            lines.append(f"{name} is {_who_has_what(identities, values)}")
    return lines


def _check_ranks(ranks: Mapping[int, int], num_ranks: int, processes_per_rank: int | None) -> None:
    expected = processes_per_rank or -(-len(ranks) // num_ranks)
    holders: dict[int, list[int]] = {rank: [] for rank in range(num_ranks)}
    for process, rank in ranks.items():
        holders[rank].append(process)
    wrong = [f"rank {rank} has {_processes(some)}" for rank, some in holders.items() if len(some) != expected]
    if not wrong:
        return
    size = (
        "the same number of processes"
        if processes_per_rank is None
        else f"the same number of processes ({processes_per_rank})"
    )
    named = wrong[:_NUM_VALUES_NAMED]
    more = f" and {len(wrong) - _NUM_VALUES_NAMED} more ranks" if len(wrong) > _NUM_VALUES_NAMED else ""
    raise ConfigError(
        f"each of the {num_ranks} ranks must have {size}, but {', '.join(named)}{more}. Pass world=World(rank, "
        "num_ranks) in each process; processes that share a batch need the same rank and groups.shared_group"
    )


class SharedBatchCheck:
    """Comparison of the batches that processes share (sequence, tensor or context parallelism).

    Each step starts one small all_gather. Its result is checked when the next step begins, so that neither the host nor
    a CUDA device waits for it. By the time an error is raised, the first differing batch has been delivered, but not
    the second. Every member of `group` must call `batch` and `end` in the same order. With NCCL, the communication runs
    on a separate CUDA stream.
    """

    def __init__(self, world: World, group: ProcessGroup) -> None:
        import torch
        import torch.distributed as dist

        self._rank, self._group = world.rank, group
        self._processes = dist.get_process_group_ranks(group)
        self._device = _device_of(group)
        self._stream = (
            torch.cuda.Stream(self._device) if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]
        )
        self._pending: _Pending | None = None

    @property
    def is_first(self) -> bool:
        """True in the first of the processes that share the rank's batches. Only that process writes the ledger."""
        import torch.distributed as dist

        return dist.get_rank() == min(self._processes)

    def batch(self, epoch: int, step: int, digest: int, sample_keys: Sequence[str]) -> None:
        """Send `digest`, a 64-bit hash of this step's batch, to the peers, and check the previous step.

        Raises the same SharedBatchError in every member if the batches of the previous step differ.
        """
        self._examine()
        self._pending = self._start(epoch, step, digest, sample_keys)

    def end(self, epoch: int) -> None:
        """Verify that all members had the same last batch, and that they end the epoch at the same step.

        Raises SharedBatchError otherwise.
        """
        self._examine()
        self._pending = self._start(epoch, _END_OF_EPOCH, 0, ())
        self._examine()

    def _start(self, epoch: int, step: int, digest: int, sample_keys: Sequence[str]) -> _Pending:
        import torch

        signed = ((digest + (1 << 63)) & _MASK) - (1 << 63)  # the same 64 bits as an int64
        with self._on_stream():
            mine = torch.tensor([self._rank, epoch, step, signed], dtype=torch.int64, device=self._device)
            return _Pending(*_start_gather(mine, self._group), epoch, step, tuple(sample_keys))

    def _examine(self) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        import torch

        try:
            with self._on_stream():
                pending.work.wait()
                told = torch.stack(pending.rows).tolist()
        except RuntimeError as error:
            raise SharedBatchError(
                f"{_processes(self._processes)} share batches, but not all of these processes reached "
                f"{_position(pending.epoch, pending.step)}: {_first_line(error)}. A process has ended, is stuck, or "
                "has left its loop early; see the log of that process for the reason"
            ) from error
        if any(row != told[0] for row in told):
            raise SharedBatchError(self._why(pending, told))

    def _why(self, pending: _Pending, told: Sequence[Sequence[int]]) -> str:
        # All members get here together, because all have seen the same rows.
        keys = [json.loads(text) for text in _gather_bytes(json.dumps(pending.sample_keys).encode(), self._group)]
        ranks, epochs, steps, digests = zip(*told, strict=True)
        start = f"processes that share batches differ at {_position(epochs[0], steps[0])}: "
        if len(set(ranks)) > 1:
            shown = self._holders([f"rank {rank}" for rank in ranks])
            return f"{start}{shown}. Pass the same world=World(rank, num_ranks) in all members of groups.shared_group"
        if len(set(zip(epochs, steps, strict=True))) > 1:
            shown = self._holders([_position(epoch, step) for epoch, step in zip(epochs, steps, strict=True)])
            return f"{start}{shown}. All processes must leave a loop, load a state and call set_epoch at the same step"
        if any(some != keys[0] for some in keys):
            slot = next(i for i in range(max(map(len, keys))) if len({_at(some, i) for some in keys}) > 1)
            return (
                f"{start}the sample in slot {slot} is {self._holders([_at(some, slot) for some in keys])}. All "
                "processes must use the same loader arguments and read the same stored bytes. If limits.quarantine is "
                "set, their quarantine files list the samples that were substituted"
            )
        shown = self._holders([f"digest {digest & _MASK:016x}" for digest in digests])
        return (
            f"{start}the samples {_shown(pending.sample_keys)} have different contents ({shown}). All processes must "
            "use the same loader arguments and the same versions of streamvid and PyAV"
        )

    def _holders(self, shown: Sequence[str]) -> str:
        return _who_has_what(self._processes, shown)

    def _on_stream(self) -> AbstractContextManager[Any]:
        if self._stream is None:
            return nullcontext()
        import torch

        return torch.cuda.stream(self._stream)


@dataclass(frozen=True, slots=True)
class _Pending:
    """An all_gather in progress: one row (rank, epoch, step, digest) per member."""

    rows: list[torch.Tensor]
    work: Any
    epoch: int
    step: int
    sample_keys: tuple[str, ...]


def _position(epoch: int, step: int) -> str:
    return f"the end of epoch {epoch}" if step == _END_OF_EPOCH else f"step {step} of epoch {epoch}"


def _at(keys: Sequence[str], slot: int) -> str:
    return _shown(keys[slot]) if slot < len(keys) else _ABSENT


# Formatting.


def _shown(value: object) -> str:
    """Return a value as JSON. Long text is truncated and followed by a hash of the full text."""
    text = json.dumps(value, sort_keys=True)
    if len(text) <= SHOWN_LENGTH:
        return text
    return f"{text[:SHOWN_LENGTH]}… (sha256 {hashlib.sha256(text.encode()).hexdigest()[:8]})"


def _first_line(error: RuntimeError) -> str:
    return str(error).partition("\n")[0][:300].rstrip(". ")


def _who_has_what(processes: Iterable[int], values: Iterable[str]) -> str:
    holders: dict[str, list[int]] = {}
    for process, value in zip(processes, values, strict=True):
        holders.setdefault(value, []).append(process)
    commonest = sorted(holders.items(), key=lambda item: (-len(item[1]), item[1][0]))
    named = [f"{value} on {_processes(some)}" for value, some in commonest[:_NUM_VALUES_NAMED]]
    more = len(commonest) - _NUM_VALUES_NAMED
    return ", ".join(named) + (f" and {more} more values" if more > 0 else "")


def _processes(numbers: Sequence[int]) -> str:
    """Format process numbers as 'process 3', 'processes 0-2, 5' or 'no process'."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    more = len(texts) - _NUM_VALUES_NAMED * 2
    text = ", ".join(texts[: _NUM_VALUES_NAMED * 2]) + (f" and {more} more ranges" if more > 0 else "")
    return "no process" if not numbers else f"process {text}" if len(numbers) == 1 else f"processes {text}"


# Transport.


def _backends(group: ProcessGroup) -> dict[str, str]:
    """Return a mapping from device type to backend, such as {"cpu": "gloo", "cuda": "nccl"}."""
    import torch.distributed as dist

    pairs = (pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return {pair[0]: pair[1] for pair in pairs}


def _device_of(group: ProcessGroup) -> torch.device:
    """Return the device for tensors of `group`: the CPU if the group has a CPU backend, so that no GPU is involved."""
    import torch

    backends = _backends(group)
    if "cpu" in backends:
        return torch.device("cpu")
    if "cuda" in backends:
        return torch.device("cuda", torch.cuda.current_device())
    raise ConfigError(
        f"groups: a process group with the backends {backends} cannot be used to compare loaders; use gloo or nccl"
    )


def _start_gather(mine: torch.Tensor, group: ProcessGroup) -> tuple[list[torch.Tensor], Any]:
    import torch
    import torch.distributed as dist

    rows = [torch.empty_like(mine) for _ in range(group.size())]
    return rows, dist.all_gather(rows, mine, group, async_op=True)


def _gather_bytes(payload: bytes, group: ProcessGroup, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> list[bytes]:
    """Return all members' payloads, in group order. Raises LoaderError if a payload does not arrive in time."""
    import torch

    device, timeout = _device_of(group), timedelta(seconds=timeout_seconds)
    try:
        if _backends(group)[device.type] == "gloo":
            # The only collective that names the missing process, and whose timeout leaves no thread waiting at exit.
            group.monitored_barrier(timeout, wait_all_ranks=True)  # type: ignore[attr-defined]
        lengths, work = _start_gather(torch.tensor([len(payload)], dtype=torch.int64, device=device), group)
        work.wait(timeout)
        sizes = [int(length) for length in lengths]
        padded = torch.frombuffer(bytearray(payload.ljust(max(sizes), b"\0")), dtype=torch.uint8).to(device)
        rows, work = _start_gather(padded, group)
        work.wait(timeout)
        return [bytes(row[:size].tolist()) for row, size in zip(rows, sizes, strict=True)]
    except RuntimeError as error:
        raise LoaderError(
            f"the loaders of all processes could not be compared (time limit: {timeout_seconds:g} s): "
            f"{_first_line(error)}. A process in the group has ended, is stuck or never iterates over a loader; if a "
            "process is merely slow to start, make all other processes wait for it before they iterate"
        ) from error
