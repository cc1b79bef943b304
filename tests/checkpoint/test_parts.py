"""What is saved of each kind of object, and that saving and loading change nothing else."""

from __future__ import annotations

import collections
import copy
import itertools
import random

import jobs
import numpy as np
import pytest
import torch
from disk import Faulty
from jobs import Job
from safetensors import safe_open
from safetensors.torch import load_file

import augend
import reference
from augend._checkpoint import _random, _save
from augend._checkpoint._optimizers import _placed
from augend._checkpoint._random import capture_random
from augend.errors import CheckpointError, ContractError, StateError

NARROW = [torch.float32, torch.bfloat16, torch.float16]


def optimizer_state(optimizer: torch.optim.Optimizer) -> str:
    """Hash dtypes, devices, strides, counters and every tensor of an optimizer, by position, groups included."""
    inner = optimizer.inner if isinstance(optimizer, augend.optim.MasterWeights) else optimizer
    masters = optimizer.masters.values() if inner is not optimizer else []
    state = copy.deepcopy(inner.state_dict())
    strides = [
        (value.stride(), str(value.device))
        for slots in inner.state.values()
        for value in slots.values()
        if isinstance(value, torch.Tensor)
    ]
    order = [sorted(slots) for slots in inner.state.values()]
    return reference.digest(state["param_groups"], sorted(state["state"].items()), strides, order, list(masters))


@pytest.mark.parametrize("optimizer", jobs.OPTIMIZERS)
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("moment", [0, 2, 4, 6])
def test_optimizer_states_are_equal_before_and_after(tmp_path, optimizer, dtype, moment):
    """Fresh, in the first window, right after a step, in the next window: dtype, counters, tensors, options equal."""
    job = Job(tmp_path, optimizer=optimizer, dtype=dtype)
    for _ in itertools.islice(job.moments(), moment + 1):
        pass
    job.run.save()
    job.run.close()
    other = Job(tmp_path, optimizer=optimizer, dtype=dtype)
    other.run.load_latest()
    assert optimizer_state(job.optimizer) == optimizer_state(other.optimizer)
    other.run.close()


@pytest.mark.parametrize("optimizer", ["adamw", "fused", "sgd", "momentum"])
@pytest.mark.parametrize("moment", [0, 2, 3, 4, 6])
@pytest.mark.parametrize("background", [False, True])
def test_saving_changes_nothing(tmp_path, optimizer, moment, background):
    """Weights, buffers, moments, pending sums, position and random state are the same to the bit after a save."""
    job = Job(tmp_path, optimizer=optimizer, background=background)
    for _ in itertools.islice(job.moments(), moment + 1):
        pass
    before = job.everything()
    job.run.save()
    job.run.wait()
    assert before == job.everything()
    lazy = len(job.optimizer.state)
    assert (0 if moment < 4 else lazy) == lazy  # reading a fresh optimizer gave it no state
    job.run.close()


@pytest.mark.parametrize("moment", [2, 4])
def test_a_refused_load_changes_nothing(tmp_path, moment):
    """A checkpoint that does not fit one part leaves every other part as it was, too."""
    job = Job(tmp_path)
    for _ in itertools.islice(job.moments(), moment + 1):
        pass
    path = job.run.save()
    job.run.close()
    other = Job(tmp_path, work="float64")  # the sums do not fit; model, optimizer and data do
    for _ in itertools.islice(other.moments(), 9):
        pass
    before = other.everything()
    with pytest.raises(ContractError, match="grads: dtype 'float32' was saved"):
        other.run.load(path)
    assert before == other.everything()
    with pytest.raises(ContractError):
        other.run.load_latest()
    assert before == other.everything()
    other.run.close()


def test_the_moments_of_a_narrow_parameter_stay_wide(tmp_path):
    """A float32 moment of 1.001 beside a bfloat16 parameter comes back as 1.001: torch's own loading makes it 1.0."""
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    module = torch.nn.Module()
    module.weight = parameter
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    wide = torch.full((3,), 1.001)
    optimizer.state[parameter] = {"step": torch.tensor(7.0), "exp_avg": wide.clone(), "exp_avg_sq": wide.clone()}
    run = augend.Checkpoint(tmp_path, model=module, optimizer=optimizer, background=False)
    path = run.save()
    optimizer.state.clear()
    run.load(path)
    slots = optimizer.state[parameter]
    assert [7.0, torch.float32] == [slots["step"].item(), slots["exp_avg"].dtype]
    assert torch.equal(wide, slots["exp_avg"])
    run.close()


def test_reading_a_fresh_optimizer_takes_no_step(tmp_path):
    """The first step after a save and a load is the first step: the weights are those of an optimizer nobody read."""
    weights = []
    for read in (False, True):
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if read:
            run = augend.Checkpoint(tmp_path, model=model, optimizer=optimizer, background=False)
            run.load(run.save())
            run.close()
            assert 0 == len(optimizer.state)
        model.weight.grad = torch.ones(1, 1)
        optimizer.step()
        weights.append(model.weight.item())
    assert weights[0] == weights[1] < -0.09


class Pair(torch.nn.Module):
    """Two parameters of one shape, registered in the order asked for."""

    def __init__(self, order: str) -> None:
        super().__init__()
        for name in order:
            self.register_parameter(name, torch.nn.Parameter(torch.full((3, 3), float(ord(name)))))


def test_states_are_matched_by_name(tmp_path):
    """Two 3x3 parameters whose order has changed get their own moments, not each other's."""
    first = Pair("ab")
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1, momentum=0.9)
    for name, parameter in first.named_parameters():
        parameter.grad = torch.full((3, 3), {"a": 1.0, "b": 2.0}[name])
    optimizer.step()
    path = augend.Checkpoint(tmp_path, model=first, optimizer=optimizer, background=False).save()
    second = Pair("ba")
    other = torch.optim.SGD(second.parameters(), lr=0.1, momentum=0.9)
    augend.Checkpoint(tmp_path, model=second, optimizer=other).load(path)
    moments = {
        name: other.state[parameter]["momentum_buffer"][0, 0].item() for name, parameter in second.named_parameters()
    }
    assert {"a": 1.0, "b": 2.0} == moments


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: torch.optim.SGD(model.parameters(), lr=0.1), "AdamW was saved, and this is .*SGD"),
        (
            lambda model: torch.optim.AdamW([{"params": [one]} for one in model.parameters()], lr=0.1),
            "1 groups of parameters were saved, and there are 2",
        ),
        (
            lambda model: torch.optim.AdamW([model.bias], lr=0.1),
            r"group 0 was saved with other parameters; it differs in 'weight'",
        ),
        (
            lambda model: augend.optim.MasterWeights(model.parameters(), torch.optim.AdamW),
            "was saved, and this is",
        ),
    ],
)
def test_another_optimizer_is_refused(tmp_path, change, message):
    """Another class, other groups, other parameters in a group: refused by name."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    path = augend.Checkpoint(tmp_path, model=model, optimizer=optimizer, background=False).save()
    with pytest.raises(ContractError, match=f"optimizer: .*{message}"):
        augend.Checkpoint(tmp_path, model=model, optimizer=change(model)).load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: torch.nn.Linear(2, 3), r"model: 'weight' was saved as torch.float32 of \[2, 2\], and is .*\[3, 2\]"),
        (lambda: torch.nn.Linear(2, 2, dtype=torch.float64), "'weight' was saved as torch.float32 .* torch.float64"),
        (lambda: torch.nn.Linear(2, 2, bias=False), r"has tensors 'bias' \(1 in all\), which is not here"),
        (
            lambda: torch.nn.Sequential(torch.nn.Linear(2, 2)),
            r"model: the checkpoint lacks tensors '0.bias' \(2 in all\)",
        ),
    ],
)
def test_another_model_is_refused(tmp_path, change, message):
    """Another shape, dtype, a missing or an additional tensor: refused by name."""
    path = augend.Checkpoint(tmp_path, model=torch.nn.Linear(2, 2), background=False).save()
    with pytest.raises(ContractError, match=message):
        augend.Checkpoint(tmp_path, model=change()).load(path)


def test_a_parameter_that_no_module_has_is_refused(tmp_path):
    """An optimizer without its module cannot be saved by names: refused, with the remedy."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2, 5))], lr=0.1)
    with pytest.raises(ContractError, match=r"shape \[2, 5\] that no module .* model=model"):
        augend.Checkpoint(tmp_path, optimizer=optimizer, background=False).save()


def test_an_optimizer_over_two_modules_names_them_apart(tmp_path):
    """Parameters of the same name in two modules keep their own moments."""
    one, two = torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD([one.weight, two.weight], lr=0.1, momentum=0.9)
    one.weight.grad, two.weight.grad = torch.tensor([[1.0]]), torch.tensor([[2.0]])
    optimizer.step()
    run = augend.Checkpoint(tmp_path, one=one, two=two, optimizer=optimizer, background=False)
    path = run.save()
    with safe_open(next((path / "optimizer").iterdir()), framework="pt") as file:
        assert {"state.one.weight.momentum_buffer", "state.two.weight.momentum_buffer"} == set(file.keys())
    optimizer.state.clear()
    run.load(path)
    assert [1.0, 2.0] == [optimizer.state[module.weight]["momentum_buffer"].item() for module in (one, two)]
    run.close()


class Own(torch.optim.SGD):
    """An optimizer that keeps its state in its own way."""

    def __init__(self, params, lr: float) -> None:
        super().__init__(params, lr)
        self.seen = 0

    def state_dict(self):
        return {**super().state_dict(), "seen": self.seen}

    def load_state_dict(self, state_dict):
        self.seen = state_dict.pop("seen")
        if self.seen == 13:
            raise ValueError("thirteen")
        super().load_state_dict(state_dict)


def test_an_optimizer_with_a_state_of_its_own_keeps_it(tmp_path):
    """A class that overrides state_dict is asked for it, and matched by the order of its parameters."""
    model = torch.nn.Linear(2, 2)
    optimizer = Own(model.parameters(), 0.1)
    optimizer.seen = 5
    run = augend.Checkpoint(tmp_path, model=model, optimizer=optimizer, background=False)
    path = run.save()
    optimizer.seen = 0
    run.load(path)
    assert 5 == optimizer.seen
    other = Own(reversed(list(model.parameters())), 0.1)
    with pytest.raises(ContractError, match="group 0 was saved with other parameters; it differs in 'the order'"):
        augend.Checkpoint(tmp_path, model=model, optimizer=other).load(path)
    run.close()


def test_what_refuses_while_it_loads_is_undone(tmp_path):
    """An object that checks its state only while it loads it gets its own state back, and nothing else was loaded."""
    model = torch.nn.Linear(2, 2)
    optimizer = Own(model.parameters(), 0.1)
    optimizer.seen = 13
    counter = Counter()
    run = augend.Checkpoint(tmp_path, counter=counter, model=model, optimizer=optimizer, background=False)
    path = run.save()
    optimizer.seen, counter.value = 1, 7
    with torch.no_grad():
        model.weight.zero_()
    with pytest.raises(ContractError, match=r"optimizer: Own refused its saved state: ValueError\('thirteen'\)"):
        run.load(path)
    assert (1, 7) == (optimizer.seen, counter.value)
    assert torch.equal(torch.zeros(2, 2), model.weight)
    run.close()


class Counter:
    """Anything with state_dict and load_state_dict."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self):
        return {"value": self.value, "all": collections.Counter({3: 2}), "where": {1: (2, float("inf"))}}

    def load_state_dict(self, state):
        assert (collections.Counter({3: 2}), {1: (2, float("inf"))}) == (state["all"], state["where"])
        self.value = state["value"]


SCHEDULERS = {
    "multistep": lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 3], gamma=0.5),
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5),
    "onecycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20),
    "plateau": lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
    "chained": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2),
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        ],
        milestones=[2],
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_torch_s_schedulers_go_on(tmp_path, name):
    """The rates after a resume are those of an uninterrupted scheduler."""

    def job(directory):
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = SCHEDULERS[name](optimizer)
        run = augend.Checkpoint(directory, model=model, optimizer=optimizer, scheduler=scheduler, background=False)
        return (model, optimizer, scheduler), run

    def rates(model, optimizer, scheduler, steps):
        grads = augend.Accumulator(model)
        for _ in range(steps):
            grads.backward(augend.losses.sum(model(torch.ones(1, 2))))
            grads.step(optimizer)
            scheduler.step(1.0) if name == "plateau" else scheduler.step()
            yield optimizer.param_groups[0]["lr"]

    objects, _ = job(tmp_path / "whole")
    expected = list(rates(*objects, 7))
    objects, run = job(tmp_path / "cut")
    first = list(rates(*objects, 3))
    run.save()
    run.close()
    objects, run = job(tmp_path / "cut")
    assert run.load_latest() is not None
    assert expected == first + list(rates(*objects, 4))
    run.close()


@pytest.mark.parametrize("where", ["here", "new"])
def test_random_state_goes_on(tmp_path, where):
    """torch's, Python's and numpy's global generators draw on where they were when the checkpoint was saved."""

    def draw() -> list[float]:
        legacy = np.random.randn(3).tolist()  # noqa: NPY002 - numpy's global generator is saved, too
        return [torch.rand(3).tolist(), random.gauss(0, 1), *legacy]

    np.random.randn()  # noqa: NPY002 - leaves half a pair of normal numbers in the generator
    random.gauss(0, 1)
    run = augend.Checkpoint(tmp_path, model=torch.nn.Linear(1, 1), background=False)
    path = run.save()
    expected = draw()
    if where == "new":
        run.close()
        run = augend.Checkpoint(tmp_path, model=torch.nn.Linear(1, 1))
    run.load(path)
    assert expected == draw()
    run.close()


def test_a_model_s_file_is_read_by_safetensors_alone(tmp_path):
    """Every tensor of the model, tied ones under both names, buffers too, is there under its own name."""
    job = Job(tmp_path)
    for _ in itertools.islice(job.moments(), 6):
        pass
    path = job.run.save()
    (file,) = (path / "model").iterdir()
    tensors = load_file(file)
    expected = job.model.state_dict()
    assert sorted(expected) == sorted(tensors)
    assert all(torch.equal(expected[name], tensors[name]) for name in expected)
    fresh = jobs.Net()
    fresh.load_state_dict(tensors)
    assert reference.digest(dict(expected)) == reference.digest(dict(fresh.state_dict()))
    job.run.close()


def test_layouts_stay_those_of_the_live_objects(tmp_path):
    """Moments of a channels-last convolution come back with the strides of their parameter."""
    model = torch.nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    model(torch.ones(2, 3, 4, 4)).sum().backward()
    optimizer.step()
    strides = model.weight.stride(), optimizer.state[model.weight]["exp_avg"].stride()
    before = {slot: value.clone() for slot, value in optimizer.state[model.weight].items()}
    run = augend.Checkpoint(tmp_path, model=model, optimizer=optimizer, background=False)
    run.load(run.save())
    after = optimizer.state[model.weight]
    assert strides == (model.weight.stride(), after["exp_avg"].stride())
    assert all(torch.equal(before[slot], after[slot]) for slot in before)
    run.close()


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"made": object()}, "thing: made is a builtins.object, which a checkpoint cannot keep"),
        ({"made": [np.int64(3)]}, r"thing: made.0 is a numpy.int64"),
        ({"made": {"it": torch.ones(2, dtype=torch.complex64)}}, "the tensor 'made.it' is .*complex64"),
        ({"made": torch.ones(2, 2).to_sparse()}, "the tensor 'made' is torch.sparse_coo"),
        ({"made": torch.ones(2, 2, device="meta")}, "the tensor 'made' is .* on meta"),
        ({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, "two tensors of its state are called 'a.b'"),
    ],
)
def test_what_cannot_be_kept_is_refused_at_the_save(tmp_path, state, message):
    """A state that no file can keep is refused when it is saved, by its place, and nothing is written."""

    class Thing:
        def state_dict(self):
            return state

        def load_state_dict(self, state_dict):
            raise AssertionError

    run = augend.Checkpoint(tmp_path, thing=Thing(), background=False)
    with pytest.raises(ContractError, match=message):
        run.save()
    assert [] == list(tmp_path.iterdir())
    run.close()


@pytest.mark.parametrize(
    ("stateful", "message"),
    [
        ({"model": 3}, r"model must be an object with state_dict.* got 3\. .*the options are called keep"),
        ({"a-b": torch.nn.Linear(1, 1)}, "named like a variable; got 'a-b'"),
        ({"model": torch.nn.Linear}, r"model must be an object with state_dict.* got <class"),
        ({"models": [torch.nn.Linear(1, 1)]}, r"models must be an object .* given one by one"),
        ({"every_step": 10}, r"every_step must be an object .*the options are called keep, every_steps"),
        ({"keep": 0}, "keep must be a whole number of at least 1; got 0"),
        ({"keep": 2.0}, "keep must be a whole number of at least 1; got 2.0"),
        ({"keep": True}, "keep must be a whole number of at least 1; got True"),
        ({"every_steps": "10"}, "every_steps must be a whole number of at least 1; got '10'"),
        ({"every_seconds": "10"}, "every_seconds must be a number of at least 0; got '10'"),
        ({"every_steps": 0}, "every_steps must be a whole number of at least 1; got 0"),
        ({"every_seconds": -1}, "every_seconds must be a number of at least 0; got -1"),
        ({"every_seconds": float("nan")}, "every_seconds must be a number of at least 0; got nan"),
    ],
)
def test_arguments_are_checked(tmp_path, stateful, message):
    """What cannot be a part, and options out of their domain, are refused at once."""
    with pytest.raises(ContractError, match=message):
        augend.Checkpoint(tmp_path, **stateful)


def test_parts_that_differ_are_refused(tmp_path):
    """Parts that only one side has, and a part of another sort, are errors: nothing is loaded in part, silently."""
    model, counter = torch.nn.Linear(1, 1), Counter()
    path = augend.Checkpoint(tmp_path, model=model, counter=counter, background=False).save()
    with pytest.raises(ContractError, match=r"has a part 'counter' that is not loaded.*counter=\.\.\.\)"):
        augend.Checkpoint(tmp_path, model=model).load(path)
    with pytest.raises(ContractError, match="no part 'more'; it has .*counter"):
        augend.Checkpoint(tmp_path, model=model, counter=counter, more=Counter()).load(path)
    with pytest.raises(ContractError, match=r"counter was saved as a state, and is a module \(Linear\)"):
        augend.Checkpoint(tmp_path, model=model, counter=model).load(path)
    position = augend.Checkpoint(tmp_path, model=model).load(path, only=("model",))
    assert (0, path) == (position.step, position.path)
    with pytest.raises(ContractError, match="'counter' is no part of this Checkpoint; it has model"):
        augend.Checkpoint(tmp_path, model=model).load(path, only=("counter",))
    with pytest.raises(ContractError, match="no part 'nothing'"):
        augend.Checkpoint(tmp_path, model=model).load(path, only=("nothing",))


def test_only_some_parts_leave_the_rest_and_random_state_alone(tmp_path):
    """load(only=...) loads those parts and nothing else."""
    job = Job(tmp_path)
    for _ in itertools.islice(job.moments(), 6):
        pass
    path = job.run.save()
    job.run.close()
    other = Job(tmp_path)
    random_state, position, optimizer = torch.get_rng_state(), other.data.state_dict(), optimizer_state(other.optimizer)
    other.run.load(path, only=["model"])
    assert torch.equal(random_state, torch.get_rng_state())
    assert (position, optimizer) == (other.data.state_dict(), optimizer_state(other.optimizer))
    assert reference.digest(job.model.state_dict()) == reference.digest(other.model.state_dict())


def test_a_broken_window_is_not_saved(tmp_path):
    """A window that cannot go on is refused at the save: what is on disk can always go on."""
    job = Job(tmp_path)
    batch = next(iter(job.data))
    microbatches = job.grads.microbatches(batch)
    microbatch = next(microbatches)
    job.model.a.weight.register_hook(lambda gradient: (_ for _ in ()).throw(RuntimeError("a fault")))
    with pytest.raises(RuntimeError, match="a fault"):
        job.grads.backward(jobs.loss(job.model, microbatch))
    with pytest.raises(StateError, match=r"cannot go on.*reset\(\)"):
        job.run.save()
    job.run.close()


def test_nothing_to_save_is_refused(tmp_path):
    """A Checkpoint without parts saves nothing, and says so."""
    with pytest.raises(ContractError, match=r"nothing to save; .*model=model"):
        augend.Checkpoint(tmp_path).save()


def test_a_state_of_another_sort_is_a_checkpoint_error(tmp_path):
    """A part whose saved state is not what such an object has is named, whatever is wrong in it."""

    class Liar(torch.optim.SGD):
        pass

    model = torch.nn.Linear(1, 1)
    optimizer = Liar(model.parameters(), lr=0.1)
    run = augend.Checkpoint(tmp_path, model=model, optimizer=optimizer, background=False)
    run._parts._parts["optimizer"].capture = lambda: {"kinds": 3}
    path = run.save()
    run.close()
    with pytest.raises((CheckpointError, ContractError), match="optimizer"):
        augend.Checkpoint(tmp_path, model=model, optimizer=optimizer).load(path)


def test_state_of_an_unknown_parameter_is_refused(tmp_path):
    """A state for a parameter that the live optimizer has not would be lost silently: refused by name."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = augend.Checkpoint(tmp_path, model=model, optimizer=optimizer, background=False)
    whole = run._parts._parts["optimizer"].capture()
    run._parts._parts["optimizer"].capture = lambda: {**whole, "state": {"gone": {"momentum_buffer": torch.ones(1)}}}
    path = run.save()
    run.close()
    with pytest.raises(ContractError, match="optimizer: the checkpoint has state of 'gone', which this optimizer has"):
        augend.Checkpoint(tmp_path, model=model, optimizer=optimizer).load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda masters: {}, "only one side has a master of 'weight'"),
        (lambda masters: {"weight": masters["weight"].double()}, r"'weight' was saved as torch.float64 of \[2, 2\]"),
        (lambda masters: {"weight": masters["weight"][:1]}, r"as torch.float32 of \[1, 2\], and is \[2, 2\]"),
    ],
)
def test_masters_that_do_not_fit_are_refused(tmp_path, change, message):
    """A missing master, and one of another dtype or shape, are refused by name."""
    model = torch.nn.Linear(2, 2, bias=False, dtype=torch.bfloat16)
    optimizer = augend.optim.MasterWeights(model.parameters(), torch.optim.AdamW)
    run = augend.Checkpoint(tmp_path, model=model, optimizer=optimizer, background=False)
    whole = run._parts._parts["optimizer"].capture()
    run._parts._parts["optimizer"].capture = lambda: {**whole, "masters": change(whole["masters"])}
    path = run.save()
    run.close()
    before = optimizer_state(optimizer)
    with pytest.raises(ContractError, match=message):
        augend.Checkpoint(tmp_path, model=model, optimizer=optimizer).load(path)
    assert before == optimizer_state(optimizer)


def test_slots_that_are_no_tensors_come_back(tmp_path):
    """Some optimizers keep plain numbers and None in their state."""
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    nested = {"seen": 3, "buffer": None, "history": [torch.ones(2)], "more": {"a": (torch.zeros(1, 1), 2)}}
    optimizer.state[model.weight] = nested
    run = augend.Checkpoint(tmp_path, model=model, optimizer=optimizer, background=False)
    path = run.save()
    optimizer.state.clear()
    run.load(path)
    run.close()
    slots = optimizer.state[model.weight]
    assert (3, None, [1.0, 1.0]) == (slots["seen"], slots["buffer"], slots["history"][0].tolist())
    assert ([[0.0]], 2) == (slots["more"]["a"][0].tolist(), slots["more"]["a"][1])


@pytest.mark.parametrize("count", [1, 2])
def test_the_generators_of_accelerators_are_saved(tmp_path, monkeypatch, count):
    """Their states come back where as many accelerators are there; with another number they are left alone."""

    class Module:
        def __init__(self, devices: int) -> None:
            self.states = [torch.full((4,), index + 1, dtype=torch.uint8) for index in range(devices)]

        def get_rng_state(self, index):
            return self.states[index]

        def set_rng_state(self, state, index):
            self.states[index] = state

    def machine(devices: int) -> Module:
        module = Module(devices)
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: devices)
        monkeypatch.setattr(torch, "get_device_module", lambda: module)
        return module

    machine(2)
    run = augend.Checkpoint(tmp_path, model=torch.nn.Linear(1, 1), background=False)
    path = run.save()
    here = machine(count)
    here.states = [state + 10 for state in here.states]
    run.load(path)
    run.close()
    expected = [[1] * 4, [2] * 4] if count == 2 else [[11] * 4]
    assert expected == [state.tolist() for state in here.states]


def test_a_rank_of_several_has_one_accelerator(monkeypatch):
    """It saves the state of its own alone: to ask the others would wake them up."""
    asked = []
    states = {index: torch.full((4,), index, dtype=torch.uint8) for index in range(8)}

    class Module:
        get_rng_state = staticmethod(lambda index: (asked.append(index), states[index])[1])
        set_rng_state = staticmethod(lambda state, index: states.update({index: state}))

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 5)
    monkeypatch.setattr(torch, "get_device_module", lambda: Module)
    monkeypatch.setattr(_random, "rank_and_world", lambda: (13, 16))
    saved = capture_random()
    assert [5] == asked
    states[5] = states[0]
    _random.prepare_random(saved)()
    assert [5] * 4 == states[5].tolist()


@pytest.mark.parametrize("name", ["torch", "python", "numpy", "accelerators"])
def test_a_random_state_that_is_none_is_refused(tmp_path, monkeypatch, name):
    """It is checked before anything is loaded."""
    model = torch.nn.Linear(1, 1)
    run = augend.Checkpoint(tmp_path, model=model, background=False)
    monkeypatch.setattr(_save, "capture_random", lambda: {**capture_random(), name: [3, ["x"]]})
    path = run.save()
    with torch.no_grad():
        model.weight.fill_(7.0)
    with pytest.raises(ContractError, match="the saved random state is not one"):
        run.load(path)
    run.close()
    assert 7.0 == model.weight.item()


class Custom(torch.nn.Module):
    """A module that keeps what torch would not: an extra state of any kind, and a version."""

    _version = 2

    def __init__(self, extra: object = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.extra = extra

    def get_extra_state(self) -> object:
        return self.extra

    def set_extra_state(self, state: object) -> None:
        if state == "bad":
            raise ValueError("a bad state")
        self.extra = state

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest) -> None:
        if local_metadata.get("version", 1) < 2:
            state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"] * 10  # an old file is migrated
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


@pytest.mark.parametrize(
    ("saved", "live"),
    [
        (collections.OrderedDict(a=1), {"a": 1}),
        (np.float64(2.5), 2.5),
        ({"seen": (1, None)}, None),
        (torch.arange(3), torch.zeros(3, dtype=torch.int64)),
        (3, "other"),
    ],
)
def test_extra_state_of_modules_comes_back(tmp_path, saved, live):
    """What get_extra_state gives is what set_extra_state gets, whatever the live module has now."""
    run = augend.Checkpoint(tmp_path, model=Custom(saved), background=False)
    path = run.save()
    run.close()
    model = Custom(live)
    augend.Checkpoint(tmp_path, model=model).load(path)
    assert str(saved) == str(model.extra) or dict(saved) == model.extra


def test_versions_of_modules_come_back(tmp_path):
    """A module that migrates old states sees that this one is new."""
    run = augend.Checkpoint(tmp_path, model=torch.nn.Sequential(Custom()), background=False)
    path = run.save()
    run.close()
    model = torch.nn.Sequential(Custom())
    augend.Checkpoint(tmp_path, model=model).load(path)
    assert [1.0, 1.0] == model[0].weight.tolist()


class Picky(Counter):
    """Refuses to load with an error of its own kind."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.error = error

    def load_state_dict(self, state) -> None:
        if state["value"] == 13:
            raise self.error("thirteen")
        super().load_state_dict(state)


@pytest.mark.parametrize("error", [AssertionError, ZeroDivisionError, OSError, KeyError, KeyboardInterrupt])
@pytest.mark.parametrize("place", ["first", "last"])
def test_whatever_refuses_everything_is_undone(tmp_path, error, place):
    """Also where the object that refuses comes last, and for an interrupt: all parts are as they were."""
    picky, counter = Picky(error), Counter()
    model = Custom("a state")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts = {"picky": picky, "counter": counter, "model": model, "optimizer": optimizer}
    if place == "last":
        parts = dict(reversed(parts.items()))
    run = augend.Checkpoint(tmp_path, **parts, background=False)
    picky.value = 13
    path = run.save()
    picky.value, counter.value, model.extra = 1, 7, "another"
    with torch.no_grad():
        model.weight.fill_(3.0)
    optimizer.param_groups[0]["lr"] = 0.5
    kind = KeyboardInterrupt if error is KeyboardInterrupt else ContractError
    with pytest.raises(kind, match="thirteen"):
        run.load(path)
    assert (1, 7, "another", 0.5) == (picky.value, counter.value, model.extra, optimizer.param_groups[0]["lr"])
    assert [3.0, 3.0] == model.weight.tolist()
    run.close()


def test_a_module_that_refuses_is_a_refusal(tmp_path):
    """An error of a module's own loading is named, and what was loaded before it is undone."""
    model, counter = Custom("bad"), Counter()
    run = augend.Checkpoint(tmp_path, counter=counter, model=model, background=False)
    path = run.save()
    counter.value, model.extra = 7, "good"
    with pytest.raises(ContractError, match=r"model: Custom refused its saved state: ValueError\('a bad state'\)"):
        run.load(path)
    assert (7, "good") == (counter.value, model.extra)
    run.close()


def test_nothing_is_saved_after_a_load_that_was_interrupted(tmp_path, monkeypatch):
    """Between two parts that cannot refuse an interrupt leaves a mixture: it can be loaded over, but not saved."""
    job = Job(tmp_path)
    for _ in itertools.islice(job.moments(), 7):
        pass
    before = job.everything()
    job.run.save()

    def interrupted(places):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(augend.Batches, "arrange", lambda data, places: interrupted(places))
        with pytest.raises(KeyboardInterrupt):
            job.run.load_latest()
    with pytest.raises(StateError, match="interrupted in the middle of it; load again before you save"):
        job.run.save()
    job.run.load_latest()
    assert before == job.everything()
    job.run.save()
    job.run.close()


def test_a_record_that_cannot_be_written_leaves_all_as_it_was(tmp_path):
    """On a full disk load_latest refuses before anything is loaded."""
    job = Job(tmp_path)
    job.run.save()
    for _ in itertools.islice(job.moments(), 7):
        pass
    before = job.everything()
    job.run._files = Faulty("append", 0)
    with pytest.raises(CheckpointError, match=r"restarts\.jsonl cannot be written: No space left"):
        job.run.load_latest()
    assert before == job.everything()
    job.run.close()


def test_a_rate_that_the_program_holds_stays_its_own(tmp_path):
    """A tensor rate is written into, not replaced: a loop that fills it goes on to be heard."""
    rate = torch.tensor(0.1)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    run = augend.Checkpoint(tmp_path, model=model, optimizer=optimizer, background=False)
    path = run.save()
    rate.fill_(0.5)
    run.load(path)
    run.close()
    assert rate is optimizer.param_groups[0]["lr"]
    assert torch.equal(torch.tensor(0.1), rate)


def test_what_an_optimizer_keeps_beside_its_parameters_is_saved(tmp_path):
    """State under keys that are no parameters, and what hooks add, comes back."""
    model = torch.nn.Linear(1, 1)

    def optimizer_of(seen: list) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if seen:
            optimizer.register_state_dict_post_hook(lambda one, state: {**state, "seen": list(seen)})
            optimizer.register_load_state_dict_pre_hook(lambda one, state: seen.append(state.pop("seen")))
        return optimizer

    plain = optimizer_of([])
    plain.state["count"] = 3
    run = augend.Checkpoint(tmp_path / "plain", model=model, optimizer=plain, background=False)
    path = run.save()
    plain.state.clear()
    run.load(path)
    run.close()
    assert 3 == plain.state["count"]
    seen: list = [5]
    run = augend.Checkpoint(tmp_path / "hooks", model=model, optimizer=optimizer_of(seen), background=False)
    path = run.save()
    seen[0] = 6
    run.load(path)
    run.close()
    assert [6, [5]] == seen


def test_what_has_no_memory_yet_is_refused(tmp_path):
    """Models on the meta device and lazy ones are named, with the remedy, and never skipped."""
    path = augend.Checkpoint(tmp_path, model=torch.nn.Linear(1, 1), background=False).save()
    with pytest.raises(ContractError, match=r"model: 'weight' has no memory yet \(meta device\); call to_empty"):
        augend.Checkpoint(tmp_path, model=torch.nn.Linear(1, 1, device="meta")).load(path)
    for model in (torch.nn.LazyLinear(1), torch.nn.Linear(1, 1, device="meta")):
        with pytest.raises(ContractError, match=r"weight' is .*(on meta|not initialised yet)"):
            augend.Checkpoint(tmp_path / "new", model=model).save()


def test_a_load_clears_the_gradient_of_an_earlier_finish(tmp_path):
    """After a load there is no update left over from before it: the next save is allowed."""
    job = Job(tmp_path)
    job.run.save()
    for microbatch in job.grads.microbatches(next(iter(job.data))):
        job.grads.backward(jobs.loss(job.model, microbatch))
    job.grads.finish()
    job.run.load_latest()
    assert not job.grads.gradients_left
    assert all(parameter.grad is None for parameter in job.model.parameters())
    job.run.save()
    job.run.close()


def test_a_step_counter_stays_where_torch_has_it():
    """Slots go to their parameter's device, but the step of a plain loop, which torch keeps on the CPU."""
    parameter = torch.nn.Parameter(torch.ones(2, device="meta"))
    value = torch.tensor(3.0)
    assert "cpu" == _placed(value, "step", parameter, {"fused": None, "capturable": False}).device.type
    for option in ("fused", "capturable"):
        assert "meta" == _placed(value, "step", parameter, {option: True}).device.type
    assert ["meta", "meta"] == [_placed(one, "exp_avg", parameter, {}).device.type for one in (value, torch.ones(2))]


def test_an_error_where_none_can_be_leaves_a_mixture_that_is_not_saved(tmp_path, monkeypatch):
    """If a part fails that cannot refuse, its own error is raised, and nothing is saved before the next load."""
    job = Job(tmp_path)
    for _ in itertools.islice(job.moments(), 7):
        pass
    before = job.everything()
    job.run.save()

    def broken(*_):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr("augend._checkpoint._optimizers._into", broken)
        with pytest.raises(RuntimeError, match="out of memory"):
            job.run.load_latest()
    with pytest.raises(StateError, match="load again before you save"):
        job.run.save()
    job.run.load_latest()
    assert before == job.everything()
    job.run.close()
