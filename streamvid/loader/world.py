"""Which rank this process is: asked of torch.distributed, else read from what launchers leave in the environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from streamvid.errors import ConfigError
from streamvid.plan.world import World

# (launcher, rank variable, world size variable). Slurm's job-wide SLURM_NTASKS is also set in a batch script or a
# shell that srun did not start, where it would make one process wait for ranks that never come: hence the step's.
_LAUNCHERS = (
    ("torchrun, accelerate or deepspeed", "RANK", "WORLD_SIZE"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE"),
)


def detect_world(environ: Mapping[str, str] | None = None) -> World:
    """The data-parallel position of this process: one rank of one where nothing says otherwise (a notebook).

    Raises ConfigError for launcher variables that contradict themselves.
    """
    if environ is None:
        initialised = _from_torch()
        if initialised is not None:
            return initialised
        environ = os.environ
    for launcher, rank_name, size_name in _LAUNCHERS:
        if rank_name in environ and size_name in environ:
            try:
                return World(rank=int(environ[rank_name]), num_ranks=int(environ[size_name]))
            except ValueError as error:
                raise ConfigError(
                    f"{rank_name}={environ[rank_name]!r} and {size_name}={environ[size_name]!r}, as {launcher} sets "
                    f"them, name no rank: {error}. Pass world=World(rank, num_ranks) to say it yourself"
                ) from error
    return World()


def _from_torch() -> World | None:
    # Only a program that imported torch can have initialised it.
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    return World(rank=torch.distributed.get_rank(), num_ranks=torch.distributed.get_world_size())


def default_num_workers() -> int:
    """Decode workers for one rank: its share of the usable cores, 8 at most; 0 where workers are not supported."""
    if sys.platform != "linux":
        return 0
    text = os.environ.get("LOCAL_WORLD_SIZE") or "1"
    if not text.isdecimal():
        raise ConfigError(f"LOCAL_WORLD_SIZE={text!r} is no number of ranks; pass num_workers to say it yourself")
    local_ranks = max(1, int(text))
    return max(1, min(8, len(os.sched_getaffinity(0)) // local_ranks))
