"""Batches of given gradients, dealt in any order, for the tests of exact sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction

import torch
from torch import Tensor

import augend
import reference
from augend.data import Microbatch
from augend.data._deal import Round
from augend.data._position import Progress
from augend.data._random import seed_all

Part = Mapping[str, Tensor]  # one micro-batch: parameter to its gradient


class Carried(torch.nn.Module):
    """Parameters whose gradient is what a row carries: the loss of a row is its product with the parameters.

    They start at zero, so that no product overflows, whatever the rows are.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.held = torch.nn.ParameterDict(
            {name: torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for name, shape in shapes.items()}
        )

    def forward(self, row: Mapping[str, Tensor]) -> Tensor:
        products = [(one * row[name]).reshape(len(row[name]), -1).sum(dim=1) for name, one in self.held.items()]
        return torch.stack(products).sum(dim=0)  # [rows]


def carried(part: Part, dtype: torch.dtype = torch.float32) -> Carried:
    """Return the model that the gradients of a micro-batch belong to."""
    return Carried({name: tuple(one.shape) for name, one in part.items()}, dtype)


def tally_of(model: torch.nn.Module, microbatch: Mapping[str, Tensor]) -> augend.Tally:
    """Return a tally whose gradient is the row, and whose count is 1."""
    total = model(microbatch)
    return augend.Tally(total, torch.ones(len(total), dtype=torch.int64))


def named(state: Mapping[str, object]) -> dict[str, object]:
    """Take the name of the dictionary off the parameters of `Carried`."""
    return {name.removeprefix("held."): one for name, one in state.items()}


def batches(parts: Sequence[Part], seed: int = 0, *, size: int | None = None) -> augend.Batches:
    """Return data whose rows carry gradients, a micro-batch each, in the order that a seed gives."""
    rows = {name: torch.stack([part[name] for part in parts]) for name in parts[0]}
    return augend.Batches(rows, batch_size=size or len(parts), microbatch_size=1, seed=seed, epochs=1)


class Dealt:
    """A batch dealt by hand to one rank: its micro-batches in any order, fillers among them.

    Args:
        parts: The micro-batches; what is under each name begins with the dimension of rows.
        order: Which comes when; None is a filler.
        step: Which batch it is.
    """

    def __init__(self, parts: Sequence[Part], order: Sequence[int | None] | None = None, step: int = 0) -> None:
        self._parts = parts
        self._order = range(len(parts)) if order is None else order
        self._sizes = [len(next(iter(part.values()))) for part in parts]
        self._first = [sum(self._sizes[:at]) for at in range(len(parts))]
        self.step = step
        self.rows = sum(self._sizes)
        self.share = (0, 1)
        self.plan: dict[str, object] = {}
        self._progress: dict[int, Progress] = {}
        assert sorted(one for one in self._order if one is not None) == list(range(len(parts)))

    def progress(self, owner: object) -> Progress:
        return self._progress.setdefault(id(owner), Progress())

    def check_live(self) -> None:
        """It stays."""

    def rounds_left(self, owner: object) -> int:
        return len(list(self._rounds(owner)))

    def remaining(self, owner: object, offer: int = 0) -> Iterator[Microbatch]:
        for which, at in self._rounds(owner):
            seed_all("micro-batch", 0, self.step, at.first_row)
            yield Microbatch(self._parts[which], at, offer=offer, epoch=0, step=self.step)

    def _rounds(self, owner: object) -> Iterator[tuple[int, Round]]:
        progress = self.progress(owner)
        begin = self.rows if progress.closed else progress.rows_done
        done = 0
        for one in self._order:
            which = 0 if one is None else one
            size = self._sizes[which]
            done += 0 if one is None else size
            if done > begin:
                yield which, Round(self._first[which], size, 0 if one is None else size, done)


def one_row(parts: Sequence[Part]) -> list[dict[str, Tensor]]:
    """Return micro-batches of one row each."""
    return [{name: one.unsqueeze(0) for name, one in part.items()} for part in parts]


def feed(
    grads: augend.Accumulator,
    model: torch.nn.Module,
    batch: object,
    tally: Callable[[torch.nn.Module, Microbatch], augend.Tally] = tally_of,
) -> list[int]:
    """Give every micro-batch its backward; returns the offer of each."""
    offers = []
    for microbatch in grads.microbatches(batch):
        offers.append(microbatch.offer)
        grads.backward(tally(model, microbatch))
    return offers


def lists(parts: Sequence[Part]) -> list[dict[str, list[float]]]:
    """Return micro-batches as the twin takes them."""
    return [{name: one.double().flatten().tolist() for name, one in part.items()} for part in parts]


def check_batch(
    grads: augend.Accumulator, model: torch.nn.Module, parts: Sequence[Part], twin: reference.ExactTwin, batch: object
) -> augend.Finished:
    """Run a batch of micro-batches of one row and check everything against the twin, to the bit."""
    loss_scale = Fraction(grads.contract.loss_scale)
    scaled = [{name: one * grads.contract.loss_scale for name, one in part.items()} for part in parts]
    expected = twin.batch(lists(scaled), loss_scale * len(parts))
    feed(grads, model, batch)
    sums = {name: one.flatten().tolist() for name, one in named(grads.pending).items()}
    assert expected.sums == sums
    done = grads.finish()
    means = {name: one.grad.double().flatten().tolist() for name, one in model.held.items()}
    assert expected.means == means
    assert (expected.offers, expected.norm) == (done.offers, done.norm)
    return done
