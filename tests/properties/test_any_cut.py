"""Any rows, masks, weights, dtypes, micro-batch sizes and orders: one sum, one count, one error bar."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import augend
import reference

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
WORK = {"float32": torch.float32, "float64": torch.float64}


@st.composite
def cuts(draw: st.DrawFn, rows: int) -> list[list[int]]:
    """Draw rows in any order, cut anywhere, empty parts among them."""
    order = draw(st.permutations(range(rows)))
    marks = sorted(draw(st.lists(st.integers(0, rows), max_size=5)))
    return [order[a:b] for a, b in zip([0, *marks], [*marks, rows], strict=True)]


def accumulate(model: torch.nn.Module, tally_of, cut: list[list[int]], **options: object) -> augend.Accumulator:
    """Put every part of a cut into one window."""
    grads = augend.Accumulator(model, **options)
    for part in cut:
        grads.backward(tally_of(model, part))
    return grads


class Net(torch.nn.Module):
    """A small network with a tied layer, so that a sum has several contributions in one backward."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 3, dtype=dtype)
        self.again = torch.nn.Linear(3, 3, dtype=dtype)
        self.again.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.again(torch.tanh(self.first(x)))


@given(st.data(), st.integers(1, 12), DTYPES, st.sampled_from(list(WORK)), st.sampled_from([1.0, 1024.0]))
def test_sums_are_those_of_the_gradients_produced(data, rows: int, dtype, work: str, loss_scale: float) -> None:
    """Each pending sum is within γ(k)·Σ|gᵢ| of the exact sum of the micro-batch gradients that autograd produced.

    k = number of micro-batches: one cast to the work dtype (exact here) and at most k - 1 additions.
    """
    cut = data.draw(cuts(rows))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    x = torch.randn(rows, 3, generator=generator).to(dtype)
    mask = torch.randint(0, 3, (rows, 3), generator=generator)
    if data.draw(st.booleans()):
        mask = mask * 0.3  # fractional weights, none of them on the grid
    model = Net(dtype)
    produced: dict[str, list[np.ndarray]] = {}
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda g, name=name: produced.setdefault(name, []).append(g.double().numpy().copy()))

    def tally_of(net: torch.nn.Module, part: list[int]) -> augend.Tally:
        losses = net(x[part]).float() ** 2 * mask[part]  # [rows, 3]
        return augend.Tally(losses.sum(dim=1), mask[part].sum(dim=1))

    grads = accumulate(model, tally_of, cut, dtype=work, loss_scale=loss_scale)
    assert grads.pending.keys() == produced.keys() == {"first.weight", "first.bias", "again.bias"}
    for name, parts in produced.items():
        exact = reference.exact_sum(parts)
        bound = reference.gamma(len(parts), WORK[work]) * np.abs(np.stack(parts)).sum(axis=0)
        assert (np.abs(grads.pending[name].double().numpy() - exact) <= bound).all()
    exact_count = sum(Fraction(round(Fraction(weight) * 2**40), 2**40) for weight in mask.sum(dim=1).tolist())
    assert exact_count == grads.state.moments["loss"].count


@given(st.data(), st.integers(1, 16), st.sampled_from(["float32", "float64"]))
def test_an_integer_model_equals_the_whole_batch_to_the_bit(data, rows: int, work: str) -> None:
    """Integer inputs, weights and masks: mean gradient and norm equal the float64 whole batch's, rounded once.

    Sums of small integers are exact in float32, and a quotient of two float32 numbers rounded through float64 is the
    correctly rounded one (Figueroa 1995: 53 >= 2·24 + 2).
    """
    cut = data.draw(cuts(rows))
    integers = st.integers(-8, 8)
    x = torch.tensor(data.draw(st.lists(st.tuples(*[integers] * 3), min_size=rows, max_size=rows)), dtype=torch.float32)
    counts = torch.tensor(data.draw(st.lists(st.integers(0, 5), min_size=rows, max_size=rows)))
    if not counts.any():
        counts[0] = 1
    model = torch.nn.Linear(3, 2)
    torch.nn.init.constant_(model.weight, 2.0)
    torch.nn.init.constant_(model.bias, -1.0)
    twin = torch.nn.Linear(3, 2, dtype=torch.float64)
    twin.load_state_dict(model.state_dict())

    def tally_of(net: torch.nn.Module, part: list[int]) -> augend.Tally:
        return augend.Tally((net(x[part].to(net.weight.dtype)) ** 2).sum(dim=1) * counts[part], counts[part])

    whole = tally_of(twin, list(range(rows)))
    expected = reference.mean_gradients(twin, whole.total, float(whole.count.sum()))
    done = accumulate(model, tally_of, cut, dtype=work).finish()
    for name, parameter in model.named_parameters():
        assert torch.equal(expected[name].float(), parameter.grad), name
    assert int(counts.sum()) == done.count
    exact = reference.norm(expected)
    assert abs(done.norm - exact) <= 1e-12 * exact
    assert reference.ratio(whole.total.tolist(), counts.tolist())[0] == done.loss.value


@given(st.data(), st.integers(1, 24))
def test_a_real_model_equals_the_whole_batch_within_a_derived_bound(data, rows: int) -> None:
    """Least squares in float32, cut anywhere, against the whole batch at once in float64.

    gⱼ = Σᵣ 2·(w·xᵣ - yᵣ)·xᵣⱼ·mᵣ. Each term passes at most d additions and multiplications for w·xᵣ, six more
    roundings for the residual, its square's derivative, mask and product with xᵣⱼ, at most `rows` additions inside a
    micro-batch, and the accumulator's k = micro-batches + 4. So
    |error| <= γ(d + 6 + rows + k)·Σᵣ 2·(Σᵢ|wᵢxᵣᵢ| + |yᵣ|)·|xᵣⱼ|·mᵣ / N.
    """
    cut = data.draw(cuts(rows))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    dimensions = 5
    x = torch.randn(rows, dimensions, generator=generator)
    y = torch.randn(rows, generator=generator) * 10
    mask = torch.randint(0, 2, (rows,), generator=generator)
    mask[0] = 1
    model = torch.nn.Linear(dimensions, 1, bias=False)
    twin = torch.nn.Linear(dimensions, 1, bias=False, dtype=torch.float64)
    twin.load_state_dict(model.state_dict())

    def tally_of(net: torch.nn.Module, part: list[int]) -> augend.Tally:
        dtype = net.weight.dtype
        residual = net(x[part].to(dtype)).squeeze(1) - y[part].to(dtype)  # [rows]
        return augend.Tally(residual**2 * mask[part], mask[part])

    whole = tally_of(twin, list(range(rows)))
    items = float(mask.sum())
    expected = reference.mean_gradients(twin, whole.total, items)["weight"]
    accumulate(model, tally_of, cut).finish()
    magnitude = x.double().abs() @ twin.weight.detach().abs().T + y.double().abs()[:, None]  # [rows, 1]
    scale = (2 * magnitude * x.double().abs() * mask[:, None]).sum(dim=0) / items  # [dimensions]
    bound = reference.gamma(dimensions + 6 + rows + len(cut) + 4, torch.float32) * scale
    assert ((model.weight.grad.double() - expected)[0].abs() <= bound).all()


finite = st.floats(-1e6, 1e6, width=32)


@given(st.data(), st.integers(1, 20), st.booleans())
def test_loss_error_and_count_are_the_same_bits_for_every_cut(data, rows: int, weighted: bool) -> None:
    """Given the same per-row totals, two cuts report the same loss, error bar and count, bit for bit."""
    totals = torch.tensor(data.draw(st.lists(finite, min_size=rows, max_size=rows)))
    if weighted:
        weights = data.draw(st.lists(st.floats(0, 100), min_size=rows, max_size=rows))
        counts = torch.tensor(weights, dtype=torch.float64)
    else:
        counts = torch.tensor(data.draw(st.lists(st.integers(0, 2**40), min_size=rows, max_size=rows)))
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)

    def tally_of(net: torch.nn.Module, part: list[int]) -> augend.Tally:
        return augend.Tally(totals[part] * net.weight[0, 0], counts[part])

    outcomes = []
    for _ in range(2):
        done = accumulate(model, tally_of, data.draw(cuts(rows))).finish(empty="one")
        model.zero_grad()
        outcomes.append((repr(done.loss.value), repr(done.loss.error), repr(done.loss.count), repr(done.count)))
    assert outcomes[0] == outcomes[1]
    on_grid = torch.round(counts * 2.0**40) / 2.0**40 if weighted else counts
    expected = reference.ratio(totals.tolist(), on_grid.tolist())
    assert (repr(expected[0]), repr(expected[1])) == outcomes[0][:2]


@given(st.data(), st.integers(1, 8), st.sampled_from(["float32", "float64"]))
def test_all_masked_rows_are_exact_zeros(data, rows: int, work: str) -> None:
    """A batch without a supervised item has count 0 and, where its mean is asked for, exact zeros for every cut."""
    model = torch.nn.Linear(3, 4)
    labels = torch.full((rows,), -100)
    x = torch.randn(rows, 3)
    grads = accumulate(
        model,
        lambda net, part: augend.losses.cross_entropy(net(x[part]), labels[part]),
        data.draw(cuts(rows)),
        dtype=work,
    )
    done = grads.finish(empty="zero")
    assert (0, 0.0) == (done.count, done.norm)
    assert all(not parameter.grad.any() for parameter in model.parameters())
