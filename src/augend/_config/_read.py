"""Read a run file, put the overrides in, check every key, and fill in what depends on other keys."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields, replace
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin, get_type_hints

import msgspec

from augend._config._overrides import Setting, overridden
from augend._config._refuse import did_you_mean, refuse
from augend._config._schema import Data, Model, Parallel, RunFile, table_of
from augend.errors import ConfigError

_DEFAULT_MICROBATCH_ROWS: Final = 8
_DEFAULT_REPLICAS: Final = 2
_EXACT_THREADS: Final = 1  # some sums of torch depend on their number
_EXACT_DIGEST_STEPS: Final = 10
_HINTS: Final = get_type_hints(RunFile)
_TABLES: Final = {name: table for name, hint in _HINTS.items() if (table := table_of(hint)) is not None}


def read(path: Path, settings: Sequence[Setting] = ()) -> RunFile:
    """Return the whole run that a TOML file describes, with every default written out.

    Args:
        path: The run file.
        settings: Keys that the command line changes.

    Raises:
        ConfigError: The file cannot be read, is no TOML, or has a key or a value that cannot be used. The message is
            one line with the key, the value and the remedy.
    """
    try:
        tables = tomllib.loads(path.read_bytes().decode())
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; give the path of a run file, such as run.toml") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read as a run file: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}; a run file is TOML text in UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    try:
        return checked(overridden(tables, settings))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def checked(tables: dict[str, Any]) -> RunFile:
    """Return the run that TOML tables describe.

    Raises:
        ConfigError: A key is unknown, missing, of the wrong type, out of range, or at odds with another.
    """
    for name, value in tables.items():
        if name not in _HINTS:
            raise refuse(name, value, f"unknown key; {did_you_mean(name, _HINTS)}")
    values = {name: _gathered(name, value) for name, value in tables.items()}
    for required in (Model, Data):
        if required.__name__.lower() not in values:
            raise _missing(required.__name__.lower(), fields(required)[0])
    try:
        run = msgspec.convert(values, RunFile)
    except msgspec.ValidationError as error:
        raise _explained(str(error), tables) from None
    return _completed(run)


def _gathered(name: str, value: object) -> object:
    """Return a table with its unknown keys gathered as arguments where it takes any, and refused where not."""
    if name not in _TABLES:
        return value
    if not isinstance(value, dict):
        raise refuse(name, value, f"expected a table; write [{name}] on a line of its own and its keys below")
    known = {field.name: field for field in fields(_TABLES[name])}
    takes_any = known.pop("arguments", None) is not None
    for key, item in value.items():
        if key not in known and not takes_any:
            raise refuse(f"{name}.{key}", item, f"unknown key; {did_you_mean(key, known)}")
    for key, field in known.items():
        if field.default is MISSING and key not in value:
            raise _missing(name, field)
    own = {key: item for key, item in value.items() if key in known}
    rest = {key: item for key, item in value.items() if key not in known}
    return {**own, "arguments": rest} if takes_any else own


def _missing(table: str, field: Field[Any]) -> ConfigError:
    meaning, example = _told(f"{table}.{field.name}")
    return ConfigError(f"{table}.{field.name}: missing, and has no default: {meaning}; write [{table}] with {example}")


def _explained(message: str, tables: dict[str, Any]) -> ConfigError:
    """Turn msgspec's words into one line with the key, its value, its meaning and an example."""
    problem, _, place = message.partition(" - at `$.")
    key = re.sub(r"\[\d+\]", "", place.rstrip("`"))  # of one element the whole list is shown
    value: Any = tables
    for name in key.split("."):
        value = value[name]
    choices = _choices(key)
    expected = f"expected one of {', '.join(choices)}" if choices else _plain(problem)
    meaning, example = _told(key)
    return refuse(key, value, f"{expected}: {meaning}; for example {example}")


def _plain(problem: str) -> str:
    """Say what was expected in the words of TOML."""
    words = {"`": "", " | null": "", "Expected": "expected", "object": "table", "array": "list"}
    words[f"float <= {sys.float_info.max}"] = "a finite float"
    for word, plain in words.items():
        problem = problem.replace(word, plain)
    return problem


def _hint(key: str) -> tuple[Any, Any]:
    """Return the annotation of a dotted key and its default."""
    table, _, name = key.rpartition(".")
    owner = _TABLES[table] if table else RunFile
    hints = get_type_hints(owner, include_extras=True)
    default = {field.name: field.default for field in fields(owner)}[name]
    return hints[name], default


def _told(key: str) -> tuple[str, str]:
    """Return what a key means, and an example line."""
    hint, default = _hint(key)
    meta = hint.__metadata__[-1]
    example = meta.examples[0] if default in {None, MISSING} else default
    shown = list(example) if isinstance(example, tuple) else example
    return meta.description, f"{key.rpartition('.')[2]} = {shown!r}"


def _choices(key: str) -> list[str]:
    inner = _hint(key)[0].__origin__
    literals = [each for each in (inner, *get_args(inner)) if get_origin(each) is Literal]
    return [repr(choice) for each in literals for choice in get_args(each)]


def _completed(run: RunFile) -> RunFile:
    """Check what one key alone cannot show, and write the defaults that depend on other keys."""
    if run.steps is not None and run.epochs is not None:
        raise refuse("steps", run.steps, f"epochs = {run.epochs} is given too; keep one of the two")
    if run.microbatch_size is not None and run.microbatch_size > run.batch_size:
        remedy = f"larger than batch_size = {run.batch_size}; a micro-batch is a part of a batch, set it lower"
        raise refuse("microbatch_size", run.microbatch_size, remedy)
    if run.data.validation == 0 and (run.validate.patience or run.validate.every_steps):
        key = "patience" if run.validate.patience else "every_steps"
        value = getattr(run.validate, key)
        raise refuse(f"validate.{key}", value, "data.validation is 0, so no rows are held out; set it to 0.05, say")
    microbatch_size = run.microbatch_size or min(_DEFAULT_MICROBATCH_ROWS, run.batch_size)
    microbatches = -(-run.batch_size // microbatch_size)
    if microbatches > run.accumulator.max_microbatches:
        remedy = (
            f"a batch of {run.batch_size} rows has {microbatches} micro-batches of {microbatch_size}; set it to more"
        )
        raise refuse("accumulator.max_microbatches", run.accumulator.max_microbatches, remedy)
    return _exactly(
        replace(
            run,
            parallel=_parallel(run.parallel),
            epochs=1 if run.steps is None and run.epochs is None else run.epochs,
            microbatch_size=microbatch_size,
        )
    )


def _exactly(run: RunFile) -> RunFile:
    """Write the defaults that depend on whether the bits of the run are promised."""
    if run.accumulator.dtype != "exact":
        return run
    threads, every_steps = run.parallel.threads or _EXACT_THREADS, run.digest.every_steps or _EXACT_DIGEST_STEPS
    return replace(
        run, parallel=replace(run.parallel, threads=threads), digest=replace(run.digest, every_steps=every_steps)
    )


def _parallel(parallel: Parallel) -> Parallel:
    """Check that the copies of hsdp share the ranks evenly, and that nothing else asks for copies."""
    if parallel.mode != "hsdp":
        if parallel.replicas is not None:
            remedy = f"parallel.mode = {parallel.mode!r} has no such key; leave it out, or set parallel.mode = 'hsdp'"
            raise refuse("parallel.replicas", parallel.replicas, remedy)
        return parallel
    replicas = parallel.replicas or _DEFAULT_REPLICAS
    if parallel.ranks > 1 and parallel.ranks % replicas:
        remedy = (
            f"parallel.replicas = {replicas} copies cannot share them evenly; set a multiple of it, or other copies"
        )
        raise refuse("parallel.ranks", parallel.ranks, remedy)
    return replace(parallel, replicas=replicas)
