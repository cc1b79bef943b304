"""Every error says what, where and what to do, and leaves the window as it was."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch

import augend
from augend._accumulate._gradients import _hook
from augend.errors import (
    AugendError,
    ContractError,
    CounterOverflowError,
    EmptyWindowError,
    GradientError,
    NonFiniteError,
    PlacementError,
    StateError,
    TallyError,
)
from models import fingerprint, rows, tally, terms_of, tower


def pending(**options: object) -> tuple[augend.Accumulator, torch.nn.Module]:
    """Return an accumulator with two micro-batches in its window."""
    model = tower()
    grads = augend.Accumulator(model, **options)
    for seed in range(2):
        grads.backward(terms_of(model, *rows(4, seed=seed), options.get("terms", ("loss",))))
    return grads, model


# ------------------------------------------------------------------ construction


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf, 1e39, 1e-60])
def test_a_loss_scale_out_of_float32_is_refused(scale: float) -> None:
    """Scales that are not positive, finite and nonzero in float32 are refused; float64 work takes 1e39 and 1e-60."""
    with pytest.raises(ContractError, match="loss_scale must be positive and finite, also in float32"):
        augend.Accumulator(tower(), loss_scale=scale)
    if 0 < scale < math.inf:
        assert scale == augend.Accumulator(tower(), dtype="float64", loss_scale=scale).contract.loss_scale
    else:
        with pytest.raises(ContractError, match="loss_scale"):
            augend.Accumulator(tower(), dtype="float64", loss_scale=scale)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "bfloat16"}, "dtype must be one of 'float32', 'float64', 'exact'; got 'bfloat16'"),
        ({"sync": "never"}, "sync must be one of 'every', 'last'"),
        ({"unused": "skip"}, "unused must be one of 'error', 'zero'"),
        ({"foreign": "keep"}, "foreign must be one of 'error', 'drop'"),
        ({"terms": ()}, "terms must be different names"),
        ({"terms": ("a", "a")}, "terms must be different names"),
        ({"max_microbatches": 0}, "max_microbatches must be at least 1"),
    ],
)
def test_arguments_out_of_their_domain_are_refused(options: dict[str, object], words: str) -> None:
    """Each argument is checked by name."""
    with pytest.raises(ContractError, match=words):
        augend.Accumulator(tower(), **options)


class Odd(torch.nn.Module):
    """A module around one parameter."""

    def __init__(self, parameter: torch.nn.Parameter) -> None:
        super().__init__()
        self.odd = parameter


@pytest.mark.parametrize(
    ("parameter", "words"),
    [
        (torch.nn.Parameter(torch.zeros(0, 3)), "'odd' has shape .0, 3. and no elements"),
        (torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64)), "'odd' is torch.complex64"),
        (torch.nn.Parameter(torch.zeros(2, dtype=torch.float64)), "'odd' is float64: its sums need"),
        (torch.nn.Parameter(torch.zeros(2), requires_grad=False), "nothing to train"),
    ],
)
def test_parameters_that_cannot_be_trained_are_refused(parameter: torch.nn.Parameter, words: str) -> None:
    """Empty, complex, too wide and frozen-only models are refused at construction, by name."""
    with pytest.raises(ContractError, match=words):
        augend.Accumulator(Odd(parameter))


def test_two_parameters_over_one_memory_are_refused() -> None:
    """Weights that only share storage would be stepped twice; tied objects and disjoint views are fine."""
    flat = torch.zeros(8)
    model = torch.nn.ParameterList([torch.nn.Parameter(flat[:5]), torch.nn.Parameter(flat[4:])])
    with pytest.raises(ContractError, match="'0' and '1' are two objects over the same memory"):
        augend.Accumulator(model)
    augend.Accumulator(torch.nn.ParameterList([torch.nn.Parameter(flat[:4]), torch.nn.Parameter(flat[4:])]))


def test_sparse_embeddings_are_refused() -> None:
    """An embedding that makes sparse gradients is refused at construction; a frozen one is not ours."""
    with pytest.raises(GradientError, match="module '1' makes sparse gradients"):
        augend.Accumulator(torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Embedding(3, 1, sparse=True)))
    frozen = torch.nn.Embedding(3, 1, sparse=True).requires_grad_(requires_grad=False)
    augend.Accumulator(torch.nn.Sequential(torch.nn.Linear(1, 1), frozen))


def test_parameters_that_are_no_plain_tensors_are_refused() -> None:
    """A tensor subclass (a sharded tensor, say) has no sum here yet."""

    class Sharded(torch.Tensor):
        pass

    model = Odd(torch.nn.Parameter(torch.zeros(2).as_subclass(Sharded)))
    with pytest.raises(PlacementError, match="'odd' is a Sharded"):
        augend.Accumulator(model)


def test_something_that_is_no_mesh_is_refused() -> None:
    """A mesh is a DeviceMesh, and nothing else is taken for one."""
    with pytest.raises(PlacementError, match="mesh must be a torch DeviceMesh"):
        augend.Accumulator(tower(), mesh=object())


# ------------------------------------------------------------------ backward and add: nothing is changed


def some(count: int = 4) -> augend.Tally:
    """Return a tally of no particular model."""
    return augend.Tally(torch.ones(count, requires_grad=True) * 2, torch.ones(count, dtype=torch.int64))


METADATA = {
    "no tally": (lambda g, m: g.backward(torch.zeros(2)), TallyError, "must be a Tally"),
    "one of two terms": (lambda g, m: g.backward({"loss": some(), "more": some()}), TallyError, "every term"),
    "unknown term": (lambda g, m: g.backward({"nll": some()}), TallyError, "every call needs a tally for every term"),
    "no term": (lambda g, m: g.backward({}), TallyError, "got none"),
    "unknown": (lambda g, m: g.add({"x": torch.zeros(1)}, 1), GradientError, "unknown parameter 'x'"),
    "frozen": (lambda g, m: g.add({"fixed.bias": torch.zeros(4)}, 1), GradientError, "frozen parameter 'fixed.bias'"),
    "shape": (lambda g, m: g.add({"head.bias": torch.zeros(4)}, 1), GradientError, r"shape \[3\] on cpu; got \[4\]"),
    "device": (
        lambda g, m: g.add({"head.bias": torch.zeros(3, device="meta")}, 1),
        GradientError,
        "got .3. on meta",
    ),
    "no tensor": (lambda g, m: g.add({"head.bias": [0.0] * 3}, 1), GradientError, "must be a tensor; got list"),
    "sparse": (lambda g, m: g.add({"head.bias": torch.zeros(3).to_sparse()}, 1), GradientError, "must be dense"),
    "complex": (
        lambda g, m: g.add({"head.bias": torch.zeros(3, dtype=torch.complex64)}, 1),
        GradientError,
        "real floating; got torch.complex64",
    ),
    "quantised": (
        lambda g, m: g.add({"head.bias": torch.quantize_per_tensor(torch.zeros(3), 1.0, 0, torch.qint8)}, 1),
        GradientError,
        "must be dense and real floating",
    ),
    "count without gradient": (lambda g, m: g.add({}, 3), GradientError, "counts 3 items and brings no gradient"),
    "negative count": (lambda g, m: g.add({"head.bias": torch.zeros(3)}, -1), TallyError, "not negative; got -1"),
    "nan count": (lambda g, m: g.add({"head.bias": torch.zeros(3)}, math.nan), TallyError, "finite"),
    "count no number": (lambda g, m: g.add({"head.bias": torch.zeros(3)}, True), TallyError, "must be a number"),
    "counts of terms": (lambda g, m: g.add({"head.bias": torch.zeros(3)}, {"x": 1}), TallyError, "every term"),
}


@pytest.mark.filterwarnings("ignore:.*quantized.*:UserWarning", "ignore:.*quantize.*:DeprecationWarning")
@pytest.mark.parametrize("name", METADATA)
def test_metadata_errors_change_nothing(name: str) -> None:
    """Errors that need no values come before any change: the window is the same to the bit, and goes on."""
    call, error, words = METADATA[name]
    grads, model = pending()
    before = fingerprint(grads, model)
    with pytest.raises(error, match=words):
        call(grads, model)
    assert before == fingerprint(grads, model)
    grads.backward(tally(model, *rows(3, seed=8)))
    grads.finish()


def test_with_several_terms_each_call_names_each() -> None:
    """A bare tally, bare gradients or a bare count among several terms are refused, and change nothing."""
    grads, model = pending(terms=("loss", "size"))
    before = fingerprint(grads, model)
    for call in (
        lambda: grads.backward(some()),
        lambda: grads.backward({"loss": some()}),
        lambda: grads.add({"loss": {}}, {"loss": 0, "size": 0}),
        lambda: grads.add({"loss": {}, "size": {}}, 0),
    ):
        with pytest.raises(TallyError, match="term"):
            call()
        assert before == fingerprint(grads, model)
    grads.add({"loss": {"head.bias": torch.ones(3)}, "size": {}}, {"loss": 2, "size": 0})
    assert 3 == grads.state.microbatches


def test_a_foreign_gradient_is_refused_or_dropped() -> None:
    """A .grad that we did not make is named and left alone; foreign="drop" drops it; ours is never foreign."""
    grads, model = pending()
    model.head.bias.grad = torch.ones(3)
    before = fingerprint(grads, model)
    for call in (lambda: grads.backward(some()), lambda: grads.add({}, 0), grads.finish):
        with pytest.raises(GradientError, match="'head.bias' has a .grad that this accumulator did not make"):
            call()
        assert before == fingerprint(grads, model)
    model.head.bias.grad = None
    grads.finish()
    assert model.head.bias.grad is not None
    grads.backward(tally(model, *rows(4)))
    assert all(parameter.grad is None for parameter in model.parameters())

    dropping, model = pending(foreign="drop")
    expected = dropping.pending["head.bias"].clone()
    model.head.bias.grad = torch.ones(3)
    dropping.add({}, 0)
    assert model.head.bias.grad is None
    assert torch.equal(expected, dropping.pending["head.bias"])


def test_a_backward_elsewhere_is_not_ours() -> None:
    """Hooks act only inside our own backward: an ordinary one leaves .grad to its owner and the sums alone."""
    grads, model = pending()
    before = fingerprint(grads, model)
    tally(model, *rows(4)).total.sum().backward()
    assert model.head.bias.grad is not None
    model.zero_grad()
    assert before == fingerprint(grads, model)


def test_an_accumulator_that_is_gone_leaves_no_hook() -> None:
    """Nothing keeps a dropped accumulator alive, and its hooks go with it."""
    grads, model = pending()
    alive = weakref.ref(grads)
    del grads
    gc.collect()
    assert alive() is None
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_a_hook_that_outlives_its_accumulator_does_nothing() -> None:
    """Between the end of an accumulator and the removal of its hooks, a gradient stays where autograd put it."""
    grads, model = pending()
    hook = _hook(weakref.WeakMethod(grads._pending.taker._receive), "head.bias")
    del grads
    gc.collect()
    model.head.bias.grad = torch.ones(3)
    hook(model.head.bias)
    assert torch.equal(torch.ones(3), model.head.bias.grad)


def test_too_many_microbatches_are_refused() -> None:
    """The window holds max_microbatches at most; the next is refused and the window can be finished."""
    grads, model = pending(max_microbatches=2)
    before = fingerprint(grads, model)
    with pytest.raises(StateError, match="holds 2 micro-batches, which is max_microbatches"):
        grads.backward(some())
    assert before == fingerprint(grads, model)
    assert 2 == grads.finish().microbatches


# ------------------------------------------------------------------ values: the window cannot go on


def broken_by(values: Callable[[], augend.Tally], error: type[AugendError], words: str) -> None:
    """Check that a value error is found at finish, is kept from then on, and that only reset and load go on."""
    grads, model = pending()
    saved = grads.state_dict()
    grads.backward(values())
    weights = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with pytest.raises(error, match=words):
        grads.finish()
    assert all(torch.equal(weights[name], parameter) for name, parameter in model.named_parameters())
    assert all(parameter.grad is None for parameter in model.parameters())
    for call in (
        lambda: grads.backward(some()),
        lambda: grads.add({}, 0),
        grads.finish,
        grads.finish_mean,
        grads.finish_sums,
        grads.state_dict,
        grads.norm,
        lambda: grads.state,
        lambda: grads.step(torch.optim.SGD(model.parameters(), lr=0.1)),
    ):
        with pytest.raises(StateError, match=r"Call reset\(\) to drop it"):
            call()
    grads.load_state_dict(saved)
    assert 2 == grads.state.microbatches
    grads.backward(values())
    with pytest.raises(error, match=words):
        _ = grads.state
    grads.reset()
    grads.backward(tally(model, *rows(4)))
    assert 1 == grads.finish().microbatches


def with_graph(total: list[float], count: torch.Tensor) -> augend.Tally:
    """Return a tally whose totals hang on a graph that reaches no parameter of a model."""
    return augend.Tally(torch.tensor(total, requires_grad=True) * 1.0, count)


def test_four_counts_of_two_to_the_62_overflow() -> None:
    """Counts that sum beyond 2^63 - 1 raise; the sum is exact, so it cannot wrap to a small number."""
    model = torch.nn.Linear(1, 1, bias=False)
    grads = augend.Accumulator(model)
    huge = torch.tensor([2**62])
    for _ in range(4):
        grads.backward(augend.Tally(model.weight[0], huge))
    with pytest.raises(CounterOverflowError, match=f"sum to {2**64}, and at most"):
        grads.finish()
    grads.reset()
    grads.backward(augend.Tally(model.weight[0], torch.tensor([2**63 - 1])))
    assert 2**63 - 1 == grads.state.count
    one = augend.Accumulator(model)
    one.backward(augend.Tally(model.weight[0].expand(4), huge.expand(4)))
    with pytest.raises(CounterOverflowError):
        _ = one.state


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (torch.tensor([-1, 3]), "is -1; counts and weights must be finite and not negative"),
        (torch.tensor([0.5, -0.5]), "is -0.5"),
        (torch.tensor([math.nan, 1.0]), "is nan"),
        (torch.tensor([math.inf, 1.0]), "is inf"),
    ],
)
def test_wrong_counts_are_found_at_finish(count: torch.Tensor, words: str) -> None:
    """Counts are values: a negative or non-finite one is named at finish, and the window cannot go on."""
    broken_by(lambda: with_graph([0.0, 0.0], count), TallyError, words)


def test_a_wrong_count_without_rows_is_found_too() -> None:
    """A 0-d count is judged alike."""
    broken_by(lambda: augend.Tally(torch.tensor(1.0), torch.tensor(-2)), TallyError, "is -2")


def test_a_count_without_any_gradient_is_an_error() -> None:
    """A loss made under no_grad, or of another model, counts items for which no gradient came; count 0 is fine."""
    for make in (lambda: torch.ones(2), lambda: torch.ones(2, requires_grad=True) * 1):

        def counted(make: Callable[[], torch.Tensor] = make) -> augend.Tally:
            return augend.Tally(make(), torch.tensor([2, 1]))

        broken_by(counted, GradientError, "counted 3 items in micro-batches whose")
        grads, _ = pending()
        grads.backward(augend.Tally(make(), torch.zeros(2)))
        assert 3 == grads.finish().microbatches


def test_an_exception_in_backward_poisons_the_window() -> None:
    """A failing graph leaves a window that cannot go on; reset brings it back, and no gradient is left behind."""
    grads, model = pending()

    def fail(gradient: torch.Tensor) -> None:
        raise RuntimeError("a hook of the user's")

    handle = model.first.weight.register_hook(fail)
    with pytest.raises(RuntimeError, match="a hook of the user's"):
        grads.backward(tally(model, *rows(4)))
    handle.remove()
    with pytest.raises(StateError, match=r"an exception left backward\(\)"):
        grads.backward(some())
    with pytest.raises(StateError, match="half added"):
        grads.finish()
    grads.reset()
    assert all(parameter.grad is None for parameter in model.parameters())
    grads.backward(tally(model, *rows(4)))
    grads.finish()


def test_a_sparse_gradient_of_a_users_own_function_poisons_the_window() -> None:
    """What only shows while gradients are made is refused there, by name."""
    model = torch.nn.Linear(2, 3, bias=False)
    grads = augend.Accumulator(model)
    lookup = torch.nn.functional.embedding(torch.tensor([1]), model.weight, sparse=True)
    with pytest.raises(GradientError, match="the gradient of 'weight' is sparse"):
        grads.backward(augend.Tally(lookup.sum(dim=1), torch.tensor([1])))
    grads.reset()
    assert model.weight.grad is None


def test_an_exception_in_the_optimizer_poisons_the_window() -> None:
    """A step that fails halfway cannot be taken for a good one."""
    grads, model = pending()

    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        grads.step(Failing(model.parameters(), lr=0.1))
    with pytest.raises(StateError, match="the update may be half taken"):
        grads.state_dict()
    grads.reset()
    assert 0 == grads.updates


# ------------------------------------------------------------------ optimizers and options


def test_optimizers_must_hold_each_parameter_once() -> None:
    """No optimizer, two optimizers, LBFGS, a scaler's leftover or no optimizer at all: refused, nothing changed."""
    grads, model = pending()
    before = fingerprint(grads, model)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    scaled = torch.optim.AdamW(parameters, fused=True)
    scaled.grad_scale = torch.tensor(2.0)
    for optimizer, words in (
        (torch.optim.SGD(parameters[1:], lr=0.1), "'first.weight' is trained, but no optimizer holds it"),
        ([torch.optim.SGD(parameters, lr=0.1), torch.optim.SGD(parameters[:1], lr=0.1)], "two optimizers hold it"),
        (torch.optim.LBFGS(parameters), "needs a closure"),
        (scaled, "carries a torch GradScaler"),
        ([object()], "step takes torch optimizers; got a object"),
        ([], "no optimizer holds it"),
    ):
        with pytest.raises(ContractError, match=words):
            grads.step(optimizer)
        assert before == fingerprint(grads, model)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_norm": -1.0}, "max_norm must be a number of at least 0"),
        ({"max_norm": math.nan}, "max_norm must be a number of at least 0"),
        ({"eps": -1e-6}, "eps must be a finite number of at least 0"),
        ({"eps": math.inf}, "eps must be a finite number"),
        ({"empty": "ignore"}, "empty must be one of 'raise', 'skip', 'one', 'zero'; got 'ignore'"),
        ({"nonfinite": "zero"}, "nonfinite must be one of 'raise', 'skip', 'allow'"),
        ({"term_weights": {"nll": 1.0}}, "term_weights names 'nll', which is no term of loss"),
        ({"term_weights": {"loss": math.nan}}, "the weight of term 'loss' must be finite"),
    ],
)
def test_options_out_of_their_domain_change_nothing(options: dict[str, object], words: str) -> None:
    """finish and step refuse what they do not understand before they touch anything."""
    grads, model = pending()
    before = fingerprint(grads, model)
    for call in (grads.finish, lambda **o: grads.step(torch.optim.SGD(model.parameters(), lr=0.1), **o)):
        with pytest.raises(ContractError, match=words):
            call(**options)
        assert before == fingerprint(grads, model)


def test_an_empty_window_raises_and_is_kept() -> None:
    """Nothing counted: an error that says how many micro-batches were made; more rows can still be added."""
    model = tower()
    grads = augend.Accumulator(model)
    for made in (0, 1):
        if made:
            grads.backward(tally(model, rows(2)[0], torch.full((2,), -100)))
        before = fingerprint(grads, model)
        for call in (grads.finish, grads.finish_mean, lambda: grads.step(torch.optim.SGD(model.parameters(), lr=1.0))):
            with pytest.raises(EmptyWindowError, match=f"{made} micro-batches were made"):
                call()
            assert before == fingerprint(grads, model)
        assert math.isnan(grads.norm())
    grads.backward(tally(model, *rows(4)))
    assert 2 == grads.finish().microbatches


def test_a_non_finite_gradient_names_its_parameter() -> None:
    """nonfinite="raise" names the first parameter and keeps the sums, but the window cannot go on."""
    grads, _model = pending()
    grads.add({"head.weight": torch.full((3, 4), math.inf)}, 1)
    with pytest.raises(NonFiniteError, match="the gradient of parameter 'head.weight' holds an inf or a nan"):
        grads.finish()
    assert bool(torch.isinf(grads.pending["head.weight"]).all())
    with pytest.raises(StateError, match="holds an inf or a nan; the window cannot go on"):
        grads.finish(nonfinite="skip")
    grads.reset()


def test_fractional_counts_are_exact() -> None:
    """Ten weights of 0.1, given as numbers, sum to ten times the grid point next to 0.1, in any order."""
    grads, _ = pending()
    start = grads.state.moments["loss"].count
    for _ in range(10):
        grads.add({"head.bias": torch.ones(3)}, 0.1)
    assert 10 * Fraction(round(Fraction(0.1) * 2**40), 2**40) == grads.state.moments["loss"].count - start
