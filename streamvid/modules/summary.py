"""Sizes of the models and of their trainable parts, logged as a table at the start of a run."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from dataclasses import dataclass, field

from rich.filesize import decimal
from torch import Tensor, nn

from streamvid.modules import fp8

OWN = "(own)"
"""Name of the row for tensors that belong to the training module itself, not to its children."""

_HEADER = ("model", "class", "parameters", "trainable", "bytes", "dtype")


@dataclass
class ModelSize:
    """Row for one model in the size table. Sizes in bytes include buffers.

    A shared tensor is counted only in the first model that contains it.
    num_of_dtype: maps each dtype name to the number of parameters with that dtype.
    """

    name: str
    kind: str = ""
    num_parameters: int = 0
    num_trainable: int = 0
    num_bytes: int = 0
    num_of_dtype: collections.Counter[str] = field(default_factory=collections.Counter)

    def add(self, name: str, tensor: Tensor) -> None:
        """Count one tensor. FP8 weights count as the parameters that they represent; their scales only add bytes."""
        self.num_bytes += tensor.nbytes
        *_, own = name.split(".")
        if isinstance(tensor, nn.Parameter) and own != fp8.SCALE:
            self.num_parameters += tensor.numel()
            self.num_trainable += tensor.numel() * tensor.requires_grad
            dtype = fp8.FLOAT8 if own == fp8.STORED else tensor.dtype
            self.num_of_dtype[str(dtype).removeprefix("torch.")] += tensor.numel()

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Dtypes of the parameters, most frequent first."""
        return tuple(dtype for dtype, _ in self.num_of_dtype.most_common())

    def cells(self) -> tuple[str, ...]:
        counts = (f"{self.num_parameters:,}", f"{self.num_trainable:,}", decimal(self.num_bytes))
        return (self.name, self.kind, *counts, ", ".join(self.dtypes))


def summarize(module: nn.Module) -> list[ModelSize]:
    """Return one row per child of `module`. If `module` has tensors of its own, the first row describes them."""
    parts = [(OWN, module, False), *((name, child, True) for name, child in module.named_children())]
    seen: set[int] = set()
    rows = []
    for name, part, recurse in parts:
        row = ModelSize(name, type(part).__name__)
        tensors = [*part.named_parameters(recurse=recurse), *part.named_buffers(recurse=recurse)]
        for own, tensor in tensors:
            if id(tensor) not in seen:
                seen.add(id(tensor))
                row.add(own, tensor)
        if tensors or name != OWN:
            rows.append(row)
    return rows


def total(rows: Iterable[ModelSize]) -> ModelSize:
    """Return a row with the sums of all rows."""
    found = ModelSize("sum")
    for row in rows:
        found.num_parameters += row.num_parameters
        found.num_trainable += row.num_trainable
        found.num_bytes += row.num_bytes
    return found


def format_table(rows: list[ModelSize]) -> str:
    """Format the rows as an aligned table for a log, with a total row if there are several rows."""
    shown = [*rows, total(rows)] if len(rows) > 1 else rows
    lines = [_HEADER, *(row.cells() for row in shown)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    template = "{:<%d}  {:<%d}  {:>%d}  {:>%d}  {:>%d}  {:<%d}" % tuple(widths)  # noqa: UP031  # widths in a format
    return "\n".join(template.format(*line).rstrip() for line in lines)
