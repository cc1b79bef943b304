"""The operations of a graph: ggml's shapes, broadcasting and formulas on torch tensors, differentiable by autograd.

A tensor of ggml's shape (ne0, ne1, ne2, ne3) is a torch tensor [ne3, ne2, ne1, ne0]. An operation works on the tensors
that it gets, so that a graph runs with other numbers of rows than it was declared with.

Numerics: each in the dtype of its inputs, within a few units in the last place of ggml's CPU kernels; sums and means
are summed in float64 and rounded once, as there. Larger differences are ggml's: on the CPU it looks up ``gelu`` in a
table of float16, from float16, and rounds both factors of the products of ``conv_2d`` to float16 (each up to 2^-11).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, final

import torch
import torch.nn.functional as F
from torch import Tensor

from augend.errors import ContractError
from augend.ggml import _shapes
from augend.ggml._nodes import Shape
from augend.ggml._shapes import Settings, check_repeats, rank_of

__all__ = ["OPERATIONS", "Operation", "Settings", "Shape", "rank_of"]


def _repeat(small: Tensor, like: Tensor) -> Tensor:
    """Repeat a tensor end to end, in each dimension as often as it fits into the other."""
    check_repeats("repeat", small.shape[::-1], like.shape[::-1])
    return small.repeat([whole // part for part, whole in zip(small.shape, like.shape, strict=True)])


def _broadcast(small: Tensor, large: Tensor) -> Tensor:
    """Return what torch broadcasts to the larger tensor as ggml would: repeated, unless it is that by itself."""
    if all(part in {1, whole} for part, whole in zip(small.shape, large.shape, strict=True)):
        return small
    return _repeat(small, large)


def _add(inputs: Sequence[Tensor], _settings: Settings) -> Tensor:
    return inputs[0] + _broadcast(inputs[1], inputs[0])


def _sub(inputs: Sequence[Tensor], _settings: Settings) -> Tensor:
    return inputs[0] - _broadcast(inputs[1], inputs[0])


def _mul(inputs: Sequence[Tensor], _settings: Settings) -> Tensor:
    return inputs[0] * _broadcast(inputs[1], inputs[0])


def _div(inputs: Sequence[Tensor], _settings: Settings) -> Tensor:
    return inputs[0] / _broadcast(inputs[1], inputs[0])


def _scale(inputs: Sequence[Tensor], settings: Settings) -> Tensor:
    factor: float = settings["factor"]
    return inputs[0] * factor


def _mul_mat(inputs: Sequence[Tensor], settings: Settings) -> Tensor:
    first, second = inputs  # [a3, a2, out, in], [b3, b2, rows, in]
    if first.shape[:2] == (1, 1):
        product = F.linear(second.flatten(0, 2), first.flatten(0, 2))  # views, which cost a gradient nothing
        return product.reshape(*second.shape[:3], first.shape[2])
    _shapes.multiplied([_shapes.padded(each.shape[::-1]) for each in inputs], settings)
    # A matrix of the first serves neighbours of the second: matrix i of many is multiplied by i // repeats.
    outer, inner = first.shape[:2]
    groups = second.reshape(outer, second.shape[0] // outer, inner, second.shape[1] // inner, *second.shape[2:])
    product = torch.matmul(groups, first[:, None, :, None].mT)
    return product.reshape(*second.shape[:3], first.shape[2])


def _relu(inputs: Sequence[Tensor], _settings: Settings) -> Tensor:
    return F.relu(inputs[0])


def _gelu(inputs: Sequence[Tensor], _settings: Settings) -> Tensor:
    return F.gelu(inputs[0], approximate="tanh")


def _silu(inputs: Sequence[Tensor], _settings: Settings) -> Tensor:
    return F.silu(inputs[0])


def _soft_max(inputs: Sequence[Tensor], _settings: Settings) -> Tensor:
    return inputs[0].softmax(-1)


def _rms_norm(inputs: Sequence[Tensor], settings: Settings) -> Tensor:
    return F.rms_norm(inputs[0], inputs[0].shape[-1:], eps=settings["eps"])


def _norm(inputs: Sequence[Tensor], settings: Settings) -> Tensor:
    return F.layer_norm(inputs[0], inputs[0].shape[-1:], eps=settings["eps"])


def _conv_2d(inputs: Sequence[Tensor], settings: Settings) -> Tensor:
    kernel, data = inputs  # [out, in, kernel height, kernel width], [pictures, in, height, width]
    stride, padding, dilation = (settings[name][::-1] for name in ("stride", "padding", "dilation"))
    return F.conv2d(data, kernel, stride=stride, padding=padding, dilation=dilation)


def _pool_2d(inputs: Sequence[Tensor], settings: Settings) -> Tensor:
    kernel, stride = settings["kernel"][::-1], settings["stride"][::-1]
    along_width, along_height = settings["padding"]
    around = (along_width, along_width, along_height, along_height)
    if settings["kind"] == "max":
        return F.max_pool2d(F.pad(inputs[0], around, value=float("-inf")), kernel, stride)
    return F.avg_pool2d(F.pad(inputs[0], around), kernel, stride)


def _reshape(inputs: Sequence[Tensor], settings: Settings) -> Tensor:
    return inputs[0].reshape(_shapes.stretched(settings["shape"], inputs[0].numel())[::-1])


def _permute(inputs: Sequence[Tensor], settings: Settings) -> Tensor:
    axes = settings["axes"]
    last = _shapes.DIMENSIONS - 1
    return inputs[0].permute([last - axes.index(last - dim) for dim in range(_shapes.DIMENSIONS)])


def _cont(inputs: Sequence[Tensor], _settings: Settings) -> Tensor:
    return inputs[0].clone(memory_format=torch.contiguous_format)


def _get_rows(inputs: Sequence[Tensor], _settings: Settings) -> Tensor:
    table, ids = inputs  # [t3, t2, rows, width], [1, t3, t2, count]
    if ids.is_floating_point():
        raise ContractError(f"get_rows: the row numbers must be torch.int32; got {ids.dtype}; declare their tensor so")
    rows = table.shape[2]
    if bool(((ids < 0) | (ids >= rows)).any()):
        raise ContractError(
            f"get_rows: row numbers must be from 0 to {rows - 1}; got {int(ids.min())} to {int(ids.max())}"
        )
    firsts = torch.arange(0, table.shape[0] * table.shape[1] * rows, rows, device=ids.device)
    return F.embedding(ids[0] + firsts.reshape(*table.shape[:2], 1), table.flatten(0, 2))


def _sum(inputs: Sequence[Tensor], _settings: Settings) -> Tensor:
    return inputs[0].sum(dtype=torch.float64).to(inputs[0].dtype).reshape(1, 1, 1, 1)


def _mean(inputs: Sequence[Tensor], _settings: Settings) -> Tensor:
    return inputs[0].sum(-1, keepdim=True, dtype=torch.float64).to(inputs[0].dtype) / inputs[0].shape[-1]


def _sqr(inputs: Sequence[Tensor], _settings: Settings) -> Tensor:
    return inputs[0].square()


def _repeat_like(inputs: Sequence[Tensor], _settings: Settings) -> Tensor:
    return _repeat(inputs[0], inputs[1])


@final
@dataclass(frozen=True, slots=True)
class Operation:
    """What a graph can do with one or two of its tensors.

    Args:
        arity: How many tensors it takes.
        shape: From the declared shapes of its inputs, in ggml's order, and its settings, that of its output; raises
            ContractError where they do not fit.
        run: From its inputs, torch tensors [ne3, ne2, ne1, ne0], and its settings, the output in the same order; never
            in place; autograd differentiates it.
    """

    arity: int
    shape: Callable[[Sequence[Shape], Settings], Shape]
    run: Callable[[Sequence[Tensor], Settings], Tensor]


OPERATIONS: Final[Mapping[str, Operation]] = MappingProxyType({
    "add": Operation(2, _shapes.repeating, _add),
    "cont": Operation(1, _shapes.unchanged, _cont),
    "conv_2d": Operation(2, _shapes.convolved, _conv_2d),
    "div": Operation(2, _shapes.repeating, _div),
    "gelu": Operation(1, _shapes.unchanged, _gelu),
    "get_rows": Operation(2, _shapes.gathered, _get_rows),
    "mean": Operation(1, _shapes.averaged, _mean),
    "mul": Operation(2, _shapes.repeating, _mul),
    "mul_mat": Operation(2, _shapes.multiplied, _mul_mat),
    "norm": Operation(1, _shapes.normalized, _norm),
    "permute": Operation(1, _shapes.permuted, _permute),
    "pool_2d": Operation(1, _shapes.pooled, _pool_2d),
    "relu": Operation(1, _shapes.unchanged, _relu),
    "repeat": Operation(2, _shapes.repeated, _repeat_like),
    "reshape": Operation(1, _shapes.reshaped, _reshape),
    "rms_norm": Operation(1, _shapes.normalized, _rms_norm),
    "scale": Operation(1, _shapes.scaled, _scale),
    "silu": Operation(1, _shapes.unchanged, _silu),
    "soft_max": Operation(1, _shapes.unchanged, _soft_max),
    "sqr": Operation(1, _shapes.unchanged, _sqr),
    "sub": Operation(2, _shapes.repeating, _sub),
    "sum": Operation(1, _shapes.summed, _sum),
})  # fmt: skip
"""Every operation, by the name of the Graph's method; the two optimizer steps are not among them."""
