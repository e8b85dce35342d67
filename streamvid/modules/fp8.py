"""Frozen weights in FP8: half the size of bfloat16, cast to the dtype of the activations on use.

    weight (out, …)  ─►  weight_fp8 (out, …)  float8_e4m3fn, kept as uint8      weight / scale, magnitudes up to 448
                         weight_scale (out, 1, …)  float32, a power of two      one per output channel

Each scale is a power of two, so a restored weight has four significant bits and is exact in bfloat16 and float32.
Computations in either dtype use the same weights. Rounding changes a weight by at most `RELATIVE_ERROR` of its value
or, if the value is tiny, `ABSOLUTE_ERROR` of the largest value in its row.

The bytes are stored as uint8, because `.to(dtype)` would convert float8, and not every communication backend supports
float8.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from streamvid.errors import ConfigError
from streamvid.modules.adapters.reading import is_adapter
from streamvid.modules.parts import LAYERS, child_names

FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0  # largest value of float8_e4m3fn
RELATIVE_ERROR = 1 / 16  # half a step of a three-bit mantissa
ABSOLUTE_ERROR = 2.0**-10 / 224  # half the smallest step, divided by the smallest scaled maximum of a row

STORED, SCALE = "weight_fp8", "weight_scale"


def store(module: nn.Module, names: Collection[str]) -> tuple[str, ...]:
    """Convert the weights of linear and convolution layers to FP8. Return the dotted names of these layers.

    names: dotted names of parts whose layers are converted. The parts must be frozen, but adapters on these layers
        remain trainable. Shared weights, embeddings, norms and biases do not change.
    Raises ConfigError if a name matches no part of the module, or a part that has trainable parameters, non-finite
    weights or no layer to convert.
    """
    parameters = [id(one) for _, one in module.named_parameters(remove_duplicate=False)]
    shared = {one for one, count in collections.Counter(parameters).items() if count > 1}
    stored: dict[str, nn.Module] = {}
    for name in names:
        below = _below(module, name)
        layers = {
            path: layer
            for path, layer in below.items()
            if isinstance(layer, LAYERS) and (path in stored or id(layer.weight) not in shared)
        }
        if not layers:
            raise ConfigError(
                f"model.fp8 contains {name!r}, which has no linear or convolution layer with its own weight; remove "
                "this name"
            )
        for path, layer in layers.items():
            if path not in stored:
                _store_layer(path, layer)
        stored |= layers
    return tuple(stored)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Convert a float tensor of shape (out, …) to FP8. Return (stored, scale), where value ≈ stored × scale.

    stored: float8_e4m3fn tensor of the same shape. scale: float32 tensor of shape (out, 1, …).
    """
    rows = weight.detach().float()
    largest = rows.abs().amax(dim=tuple(range(1, rows.dim())), keepdim=True)
    mantissa, exponent = torch.frexp(largest)  # largest = mantissa · 2^exponent, mantissa in [0.5, 1); 448 = 0.875 · 2⁹
    exponent = torch.where(mantissa <= LARGEST / 512, exponent - 9, exponent - 8)
    # A lower bound for rows that are almost zero, so that every dtype but float16 can hold the scale.
    scale = torch.exp2(exponent.clamp(min=-100).float())
    return (rows / scale).to(FLOAT8), scale


def dequantize(stored: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Restore weights in `dtype` from the output of `quantize`."""
    if dtype == torch.float16:  # float16 cannot hold the scale of a row of small weights
        return (stored.float() * scale.float()).to(dtype)
    return stored.to(dtype) * scale.to(dtype)


class _Fp8Layer(nn.Module):
    """Base class that takes precedence over a layer's own class. It restores `weight` from FP8 on every access."""

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
    """Apply a layer to `x`, computing in the dtype of `x`."""
    weight = layer.weight_as(x.dtype)
    bias = None if layer.bias is None else layer.bias.to(x.dtype)
    apply = functional.linear if isinstance(layer, nn.Linear) else layer._conv_forward
    return apply(x, weight, bias)


class _Apply(torch.autograd.Function):
    """Forward and backward passes of an FP8 layer.

    The forward pass saves no tensors for the backward pass, which restores the frozen weight again.
    """

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
    # The subclass keeps the name, because wrapping policies and messages use it.
    bases: tuple[type, ...] = (_Fp8Layer, kind)
    plain = {layer.forward for layer in LAYERS}
    own = {} if kind.forward in plain else {"forward": kind.forward}
    return type(kind.__name__, bases, {"__module__": kind.__module__, **own})


def _store_layer(path: str, layer: nn.Module) -> None:
    weight = layer._parameters.pop("weight", None)
    if weight is None:
        raise ConfigError(
            f"model.fp8 includes {path}, whose weight is not a parameter; list only parts without this layer"
        )
    if not bool(weight.isfinite().all()):
        raise ConfigError(f"model.fp8 includes {path}, whose weights are not all finite; check the weight file")
    stored, scale = quantize(weight)
    layer.__class__ = _class_of(type(layer))  # type: ignore[arg-type]  # a class can be hashed
    layer.register_parameter(STORED, nn.Parameter(stored.view(torch.uint8), requires_grad=False))
    layer.register_parameter(SCALE, nn.Parameter(scale, requires_grad=False))
    layer._dtype_before = weight.dtype  # type: ignore[assignment]


def _below(module: nn.Module, name: str) -> dict[str, nn.Module]:
    """Return a mapping from names to modules for the part `name` and its submodules, excluding adapters.

    Raises ConfigError if the part does not exist or has trainable parameters.
    """
    modules = dict(module.named_modules())
    if not name or name not in modules:
        raise ConfigError(
            f"model.fp8 contains {name!r}, which is neither a part of the training module nor a weight file of one "
            f"of its children; allowed: {child_names(module)}, a dotted name below one of these, or a path as written "
            "in model.weights"
        )
    found = {path: part for path, part in modules.items() if f"{path}.".startswith(f"{name}.") and not is_adapter(path)}
    for path, part in found.items():
        for own, parameter in part.named_parameters(recurse=False):
            if parameter.requires_grad:
                raise ConfigError(
                    f"model.fp8 contains {name!r}, but {path}.{own} is trainable; only frozen weights can be stored in "
                    "FP8. Remove the name from model.fp8, or set model.trainable to names outside this part"
                )
    return found
