"""Size of the models and what trains in them: the table at the start of a run."""

from __future__ import annotations

import collections
from dataclasses import dataclass

import torch
from torch import nn

from streamvid.modules import fp8

OWN = "(own)"
"""Row of the tensors that belong to the training module itself and to none of its children."""

_HEADER = ("model", "class", "parameters", "trainable", "bytes", "dtype")


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """One row of the table. A shared tensor counts for the first model; bytes include buffers; dtypes by frequency."""

    name: str
    kind: str
    num_parameters: int
    num_trainable: int
    num_bytes: int
    dtypes: tuple[str, ...]

    def cells(self) -> tuple[str, ...]:
        counts = (f"{self.num_parameters:,}", f"{self.num_trainable:,}", _size(self.num_bytes))
        return (self.name, self.kind, *counts, ", ".join(self.dtypes))


def summarize(module: nn.Module) -> tuple[ModelSize, ...]:
    """Return parameters, trainable ones, bytes and dtypes of each child of `module`.

    Weights in 8 bits count as the parameters that they represent; their scales count only as bytes.
    """
    seen: set[int] = set()
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    rows = [_row(OWN, type(module).__name__, own, seen)] if own else []
    for name, child in module.named_children():
        tensors = [*child.named_parameters(), *child.named_buffers()]
        rows.append(_row(name, type(child).__name__, tensors, seen))
    return tuple(rows)


def total(rows: tuple[ModelSize, ...]) -> ModelSize:
    """Add up the rows of a table."""
    return ModelSize(
        name="sum",
        kind="",
        num_parameters=sum(row.num_parameters for row in rows),
        num_trainable=sum(row.num_trainable for row in rows),
        num_bytes=sum(row.num_bytes for row in rows),
        dtypes=(),
    )


def format_table(rows: tuple[ModelSize, ...]) -> str:
    """Align the rows for a log, with a sum below several."""
    shown = (*rows, total(rows)) if len(rows) > 1 else rows
    lines = [_HEADER, *(row.cells() for row in shown)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    template = "{:<%d}  {:<%d}  {:>%d}  {:>%d}  {:>%d}  {:<%d}" % tuple(widths)  # noqa: UP031  # widths in a format
    return "\n".join(template.format(*line).rstrip() for line in lines)


def _row(name: str, kind: str, tensors: list[tuple[str, torch.Tensor]], seen: set[int]) -> ModelSize:
    num_parameters = 0
    num_trainable = 0
    num_bytes = 0
    values: collections.Counter[str] = collections.Counter()
    for key, tensor in tensors:
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        num_bytes += tensor.numel() * tensor.element_size()
        if not isinstance(tensor, nn.Parameter) or fp8.is_scale(key):
            continue
        num_parameters += tensor.numel()
        num_trainable += tensor.numel() * tensor.requires_grad
        values[fp8.NAME if fp8.is_stored(key) else str(tensor.dtype).removeprefix("torch.")] += tensor.numel()
    return ModelSize(
        name=name,
        kind=kind,
        num_parameters=num_parameters,
        num_trainable=num_trainable,
        num_bytes=num_bytes,
        dtypes=tuple(dtype for dtype, _ in values.most_common()),
    )


def _size(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:,.1f} GB"
