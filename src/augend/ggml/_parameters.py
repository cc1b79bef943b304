"""Losses, optimizers and their parameters: what a training graph is told."""

from __future__ import annotations

import enum
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from numbers import Real
from typing import Final, TypeAlias, final

from augend.errors import ContractError
from augend.ggml._rules import Compat, rules_of


def rounded(value: Real | float) -> float:
    """Return the nearest float32, as a float; beyond the largest one that is an infinity."""
    try:
        return float(struct.unpack("f", struct.pack("f", float(value)))[0])
    except OverflowError:
        return -math.inf if value < 0 else math.inf


def _round_all(numbers: AdamW | SGD) -> None:
    for field in fields(numbers):
        value = getattr(numbers, field.name)
        if not isinstance(value, Real):
            raise ContractError(f"{field.name} of {type(numbers).__name__} must be a real number; got {value!r:.80}")
        object.__setattr__(numbers, field.name, rounded(value))


@final
class Kind(enum.Enum):
    """Which optimizer makes the updates."""

    ADAMW = "adamw"
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019)."""
    SGD = "sgd"
    """Gradient descent with decoupled weight decay, without momentum."""


@final
class Loss(enum.Enum):
    """What is minimised."""

    MEAN = "mean"
    """The mean of all elements of the outputs. Outputs of one element for the whole batch weigh a short batch as a
    whole one: leave the mean over rows to the loss."""
    SUM = "sum"
    """Their sum; never divided by the number of physical batches in a window."""
    CROSS_ENTROPY = "cross_entropy"
    """The mean over rows of the cross entropy between the softmax of a row and its labels."""
    MEAN_SQUARED_ERROR = "mean_squared_error"
    """The mean of all squared differences between outputs and labels."""

    @property
    def has_labels(self) -> bool:
        """Whether it compares the outputs with labels."""
        return self in {Loss.CROSS_ENTROPY, Loss.MEAN_SQUARED_ERROR}

    @property
    def per_datapoint(self) -> bool:
        """Whether it is a mean, which is stored divided by the physical batches of a window. All but SUM are."""
        return self is not Loss.SUM


@final
class Build(enum.Enum):
    """What an optimizer is built to do; ggml's numbers are the values."""

    FORWARD = 10
    """Evaluate only."""
    GRADIENT = 20
    """Evaluate and gather gradients, and never step."""
    UPDATE = 30
    """Evaluate, gather gradients and step."""


@final
@dataclass(frozen=True, slots=True)
class AdamW:
    """The numbers of AdamW, each rounded to float32, in which the steps are made.

    Args:
        alpha: The learning rate.
        beta1: How much of the first moment is kept in a step.
        beta2: How much of the second moment is kept in a step.
        eps: Added to the root of the second moment.
        wd: Weight decay; a step keeps ``1 - alpha * wd`` of a weight.

    Raises:
        ContractError: One is not a real number.
    """

    alpha: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    wd: float = 0.0

    def __post_init__(self) -> None:
        _round_all(self)


@final
@dataclass(frozen=True, slots=True)
class SGD:
    """The numbers of gradient descent, each rounded to float32, in which the steps are made.

    Args:
        alpha: The learning rate.
        wd: Weight decay; a step keeps ``1 - alpha * wd`` of a weight.

    Raises:
        ContractError: One is not a real number.
    """

    alpha: float = 1e-3
    wd: float = 0.0

    def __post_init__(self) -> None:
        _round_all(self)


_ADAMW: Final = AdamW()
_SGD: Final = SGD()


@final
@dataclass(frozen=True, slots=True, init=False)
class Parameters:
    """The numbers of both optimizers, of which one is active; both are kept.

    Args:
        adamw: Of AdamW; five numbers in the order of its fields are taken, too.
        sgd: Of gradient descent; two numbers in the order of its fields are taken, too.

    Raises:
        ContractError: One is neither, has another length, or holds what is not a real number.

    Example:
        >>> from augend.ggml import Parameters
        >>> Parameters(sgd=[0.5, 0.25]).sgd
        SGD(alpha=0.5, wd=0.25)
    """

    adamw: AdamW
    sgd: SGD

    def __init__(self, adamw: AdamW | Sequence[float] = _ADAMW, sgd: SGD | Sequence[float] = _SGD) -> None:
        object.__setattr__(self, "adamw", _converted(adamw, AdamW))
        object.__setattr__(self, "sgd", _converted(sgd, SGD))


@final
@dataclass(frozen=True, slots=True)
class Moment:
    """When a schedule is asked: immediately before an update.

    Args:
        epoch: The epoch, from 1; 0 outside of a fit.
        iteration: The number of the update that is about to be made, from 1.
    """

    epoch: int
    iteration: int


Schedule: TypeAlias = Callable[[Moment], Parameters]
"""Returns the parameters of an update; asked once for each."""


def check_parameters(parameters: Parameters, kind: Kind, compat: Compat | None = None) -> None:
    """Check what is about to be used for an update.

    Args:
        parameters: Both sets.
        kind: Which of them is active, and must be within its bounds.
        compat: By default and for ``"prism"`` the numbers of both sets must be finite; ggml looks at the active one
            alone, and takes an infinite rate. By default a beta of 1, with which no step is defined, is refused.

    Raises:
        ContractError: A number is not; the message names it and its bounds.
    """
    if not isinstance(parameters, Parameters):
        raise ContractError(f"an update takes Parameters; a schedule or a caller gave {type(parameters).__name__}")
    rules = rules_of(compat)
    if rules.all_finite:
        for name, value in (*_named(parameters, Kind.ADAMW), *_named(parameters, Kind.SGD)):
            if not math.isfinite(value):
                raise ContractError(f"{name} must be finite in float32; got {value}")
    for name, value in _named(parameters, kind):
        bounds, holds = _bounds(name.rpartition(".")[2], value, strict=rules.strict_bounds)
        if not holds:
            raise ContractError(f"{name} must be {bounds} in float32; got {value}")


def adamw_vector(adamw: AdamW, iteration: int) -> tuple[float, ...]:
    """Return the seven float32 numbers of one AdamW step, in ggml's order.

    Args:
        adamw: The numbers of the step.
        iteration: The number of the step, from 1.

    Returns:
        alpha, beta1, beta2, eps, wd, 1/(1 - beta1^iteration) and 1/(1 - beta2^iteration); the latter two are inf where
        the power is 1.

    Numerics:
        The power is that of float64, rounded to float32; ggml's is the C library's powf, which with glibc is one unit
        off for one power in some 700. The difference and the quotient are float32's own.
    """
    power = float(rounded(iteration))
    return (*astuple(adamw), _correction(adamw.beta1, power), _correction(adamw.beta2, power))


def _correction(beta: float, power: float) -> float:
    # A difference or a quotient of two float32 formed in float64 and then rounded is the one formed in float32
    # (Figueroa 1995): 53 >= 2 * 24 + 2 bits.
    gap = rounded(1.0 - rounded(beta**power))
    return rounded(1.0 / gap) if gap else math.inf


def _converted(numbers: object, kind: type[AdamW | SGD]) -> AdamW | SGD:
    if isinstance(numbers, kind):
        return numbers
    names = [field.name for field in fields(kind)]
    if not isinstance(numbers, Sequence) or isinstance(numbers, str) or len(numbers) != len(names):
        raise ContractError(
            f"the parameters of {kind.__name__} must be an {kind.__name__} or the {len(names)} numbers "
            f"{', '.join(names)}; got {numbers!r:.80}"
        )
    return kind(*numbers)


def _named(parameters: Parameters, kind: Kind) -> Iterator[tuple[str, float]]:
    numbers = parameters.adamw if kind is Kind.ADAMW else parameters.sgd
    for field in fields(numbers):
        yield f"{kind.value}.{field.name}", getattr(numbers, field.name)


def _bounds(field: str, value: float, *, strict: bool) -> tuple[str, bool]:
    """Return the bounds of a field in words, and whether a value is within them. A NaN never is."""
    match field:
        case "alpha":
            return "more than 0", value > 0
        case "eps":
            return "at least 0", value >= 0
        case "beta1" | "beta2" if strict:
            return "at least 0 and less than 1", 0 <= value < 1
        case _:
            return "from 0 to 1", 0 <= value <= 1
