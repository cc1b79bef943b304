"""evaluate: one pass over held-out rows that leaves no trace. Built on the public API alone: copy it, change it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, TypeAlias

import torch
from torch import nn

from augend import Estimate, Mean, Tally
from augend._fit._random import undisturbed
from augend.data import Batches, Microbatch
from augend.errors import ContractError, TallyError
from augend.metrics import Metric, Ranks

LossFunction: TypeAlias = Callable[[nn.Module, Microbatch], Tally | Mapping[str, Tally]]
MetricFunction: TypeAlias = Callable[[nn.Module, Microbatch], Tally | Metric]

NO_METRICS: Final[Mapping[str, MetricFunction]] = MappingProxyType({})


def evaluate(
    model: nn.Module,
    data: Batches,
    *,
    loss: LossFunction | None = None,
    metrics: Mapping[str, MetricFunction] = NO_METRICS,
    ranks: Ranks | None = None,
) -> dict[str, Estimate]:
    """Measure a model on every row of ``data`` once, in the order of the source, in eval mode, without gradients.

    The pass is its own: the position of ``data`` does not move. Random state (torch on every device, ``random``,
    numpy) and the train/eval mode of every submodule are put back, also after an exception.

    Collective over the ranks that share ``data``: each measures its micro-batches, and all return the same.

    Args:
        model: The model. Buffers that its forward changes even in eval mode stay changed.
        data: Held-out rows. Their ``microbatch_size`` decides memory and speed, never the result beyond what the
            model itself returns for a row.
        loss: ``loss(model, microbatch)`` returns a ``Tally``, or one for each named term.
        metrics: Each ``metric(model, microbatch)`` returns a ``Tally``, or a ``Mean``, ``Accuracy`` or ``Perplexity``
            made for this micro-batch alone; they are merged into a copy, and stay as they are. What comes of a
            filler is left out.
        ranks: The ranks that share ``data``, for many calls; None finds them anew, which on several ranks takes a
            process group more for each call.

    Returns:
        An ``Estimate`` for each loss term (``"loss"`` for a plain tally), then for each metric.

    Raises:
        ContractError: ``data`` is no ``Batches``, there is nothing to measure, two things have one name, a function
            returns the metric that it returned before, or ranks measure different things.
        LostRankError: A rank is gone, or did not come in time.
        TallyError: A tally has other rows than its micro-batch (0-d tallies are allowed).

    Numerics:
        Given the same per-row totals and counts, the same bits for every ``batch_size`` and ``microbatch_size`` and
        any number of ranks.

    Example:
        >>> import torch
        >>> rows = augend.Batches(torch.tensor([[0.0], [1.0], [5.0]]), batch_size=2, microbatch_size=1)
        >>> model = torch.nn.Identity()
        >>> def size(model, microbatch):
        ...     return augend.losses.sum(model(microbatch[0]))
        >>> print(augend.evaluate(model, rows, loss=size)["loss"].value)
        2.0
    """
    check_batches("data", data)
    if loss is None and not metrics:
        raise ContractError("nothing to measure; give loss=, metrics=, or both")
    ranks = Ranks(data.mesh) if ranks is None else ranks
    state = data.state_dict()  # rows of other ranks' data would be counted twice, or not at all
    ranks.same("an evaluation", {**state["contract"], "microbatch_size": state["microbatch_size"]})
    held: dict[str, Metric] = {}
    latest: dict[str, Metric] = {}
    own = False  # whether a row of this rank counts: what stands in held before that only says of which kind it is
    with undisturbed(model), torch.no_grad():
        model.eval()
        for batch in data.fresh():
            for microbatch in batch:
                measured = _measured(model, microbatch, loss, metrics)
                for name, metric in measured.items():
                    if metric is latest.get(name):
                        remedy = "return a new metric for each micro-batch"
                        raise ContractError(f"{name!r} returned the same {type(metric).__name__} again; {remedy}")
                    if microbatch.real_rows and own:
                        held[name].merge(metric)
                    elif microbatch.real_rows or name not in held:
                        held[name] = copy.deepcopy(metric)
                own = own or microbatch.real_rows > 0
                latest = measured
    return {name: metric.compute() for name, metric in ranks.merge(held, own=own).items()}


def check_batches(name: str, data: object) -> None:
    """Refuse anything but a ``Batches``.

    Raises:
        ContractError: It is something else.
    """
    if not isinstance(data, Batches):
        raise ContractError(f"{name} must be an augend.Batches; got {type(data).__name__}; wrap it in augend.Batches")


def _measured(
    model: nn.Module, microbatch: Microbatch, loss: LossFunction | None, metrics: Mapping[str, MetricFunction]
) -> dict[str, Metric]:
    """Return one metric a name, of one micro-batch."""
    results: dict[str, Tally | Metric] = {}
    if loss is not None:
        tally = loss(model, microbatch)
        results.update({"loss": tally} if isinstance(tally, Tally) else tally)
    for name, metric in metrics.items():
        if name in results:
            raise ContractError(f"{name!r} is a loss term and a metric; give the metric another name")
        results[name] = metric(model, microbatch)
    return {name: _as_metric(name, result, microbatch) for name, result in results.items()}


def _as_metric(name: str, result: Tally | Metric, microbatch: Microbatch) -> Metric:
    if isinstance(result, Metric):
        return result
    if not isinstance(result, Tally):
        kinds = "a Tally, Mean, Accuracy or Perplexity"
        raise ContractError(f"{name!r} must return {kinds} for each micro-batch; got {type(result).__name__}")
    if result.total.dim() == 1 and 0 < microbatch.real_rows != len(result.total):
        raise TallyError(
            f"the tally of {name!r} has {len(result.total)} rows and the micro-batch {microbatch.real_rows}: "
            "error bars need one number a row. Sum what belongs to one row, or give a 0-d total and count if the "
            "loss has no rows"
        )
    mean = Mean()
    mean.update(result, microbatch)
    return mean
