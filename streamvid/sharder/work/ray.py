"""Ray engine: runs the tasks of a build on a Ray cluster.

Ray schedules each task on a machine with enough CPUs, and starts it again if its machine is lost. Within a task, worker
processes isolate hostile files, as on one machine.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable, Iterator
from typing import Any

from streamvid.errors import ConfigError, StreamvidError
from streamvid.host.share import MAX_SHARES, Share
from streamvid.sharder.work.tasks import Remaining

_RETRIES = 3
_SECONDS_TO_CONNECT, _SECONDS_BETWEEN_REPORTS = 10.0, 2.0
_MAX_ROUNDS = 4  # probe, curate, encode, build
_logger = logging.getLogger(__name__)


def run_on_ray(
    task: Callable[[Share], Remaining | None],
    num_cpus: int,
    address: str,
    num_tasks: int | None,
    report: Callable[[], None],
) -> None:
    """Run the tasks of a build on a Ray cluster until all shards are built or tasks are permanently lost.

    task: function that does a share and returns the unfinished work of other shares; it is sent to the cluster.
    num_cpus: number of CPUs per task. num_tasks: None for as many tasks as the cluster can run at a time.
    report: function that is called every few seconds.

    Raises ConfigError if Ray is not installed or the cluster is unsuitable, and the error of the first task that fails.
    The run that seals the dataset does the work that lost tasks left unfinished.
    """
    with _connected(address) as ray:
        count = _count_tasks(ray, num_cpus, num_tasks)

        @ray.remote(num_cpus=num_cpus, max_retries=_RETRIES)  # type: ignore[untyped-decorator,unused-ignore]
        def do_share(share: Share) -> Remaining | None:
            return task(share)

        for _ in range(_MAX_ROUNDS):
            pending = [do_share.remote(Share(number, count)) for number in range(count)]
            remaining: list[Remaining | None] = []
            try:
                while pending:
                    ended, pending = ray.wait(pending, timeout=_SECONDS_BETWEEN_REPORTS)
                    remaining += [_result(ray, reference) for reference in ended]
                    report()
            except BaseException:
                for reference in pending:
                    ray.cancel(reference, force=True)
                raise
            if None in remaining:
                return


@contextlib.contextmanager
def _connected(address: str) -> Iterator[Any]:
    try:
        import ray
    except ImportError as error:
        raise ConfigError("engine='ray' needs Ray: pip install 'streamvid[ray]'") from error
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
            f"ray_address={address!r}: no Ray cluster answers there; start one with `ray start --head`, or pass the "
            "address of a running one"
        ) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _count_tasks(ray: Any, num_cpus: int, num_tasks: int | None) -> int:
    """Return the number of tasks. Raises ConfigError if no machine has enough CPUs for a task."""
    cpus = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    if max(cpus, default=0) < num_cpus:
        raise ConfigError(
            f"workers={num_cpus}: must be at most {max(cpus, default=0)}, the number of CPUs of the largest machine in "
            "the Ray cluster; pass workers (--workers)"
        )
    return min(MAX_SHARES, max(2, sum(count // num_cpus for count in cpus)) if num_tasks is None else num_tasks)


def _result(ray: Any, reference: Any) -> Remaining | None:
    """Return the result of a task that has ended. Raises its error."""
    try:
        result: Remaining | None = ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise error.cause if isinstance(error.cause, StreamvidError) else RuntimeError(str(error)) from None
    except (ray.exceptions.WorkerCrashedError, ray.exceptions.RaySystemError, ray.exceptions.NodeDiedError) as error:
        _logger.warning("a task was lost %d times; its remaining work is done at the end (%s)", _RETRIES + 1, error)
        return Remaining("lost", 1, 1)
    return result
