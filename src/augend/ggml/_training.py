"""Training: what an optimizer is told, and what of it cannot be."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Final, final

from augend.errors import ContractError
from augend.ggml._given import whole_number
from augend.ggml._graph import Graph
from augend.ggml._nodes import Node
from augend.ggml._parameters import Build, Kind, Loss, Parameters, Schedule, check_parameters
from augend.ggml._rules import Compat
from augend.ggml._run import order_of

_DEFAULTS: Final = Parameters()
_CALLER: Final = 4  # of Optimizer.evaluate, counted from the warning


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """What is trained, on what, and how.

    Args:
        inputs: The leaf that takes a physical batch, ``[width, rows]`` in ggml's order.
        outputs: What the loss is taken of; its dimension 1 is the datapoints.
        loss: Which loss.
        kind: Which optimizer.
        period: Physical batches in a window, which one update is made of.
        parameters: The optimizer's numbers, or a function that is asked for them before each update.
        build: What may be evaluated; updates, unless less is wanted.
    """

    inputs: Node
    outputs: Node
    loss: Loss
    kind: Kind = Kind.ADAMW
    period: int = 1
    parameters: Parameters | Schedule = _DEFAULTS
    build: Build = Build.UPDATE


def check_training(graph: Graph, training: Training, compat: Compat | None) -> None:
    """Refuse what cannot be trained.

    Raises:
        ContractError: A node is of another graph, nothing is trained, or something is out of bounds.
    """
    outputs = training.outputs
    whole_number("period", training.period, 1, graph.limits.period)
    for name, kind in (("loss", Loss), ("kind", Kind), ("build", Build)):
        value = getattr(training, name)
        if not isinstance(value, kind):
            raise ContractError(f"{name} must be one of {', '.join(map(str, kind))}; got {value!r:.80}")
    if not isinstance(training.parameters, Parameters) and not callable(training.parameters):
        raise ContractError(
            f"parameters must be Parameters or a function that returns some; got {training.parameters!r:.80}"
        )
    graph.shape(training.inputs)
    shape = graph.shape(outputs)
    if training.inputs not in order_of([outputs]):
        raise ContractError(f"nothing that {outputs!r} is made of is {training.inputs!r}: the inputs would not be used")
    if training.loss is Loss.CROSS_ENTROPY and shape[2:] != (1, 1):
        raise ContractError(f"the outputs of a cross entropy are [classes, rows]; {outputs!r} has more dimensions")
    if not graph.parameters(outputs):
        raise ContractError(f"nothing is trained: no tensor that {outputs!r} is made of was made with parameter=True")
    if isinstance(training.parameters, Parameters) and (compat != "ggml"):
        check_parameters(training.parameters, training.kind, compat)


def tell_unused(names: set[str]) -> set[str]:
    """Say of parameters that they were given no gradient; returns them."""
    if names:
        warnings.warn(
            f"no gradient came to {', '.join(sorted(names))}: values that do not reach the outputs are not trained",
            stacklevel=_CALLER,
        )
    return names
