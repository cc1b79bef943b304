"""The trial of optimizers: what depends on the cut of a tensor is found and refused by name, and nothing is touched."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_pre_hook

from augend._finish._elementwise import check_elementwise, proof_key
from augend.errors import ContractError
from augend.optim import MasterWeights

FAMILY = {
    "AdamW": (optim.AdamW, {}),
    "AdamW without decay": (optim.AdamW, {"weight_decay": 0.0}),
    "AdamW amsgrad maximize": (optim.AdamW, {"amsgrad": True, "maximize": True}),
    "AdamW foreach": (optim.AdamW, {"foreach": True}),
    "AdamW with a rate in a tensor": (optim.AdamW, {"lr": torch.tensor(1e-3)}),
    "Adam": (optim.Adam, {}),
    "SGD": (optim.SGD, {}),
    "SGD momentum dampening": (optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
    "SGD nesterov decay": (optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "NAdam": (optim.NAdam, {}),
    "RAdam": (optim.RAdam, {}),
    "Adamax": (optim.Adamax, {}),
    "Adagrad, whose state is made with it": (optim.Adagrad, {}),
    "Adadelta": (optim.Adadelta, {}),
    "ASGD that averages": (optim.ASGD, {"t0": 2.0}),
    "RMSprop centered momentum": (optim.RMSprop, {"centered": True, "momentum": 0.9}),
    "Rprop": (optim.Rprop, {}),
}
# In 16 bits, add(alpha=) rounds once in the vector loop and twice in the remainder.
NARROW = {
    "AdamW": (optim.AdamW, {}, None),
    "Adam": (optim.Adam, {}, None),
    "Adam decay": (optim.Adam, {"weight_decay": 0.1}, "differs in"),
    "SGD": (optim.SGD, {}, "the parameter differs in"),
    "SGD nesterov decay": (optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, "differs in"),
    "RMSprop momentum": (optim.RMSprop, {"momentum": 0.9}, "differs in"),
}
REFUSED = {
    "Adafactor": (optim.Adafactor, "Adafactor: it takes means of squares over rows and columns"),
    "Muon": (optim.Muon, "Muon: it makes whole matrices orthogonal"),
    "LBFGS": (optim.LBFGS, "LBFGS: it takes dot products over all parameters"),
    "SparseAdam": (optim.SparseAdam, "failed where it was tried: SparseAdam does not support dense gradients"),
}
FUSED = {
    "AdamW": (optim.AdamW, {}),
    "Adam decay": (optim.Adam, {"weight_decay": 0.1}),
    "SGD momentum": (optim.SGD, {"momentum": 0.9}),
}


def matrices(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    """Return two parameters whose rows are multiples of 32 elements."""
    return {
        "first": nn.Parameter(torch.ones(5, 32, dtype=dtype)),
        "second": nn.Parameter(torch.ones(3, 4, 8, dtype=dtype)),
    }


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    """Return parameters of one, two and no dimensions."""
    vector, number = nn.Parameter(torch.ones(7, dtype=dtype)), nn.Parameter(torch.ones((), dtype=dtype))
    return {**matrices(dtype), "vector": vector, "number": number}


def refusal(optimizer: optim.Optimizer, trained: dict[str, nn.Parameter]) -> str:
    """Return why an optimizer is refused."""
    with pytest.raises(ContractError) as caught:
        check_elementwise(optimizer, trained)
    return str(caught.value)


class HomeMade(optim.Optimizer):
    """Steps by a function of the gradient, without state."""

    def __init__(self, params: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(params, {"lr": 0.5})
        self.change = change

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * self.change(parameter.grad))


class Counting(HomeMade):
    """Keeps a tensor of state of a given kind."""

    def __init__(self, params: Any, kept: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(params, lambda gradient: gradient)
        self.kept = kept

    def step(self, closure: None = None) -> None:
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["kept"] = self.kept(parameter.grad)


class Remembering(HomeMade):
    """Steps the parameters it was made with, whatever its groups say."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lambda gradient: gradient)
        self.remembered = [parameter for group in self.param_groups for parameter in group["params"]]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for parameter in self.remembered:
            parameter.add_(1.0)


class Looking(HomeMade):
    """Finds its groups by way of itself, and holds two methods of its own and what no copy can be made of."""

    def __init__(self, params: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(params, change)
        self.myself = [self]
        self.bound = self.zero_grad
        self.register_step_pre_hook(self.uncopied(iter(range(3)), (line for line in range(3))))

    @staticmethod
    def uncopied(*held: object) -> Callable[..., None]:
        return functools.partial(lambda *given: None, *held)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.myself[0].param_groups:
            for parameter in group["params"]:
                parameter.sub_(self.change(parameter.grad))


class Prepared(HomeMade):
    """Makes its state with itself: a counter, and a tensor that is like the parameter but for its dtype."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, torch.sign)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {"count": torch.tensor(7.0), "sum": torch.zeros_like(parameter).double()}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] += 1
                state["sum"] += parameter.grad
                parameter.sub_(state["sum"] / state["count"])


class Wrapping(HomeMade):
    """Holds another optimizer."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params, lambda gradient: gradient)
        self.base = optim.SGD(params)


class Locked(HomeMade):
    """Holds what no copy can be made of."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lambda gradient: gradient)
        self.lines: Iterator[int] = (line for line in range(3))


@pytest.mark.parametrize("name", FAMILY)
def test_elementwise_optimizers_pass(name: str) -> None:
    """Torch's elementwise optimizers pass in float32, in every form, for parameters of every shape."""
    make, options = FAMILY[name]
    trained = parameters()
    check_elementwise(make(trained.values(), **options), trained)


@pytest.mark.parametrize("name", NARROW)
def test_narrow_parameters_pass_where_torch_rounds_alike(name: str) -> None:
    """In bfloat16 some pass and others do not; those that do not pass over float32 masters, as the error says."""
    make, options, found = NARROW[name]
    trained = parameters(torch.bfloat16)
    optimizer = make(trained.values(), **options)
    if found is None:
        check_elementwise(optimizer, trained)
    else:
        text = refusal(optimizer, trained)
        assert found in text
        assert "on torch.bfloat16 parameters such as 'first'" in text
        assert text.endswith("keep float32 masters with augend.optim.MasterWeights")
    check_elementwise(MasterWeights(trained.values(), functools.partial(make, **options)), trained)


@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_elements_is_refused_by_name(name: str) -> None:
    """Optimizers that mix the elements of a tensor, or take no dense gradients, are refused with the reason."""
    make, reason = REFUSED[name]
    trained = {"weight": nn.Parameter(torch.ones(4, 4))}
    text = refusal(make(trained.values()), trained)
    assert reason in text
    assert "exact mode cannot promise the same bits with" in text


def test_every_optimizer_of_torch_is_judged() -> None:
    """No optimizer of this torch is left out of the tables above."""
    of_torch = {one for one in vars(optim).values() if isinstance(one, type) and issubclass(one, optim.Optimizer)}
    assert of_torch - {optim.Optimizer} == {make for make, _ in (*FAMILY.values(), *REFUSED.values())}


@pytest.mark.parametrize("name", FUSED)
def test_a_fused_kernel_is_caught_where_shards_are_not_aligned(name: str) -> None:
    """The trial finds that slices differ; the error names a parameter that can be cut so, and both remedies work."""
    make, options = FUSED[name]
    trained = parameters()
    text = refusal(make(trained.values(), fused=True, **options), trained)
    assert f"{make.__name__} with fused=True on torch.float32 parameters such as 'first'" in text
    assert "differs in" in text
    assert "'vector' of shape [7] can be cut elsewhere; use fused=False" in text
    check_elementwise(make(trained.values(), fused=False, **options), trained)
    groups = [
        {"params": [trained["first"], trained["second"]]},
        {"params": [trained["vector"], trained["number"]], "fused": False},
    ]
    optimizer = make(groups, fused=True, **options)
    check_elementwise(optimizer, trained)
    for parameter in trained.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()  # torch takes one fused group and one that is not
    check_elementwise(optimizer, trained)


def test_rows_that_are_no_multiple_of_16_elements_are_not_aligned() -> None:
    """A matrix of 24 columns can be cut inside a register of AVX-512; 5 x 16 cannot, and what is frozen is not."""
    even, uneven = nn.Parameter(torch.ones(5, 16)), nn.Parameter(torch.ones(16, 24))
    optimizer = optim.AdamW([even, uneven], fused=True)
    assert "'uneven' of shape [16, 24] can be cut elsewhere" in refusal(optimizer, {"even": even, "uneven": uneven})
    check_elementwise(optimizer, {"even": even})


def test_narrow_rows_must_be_multiples_of_32_elements() -> None:
    """64 bytes are 32 elements of bfloat16: what no register leaves over."""
    even, uneven = (nn.Parameter(torch.ones(5, columns, dtype=torch.bfloat16)) for columns in (32, 16))
    check_elementwise(optim.AdamW([even], fused=True), {"even": even})
    text = refusal(optim.AdamW([even, uneven], fused=True), {"even": even, "uneven": uneven})
    assert "a multiple of 32 elements, but 'uneven' of shape [5, 16] can be cut elsewhere" in text


class Sharded(nn.Parameter):
    """Says of itself, as a DTensor does, that it is split over its second dimension."""

    placements = (torch.distributed.tensor.Replicate(), torch.distributed.tensor.Shard(1))


def test_the_dimension_that_is_cut_counts_too() -> None:
    """A parameter that is split over columns is aligned if its columns are too."""
    even, uneven = Sharded(torch.ones(16, 16)), Sharded(torch.ones(5, 16))
    check_elementwise(optim.AdamW([even], fused=True), {"even": even})
    assert "'uneven' of shape [5, 16]" in refusal(optim.AdamW([uneven], fused=True), {"uneven": uneven})


def test_fused_kernels_that_round_alike_in_the_trial_must_be_aligned_too() -> None:
    """Plain fused SGD shows no difference here; its remainder is written separately all the same."""
    trained = parameters()
    assert "even if no slice showed it" in refusal(optim.SGD(trained.values(), fused=True), trained)


def test_a_fused_kernel_that_steps_nothing_is_refused() -> None:
    """torch 2.13 leaves 16-bit parameters as they are in the vector loop of fused SGD (pytorch#191763)."""
    trained = matrices(torch.bfloat16)
    text = refusal(optim.SGD(trained.values(), fused=True), trained)
    assert "6 steps left a parameter of its param_groups as it was" in text


def test_a_fused_step_that_mixes_elements_is_refused() -> None:
    """Aligned cuts are tried, not believed."""
    trained = matrices()
    optimizer = HomeMade([{"params": list(trained.values()), "fused": True}], lambda gradient: gradient.cumsum(0))
    assert "even at multiples of 16 elements: the parameter differs in" in refusal(optimizer, trained)


MIXING = {
    "norm of the tensor": lambda gradient: gradient / gradient.norm(),
    "norm of each row": lambda gradient: gradient / (gradient.norm(dim=-1, keepdim=True) + 1),
    "mean over columns": lambda gradient: gradient - gradient.mean(0),
    "position": lambda gradient: gradient * torch.arange(1.0, gradient.numel() + 1).reshape(gradient.shape),
    "noise": lambda gradient: gradient + torch.rand_like(gradient),
}


@pytest.mark.parametrize("name", MIXING)
def test_home_made_optimizers_that_mix_elements_are_caught(name: str) -> None:
    """What an optimizer computes decides, not who wrote it; an elementwise one passes."""
    trained = matrices()
    text = refusal(HomeMade(trained.values(), MIXING[name]), trained)
    assert "HomeMade on torch.float32 parameters such as 'first': the parameter differs in" in text
    assert "use an elementwise optimizer such as torch.optim.AdamW" in text
    check_elementwise(HomeMade(trained.values(), torch.sign), trained)


def test_matrices_are_tried_as_matrices() -> None:
    """An optimizer that mixes the elements of matrices alone is caught where a trained parameter is one."""
    trained = parameters()
    optimizer = HomeMade(
        trained.values(), lambda gradient: gradient / gradient.norm() if gradient.ndim > 1 else gradient
    )
    assert "such as 'first'" in refusal(optimizer, trained)
    check_elementwise(optimizer, {"vector": trained["vector"], "number": trained["number"]})


def test_numbers_are_never_cut() -> None:
    """A parameter without dimensions lies whole on every rank, so nothing is tried for it."""
    number = nn.Parameter(torch.ones(()))
    check_elementwise(HomeMade([number], MIXING["noise"]), {"number": number})


KEPT = {
    "a row of sums": (
        lambda gradient: gradient.sum(0, keepdim=True).repeat(2, *[1] * (gradient.ndim - 1)),
        "cannot be cut",
    ),
    "a norm": (torch.norm, "its kept depends on the slice"),
    "a shifted gradient": (lambda gradient: gradient.roll(1, 0), "its kept differs in"),
    "another dtype where it is short": (
        lambda gradient: gradient.to(torch.float64 if len(gradient) > 9 else torch.float32),
        "its kept",
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_state_must_be_the_same_bits_too(name: str) -> None:
    """State that depends on the cut is refused, though the parameters come out alike."""
    kept, reason = KEPT[name]
    trained = matrices()
    assert reason in refusal(Counting(trained.values(), kept), trained)


def test_state_of_the_parameters_shape_or_of_one_number_is_compared() -> None:
    """What is elementwise, or a number that is equal for all slices, passes."""
    trained = matrices()
    check_elementwise(Counting(trained.values(), torch.square), trained)
    check_elementwise(Counting(trained.values(), lambda _: torch.tensor(3.0)), trained)
    check_elementwise(Counting(trained.values(), lambda _: "no tensor"), trained)


def test_what_cannot_be_tried_is_refused() -> None:
    """Nothing is promised of an optimizer that wraps another, cannot be copied, fails, or keeps its own list."""
    trained = matrices()
    assert "wraps another optimizer in its 'base'" in refusal(Wrapping(trained.values()), trained)
    assert "failed where it was tried: cannot pickle 'generator'" in refusal(Locked(trained.values()), trained)
    text = refusal(optim.AdamW(trained.values(), capturable=True), trained)
    assert "failed where it was tried: If capturable=True" in text
    text = refusal(Remembering(trained.values()), trained)
    assert "6 steps left a parameter of its param_groups as it was" in text
    assert all(torch.equal(torch.ones_like(one), one) for one in trained.values())


def test_an_optimizer_is_tried_from_where_it_stands() -> None:
    """State that was made with the optimizer, or in earlier steps, is there in the trial, in its shape and dtype."""
    trained = matrices()
    check_elementwise(Prepared(trained.values()), trained)
    optimizer = optim.Adam(trained.values(), amsgrad=True)
    for parameter in trained.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    check_elementwise(optimizer, trained)


def test_a_compiled_step_is_refused() -> None:
    """Each shape of a part may be compiled to other arithmetic."""
    trained = matrices()
    optimizer = optim.SGD(trained.values())
    optimizer.step = torch.compile(optimizer.step, backend="eager")
    assert "a compiled step of SGD" in refusal(optimizer, trained)


def test_the_optimizer_is_left_as_it_was() -> None:
    """Neither parameters, state, options, hooks nor random state see the trial, nor does a scheduler hinder it."""
    trained = matrices()
    optimizer = optim.AdamW(trained.values(), lr=torch.tensor(0.5))
    for parameter in trained.values():
        parameter.grad = torch.ones_like(parameter)
    schedule = optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    optimizer.step()
    schedule.step()
    calls: list[object] = []
    optimizer.register_step_pre_hook(lambda *given: calls.append(given))
    before, values = copy.deepcopy(optimizer.state_dict()), [one.detach().clone() for one in trained.values()]
    random = torch.get_rng_state()
    handle = register_optimizer_step_pre_hook(lambda *given: calls.append(given))
    try:
        check_elementwise(optimizer, trained)
        with pytest.raises(ContractError):
            check_elementwise(HomeMade(trained.values(), MIXING["noise"]), trained)
    finally:
        handle.remove()
    assert [] == calls
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(value, one) for value, one in zip(values, trained.values(), strict=True))
    assert str(before) == str(optimizer.state_dict())
    assert {0.25} == {float(group["lr"]) for group in optimizer.param_groups}


class Choosing(HomeMade):
    """Rounds otherwise where it chooses its kernel by itself."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad if group["foreach"] is None else parameter.grad + parameter.grad / 3)


def test_a_plain_tensor_must_be_stepped_as_a_sharded_one() -> None:
    """Torch never chooses foreach for a DTensor, so a whole tensor's own choice is held against slices without it."""
    trained = matrices()
    optimizers = [
        Choosing([{"params": list(trained.values()), "foreach": choice}], torch.sign) for choice in (None, False, True)
    ]
    assert "the parameter differs in" in refusal(optimizers[0], trained)
    check_elementwise(optimizers[1], trained)
    check_elementwise(optimizers[2], trained)


def test_an_optimizer_that_refers_to_itself_is_tried_as_its_copy() -> None:
    """An attribute that leads back to the optimizer leads the copy to the copy."""
    trained = matrices()
    check_elementwise(Looking(trained.values(), torch.sign), trained)


@pytest.mark.parametrize("rate", [0.0, torch.tensor(0.0)])
def test_a_rate_of_zero_proves_nothing_wrong(rate: float | torch.Tensor) -> None:
    """At the start of a warm-up nothing moves: the state is judged all the same, and a rate in a tensor moves."""
    trained = parameters()
    check_elementwise(optim.AdamW(trained.values(), lr=rate), trained)
    fused = optim.AdamW(trained.values(), lr=rate, fused=True)
    assert "differs in" in refusal(fused, trained)
    still = HomeMade(trained.values(), MIXING["norm of the tensor"])
    still.param_groups[0]["lr"] = rate
    if isinstance(rate, float):
        check_elementwise(still, trained)  # and again when the rate is another: the key says so
    else:
        assert "differs in" in refusal(still, trained)


def test_each_group_is_tried_with_its_own_options() -> None:
    """A group whose options make a difference is found behind one that passes; masters have the outer options."""
    trained = parameters(torch.bfloat16)
    groups = [{"params": [trained["vector"]]}, {"params": [trained["first"]], "weight_decay": 0.1}]
    assert "such as 'first'" in refusal(optim.Adam(groups), trained)
    wide = parameters()
    masters = MasterWeights(wide.values(), optim.AdamW)
    check_elementwise(masters, wide)
    masters.param_groups[0]["fused"] = True
    assert "'vector' of shape [7]" in refusal(masters, wide)


def test_the_key_tells_what_a_proof_holds_for() -> None:
    """A schedule's numbers leave the key as it is; what a step decides by changes it, and so do parameters and kind."""
    trained = list(matrices().values())
    options: list[dict[str, Any]] = [
        {"lr": 0.1},
        {"lr": 0.0},
        {"lr": torch.tensor(0.1)},
        {"weight_decay": 0.0},
        {"amsgrad": True},
        {"foreach": True},
        {"foreach": False},
        {"betas": (0.0, 0.9)},
    ]
    optimizers = [optim.AdamW(trained, **one) for one in options]
    optimizers += [optim.AdamW(trained[:1]), optim.Adam(trained), optim.AdamW([{"params": [one]} for one in trained])]
    keys = [proof_key(one) for one in optimizers]
    assert all(key != other for key, other in itertools.combinations(keys, 2))
    assert keys[0] == proof_key(optim.AdamW(dict(zip("ab", trained, strict=True)).items(), lr=0.3, weight_decay=0.7))
    optimizers[0].step()
    assert keys[0] == proof_key(optimizers[0])
    assert len({hash(key) for key in keys}) > 1


class Sized(HomeMade):
    """Treats a tensor otherwise from a size on: as states in 8 bits with one scale a block, or rules by rows."""

    def __init__(self, params: Any, large: Callable[[torch.Tensor], bool]) -> None:
        super().__init__(params, lambda gradient: gradient * (2.0 if large(gradient) else 1.0))


@pytest.mark.parametrize(
    "large",
    [
        lambda gradient: gradient.numel() >= 4096 and gradient.numel() % 256 == 0,
        lambda gradient: gradient.shape[0] >= 1000,
    ],
    ids=["blocks", "rows"],
)
def test_rules_that_begin_with_a_size_are_caught(large: Callable[[torch.Tensor], bool]) -> None:
    """What a small trial cannot show is tried on many elements too."""
    trained = parameters()
    assert "differs in" in refusal(Sized(trained.values(), large), trained)
