"""Lookup of submodules by dotted name, and lists of names for messages."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Layer types that hold most weights. They support adapters and FP8 weights."""

NUM_SHOWN = 5


def part_of(module: nn.Module, name: str) -> nn.Module | None:
    """Return the submodule with this dotted name, or None if it does not exist."""
    try:
        return module.get_submodule(name)
    except AttributeError:
        return None


def child_names(module: nn.Module) -> str:
    """Format the names of a module's children for a message."""
    return ", ".join(name for name, _ in module.named_children()) or "none (the module has no children)"


def some(names: Collection[str]) -> str:
    """Format the first few names for a message, with the total number if some are omitted."""
    ordered = list(names)
    shown = ", ".join(ordered[:NUM_SHOWN])
    return shown if len(ordered) <= NUM_SHOWN else f"{shown}, … ({len(ordered)} in total)"
