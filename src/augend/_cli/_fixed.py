"""What a run keeps from its beginning to its end: most keys of its file, and its rows."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from datetime import date, time
from numbers import Number
from typing import Any, Final, final

import numpy as np
import torch
from torch import Tensor, nn

from augend import Batches, sources
from augend._config import RunFile, shown
from augend._fit import undisturbed
from augend.errors import ConfigError

_MAY_CHANGE: Final = frozenset(
    {
        *("steps", "epochs", "microbatch_size", "optimizer.lr"),
        *("checkpoint", "validate", "parallel", "schedule", "step", "digest"),
    }
)
_MAY_CHANGE_OF_A_LLAMA: Final = frozenset({"model.checkpoint_activations"})  # it changes no bit
_MAY_MOVE_WITH_A_FILE: Final = frozenset({"model.name"})  # all weights are in the checkpoints
_MAY_CHANGE_IN_FLOATS: Final = frozenset({"accumulator.max_microbatches"})  # exact sums have head-room for as many
_PLACES: Final = frozenset({"data.folder", "data.path", "data.tokenizer"})  # files may move: their rows are compared
_NUMPY_SEEDS: Final = 2**32


@final
class Fixed:
    """The part of a checkpoint that refuses another run: its state is what may not change.

    Args:
        run: The resolved run file.
        source: Its rows. Those of a named source are all read, of a source of the user's own the first and the last.
    """

    def __init__(self, run: RunFile, source: sources.Source) -> None:
        own = ":" in run.data.source
        may_change = _MAY_CHANGE | (frozenset() if own else _PLACES)
        if run.accumulator.dtype != "exact":
            may_change |= _MAY_CHANGE_IN_FLOATS
        if run.model.name == "llama" or run.model.name.startswith("gguf:"):
            may_change |= _MAY_CHANGE_OF_A_LLAMA
        if run.model.name.startswith("gguf:"):
            may_change |= _MAY_MOVE_WITH_A_FILE
        self._keys = _keys_of(run, may_change=may_change)
        count = Batches(source.rows, batch_size=1, microbatch_size=1).rows_per_epoch
        self._rows = {
            "count": count,
            "vocabulary": None if source.tokenizer is None else source.tokenizer.vocab_size,
            "sha256": _ends(source.rows, count, run.seed) if own else _digest(_all(source.rows, count)),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the keys with their values, and a fingerprint of the rows."""
        return {"keys": dict(self._keys), "rows": dict(self._rows)}

    @property
    def rows(self) -> dict[str, Any]:
        """How many rows there are, and what tells them from others, in plain numbers and text."""
        return dict(self._rows)

    def prepare_load(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Refuse a state that is not this one.

        Raises:
            ConfigError: A key has another value, or the rows are others.
        """
        saved = state["keys"]
        for key in [*saved, *(key for key in self._keys if key not in saved)]:
            _check(key, saved.get(key), self._keys.get(key))
        if state["rows"] != self._rows:
            was, now = state["rows"]["count"], self._rows["count"]
            numbers = f" ({was} then, {now} now)" if was != now else ""
            raise ConfigError(
                f"data.source: its rows are others than those the run was begun with{numbers}; bring those back, or "
                "begin a new run"
            )
        return lambda: None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Refuse a state that is not this one; there is nothing else to load.

        Raises:
            ConfigError: See ``prepare_load``.
        """
        self.prepare_load(state)()


def _keys_of(run: RunFile, *, may_change: frozenset[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in asdict(run).items():
        if isinstance(value, dict):
            arguments = value.pop("arguments", {})
            found |= {f"{name}.{key}": each for key, each in {**value, **arguments}.items() if name not in may_change}
        else:
            found[name] = value
    return {key: _plain(value) for key, value in found.items() if key not in may_change and value is not None}


def _plain(value: Any) -> Any:
    """Return a TOML value as a checkpoint holds it: dates as text, tuples as lists."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value.isoformat() if isinstance(value, date | time) else value


def _check(key: str, was: Any, now: Any) -> None:
    if was == now or repr(was) == repr(now):  # nan is not equal to itself
        return
    if was is None:
        raise ConfigError(f"{key} = {shown(now)}: the run was begun without it; leave it out, or begin a new run")
    what = f"{key}: missing now;" if now is None else f"{key} = {shown(now)}:"
    raise ConfigError(f"{what} the run was begun with {shown(was)}; set it back, or begin a new run")


def _all(rows: Any, count: int) -> Iterable[object]:
    return [rows] if isinstance(rows, Mapping) else (rows[index] for index in range(count))


def _ends(rows: Any, count: int, seed: int) -> str | None:
    """Return a fingerprint of the first and the last row; None if they are of no known kind, or never the same."""
    found = []
    for _ in range(2):
        with undisturbed(nn.Module()):
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed % _NUMPY_SEEDS)  # noqa: NPY002  # the user's rows may draw from it
            found.append(_digest(_row(rows, index) for index in (0, count - 1)))
    return found[0] if found[0] == found[1] else None


def _row(rows: Any, index: int) -> object:
    if isinstance(rows, Mapping):
        return {name: column[index] for name, column in rows.items()}
    if isinstance(rows, tuple):
        return tuple(column[index] for column in rows)
    return rows[index]


def _digest(values: Iterable[object]) -> str | None:
    """Return the SHA-256 of values, or None if one is of no known kind."""
    digest = hashlib.sha256()
    return digest.hexdigest() if all(_add(digest, value) for value in values) else None


def _add(digest: Any, value: object) -> bool:
    """Add a value with its kind, and tell whether that is a known one."""
    if isinstance(value, Tensor) and type(value) is Tensor and value.layout is torch.strided and not value.is_meta:
        digest.update(f"{value.dtype} {list(value.shape)}\0".encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return True
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        digest.update(f"{array.dtype} {array.shape}\0".encode())
        digest.update(b"" if array.dtype.hasobject else array.tobytes())
        return not array.dtype.hasobject
    if isinstance(value, Mapping):
        digest.update(f"mapping {len(value)}\0".encode())
        return all(_add(digest, key) and _add(digest, each) for key, each in value.items())
    if isinstance(value, list | tuple):
        digest.update(f"sequence {len(value)}\0".encode())
        return all(_add(digest, each) for each in value)
    digest.update(f"{value!r}\0".encode() if isinstance(value, Number | str) else b"")
    return isinstance(value, Number | str)
