"""check_cuts: one batch, whole and cut, in float64, by augend, and by the usual mean of means."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn

from augend import Accumulator, Batches, Mean, Tally

Loss: TypeAlias = Callable[[nn.Module, Any], Tally]
Gradients: TypeAlias = Mapping[str, Tensor]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """How far one way of cutting the batch is from the whole batch, each time relative to it.

    Args:
        microbatch_size: Rows in a micro-batch.
        gradient: 2-norm of the difference of augend's mean gradient, over that of the whole batch's.
        loss: The same of the loss.
        usual_gradient: The same for the mean of the micro-batches' mean gradients.
        usual_loss: The same of the loss. NaN where a micro-batch has nothing to count.
    """

    microbatch_size: int
    gradient: float
    loss: float
    usual_gradient: float
    usual_loss: float


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class CutReport:
    """What ``check_cuts`` measured.

    Args:
        rows: Rows of the batch.
        count: Supervised items of the batch.
        loss: Loss of the whole batch in float64.
        norm: 2-norm of its mean gradient in float64.
        cuts: One for each micro-batch size.
    """

    rows: int
    count: float
    loss: float
    norm: float
    cuts: tuple[Cut, ...]


def check_cuts(
    model: nn.Module,
    rows: object,
    *,
    loss: Loss,
    batch_size: int,
    microbatch_sizes: Iterable[int],
    seed: int = 0,
    **loader: Any,
) -> CutReport:
    """Measure on the first batch of ``rows`` what cutting it does to the gradient and the loss.

    The reference is the whole batch at once through a float64 copy of the model, in plain PyTorch. Everything runs on
    copies in eval mode: dropout is off, and neither the model nor its gradients change.

    Args:
        model: The model, in the dtype in which it is trained.
        rows: What ``augend.Batches`` takes.
        loss: ``loss(model, microbatch)`` returns a ``Tally``. For the reference it is given a plain mapping with
            floating tensors in float64.
        batch_size: Rows of the batch.
        microbatch_sizes: Sizes to cut it into.
        seed: Decides which rows are in the first batch.
        **loader: What ``augend.Batches`` passes on to the ``DataLoader``.

    Returns:
        The reference, and one line for each size.

    Example:
        >>> import torch
        >>> x = torch.arange(12.0).reshape(6, 2)
        >>> labels = torch.tensor([0, 1, -100, -100, -100, 1])
        >>> def loss(model, microbatch):
        ...     return augend.losses.cross_entropy(model(microbatch[0]), microbatch[1])
        >>> report = augend.testing.check_cuts(
        ...     torch.nn.Linear(2, 2), (x, labels), loss=loss, batch_size=6, microbatch_sizes=[4]
        ... )
        >>> report.cuts[0].gradient < 1e-6, report.cuts[0].usual_gradient > 0.01
        (True, True)
    """

    def batches(size: int) -> Batches:
        return Batches(rows, batch_size=batch_size, microbatch_size=size, seed=seed, **loader)

    exact = copy.deepcopy(model).double().eval()
    trained = copy.deepcopy(model).eval()
    whole = next(iter(batches(batch_size)))
    tally = loss(exact, _doubled(next(iter(whole))))
    reference, reference_loss = _mean_of_means(exact, [tally])
    cuts = []
    for size in microbatch_sizes:
        gradients, value = _accumulated(trained, batches(size), loss)
        usual, usual_value = _mean_of_means(trained, (loss(trained, part) for part in next(iter(batches(size)))))
        cut = Cut(
            microbatch_size=size,
            gradient=_deviation(gradients, reference),
            loss=_relative(abs(value - reference_loss), abs(reference_loss)),
            usual_gradient=_deviation(usual, reference),
            usual_loss=_relative(abs(usual_value - reference_loss), abs(reference_loss)),
        )
        cuts.append(cut)
    return CutReport(
        rows=whole.rows,
        count=tally.count.sum().item(),
        loss=reference_loss,
        norm=_norm(reference.values()),
        cuts=tuple(cuts),
    )


def _doubled(microbatch: Mapping[Any, Any]) -> dict[Any, Any]:
    return {
        key: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for key, value in microbatch.items()
    }


def _accumulated(model: nn.Module, data: Batches, loss: Loss) -> tuple[Gradients, float]:
    """Return the mean gradient and the loss of the first batch, by augend."""
    grads, losses = Accumulator(model), Mean()
    for microbatch in grads.microbatches(next(iter(data))):
        tally = loss(model, microbatch)
        losses.update(tally, microbatch)
        grads.backward(tally)
    return grads.finish_mean(nonfinite="allow").gradients, losses.compute().value


def _mean_of_means(model: nn.Module, tallies: Iterable[Tally]) -> tuple[Gradients, float]:
    """Return what most training loops compute: each part's mean, averaged over the parts as if they were equal."""
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    sums = {name: torch.zeros_like(parameter, dtype=torch.float64) for name, parameter in parameters.items()}
    losses = []
    for tally in tallies:
        mean = tally.mean()
        gradients = torch.autograd.grad(mean, list(parameters.values()), materialize_grads=True)
        for total, gradient in zip(sums.values(), gradients, strict=True):
            total.add_(gradient)
        losses.append(mean.item())
    return {name: total / len(losses) for name, total in sums.items()}, math.fsum(losses) / len(losses)


def _deviation(gradients: Gradients, reference: Gradients) -> float:
    """Return the relative 2-norm of a difference; a parameter without a gradient counts as zeros."""
    differences = (
        gradients[name].double() - exact if name in gradients else exact for name, exact in reference.items()
    )
    return _relative(_norm(differences), _norm(reference.values()))


def _norm(tensors: Iterable[Tensor]) -> float:
    return math.hypot(*(torch.linalg.vector_norm(tensor).item() for tensor in tensors))


def _relative(difference: float, reference: float) -> float:
    return difference / reference if reference else difference
