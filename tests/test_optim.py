"""MasterWeights: float32 masters for 16-bit parameters, stepped as float32 parameters would be."""

from __future__ import annotations

import copy
import functools

import pytest
import torch

import augend
import reference
from augend.errors import ContractError
from augend.optim import MasterWeights
from models import rows, tally, tower

STORED = [torch.bfloat16, torch.float16]
MAKE = {
    "AdamW": functools.partial(torch.optim.AdamW, lr=1e-3, eps=1e-3),
    "AdamW fused": functools.partial(torch.optim.AdamW, lr=1e-3, eps=1e-3, fused=True),
    "SGD momentum": functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
}


@pytest.mark.parametrize("dtype", STORED)
def test_small_steps_are_not_lost(dtype: torch.dtype) -> None:
    """Sixty-four steps of 2^-12 from 1.0 move a 16-bit weight by exactly 2^-6; 16 bits alone may never move."""
    model = torch.nn.Linear(1, 1, bias=False, dtype=dtype)
    torch.nn.init.ones_(model.weight)
    optimizer = MasterWeights(model.parameters(), functools.partial(torch.optim.SGD, lr=2.0**-12))
    grads = augend.Accumulator(model)
    for _ in range(64):
        grads.add({"weight": torch.ones(1, 1)}, 1)
        grads.step(optimizer)
    assert 1.0 - 2.0**-6 == float(optimizer.masters[model.weight].detach()) == float(model.weight.detach())


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("dtype", STORED)
def test_masters_are_stepped_as_float32_parameters(dtype: torch.dtype, name: str) -> None:
    """The masters equal float32 parameters with the same gradients, bit for bit; the parameter is their cast."""
    model = torch.nn.Linear(3, 2, dtype=dtype)
    plain = torch.nn.Linear(3, 2)
    plain.load_state_dict({key: value.float() for key, value in model.state_dict().items()})
    pairs = [
        (augend.Accumulator(model), MasterWeights(model.parameters(), MAKE[name])),
        (augend.Accumulator(plain), MAKE[name](list(plain.parameters()))),
    ]
    for step in range(5):
        gradients = {key: torch.randn(value.shape) for key, value in plain.state_dict().items()}
        for grads, optimizer in pairs:
            grads.add(gradients, step + 1)
            grads.step(optimizer, max_norm=0.5)
    masters = pairs[0][1].masters
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(other, masters[parameter])
        assert torch.equal(masters[parameter].to(dtype), parameter)
        assert parameter.grad is None
        assert masters[parameter].grad is None


def test_the_master_wins() -> None:
    """What is written to the parameter between steps is lost: the next step casts the master again."""
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    torch.nn.init.ones_(model.weight)
    optimizer = MasterWeights(model.parameters(), functools.partial(torch.optim.SGD, lr=0.5))
    with torch.no_grad():
        model.weight.fill_(100.0)
    model.weight.grad = torch.ones(1, 1, dtype=torch.bfloat16)
    optimizer.step()
    assert 0.5 == float(model.weight.detach())


def test_it_is_an_ordinary_optimizer() -> None:
    """A plain backward, torch's schedulers and zero_grad work; float32 parameters and absent gradients too."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, dtype=torch.bfloat16), torch.nn.Linear(2, 2))
    optimizer = MasterWeights(
        [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.25}],
        functools.partial(torch.optim.SGD, lr=1.0),
    )
    assert [1.0, 0.25] == [group["lr"] for group in optimizer.param_groups]
    assert optimizer.masters[model[1].weight] is model[1].weight
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model[0].weight.grad = torch.ones(2, 2, dtype=torch.bfloat16)
    model[1].bias.grad = torch.ones(2)
    optimizer.step()
    scheduler.step()
    after = list(model.parameters())
    assert torch.equal((before[0].float() - 1).bfloat16(), after[0])
    assert torch.equal(before[1], after[1])
    assert torch.equal(before[3] - 0.25, after[3])
    assert [0.5, 0.125] == [group["lr"] for group in optimizer.param_groups]
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
    model[1].bias.grad = torch.ones(2)
    optimizer.step()
    assert torch.equal(before[3] - 0.25 - 0.125, after[3])


@pytest.mark.parametrize("dtype", STORED)
def test_state_round_trip(dtype: torch.dtype) -> None:
    """Saved and loaded into new objects it goes on with the same bits: masters are not cast to 16 bits on the way."""
    runs = []
    for resumed in (False, True):
        model = tower(dtype)
        optimizer = MasterWeights(model.parameters(), MAKE["AdamW"])
        grads = augend.Accumulator(model)
        for step in range(6):
            if resumed and step == 3:
                state = copy.deepcopy(optimizer.state_dict())
                model = tower(dtype)
                optimizer = MasterWeights(model.parameters(), MAKE["AdamW"])
                optimizer.load_state_dict(state)
                grads = augend.Accumulator(model)
            grads.backward(tally(model, *rows(4, seed=step, dtype=dtype)))
            grads.step(optimizer)
        runs.append(reference.digest(dict(model.named_parameters()), optimizer.state_dict()))
    assert runs[0] == runs[1]


def test_wrong_states_and_uses_are_refused() -> None:
    """Another version, other masters, a closure, and a maker that drops groups are refused by name."""
    model = torch.nn.Linear(2, 1, dtype=torch.bfloat16)
    optimizer = MasterWeights(model.parameters(), MAKE["AdamW"])
    before = reference.digest(optimizer.state_dict())
    state = copy.deepcopy(optimizer.state_dict())
    for change, words in (
        ({"version": 2}, "version 1; got 2"),
        ({"masters": []}, r"float32 of shapes \[\[1, 2\], \[1\]\]"),
    ):
        with pytest.raises(ContractError, match=words):
            optimizer.load_state_dict({**state, **change})
    named = MasterWeights(model.named_parameters(), MAKE["AdamW"])
    assert [["weight", "bias"]] == named.state_dict()["names"]
    swapped = MasterWeights(reversed(list(model.named_parameters())), MAKE["AdamW"])
    with pytest.raises(ContractError, match=r"of the parameters \[\['weight', 'bias'\]\], and these are \[\['bias', "):
        swapped.load_state_dict(named.state_dict())
    narrow = [one.bfloat16() for one in state["masters"]]
    with pytest.raises(ContractError, match="float32 of shapes"):
        optimizer.load_state_dict({**state, "masters": narrow})
    assert before == reference.digest(optimizer.state_dict())
    with pytest.raises(ContractError, match="takes no closure"):
        optimizer.step(lambda: 0.0)
    groups = [{"params": [model.weight]}, {"params": [model.bias]}]
    with pytest.raises(ContractError, match="make must keep the 2 groups"):
        MasterWeights(groups, lambda given: torch.optim.SGD([p for g in given for p in g["params"]], lr=0.1))


def test_a_rate_set_after_the_step_is_saved() -> None:
    """optimizer.step, scheduler.step, save: the saved rate is the new one."""
    model = torch.nn.Linear(1, 1, dtype=torch.bfloat16)
    optimizer = MasterWeights(model.parameters(), functools.partial(torch.optim.SGD, lr=1.0))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.step()
    scheduler.step()
    other = MasterWeights(model.parameters(), functools.partial(torch.optim.SGD, lr=7.0))
    other.load_state_dict(optimizer.state_dict())
    assert 0.5 == other.param_groups[0]["lr"] == other.inner.param_groups[0]["lr"]


def test_an_optimizer_that_counts_in_its_groups_keeps_counting() -> None:
    """What the inner optimizer writes into its groups is not undone by the next step."""

    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                group["k"] = group.get("k", 0) + 1
            return super().step(closure)

    model = torch.nn.Linear(1, 1, dtype=torch.bfloat16)
    optimizer = MasterWeights(model.parameters(), functools.partial(Counting, lr=1.0))
    for _ in range(3):
        optimizer.step()
    assert 3 == optimizer.inner.param_groups[0]["k"] == optimizer.param_groups[0]["k"]


def test_cyclic_schedulers_copies_and_pickles_work() -> None:
    """OneCycleLR finds the betas; a deep copy has masters of its own parameters; groups are fixed at construction."""
    model = torch.nn.Linear(2, 1, dtype=torch.bfloat16)
    optimizer = MasterWeights(model.parameters(), MAKE["AdamW"])
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=4)
    other_model, other = copy.deepcopy((model, optimizer))
    assert list(other_model.parameters()) == list(other.masters)
    for one, parameters in ((optimizer, model), (other, other_model)):
        parameters.weight.grad = torch.ones(1, 2, dtype=torch.bfloat16)
        one.step()
    assert torch.equal(model.weight, other_model.weight)
    assert torch.equal(optimizer.masters[model.weight], other.masters[other_model.weight])
    assert optimizer.masters[model.weight] is not other.masters[other_model.weight]
    with pytest.raises(ContractError, match="takes all its groups when it is made"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})


def test_a_failed_step_leaves_no_gradient_on_a_master() -> None:
    """A master's gradient of a failed step does not come back with the next batch."""

    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            raise RuntimeError("no")

    model = torch.nn.Linear(1, 1, dtype=torch.bfloat16)
    optimizer = MasterWeights(model.parameters(), functools.partial(Failing, lr=1.0))
    grads = augend.Accumulator(model)
    grads.add({"weight": torch.ones(1, 1)}, 1)
    with pytest.raises(RuntimeError, match="no"):
        grads.step(optimizer)
    assert all(master.grad is None for master in optimizer.masters.values())
