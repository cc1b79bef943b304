"""Steps and validations as plain values and lines of JSON, and back: the saved form of a history."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Annotated, Final, Literal, TypeAlias, final

import msgspec
from msgspec import Meta

from augend import Estimate
from augend._fit._history import Step, Validation
from augend.errors import StateError

_Whole: TypeAlias = Annotated[int, Meta(ge=0)]
_Number: TypeAlias = float | Literal["nan", "inf", "-inf"]  # JSON has none of the three
_Digest: TypeAlias = Annotated[str, Meta(pattern=r"\A[0-9a-f]{16}\Z")]
_Count: TypeAlias = Annotated[int, Meta(ge=0)] | Annotated[float, Meta(ge=0)]


@final
class _Estimate(msgspec.Struct, forbid_unknown_fields=True):
    """One named estimate; a list of them keeps the order of the terms, which the keys of an object need not."""

    name: str
    value: _Number
    error: _Number
    count: _Count
    low: _Number
    high: _Number


@final
class _Step(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    step: _Whole
    epoch: _Whole
    rows: Annotated[int, Meta(ge=1)]
    losses: Annotated[list[_Estimate], Meta(min_length=1)]
    count: _Count
    norm: _Number
    scale: _Number
    skipped: bool
    update: _Whole
    lr: _Number
    seconds: _Number
    offers: Annotated[int, Meta(ge=1)] = 1
    digests: dict[str, _Digest] = msgspec.field(default_factory=dict)


@final
class _Validation(msgspec.Struct, forbid_unknown_fields=True):
    step: _Whole
    epoch: _Whole
    estimates: Annotated[list[_Estimate], Meta(min_length=1)]
    seconds: _Number


_ENCODER: Final = msgspec.json.Encoder()
_STEP_DECODER: Final = msgspec.json.Decoder(_Step)


def line_of(step: Step) -> bytes:
    """Return a step as one line of JSON, its end included; nan and inf are written as text, other floats exactly."""
    record = _Step(
        step=step.step,
        epoch=step.epoch,
        rows=step.rows,
        losses=_write_all(step.losses),
        count=step.count,
        norm=_write(step.norm),
        scale=_write(step.scale),
        skipped=step.skipped,
        update=step.update,
        lr=_write(step.lr),
        seconds=_write(step.seconds),
        offers=step.offers,
        digests=dict(step.digests),
    )
    return _ENCODER.encode(record) + b"\n"


def step_of(line: bytes, number: int) -> Step:
    """Read what ``line_of`` returned.

    Args:
        line: With its end or without.
        number: Of the line, from 1, for messages.

    Raises:
        StateError: The line is no step; names the line and the field.
    """
    try:
        record = _STEP_DECODER.decode(line)
    except msgspec.DecodeError as error:  # of which a wrong value is one kind
        raise StateError(f"line {number} of the history's steps: {error}") from error
    return Step(
        step=record.step,
        epoch=record.epoch,
        rows=record.rows,
        losses=_read_all(record.losses, f"line {number} of the history's steps"),
        count=record.count,
        norm=float(record.norm),
        scale=float(record.scale),
        skipped=record.skipped,
        update=record.update,
        lr=float(record.lr),
        seconds=float(record.seconds),
        offers=record.offers,
        digests=record.digests,
    )


def plain_of(validation: Validation) -> dict[str, object]:
    """Return a validation as plain values; nan and inf as text."""
    record = _Validation(
        step=validation.step,
        epoch=validation.epoch,
        estimates=_write_all(validation.estimates),
        seconds=_write(validation.seconds),
    )
    plain: dict[str, object] = msgspec.to_builtins(record)
    return plain


def validation_of(plain: object, number: int) -> Validation:
    """Read what ``plain_of`` returned.

    Args:
        plain: The values.
        number: Of the validation, from 1, for messages.

    Raises:
        StateError: They are no validation; names the field.
    """
    where = f"validation {number} of the history"
    try:
        record = msgspec.convert(plain, _Validation)
    except msgspec.ValidationError as error:
        raise StateError(f"{where}: {error}") from error
    return Validation(
        step=record.step,
        epoch=record.epoch,
        estimates=_read_all(record.estimates, where),
        seconds=float(record.seconds),
    )


def _write_all(estimates: Mapping[str, Estimate]) -> list[_Estimate]:
    return [
        _Estimate(name, _write(one.value), _write(one.error), one.count, _write(one.low), _write(one.high))
        for name, one in estimates.items()
    ]


def _read_all(records: Iterable[_Estimate], where: str) -> dict[str, Estimate]:
    estimates: dict[str, Estimate] = {}
    for one in records:
        if one.name in estimates:
            raise StateError(f"{where}: {one.name!r} is there twice")
        estimates[one.name] = Estimate(
            float(one.value), float(one.error), one.count, low=float(one.low), high=float(one.high)
        )
    return estimates


def _write(value: float) -> _Number:
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return value
