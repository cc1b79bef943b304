"""One division at the end: policies, norm, clipping, narrowing, and real optimizers."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import augend
import reference
from augend._finish._divide import divide_
from augend.errors import NonFiniteError, StateError
from models import rows, tally, terms_of, tower

OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.05),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.05, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.05, foreach=True),
    "AMSGrad": lambda p: torch.optim.Adam(p, lr=0.05, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.05),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.05),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.05),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.05),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.05),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.05),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.05),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
}


def pending(**options: object) -> tuple[augend.Accumulator, torch.nn.Module]:
    """Return an accumulator with two micro-batches in its window."""
    model = tower(options.pop("stored", torch.float32))
    grads = augend.Accumulator(model, **options)
    for seed in range(2):
        x, y = rows(4, seed=seed, dtype=model.head.weight.dtype)
        grads.backward(terms_of(model, x, y, options.get("terms", ("loss",))))
    return grads, model


def trained(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the trainable parameters by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


# ------------------------------------------------------------------ the optimizer is really called


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_step_is_finish_and_the_optimizers_own_step(name: str) -> None:
    """Any torch optimizer: step() gives bitwise the weights of finish() followed by optimizer.step()."""
    outcomes = []
    for by_hand in (False, True):
        grads, model = pending()
        optimizer = OPTIMIZERS[name](model.parameters())
        start = reference.digest(dict(model.named_parameters()))
        for batch in range(3):
            if by_hand:
                done = grads.finish(max_norm=0.1)
                optimizer.step()
            else:
                done = grads.step(optimizer, max_norm=0.1)
                assert all(parameter.grad is None for parameter in model.parameters())
            grads.backward(tally(model, *rows(4, seed=20 + batch)))
        outcomes.append((reference.digest(dict(model.named_parameters())), repr(done)))
        assert start != outcomes[-1][0]
    assert outcomes[0] == outcomes[1]
    assert 3 == done.update


def test_several_optimizers_step_together() -> None:
    """Two optimizers that share out the parameters both step, on one mean gradient and one norm."""
    grads, model = pending()
    parameters = trained(model)
    first = {name: one for name, one in parameters.items() if name.startswith("first")}
    rest = {name: one for name, one in parameters.items() if name not in first}
    before = {name: one.detach().clone() for name, one in parameters.items()}
    mean = {name: one / grads.state.count for name, one in grads.pending.items()}
    grads.step([torch.optim.SGD(first.values(), lr=1.0), torch.optim.SGD(rest.values(), lr=0.5)])
    for name, parameter in parameters.items():
        rate = 1.0 if name in first else 0.5
        expected = before[name] - rate * mean[name] if name in mean else before[name]
        assert torch.equal(expected, parameter), name


# ------------------------------------------------------------------ absent gradients


def test_absent_gradients_stay_absent() -> None:
    """A parameter that no micro-batch used gets no gradient, no optimizer state and no decay."""
    grads, model = pending()
    before = model.idle.weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    grads.step(optimizer)
    assert torch.equal(before, model.idle.weight)
    assert model.idle.weight not in optimizer.state
    assert "idle.weight" not in grads.pending


@pytest.mark.parametrize("unused", ["error", "zero"])
def test_what_no_rank_used_stays_absent(unused: str) -> None:
    """On one process nobody can disagree: a parameter without a gradient has none, whatever its values."""
    grads, model = pending(unused=unused)
    with torch.no_grad():
        model.idle.bias.fill_(math.nan)
    grads.finish()
    assert model.idle.weight.grad is None
    assert model.idle.bias.grad is None


def test_a_parameter_used_in_one_microbatch_only() -> None:
    """Its sum is divided by the whole window's count: (1 + 0) / 2 items, whichever micro-batch used it."""
    for order in ((0, 1), (1, 0)):
        model = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(1)) for _ in range(2)])
        grads = augend.Accumulator(model)
        for which in order:
            grads.backward(augend.Tally(model[which] * 1.0, torch.tensor([1])))
        grads.finish()
        assert [0.5, 0.5] == [float(one.grad) for one in model]


def test_tied_weights_count_once_in_the_norm() -> None:
    """Gradients 2 and 3 of one tied weight are one gradient 5, of norm 5."""
    model = torch.nn.Module()
    model.a = torch.nn.Linear(1, 1, bias=False)
    model.b = torch.nn.Linear(1, 1, bias=False)
    model.b.weight = model.a.weight
    grads = augend.Accumulator(model)
    total = model.a(torch.tensor([[2.0]])) + model.b(torch.tensor([[3.0]]))
    grads.backward(augend.Tally(total[0], torch.tensor([1])))
    assert 5.0 == grads.finish().norm
    assert [[5.0]] == model.a.weight.grad.tolist()


# ------------------------------------------------------------------ policies


def masked(**options: object) -> tuple[augend.Accumulator, torch.nn.Module]:
    """Return an accumulator whose window counted nothing, yet holds gradients."""
    model = tower()
    grads = augend.Accumulator(model, **options)
    x, _ = rows(4)
    grads.backward(augend.Tally(model(x).sum(dim=1), torch.zeros(4, dtype=torch.int64)))
    return grads, model


def test_an_empty_batch_can_be_skipped() -> None:
    """empty="skip": no gradient, no step, no state, the update counter stands; the batch is reported as skipped."""
    grads, model = masked()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = reference.digest(dict(model.named_parameters()))
    done = grads.step(optimizer, empty="skip")
    assert (True, 0, 0, 1) == (done.skipped, done.update, done.count, done.microbatches)
    assert math.isnan(done.norm)
    assert math.isnan(done.loss.value)
    assert before == reference.digest(dict(model.named_parameters()))
    assert not optimizer.state
    assert grads.finish_mean(empty="skip").skipped


def test_an_empty_batch_can_be_divided_by_one() -> None:
    """empty="one": the sums pass through, divided by the loss scale alone."""
    grads, model = masked(loss_scale=4.0)
    sums = {name: one / 4.0 for name, one in grads.pending.items()}
    done = grads.finish(empty="one")
    assert all(torch.equal(sums[name], trained(model)[name].grad) for name in sums)
    assert (False, 1) == (done.skipped, done.update)


def test_an_empty_batch_can_be_exact_zeros() -> None:
    """empty="zero": exact zeros even where masked rows left nan behind; absent gradients stay absent."""
    grads, model = masked()
    grads.add({"head.bias": torch.full((3,), math.nan)}, 0)
    grads.finish(empty="zero")
    assert not model.head.bias.grad.any()
    assert not model.first.weight.grad.any()
    assert model.idle.weight.grad is None


def test_no_microbatch_at_all_is_only_ever_skipped() -> None:
    """Dividing nothing by one or wiping nothing to zero is no step: without a micro-batch only skip goes on."""
    grads = augend.Accumulator(tower())
    for empty in ("one", "zero", "raise"):
        with pytest.raises(augend.errors.EmptyWindowError, match="0 micro-batches were made"):
            grads.finish(empty=empty)
    assert grads.finish(empty="skip").skipped


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_non_finite_batch_is_skipped_or_let_through(value: float) -> None:
    """nonfinite="skip" leaves weights, moments and counters alone and reports it; "allow" goes on knowingly."""
    for policy in ("skip", "allow"):
        grads, model = pending()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        grads.add({"head.bias": torch.full((3,), value)}, 1)
        before = reference.digest(dict(model.named_parameters()))
        done = grads.step(optimizer, nonfinite=policy, max_norm=1.0)
        assert not math.isfinite(done.norm)
        assert (policy == "skip", int(policy == "allow")) == (done.skipped, done.update)
        assert (before == reference.digest(dict(model.named_parameters()))) == (policy == "skip")
        grads.backward(tally(model, *rows(4)))  # either way the window is open again
        assert 1 == grads.state.microbatches


def test_a_non_finite_loss_with_finite_gradients_is_judged_too() -> None:
    """A total of inf whose gradient is finite follows the policy, and the reported loss is NaN, not hidden."""
    model = torch.nn.Linear(1, 1, bias=False)
    for policy, error in (("raise", NonFiniteError), ("skip", None), ("allow", None)):
        grads = augend.Accumulator(model)
        grads.backward(augend.Tally(model.weight[0] + math.inf, torch.tensor([1])))
        if error:
            with pytest.raises(error, match="a row's total of term 'loss' is inf or nan"):
                grads.finish(nonfinite=policy)
            continue
        done = grads.finish(nonfinite=policy)
        assert math.isnan(done.loss.value)
        assert done.skipped == (policy == "skip")


def test_a_mean_that_its_parameter_cannot_hold() -> None:
    """A finite float32 mean beyond float16 follows the policy by name instead of becoming inf; clipping can save it."""
    for policy in ("raise", "skip", "allow"):
        grads, model = pending(stored=torch.float16)
        grads.add({"head.bias": torch.full((3,), 1e6)}, 0)
        if policy == "raise":
            with pytest.raises(NonFiniteError, match="'head.bias' reaches 250000, which torch.float16 cannot"):
                grads.finish(nonfinite=policy)
        else:
            assert (policy == "skip") == grads.finish(nonfinite=policy).skipped
    grads, model = pending(stored=torch.float16)
    grads.add({"head.bias": torch.full((3,), 1e6)}, 0)
    grads.finish(max_norm=1.0)
    assert bool(torch.isfinite(model.head.bias.grad).all())


def test_an_empty_term_beside_a_full_one_is_zero() -> None:
    """A term that counted nothing gives exact zeros and a NaN loss, whatever its masked rows left behind."""
    model = torch.nn.Linear(1, 1, bias=False)
    grads = augend.Accumulator(model, terms=("main", "rare"))
    bad = augend.Tally(model.weight[0] * math.nan, torch.tensor([0]))
    grads.backward({"main": augend.Tally(model.weight[0] * 6.0, torch.tensor([3])), "rare": bad})
    done = grads.finish(nonfinite="allow")
    assert [[2.0]] == model.weight.grad.tolist()
    assert (3, 2.0) == (done.count, done.norm)
    assert math.isnan(done.losses["rare"].value)
    with pytest.raises(StateError, match="several loss terms"):
        _ = done.loss


# ------------------------------------------------------------------ norm and clipping

elements = st.one_of(st.floats(-4, 4, width=32), st.sampled_from([0.0, 1e30, -1e30, 1e-30, 2.0**-149, 3e38]))


def given_gradients(
    values: list[list[float]], count: int, loss_scale: float = 1.0
) -> tuple[augend.Accumulator, torch.nn.Module]:
    """Return an accumulator that holds the given gradients, one parameter each."""
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(len(one))) for one in values])
    grads = augend.Accumulator(model, loss_scale=loss_scale)
    grads.add({str(i): torch.tensor(one) for i, one in enumerate(values)}, count)
    return grads, model


@given(st.lists(st.lists(elements, min_size=1, max_size=9), min_size=1, max_size=4), st.integers(1, 2**40))
def test_the_norm_is_that_of_the_mean(values: list[list[float]], count: int) -> None:
    """Whatever the magnitudes and however grouped, the norm is within 1e-12 of the exact one over the count."""
    grads, _ = given_gradients(values, count)
    exact = reference.norm({"all": torch.tensor([x for one in values for x in one])}) / count
    measured = grads.norm()
    assert abs(measured - exact) <= 1e-12 * exact
    assert measured == grads.finish().norm


# Torch's float32 norm loses squares below 1e-38, so its elements stay above 1e-12; ours are tested without that above.
visible = st.floats(-4, 4, width=32).map(lambda x: x if abs(x) > 1e-12 else 0.0)


@given(
    st.lists(st.lists(visible, min_size=1, max_size=9), min_size=1, max_size=4),
    st.sampled_from([1e-6, 0.01, 1.0, 1e6]),
    st.integers(1, 100),
    st.sampled_from([0.0, 1e-6]),
)
def test_clipping_agrees_with_torch(values: list[list[float]], max_norm: float, count: int, eps: float) -> None:
    """The result is torch's clip_grad_norm_ of the mean, within both sides' roundings and torch's 1e-6 / norm.

    Ours: factor and quotient rounded once each, a norm within 1e-12. Torch's: the mean rounded once, its float32 norm
    within γ(n + 3) (squares, additions, the root), coefficient and product rounded: γ(n + 9) of an element in all.
    Torch divides by norm + 1e-6; with eps = 1e-6 so do we, with eps = 0 the results differ by that share more.
    """
    grads, model = given_gradients(values, count)
    theirs = [torch.nn.Parameter(torch.zeros(len(one))) for one in values]
    for parameter, one in zip(theirs, values, strict=True):
        parameter.grad = torch.tensor(one) / count
    means = [parameter.grad.double().clone() for parameter in theirs]
    length = float(torch.nn.utils.clip_grad_norm_(theirs, max_norm))
    done = grads.finish(max_norm=max_norm, eps=eps)
    assert (
        done.norm == 0 or abs(done.norm - length) <= reference.gamma(sum(map(len, values)) + 9, torch.float32) * length
    )
    share = 0.0 if eps or not length else 1e-6 / length
    bound = reference.gamma(sum(map(len, values)) + 9, torch.float32) + share
    tiny = 2.0**-149  # the smallest float32, where rounding is absolute
    for mine, other, mean in zip(model, theirs, means, strict=True):
        slack = bound * mean.abs() * done.scale + tiny
        assert ((mine.grad.double() - other.grad.double()).abs() <= slack).all()


def test_a_zero_norm_clips_nothing() -> None:
    """Norm 0: scale 1 and zeros, no 0/0, also with max_norm 0."""
    for max_norm in (1.0, 0.0):
        grads, model = given_gradients([[0.0, 0.0]], 3)
        done = grads.finish(max_norm=max_norm)
        assert (0.0, 1.0) == (done.norm, done.scale)
        assert not model[0].grad.any()


def test_a_max_norm_of_zero_gives_zeros() -> None:
    """max_norm 0 writes exact zeros."""
    grads, model = given_gradients([[3.0, 4.0]], 1)
    done = grads.finish(max_norm=0.0)
    assert (5.0, 0.0) == (done.norm, done.scale)
    assert not model[0].grad.any()


def test_a_norm_over_thirty_million_elements() -> None:
    """Thirty million equal elements, where float32 norms are off by 1e-3: within 1e-12."""
    value = float(torch.tensor(0.7))
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(n)) for n in (30_000_000 - 12_345, 12_345)])
    grads = augend.Accumulator(model)
    grads.add({str(i): torch.full_like(one, value) for i, one in enumerate(model)}, 3)
    exact = value * math.sqrt(30_000_000) / 3
    assert abs(grads.norm() - exact) <= 1e-12 * exact


# ------------------------------------------------------------------ the factor


@given(
    st.floats(-1e6, 1e6, width=32).filter(lambda x: x == 0 or abs(x) > 1e-6),
    st.sampled_from([1e-38, 1e-30, 1.0, 1e30, 3e38]),
    st.integers(1, 2**62),
)
def test_a_factor_of_any_size_gives_the_mean(gradient: float, loss_scale: float, count: int) -> None:
    """Scales and counts whose product is no float32: the mean is right to two roundings, or exact in float64 first."""
    scale = float(torch.tensor(loss_scale))
    held = float(torch.tensor(gradient) * torch.tensor(loss_scale))
    if not math.isfinite(held):
        return
    grads, model = given_gradients([[held]], count, loss_scale=scale)
    grads.finish()
    exact = held / scale / count
    assert abs(float(model[0].grad) - exact) <= abs(exact) * 2.1 * 2.0**-24 + 2.0**-149


def test_fused_adamw_is_not_silently_still() -> None:
    """A divisor beyond float32 (2^100 x 2^60) still moves the weights exactly as scale and count of one do."""
    moved = []
    for scale, count in ((1.0, 1), (2.0**100, 2**60)):
        model = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        grads = augend.Accumulator(model, loss_scale=scale)
        gradient = torch.tensor([[3.0, 4.0]]) * 2.0**-60
        grads.add({"weight": gradient * scale * (count / 2**60)}, count)
        if count == 1:
            grads.reset()
            grads.add({"weight": gradient * 2.0**-60}, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True, eps=0.0)
        grads.step(optimizer)
        moved.append(model.weight.tolist())
    assert moved[0] == moved[1]
    assert moved[0] != [[1.0, 1.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_division_is_right_at_every_magnitude(dtype: torch.dtype) -> None:
    """divide_ agrees with exact division to two roundings, whichever way it takes."""
    for first in (2.0**-120, 2.0**-20, 3.0, 2.0**90):
        for second in (1.0, 7.0, 2.0**62):
            for multiplier in (1.0, 0.3, 2.0**-70):
                value = float(torch.tensor(1.7 * first, dtype=dtype))
                tensor = torch.tensor([value], dtype=dtype)
                divide_([tensor], (first, second), multiplier)
                got = float(tensor[0])
                exact = value / first / second * multiplier
                slack = (
                    torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
                )  # a subnormal's rounding is absolute
                assert abs(got - exact) <= 4 * reference.UNIT[dtype] * exact + slack, (first, second, multiplier)


def test_gradients_take_the_layout_of_their_parameter() -> None:
    """Fused optimizers are wrong where strides differ: .grad has its parameter's, for any layout and dtype."""
    for work in ("float32", "float64"):
        model = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        grads = augend.Accumulator(model, dtype=work)
        grads.add({"weight": torch.randn(4, 3, 3, 3)}, 1)
        expected = grads.pending["weight"].clone()
        grads.finish()
        assert model.weight.stride() == model.weight.grad.stride()
        assert torch.equal(expected.float(), model.weight.grad)


def test_a_float64_model_keeps_float64() -> None:
    """float64 parameters have float64 sums and gradients, at magnitudes where squares leave float64."""
    for size in (1e200, 1e-200):
        model = torch.nn.Linear(2, 1, bias=False, dtype=torch.float64)
        grads = augend.Accumulator(model, dtype="float64")
        grads.add({"weight": torch.tensor([[3.0, 4.0]], dtype=torch.float64) * size}, 1)
        done = grads.finish()
        assert abs(done.norm - 5 * size) <= 1e-12 * 5 * size
        assert torch.equal(torch.tensor([[3.0, 4.0]], dtype=torch.float64) * size, model.weight.grad)


def test_finish_mean_leaves_grad_alone() -> None:
    """finish_mean returns work-dtype means of 16-bit parameters, unclipped, and writes no .grad."""
    grads, model = pending(stored=torch.bfloat16)
    sums = {name: one.clone() for name, one in grads.pending.items()}
    count = grads.state.count
    means = grads.finish_mean()
    assert all(torch.equal(sums[name] / count, means.gradients[name]) for name in sums)
    assert (count, torch.float32) == (means.state.count, means.gradients["head.bias"].dtype)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert 0 == grads.state.microbatches


def test_a_drained_window_shares_nothing_with_the_next() -> None:
    """Sums that were handed over do not change when the accumulator goes on."""
    grads, model = pending()
    sums = grads.finish_sums()
    before = reference.digest(dict(sums.gradients))
    grads.backward(tally(model, *rows(4)))
    grads.finish()
    assert before == reference.digest(dict(sums.gradients))
    assert (4, 2) == (sums.state.count, sums.state.microbatches)


def test_add_counts_as_a_microbatch_without_a_loss() -> None:
    """Gradients made elsewhere add exactly; the loss of the window is then unknown, and says so."""
    grads, _model = pending()
    mine = grads.pending["head.bias"].clone()
    gradient = torch.ones(3, dtype=torch.bfloat16)
    grads.add({"head.bias": gradient}, 2.0)
    gradient.zero_()
    assert torch.equal(mine + 1, grads.pending["head.bias"])
    done = grads.finish()
    assert (6, 3) == (done.count, done.microbatches)
    assert math.isnan(done.loss.value)


def test_a_tally_without_rows_has_a_value_and_no_error_bar() -> None:
    """A 0-d tally trains and reports; its error is NaN, because nobody knows its rows."""
    model = torch.nn.Linear(1, 1, bias=False)
    grads = augend.Accumulator(model)
    grads.backward(augend.Tally(model.weight.sum() * 0 + 6.0, torch.tensor(3)))
    done = grads.finish()
    assert 2.0 == done.loss.value
    assert math.isnan(done.loss.error)


def test_retain_graph_is_passed_on() -> None:
    """A graph shared with another loss survives when asked."""
    model = torch.nn.Linear(1, 1, bias=False)
    grads = augend.Accumulator(model)
    total = model(torch.ones(1, 1))[:, 0] ** 2
    grads.backward(augend.Tally(total, torch.tensor([1])), retain_graph=True)
    grads.backward(augend.Tally(total, torch.tensor([1])))
    assert 2 == grads.state.count


def test_a_norm_beyond_float64_is_judged_as_such() -> None:
    """Finite float64 sums whose norm is no float64 are non-finite for the policy, and said to be finite."""
    model = torch.nn.Linear(2, 1, bias=False, dtype=torch.float64)
    grads = augend.Accumulator(model, dtype="float64")
    grads.add({"weight": torch.full((1, 2), 1.5e308, dtype=torch.float64)}, 1)
    with pytest.raises(NonFiniteError, match="the norm of the mean gradient is inf, although every sum is finite"):
        grads.finish()


def test_a_skipped_record_survives_json() -> None:
    """The record of a skipped batch holds nan; saved and loaded it is the same record."""
    grads, _ = masked()
    done = grads.finish(empty="skip")
    state = json.loads(json.dumps({k: v for k, v in grads.state_dict().items() if k != "sums"}, allow_nan=False))
    grads.load_state_dict({**state, "sums": {"loss": {}}})
    assert repr(done) == repr(grads._last)
