"""Loading weight files into the training module: each file fills the child with matching keys and shapes.

A file has the same keys as its child, optionally with one common prefix: the child's name, pipe.NAME, model or module.
A file may also contain the weights of the entire training module.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from streamvid.errors import ConfigError
from streamvid.modules.config import WeightsConfig
from streamvid.modules.parts import child_names, part_of, some
from streamvid.modules.weight_files import WeightSource, read_state

_log = logging.getLogger(__name__)

_WHOLE = "the whole training module"


@dataclass(frozen=True)
class Match:
    """Result of comparing a weight file with a child of the training module.

    - names: maps each key in the file to a name in the training module, for tensors of the same shape.
    - missing: names in the training module that the file lacks.
    - unexpected: keys in the file that the child lacks.
    - other_shape: descriptions of the tensors whose shapes differ.
    """

    child: str
    names: dict[str, str]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    other_shape: tuple[str, ...]

    def is_allowed(self, config: WeightsConfig) -> bool:
        """Return whether the file fits the child, given the mismatches that `config` allows."""
        lacks = self.missing and not config.allow_missing
        exceeds = self.unexpected and not config.allow_unexpected
        return bool(self.names) and not (self.other_shape or lacks or exceeds)

    @property
    def num_known(self) -> int:
        """Number of keys whose names occur in the child, regardless of shape."""
        return len(self.names) + len(self.other_shape)


def load(
    module: nn.Module, sources: Sequence[WeightSource], config: WeightsConfig, *, may_lack: Sequence[str] | None = ()
) -> dict[str, str]:
    """Load weight files into `module`.

    Return a mapping from the paths, as written in the configuration, to the names of the children that the files fill
    ("" for the training module itself).

    may_lack: children that the module may lack; None allows any child. Files of absent children are skipped.
    Raises ConfigError before the first tensor changes if a file matches no child or more than one, or if a key is
    missing or unexpected and `config` does not allow this. Raises ConfigError at the end if a parameter is still a meta
    tensor.
    """
    states = [read_state(source.files) for source in sources]
    went: dict[str, str] = {}
    chosen: dict[str, tuple[WeightSource, dict[str, Tensor]]] = {}
    for source, state in zip(sources, states, strict=True):
        match = choose(module, source, state, config, may_lack=may_lack)
        if match is None:
            _log.info("skipped %s: this task does not use its model", source.name)
            continue
        went.update(dict.fromkeys(source.written, match.child))
        if match.child in chosen:
            first = chosen[match.child][0].name
            _log.warning("%s already has weights from %s; ignored %s", match.child or _WHOLE, first, source.name)
            continue
        chosen[match.child] = (source, {name: state[key] for key, name in match.names.items()})
    for child, (source, tensors) in chosen.items():
        _fill(module, tensors)
        _log.info("%s: %d tensors from %s", child or _WHOLE, len(tensors), source.name)
    _require_memory(module)
    return went


def choose(
    module: nn.Module,
    source: WeightSource,
    state: Mapping[str, Tensor],
    config: WeightsConfig,
    *,
    may_lack: Sequence[str] | None,
) -> Match | None:
    """Return the match between a source and one child, or None if the task does not use the source's model.

    Raises ConfigError if the source matches no child or more than one.
    """
    child, allowed = source.child, f"allowed: {child_names(module)}"
    if child is not None and part_of(module, child) is None:
        if may_lack is None or child in may_lack:
            return None
        raise ConfigError(
            f"model.weights.paths assigns {source.name} to {child!r}, which the training module lacks; {allowed}"
        )
    twins = _twins(module)
    candidates = [child] if child is not None else ["", *(name for name, _ in module.named_children())]
    matches = [match for name in candidates for match in _matches(module, name, state, twins)]
    if not matches:
        raise ConfigError(
            f"{source.name}: {_WHOLE if child is None else repr(child)} has no tensors to fill; remove the file from "
            "model.weights, or assign it to a child with tensors"
        )
    fitting = [match for match in matches if match.is_allowed(config)]
    if not fitting:
        # Names matter more than shapes: the same model in another size is nearer than one whose bias happens to fit.
        nearest = max(matches, key=lambda match: (match.num_known, len(match.names), -len(match.missing)))
        lacks_some = may_lack is None or any(part_of(module, name) is None for name in may_lack)
        # Names alone decide here too, because a file for another size of a model that is present is a mistake.
        if child is None and lacks_some and 2 * nearest.num_known < len(state):
            return None
        raise ConfigError(_misfit(source, nearest, config))
    best = max(len(match.names) for match in fitting)
    ways = {frozenset(match.names.values()): match for match in reversed(fitting) if len(match.names) == best}
    if len(ways) > 1:
        children = ", ".join(sorted(match.child for match in ways.values()))
        raise ConfigError(
            f"{source.name} fits several children ({children}); choose one with a mapping in model.weights.paths, such "
            "as {CHILD: FILE}"
        )
    # A file whose keys start with the child's name also fits the whole module, but it belongs to the child.
    return max((match for match in fitting if len(match.names) == best), key=lambda match: match.child)


def _matches(
    module: nn.Module, child: str, state: Mapping[str, Tensor], twins: Mapping[str, frozenset[str]]
) -> Iterator[Match]:
    tensors = module.get_submodule(child).state_dict(keep_vars=True)
    own = {name: tensor.shape for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
    if not own:
        return
    before = f"{child}." if child else ""
    for prefix in dict.fromkeys(("", before, f"pipe.{before}", "model.", "module.")):
        if not all(key.startswith(prefix) for key in state):
            continue
        cut = {key.removeprefix(prefix): key for key in state}
        same = {name: key for name, key in cut.items() if name in own and state[key].shape == own[name]}
        filled = {twin for name in cut if name in own for twin in twins.get(before + name, ())}
        yield Match(
            child,
            names={key: before + name for name, key in same.items()},
            missing=tuple(before + name for name in own if name not in cut and before + name not in filled),
            unexpected=tuple(key for name, key in cut.items() if name not in own),
            other_shape=tuple(
                f"{before}{name} {_shape(own[name])} here and {_shape(state[key].shape)} in the file"
                for name, key in cut.items()
                if name in own and name not in same
            ),
        )


def _twins(module: nn.Module) -> dict[str, frozenset[str]]:
    """Return a mapping from each name of a shared parameter to all names of this parameter.

    A weight file needs to contain only one of these names.
    """
    groups: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return {name: frozenset(group) for group in groups.values() if len(group) > 1 for name in group}


def _misfit(source: WeightSource, match: Match, config: WeightsConfig) -> str:
    nearest, count = match.child or _WHOLE, f"{len(match.names)} matching tensors"
    fits_none = f"{source.name} fits no child; the nearest is {nearest}, with {count}"
    parts = [fits_none if source.child is None else f"{source.name} does not fit {nearest}: it has {count}"]
    if match.missing and not config.allow_missing:
        hint = "; if this file is one of several shards, put them into one list" if not match.unexpected else ""
        parts.append(f"missing: {some(match.missing)} (model.weights.allow_missing keeps the factory's values{hint})")
    if match.unexpected and not config.allow_unexpected:
        parts.append(f"unexpected: {some(match.unexpected)} (model.weights.allow_unexpected ignores them)")
    if match.other_shape:
        parts.append(f"different shapes: {some(match.other_shape)}")
    return "; ".join(parts)


def _shape(shape: torch.Size) -> str:
    return "×".join(map(str, shape)) or "scalar"


def _fill(module: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Copy tensors into the module, converting them to the module's dtypes.

    Meta parameters are replaced with the file's tensors, which keep their dtypes.
    """
    empty = {
        name: one for name, one in module.named_parameters(remove_duplicate=False) if one.is_meta and name in tensors
    }
    for name, present in empty.items():
        # Cloned, because the file may disappear or change during the run. Swapped, so that all names of a shared
        # parameter refer to the new one.
        filled = nn.Parameter(tensors[name].clone(), present.requires_grad and tensors[name].is_floating_point())
        torch.utils.swap_tensors(present, filled)  # type: ignore[no-untyped-call]
    module.load_state_dict({name: tensor for name, tensor in tensors.items() if name not in empty}, strict=False)


def _require_memory(module: nn.Module) -> None:
    empty = [name for name, tensor in module.named_parameters() if tensor.is_meta]
    if empty:
        raise ConfigError(
            f"no weight file contains {some(empty)}, and the factory did not initialize them (they are meta tensors); "
            "add the missing files to model.weights, or set model.init to 'cpu' so that the factory initializes them"
        )
