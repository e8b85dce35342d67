"""Frozen weights in 8 bits: half the bytes of bfloat16, cast to the dtype of the activations when they are used.

    weight (out, …)  ─►  weight_fp8 (out, …)  float8_e4m3fn, kept as uint8      weight / scale, at most 448 in a row
                         weight_scale (out, 1, …)  float32, a power of two      one per output channel

A scale is a power of two, so that a restored weight has four significant bits and is exact in every dtype: bfloat16
and float32 compute with the same weights. Rounding changes a weight by at most `RELATIVE_ERROR` of its value or, if it
is tiny, `ABSOLUTE_ERROR` of the largest value in its row.

The bytes are stored as uint8, because `.to(dtype)` would convert float8, and not every backend can send it.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from streamvid.errors import ConfigError
from streamvid.modules.parts import child_names

FLOAT8 = torch.float8_e4m3fn
NAME = "float8_e4m3fn"
LARGEST = 448.0  # of float8_e4m3fn
RELATIVE_ERROR = 1 / 16  # half a step of a mantissa of three bits
ABSOLUTE_ERROR = 2.0**-10 / 224  # half the smallest step, over the smallest value that a row's maximum is scaled to

_STORED, _SCALE = "weight_fp8", "weight_scale"
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_ADAPTERS = ("lora_A", "lora_B")


def store(module: nn.Module, names: Collection[str]) -> tuple[str, ...]:
    """Store the weights of all linear and convolution layers below the dotted `names` in 8 bits; return the layers.

    They must be frozen; adapters on them still train. Shared weights, embeddings, norms and biases do not change.
    Raises ConfigError if the module has no part of a name, or if something below it trains.
    """
    shared = _shared_parameters(module)
    stored: dict[str, None] = {}
    for name in names:
        below = dict(_below(module, name))
        _refuse_trainable(name, below)
        layers = [
            (path, layer)
            for path, layer in below.items()
            if isinstance(layer, _LAYERS) and not _is_adapter(path) and id(layer.weight) not in shared
        ]
        for path, layer in layers:
            if path not in stored:
                _store_layer(path, layer)
                stored[path] = None
        if not layers:
            raise ConfigError(f"fp8 names {name!r}, which has no linear or convolution layer; remove it")
    return tuple(stored)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Convert (out, …) floats to float8_e4m3fn and a scale (out, 1, …) float32: value ≈ stored × scale."""
    rows = weight.detach().float()
    largest = rows.abs().amax(dim=tuple(range(1, rows.dim())), keepdim=True)
    mantissa, exponent = torch.frexp(largest)  # largest = mantissa · 2^exponent, mantissa in [0.5, 1); 448 = 0.875 · 2⁹
    exponent = torch.where(mantissa <= LARGEST / 512, exponent - 9, exponent - 8)
    # A lower bound for rows that are almost zero, so that every dtype but float16 can hold the scale.
    scale = torch.exp2(exponent.clamp(min=-100).float())
    return (rows / scale).to(FLOAT8), scale


def dequantize(stored: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Restore the weights of `quantize`, in `dtype`."""
    if dtype == torch.float16:  # it cannot hold the scale of a row of small weights
        return (stored.float() * scale.float()).to(dtype)
    return stored.to(dtype) * scale.to(dtype)


def is_stored(name: str) -> bool:
    """Check whether a parameter of this name holds weights in 8 bits."""
    return name.rpartition(".")[2] == _STORED


def is_scale(name: str) -> bool:
    """Check whether a parameter of this name holds the scales of such weights."""
    return name.rpartition(".")[2] == _SCALE


class _Fp8Layer(nn.Module):
    """Base class that precedes a layer's own: `weight` is restored from 8 bits on every access."""

    weight_fp8: nn.Parameter
    weight_scale: nn.Parameter
    _dtype_before: torch.dtype

    @property
    def weight(self) -> Tensor:
        """The weight in its original dtype, for code that reads it directly."""
        return self.weight_as(self._dtype_before)

    def weight_as(self, dtype: torch.dtype) -> Tensor:
        return dequantize(self.weight_fp8.view(FLOAT8), self.weight_scale, dtype)

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        result: Tensor = _Apply.apply(x.to(dtype), self)  # type: ignore[no-untyped-call]
        return result


def _applied(layer: Any, x: Tensor) -> Tensor:
    """Run the layer in the dtype of `x`."""
    weight = layer.weight_as(x.dtype)
    bias = None if layer.bias is None else layer.bias.to(x.dtype)
    result: Tensor
    if isinstance(layer, nn.Linear):
        result = functional.linear(x, weight, bias)
    else:
        result = layer._conv_forward(x, weight, bias)
    return result


class _Apply(torch.autograd.Function):
    """The layer, storing nothing for the backward pass: that casts the frozen weight again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: _Fp8Layer) -> Tensor:
        ctx.layer, ctx.shape, ctx.device = layer, x.shape, x.device
        return _applied(layer, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        layer: Any = ctx.layer
        if layer.weight_fp8.dim() == 2:
            return grad @ layer.weight_as(grad.dtype), None
        # A convolution is linear in its input, so its gradient is the same at any input.
        with torch.enable_grad():
            x = torch.zeros(ctx.shape, dtype=grad.dtype, device=ctx.device, requires_grad=True)
            (of_x,) = torch.autograd.grad(_applied(layer, x), x, grad)
        return of_x, None


@functools.cache
def _class_of(kind: type[nn.Module]) -> type[nn.Module]:
    # The same name, because wrapping policies and messages use it.
    bases: tuple[type, ...] = (_Fp8Layer, kind)
    plain = {layer.forward for layer in _LAYERS}
    own = {} if kind.forward in plain else {"forward": kind.forward}
    return type(kind.__name__, bases, {"__module__": kind.__module__, **own})


def _store_layer(path: str, layer: nn.Module) -> None:
    weight = layer._parameters.pop("weight")
    if weight is None:
        raise ConfigError(f"fp8 includes {path}, which has no weight; leave it out")
    if not bool(weight.isfinite().all()):
        raise ConfigError(f"fp8 includes {path}, whose weights are not all finite; its file is damaged")
    stored, scale = quantize(weight)
    layer.__class__ = _class_of(type(layer))  # type: ignore[arg-type]  # a class can be hashed
    layer.register_parameter(_STORED, nn.Parameter(stored.view(torch.uint8), requires_grad=False))
    layer.register_parameter(_SCALE, nn.Parameter(scale, requires_grad=False))
    layer._dtype_before = weight.dtype  # type: ignore[assignment]


def _below(module: nn.Module, name: str) -> Iterable[tuple[str, nn.Module]]:
    modules = dict(module.named_modules())
    if not name or name not in modules:
        raise ConfigError(
            f"fp8 names {name!r}, which is neither a part of the training module nor one of its weight files; "
            f"allowed: {child_names(module)}, a dotted name below them, or a path of weights.paths"
        )
    return [(path, layer) for path, layer in modules.items() if path == name or path.startswith(f"{name}.")]


def _refuse_trainable(name: str, below: dict[str, nn.Module]) -> None:
    for path, layer in below.items():
        for own, parameter in layer.named_parameters(recurse=False):
            if parameter.requires_grad and not _is_adapter(path):
                raise ConfigError(
                    f"fp8 names {name!r}, but {path}.{own} trains; 8 bits are for frozen weights: "
                    "remove it from fp8 or from trainable"
                )


def _is_adapter(path: str) -> bool:
    return any(part in _ADAPTERS for part in path.split("."))


def _shared_parameters(module: nn.Module) -> set[int]:
    seen: set[int] = set()
    shared: set[int] = set()
    for _, parameter in module.named_parameters(remove_duplicate=False):
        (shared if id(parameter) in seen else seen).add(id(parameter))
    return shared
