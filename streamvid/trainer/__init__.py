"""Thin accelerate loop that trains any module on the loader's batches.

The package may import all lower layers and is the only user of accelerate. Reading order: config, trainer (the loop),
run (one step), tasks, data, launch (processes and signals), checkpoint, metrics, evaluate, encode.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from streamvid.trainer.config import TrainConfig

if TYPE_CHECKING:
    from streamvid.trainer.trainer import TrainResult, train

__all__ = ["TrainConfig", "TrainResult", "train"]


def __getattr__(name: str) -> Any:
    if name in ("TrainResult", "train"):
        # torch and accelerate take seconds to import, and `streamvid --help` needs neither.
        from streamvid.trainer import trainer

        return getattr(trainer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
