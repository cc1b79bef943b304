"""States as trees: what is no tensor becomes JSON, and every tensor a leaf with a name. Nothing is ever executed."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from augend.errors import CheckpointError, ContractError

_TENSOR, _FLOAT, _TUPLE, _PAIRS, _COUNTER = "$tensor", "$float", "$tuple", "$pairs", "$counter"
DTYPES: Final = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
    )
}


def split(tree: object, what: str) -> tuple[Any, dict[str, Tensor]]:
    """Take a state apart.

    Args:
        tree: Dictionaries, lists, tuples, counters, None, numbers, text and dense tensors, one in another.
        what: What the state is of, for messages.

    Returns:
        What JSON keeps exactly (every tensor named in its place), and the tensors, live, by their names: the keys on
        the way to them, with dots.

    Raises:
        ContractError: It holds something else; the message says where.
    """
    tensors: dict[str, Tensor] = {}
    return _plain(tree, (), what, tensors), tensors


def join(plain: object, tensors: Mapping[str, Tensor]) -> Any:
    """Put a state together again.

    Raises:
        CheckpointError: A tensor is missing, or a mark is not one of ours.
    """
    if isinstance(plain, list):
        return [join(one, tensors) for one in plain]
    if not isinstance(plain, dict):
        return plain
    if len(plain) != 1 or not next(iter(plain)).startswith("$"):
        return {key: join(one, tensors) for key, one in plain.items()}
    ((mark, value),) = plain.items()
    try:
        return _marked(mark, value, tensors)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"a state has the entry {plain!r:.80}, which cannot be read: {error!r}") from error


def _marked(mark: str, value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if mark == _TENSOR:
        return tensors[value]
    if mark == _FLOAT:
        return float(value)
    if mark == _TUPLE:
        return tuple(join(value, tensors))
    pairs = {join(key, tensors): join(one, tensors) for key, one in value}
    return {_PAIRS: dict, _COUNTER: Counter}[mark](pairs)


def _plain(tree: object, path: tuple[str, ...], what: str, tensors: dict[str, Tensor]) -> Any:
    kind = type(tree)
    if isinstance(tree, Tensor):
        return {_TENSOR: _named(tree, path, what, tensors)}
    if isinstance(tree, list | tuple) and kind in {list, tuple, torch.Size}:
        items = [_plain(one, (*path, str(index)), what, tensors) for index, one in enumerate(tree)]
        return items if kind is list else {_TUPLE: items}
    if isinstance(tree, dict) and kind in {dict, OrderedDict, Counter}:
        if kind is not Counter and all(isinstance(key, str) and not key.startswith("$") for key in tree):
            return {key: _plain(one, (*path, key), what, tensors) for key, one in tree.items()}
        pairs = [
            [_plain(key, (*path, "key"), what, tensors), _plain(one, (*path, str(key)), what, tensors)]
            for key, one in tree.items()
        ]
        return {_COUNTER if kind is Counter else _PAIRS: pairs}
    if tree is None or isinstance(tree, bool | str | int | float):
        return _scalar(tree)
    raise ContractError(
        f"{what}: {'.'.join(path) or 'its state'} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint "
        "cannot keep; give it as numbers, text, lists, dictionaries or tensors in state_dict()"
    )


def _scalar(value: bool | str | float | None) -> Any:  # noqa: FBT001  # one of many kinds of value
    """Return what JSON keeps of a value: not the subclass that it may be of, and inf and nan as text."""
    for kind in (bool, str, int):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: str(float(value))}
    return None if value is None else float(value)


def _named(tensor: Tensor, path: tuple[str, ...], what: str, tensors: dict[str, Tensor]) -> str:
    name = ".".join(path)
    dense = tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_meta
    if not dense or tensor.dtype not in DTYPES.values():
        kind = f"{tensor.layout}, {tensor.dtype} on {tensor.device}"
        raise ContractError(f"{what}: the tensor {name!r} is {kind}, which safetensors files cannot keep")
    if not name or name in tensors:
        raise ContractError(f"{what}: two tensors of its state are called {name!r}; give them other keys")
    tensors[name] = tensor.detach()
    return name
