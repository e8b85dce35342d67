"""Protocols that a loader does not support. Using them raises errors that name the alternative."""

from __future__ import annotations

from typing import Any, NoReturn


class UnsupportedProtocols:
    """Base class of VideoLoader with the members that torch, pickle and accelerate look for in other loaders."""

    @property
    def sampler(self) -> NoReturn:
        """Unsupported attribute. Reading it always raises an AttributeError that names the alternative.

        accelerate's `skip_first_batches` reads this attribute, for example in Hugging Face's Trainer.
        """
        raise AttributeError(
            "a VideoLoader has no sampler, and its batches cannot be skipped; resume with load_state_dict() instead "
            "(in Hugging Face's Trainer, also set ignore_data_skip=True; see tools/examples/hf_trainer.py)"
        )

    def __getitem__(self, index: object) -> Any:
        raise TypeError(
            "a VideoLoader cannot be indexed; iterate over it to get batches. Do not wrap it in a torch DataLoader: it "
            "has its own workers and batching"
        )

    def __reduce__(self) -> Any:
        raise TypeError(
            "a VideoLoader cannot be pickled; create a loader in the process that uses it, and restore its position "
            "with load_state_dict()"
        )
