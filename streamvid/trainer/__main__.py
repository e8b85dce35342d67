"""accelerate launch [--config_file configs/accelerate/…] -m streamvid.trainer --config FILE [--set a.b=c]"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Mapping, Sequence

from streamvid.config import load_config
from streamvid.errors import StreamvidError
from streamvid.shipped import shipped_config
from streamvid.trainer.config import TrainConfig

_log = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as told; 0 when complete, 128 + the signal that stopped it, 2 for a mistake in the config, else 1."""
    parser = argparse.ArgumentParser(prog="python -m streamvid.trainer", description=__doc__)
    parser.add_argument("--config", metavar="FILE", help="YAML of a TrainConfig, or a preset: tiny")
    parser.add_argument("--set", metavar="NAME=VALUE", dest="overrides", action="append", default=[])
    options = parser.parse_args(arguments)
    is_main = int(os.environ.get("RANK", "0")) == 0
    logging.basicConfig(level=logging.INFO if is_main else logging.WARNING, format="%(asctime)s %(message)s")
    if is_alone_by_mistake(os.environ):
        _log.warning(
            "this is the only process: `accelerate launch --cpu --num_processes N` starts one and no more; "
            "use `accelerate launch --config_file configs/accelerate/cpu_2ranks.yaml`"
        )
    try:
        file = shipped_config("train", options.config) if options.config else None
        return run_to_exit_code(load_config(TrainConfig, file, options.overrides))
    except StreamvidError as error:
        _log.error("%s", error)
        return 2 if isinstance(error, ValueError) else 1


def run_to_exit_code(config: TrainConfig) -> int:
    """Do what the config's task says."""
    from accelerate import PartialState

    from streamvid.trainer.encode import encode
    from streamvid.trainer.tasks import find_task
    from streamvid.trainer.trainer import train

    encodes = find_task(config.task).sidecar == "write"
    if encodes:
        logging.getLogger("streamvid.loader").setLevel(logging.WARNING)  # it would tell of each shard
    result = encode(config) if encodes else train(config)
    PartialState().destroy_process_group()
    if result.stopped_by is not None:
        _log.warning("stopped by %s; the same command goes on from there", result.stopped_by.name)
    return 0 if result.stopped_by is None else 128 + result.stopped_by


def is_alone_by_mistake(environ: Mapping[str, str]) -> bool:
    """Whether accelerate's launcher for CPUs named a master for others, whom it leaves to mpirun to start."""
    ranks = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
    is_cpu_launch = environ.get("ACCELERATE_USE_CPU", "").lower() == "true" and "MASTER_PORT" in environ
    return is_cpu_launch and not any(name in environ for name in ranks)


if __name__ == "__main__":
    sys.exit(main())
