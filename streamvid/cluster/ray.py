"""Ray engine: runs tasks on a Ray cluster.

Ray schedules each task on a machine with enough CPUs and GPUs, and starts it again if its machine is lost. Within a
task, worker processes isolate hostile files, as they do on a single machine.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from streamvid.cluster.options import ClusterOptions
from streamvid.cluster.share import MAX_SHARES, Share
from streamvid.errors import ConfigError, StreamvidError

Result = TypeVar("Result")
_RETRIES = 3
_SECONDS_TO_CONNECT, _SECONDS_BETWEEN_REPORTS = 10.0, 2.0
_SPARE_ROUNDS = 2
"""Additional rounds for the work of tasks that were lost with their machines."""
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TaskNeeds:
    """Resources that each task needs.

    num_cpus: number of CPUs; None selects all CPUs of a machine or, if tasks use GPUs, the machine's CPUs per GPU.
    option: name of the option that sets `num_cpus`, for error messages.
    uses_gpu: True to give each task one GPU if any machine in the cluster has GPUs.
    max_tasks: largest useful number of tasks.
    num_phases: number of phases in the work. Each phase begins when all tasks have finished the previous phase.
    """

    num_cpus: int | None
    option: str
    uses_gpu: bool = False
    max_tasks: int = MAX_SHARES
    num_phases: int = 1


def run_on_ray(
    task: Callable[[Share, int], Result],
    is_done: Callable[[Result], bool],
    needs: TaskNeeds,
    options: ClusterOptions,
    report: Callable[[], None],
) -> list[Result]:
    """Run all tasks on a Ray cluster, once per phase, until a task finds that all work is done. Return all results.

    task: function that performs a task, given the task's share and number of CPUs. It is sent to the cluster.
    is_done: function that returns True if the result of a task shows that all work is done.
    report: function that is called every few seconds.

    If tasks were lost, up to two more rounds repeat their work. A task that was lost too often has no result.

    Raises ConfigError if Ray is not installed or the cluster is unsuitable. If a task fails, raises its error.
    """
    # Ray prints what happens to workers; standard output belongs to the caller, such as `--json`.
    with contextlib.redirect_stdout(sys.stderr), _connected(options.ray_address) as ray:
        machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        num_gpus = int(needs.uses_gpu and any(machine.get("GPU", 0) >= 1 for machine in machines))
        num_cpus, count = _divide(machines, num_gpus, needs)
        count = count if options.num_tasks is None else options.num_tasks

        @ray.remote(num_cpus=num_cpus, num_gpus=num_gpus, max_retries=_RETRIES)  # type: ignore[untyped-decorator,unused-ignore]
        def do_share(share: Share) -> Result:
            return task(share, num_cpus)

        results: list[Result] = []
        for _ in range(needs.num_phases + _SPARE_ROUNDS):
            found = _run_all(ray, [do_share.remote(Share(number, count)) for number in range(count)], report)
            results += found
            if any(map(is_done, found)):
                break
        return results


def _run_all(ray: Any, pending: list[Any], report: Callable[[], None]) -> list[Any]:
    """Wait for all pending tasks, and return the results of the tasks that were not lost."""
    found: list[Any] = []
    try:
        while pending:
            ended, pending = ray.wait(pending, timeout=_SECONDS_BETWEEN_REPORTS)
            for reference in ended:
                found += _result(ray, reference)
            report()
    except BaseException:
        for reference in pending:
            ray.cancel(reference, force=True)
        raise
    return found


@contextlib.contextmanager
def _connected(address: str) -> Iterator[Any]:
    try:
        import ray
    except ImportError as error:
        raise ConfigError("engine='ray' requires Ray; install it with `pip install 'streamvid[ray]'`") from error
    if ray.is_initialized():  # by the caller
        yield ray
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if port.isdecimal():  # Ray itself tries for minutes
            socket.create_connection((host, int(port)), _SECONDS_TO_CONNECT).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"ray_address={address!r}: no Ray cluster responds at this address; start one with `ray start --head`, "
            "or pass the address of a running one"
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _divide(machines: Sequence[Mapping[str, float]], num_gpus: int, needs: TaskNeeds) -> tuple[int, int]:
    """Return (number of CPUs per task, number of tasks). Raises ConfigError if no machine can run a task."""
    usable = [machine for machine in machines if machine.get("GPU", 0) >= num_gpus and machine.get("CPU", 0) >= 1]
    shares = [int(machine["CPU"] // (machine["GPU"] if num_gpus else 1)) for machine in usable]
    num_cpus = max(1, min(shares, default=1)) if needs.num_cpus is None else needs.num_cpus
    if not usable:
        needed = "a GPU and a CPU" if num_gpus else "a CPU"
        raise ConfigError(f"engine='ray': no machine in the Ray cluster has {needed}; add such a machine")
    most = int(max(machine["CPU"] for machine in usable))
    if most < num_cpus:
        raise ConfigError(
            f"{needs.option}={num_cpus}: must be at most {most}, the number of CPUs on the largest machine "
            f"{'with a GPU ' if num_gpus else ''}in the Ray cluster; set {needs.option} to a lower number"
        )
    at_once = [int(machine["CPU"] // num_cpus) for machine in usable]
    if num_gpus:
        at_once = [min(count, int(machine["GPU"])) for count, machine in zip(at_once, usable, strict=True)]
    return num_cpus, max(2, min(sum(at_once), needs.max_tasks, MAX_SHARES))


def _result(ray: Any, reference: Any) -> list[Any]:
    """Return a list that contains the result of a task that has ended, or an empty list if the task was lost.

    If the task raised an error, raises the same error.
    """
    try:
        return [ray.get(reference)]
    except ray.exceptions.RayTaskError as error:
        raise error.cause if isinstance(error.cause, StreamvidError) else RuntimeError(str(error)) from None
    except (ray.exceptions.WorkerCrashedError, ray.exceptions.RaySystemError, ray.exceptions.NodeDiedError) as error:
        _logger.warning(
            "a task was lost %d times; another round or the next run will do its remaining work (%s)",
            _RETRIES + 1,
            error,
        )
        return []
