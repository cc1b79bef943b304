"""``--set key.path=value``: one key of the run file, changed from the command line."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Final, final

from augend._config._refuse import refuse
from augend.errors import ConfigError

_EXCLUSIVE: Final = {"steps": "epochs", "epochs": "steps"}
_MODE: Final = ("parallel", "mode")
_REPLICAS: Final = ("parallel", "replicas")


@final
@dataclass(frozen=True, slots=True)
class Setting:
    """One key of the run file and its new value.

    Args:
        path: The names from the outermost table to the key.
        value: Read as TOML where the text is TOML, else the text.
    """

    path: tuple[str, ...]
    value: object

    @staticmethod
    def parse(text: str) -> Setting:
        """Read ``key=value`` or ``table.key=value``.

        Raises:
            ConfigError: There is no ``=``, or a name is empty.
        """
        key, equals, value = text.partition("=")
        path = tuple(name.strip() for name in key.split("."))
        if not equals or not all(path):
            raise ConfigError(f"--set {text}: expected key=value or table.key=value, such as --set optimizer.lr=3e-4")
        return Setting(path, _parsed(value.strip()))


def overridden(tables: dict[str, Any], settings: Sequence[Setting]) -> dict[str, Any]:
    """Return the run file's tables with each setting put in its place; the later wins.

    Setting ``steps`` takes ``epochs`` out of the file and the other way round, because they exclude each other; and
    setting another ``parallel.mode`` than ``hsdp`` takes out the ``replicas`` that belong to that.

    Raises:
        ConfigError: A setting goes below something that is no table.
    """
    result = deepcopy(tables)
    paths = {setting.path for setting in settings}
    given = {path[0] for path in paths}
    for path, value in ((setting.path, setting.value) for setting in settings):
        if path[0] in _EXCLUSIVE and _EXCLUSIVE[path[0]] not in given:
            result.pop(_EXCLUSIVE[path[0]], None)
        if path == _MODE and value != "hsdp" and _REPLICAS not in paths:
            _drop_replicas(result)
        _put(result, path, value)
    return result


def _drop_replicas(tables: dict[str, Any]) -> None:
    parallel = tables.get("parallel")
    if isinstance(parallel, dict) and parallel.get("mode") == "hsdp":
        parallel.pop("replicas", None)


def _parsed(text: str) -> object:
    try:
        document = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return document["value"] if len(document) == 1 else text  # more keys: the text had line breaks


def _put(tables: dict[str, Any], path: tuple[str, ...], value: object) -> None:
    place = tables
    for depth, name in enumerate(path[:-1], start=1):
        place = place.setdefault(name, {})
        if not isinstance(place, dict):
            above = ".".join(path[:depth])
            raise refuse(".".join(path), value, f"{above} is {place!r} and no table, so nothing can be set below it")
    place[path[-1]] = value
