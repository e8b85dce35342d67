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
    if _is_alone_by_mistake(os.environ):
        _log.warning(
            "this is the only process: `accelerate launch --cpu --num_processes N` starts one and no more; "
            "use `accelerate launch --config_file configs/accelerate/cpu_2ranks.yaml`"
        )
    try:
        config = load_config(
            TrainConfig, shipped_config("train", options.config) if options.config else None, options.overrides
        )
    except StreamvidError as error:
        _log.error("%s", error)
        return 2
    return _train(config)


def _train(config: TrainConfig) -> int:
    from accelerate import PartialState

    from streamvid.trainer.trainer import train

    try:
        result = train(config)
    except StreamvidError as error:
        _log.error("%s", error)
        return 1
    PartialState().destroy_process_group()
    if result.stopped_by is not None:
        _log.warning("stopped by %s after step %d of %d", result.stopped_by.name, result.step, result.num_steps)
        return 128 + result.stopped_by
    return 0


def _is_alone_by_mistake(environ: Mapping[str, str]) -> bool:
    # accelerate's launcher for CPUs names a master for the others, whom it leaves to mpirun to start.
    ranks = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
    is_cpu_launch = environ.get("ACCELERATE_USE_CPU", "").lower() == "true" and "MASTER_PORT" in environ
    return is_cpu_launch and not any(name in environ for name in ranks)


if __name__ == "__main__":
    sys.exit(main())
