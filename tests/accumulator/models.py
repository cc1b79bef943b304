"""Models, tallies and hashes that the accumulator's tests share."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

import augend
import reference
from augend._accumulate._window import _moments_of as moments_of


class Tower(torch.nn.Module):
    """Two tied layers, a frozen one, one that is never used, and parameters of the asked dtype."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4, dtype=dtype)
        self.again = torch.nn.Linear(4, 4, bias=False, dtype=dtype)
        self.again.weight = self.first.weight
        self.fixed = torch.nn.Linear(4, 4, dtype=dtype).requires_grad_(requires_grad=False)
        self.idle = torch.nn.Linear(2, 2, dtype=dtype)
        self.head = torch.nn.Linear(4, 3, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.again(torch.relu(self.fixed(self.first(x))))))


def tower(dtype: torch.dtype = torch.float32) -> Tower:
    """Build the same tower every time."""
    torch.manual_seed(7)
    return Tower(dtype)


def rows(count: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return inputs [rows, 4] and labels [rows], a few of them ignored."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (count,), generator=generator)
    labels[::3] = -100
    return torch.randn(count, 4, generator=generator).to(dtype), labels


def tally(model: torch.nn.Module, x: Tensor, y: Tensor) -> augend.Tally:
    """Return the cross entropy of rows."""
    return augend.losses.cross_entropy(model(x), y)


def terms_of(model: torch.nn.Module, x: Tensor, y: Tensor, terms: tuple[str, ...]) -> dict[str, augend.Tally]:
    """Return a tally for each term: the loss, and the size of the outputs for the others."""
    out = model(x)
    size = augend.Tally((out.float() ** 2).sum(dim=1), torch.full((len(x),), 3))
    return {terms[0]: augend.losses.cross_entropy(out, y), **dict.fromkeys(terms[1:], size)}


def fingerprint(grads: augend.Accumulator, model: torch.nn.Module) -> str:
    """Hash sums, counters, moments, the last finish, parameters and their gradients, to the bit."""
    window = grads._pending.window
    held = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return reference.digest(
        window.sums,
        window.microbatches,
        window.rows_done,
        window.loose,
        repr({term: window._moments[term] + moments_of(term, tallies) for term, tallies in window._tallies.items()}),
        grads._updates,
        repr(grads._last),
        dict(model.named_parameters()),
        held,
    )


def replace_any_part(data: st.DataObject, state: dict) -> None:
    """Put anything in the place of a part of a saved state, at any depth of it."""
    place = state
    while True:
        key = data.draw(st.sampled_from(sorted(place)))
        if not isinstance(place[key], dict) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    junk = st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.integers(), max_size=2)
    )
    place[key] = data.draw(junk)
