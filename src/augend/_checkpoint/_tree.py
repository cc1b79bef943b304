"""States as trees: what is no tensor becomes JSON, and every tensor a leaf with a name. Nothing is ever executed."""

from __future__ import annotations

import math
import re
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from augend._checkpoint._safetensors import NAMES
from augend.errors import CheckpointError, ContractError

_TENSOR, _FLOAT, _TUPLE, _PAIRS, _COUNTER = "$tensor", "$float", "$tuple", "$pairs", "$counter"
_FLOATS: Final = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_DEEPEST: Final = 64  # dictionaries and lists one in another: far from where Python's own stack ends
_INT_BITS: Final = 2048  # far from where Python refuses to print or read an int
_LONE_SURROGATE: Final = re.compile("[\ud800-\udfff]")  # which UTF-8 has not
_RESERVED: Final = "__metadata__"  # a key of every safetensors file
DTYPES: Final = {str(dtype).removeprefix("torch."): dtype for dtype in NAMES}


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
        CheckpointError: A tensor is missing, or it is not what ``split`` makes.
    """
    try:
        return _joined(plain, 0, tensors)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"a state has an entry that cannot be read: {error!r:.200}") from error


def tensors_in(plain: object) -> Iterator[str]:
    """Yield the names of the tensors in what ``split`` made for JSON, in the order of the state."""
    if isinstance(plain, dict) and isinstance(plain.get(_TENSOR), str):
        yield plain[_TENSOR]
    elif isinstance(plain, dict | list):
        for one in plain.values() if isinstance(plain, dict) else plain:
            yield from tensors_in(one)


def _joined(plain: object, depth: int, tensors: Mapping[str, Tensor]) -> Any:
    if depth > 2 * _DEEPEST:  # a pair is one level more
        raise ValueError("it is nested deeper than any state")
    if isinstance(plain, list):
        return [_joined(one, depth + 1, tensors) for one in plain]
    if not isinstance(plain, dict):
        return plain
    if not any(key.startswith("$") for key in plain):
        return {key: _joined(one, depth + 1, tensors) for key, one in plain.items()}
    ((mark, value),) = plain.items()
    if mark in {_TENSOR, _FLOAT}:
        return {_TENSOR: tensors, _FLOAT: _FLOATS}[mark][value]
    items = [_joined(one, depth + 1, tensors) for one in _list(value)]
    if mark == _TUPLE:
        return tuple(items)
    return {_PAIRS: dict, _COUNTER: Counter}[mark](dict(map(_list, items)))


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"a {type(value).__name__}, not a list")
    return value


def _plain(tree: object, path: tuple[str, ...], what: str, tensors: dict[str, Tensor]) -> Any:
    kind = type(tree)
    if len(path) > _DEEPEST:
        raise ContractError(f"{what}: {'.'.join(path):.80}... is nested deeper than {_DEEPEST} levels, or holds itself")
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
    if isinstance(tree, int) and tree.bit_length() > _INT_BITS:
        raise ContractError(f"{what}: {'.'.join(path)} is a number of more than {_INT_BITS} bits; keep it as text")
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
    if is_lazy(tensor):
        raise ContractError(f"{what}: the tensor {name!r} is not initialised yet; run a forward first")
    dense = tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_meta
    if not dense or tensor.dtype not in NAMES:
        kind = f"{tensor.layout}, {tensor.dtype} on {tensor.device}"
        raise ContractError(f"{what}: the tensor {name!r} is {kind}, which safetensors files cannot keep")
    if name in {"", _RESERVED} or _LONE_SURROGATE.search(name):
        raise ContractError(f"{what}: a tensor of its state has the key {name!r}, which no file can keep; rename it")
    if name in tensors:
        raise ContractError(f"{what}: two tensors of its state are called {name!r}; give them other keys")
    tensors[name] = tensor.detach()
    return name
