"""From the names in a run file to functions, and from its arguments to calls that can be made."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import reduce
from importlib import import_module
from operator import or_
from pathlib import Path
from types import ModuleType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from torch import Tensor

from augend._config import did_you_mean, refuse
from augend.errors import ConfigError

Function = Callable[..., Any]


def find(key: str, name: str, known: Mapping[str, Function]) -> Function:
    """Return the function that a key of the run file names.

    Args:
        key: The dotted key, for messages.
        name: One of the known names, or ``module:function``; the module may lie in the current directory.
        known: Functions by name.

    Raises:
        ConfigError: There is no such function, its module cannot be imported, or its arguments cannot be known.
    """
    if ":" not in name:
        if name not in known:
            raise refuse(key, name, f"no such name; {did_you_mean(name, known)}, or module:function")
        return known[name]
    module_name, _, function_name = name.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), function_name)):
        raise refuse(key, name, "expected module:function, such as nets.small:make")
    module = _imported(key, name, module_name)
    function = getattr(module, function_name, None)
    if not callable(function):
        functions = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
        raise refuse(key, name, f"{module_name} has no such function; {did_you_mean(function_name, functions)}")
    try:
        inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise refuse(key, name, "its arguments cannot be known; name a function or class written in Python") from error
    return function  # type: ignore[no-any-return]  # callable() is all that can be known of it


def _imported(key: str, name: str, module_name: str) -> ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")  # as python -m does, so that a module beside the run file's user is found
    try:
        return import_module(module_name)
    except ModuleNotFoundError as error:
        remedy = f"no module named {error.name}; it is looked for in {Path.cwd()} and among the installed packages"
        raise refuse(key, name, remedy) from error
    except (ImportError, SyntaxError) as error:
        raise refuse(key, name, f"{module_name} cannot be imported: {error}; correct it") from error


def bound(
    table: str, function: Function, arguments: Mapping[str, object], *, given: tuple[str, ...] = ()
) -> dict[str, object]:
    """Return the arguments of a table of the run file as the function takes them.

    Args:
        table: The table's name, for messages.
        function: What will be called.
        arguments: TOML values by name. A list becomes a tuple, and text a path, where the annotation says so.
        given: Names that do not come from the run file; positional ones come first.

    Raises:
        ConfigError: An argument is unknown, missing, or of the wrong type.
    """
    parameters = dict(inspect.signature(function).parameters)
    for name in given:
        parameters.pop(name, None)
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    named = {name: one for name, one in parameters.items() if one.kind not in {one.VAR_KEYWORD, one.VAR_POSITIONAL}}
    function_name = name_of(function)
    for name, value in arguments.items():
        if name in given or (name not in named and not open_ended):
            raise refuse(f"{table}.{name}", value, f"no argument of {function_name}; {did_you_mean(name, named)}")
    for name, parameter in named.items():
        if parameter.default is parameter.empty and name not in arguments:
            raise ConfigError(f"{table}.{name}: missing; {function_name} needs it: write [{table}] with {name} = ...")
    hints = {name: _without_tensors(hint) for name, hint in _hints(function).items()}
    return {name: _converted(f"{table}.{name}", hints.get(name, Any), value) for name, value in arguments.items()}


def name_of(function: Function) -> str:
    """Return what a message calls a function, which may be a partial one without a name."""
    return getattr(function, "__name__", str(function))


def _hints(function: Function) -> dict[str, Any]:
    try:
        return get_type_hints(function.__init__ if inspect.isclass(function) else function)
    except (NameError, TypeError):  # annotations that cannot be read at run time
        return {}


def _converted(key: str, hint: Any, value: object) -> object:
    if hint is object:
        return value
    try:
        return msgspec.convert(value, hint, dec_hook=_as_path)
    except msgspec.ValidationError as error:
        problem = (
            str(error).partition(" - at ")[0].replace("`", "").replace("Expected", "expected").replace("array", "list")
        )
        choices = _choices(hint)
        raise refuse(key, value, f"expected one of {', '.join(choices)}" if choices else problem) from None
    except TypeError:  # an annotation that msgspec does not know; the function itself will see
        return value


def _without_tensors(hint: Any) -> Any:
    """Leave tensors out of an annotation: TOML has none, and msgspec does not know a union with them."""
    arguments = tuple(_without_tensors(each) for each in get_args(hint) if each is not Tensor)
    origin: Any = get_origin(hint)
    if origin in {Union, UnionType}:
        return reduce(or_, arguments)
    return origin[arguments] if origin in {tuple, list} else hint


def _choices(hint: Any) -> list[str]:
    """Return the values that an annotation lists, also as a part of a union."""
    if get_origin(hint) is Literal:
        return [repr(choice) for choice in get_args(hint)]
    return [choice for each in get_args(hint) for choice in _choices(each)]


def _as_path(kind: type, value: object) -> object:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise ValueError(f"expected {kind.__name__}, got {type(value).__name__}")
