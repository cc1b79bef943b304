"""fit: the plain loop, with validation, schedule, early stopping and listeners that never change its result."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import augend
from augend._fit import Begin, End, Step, Validation
from augend.errors import ContractError, EmptyWindowError, NonFiniteError

ROWS = 24


def rows(seed: int = 0) -> dict[str, torch.Tensor]:
    """Draw a small regression problem."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, 4, generator=generator)  # [rows, 4]
    return {"x": x, "y": x.sum(dim=1, keepdim=True) + 0.1 * torch.randn(ROWS, 1, generator=generator)}


def batches(seed: int = 0, **options) -> augend.Batches:
    """Batches of 8 rows in micro-batches of 3: three steps an epoch."""
    return augend.Batches(rows(seed), **{"batch_size": 8, "microbatch_size": 3, **options})


def network() -> nn.Module:
    """Return a network with dropout and running statistics: all that validation could disturb."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.25), nn.Linear(8, 1))


def mse(model: nn.Module, microbatch) -> augend.Tally:
    """Return the squared error of each row."""
    return augend.losses.mse(model(microbatch["x"]), microbatch["y"])


def fitted(model: nn.Module, data: augend.Batches, *, lr: float = 0.05, **options) -> augend.History:
    """Fit with Adam."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    return augend.fit(model, data, **{"loss": mse, "optimizer": optimizer, **options})


def bits(model: nn.Module) -> list[tuple[str, list]]:
    """Return all parameters and buffers."""
    return [(name, value.tolist()) for name, value in model.state_dict().items()]


def test_fit_is_the_plain_loop():
    """Weights, losses and norms are bitwise those of the loop that the front door shows."""
    mine = network()
    history = fitted(mine, batches(), steps=5, max_norm=1.0)
    model, data = network(), batches()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    grads = augend.Accumulator(model)
    finished = []
    for batch in data:
        if batch.step == 5:
            break
        for microbatch in grads.microbatches(batch):
            grads.backward(mse(model, microbatch))
        finished.append(grads.step(optimizer, max_norm=1.0))
    assert bits(model) == bits(mine)
    assert [(done.losses, done.norm, done.scale, done.count) for done in finished] == [
        (step.losses, step.norm, step.scale, step.count) for step in history.steps
    ]
    assert [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1)] == [(step.step, step.epoch) for step in history.steps]
    assert [1, 2, 3, 4, 5] == [step.update for step in history.steps]


@given(st.integers(1, 16), st.integers(0, 2**31))
def test_the_cut_does_not_change_a_bit_where_numbers_are_whole(size, seed):
    """A linear model on whole numbers, 16 rows a batch and a rate of 2^-8: every cut gives the same weights."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-3, 4, (16, 3), generator=generator).float()
    data = {"x": x, "y": torch.randint(-3, 4, (16, 1), generator=generator).float()}

    def trained(microbatch_size: int) -> list:
        model = nn.Linear(3, 1)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        cut = augend.Batches(data, batch_size=16, microbatch_size=microbatch_size)
        augend.fit(model, cut, loss=mse, optimizer=torch.optim.SGD(model.parameters(), lr=2.0**-8), steps=2)
        return bits(model)

    assert trained(16) == trained(size)


def test_validation_does_not_disturb_training():
    """With dropout, running statistics and shuffling: the same bits with validation after every step and without."""
    alone, watched = network(), network()
    fitted(alone, batches(), epochs=3)
    history = fitted(watched, batches(), epochs=3, validation=batches(seed=1), validate_every=1, metrics={"again": mse})
    assert bits(alone) == bits(watched)
    assert 9 == len(history.validations)


def test_validation_comes_at_the_end_of_every_epoch_and_of_training():
    """Without validate_every: after steps 3 and 6 and at the end; with 2: after 2, 4, 6 and at the end."""
    epochs = fitted(network(), batches(), steps=7, validation=batches(seed=1))
    every = fitted(network(), batches(), steps=7, validation=batches(seed=1), validate_every=2)
    assert [2, 5, 6] == [validation.step for validation in epochs.validations]
    assert [1, 3, 5, 6] == [validation.step for validation in every.validations]


def test_what_validation_says_is_what_evaluate_says():
    """The last validation is evaluate on the trained model: losses, metrics, and every bit."""
    model = network()
    history = fitted(model, batches(), epochs=1, validation=batches(seed=1), metrics={"again": mse})
    expected = augend.evaluate(model, batches(seed=1), loss=mse, metrics={"again": mse})
    assert expected == history.validations[-1].estimates
    assert expected["loss"] == history.validations[-1].loss


def test_training_begins_where_the_data_stands():
    """Steps and epochs count from the start of the data: 2 steps and then up to 5 are the 5 steps at once."""
    whole, parts = network(), network()
    fitted(whole, batches(), steps=5)
    data = batches()
    held = {
        "optimizer": torch.optim.Adam(parts.parameters(), lr=0.05),
        "accumulator": augend.Accumulator(parts),  # the same one: dropout is drawn by its ordinal
    }
    first = fitted(parts, data, steps=2, **held)
    second = fitted(parts, data, steps=5, **held)
    assert bits(whole) == bits(parts)
    assert [[0, 1], [2, 3, 4]] == [[step.step for step in history.steps] for history in (first, second)]
    third = fitted(parts, data, epochs=1, **held)
    assert "0 steps: all 3 steps are done" == str(third)


@pytest.mark.parametrize("length", [{"epochs": 2}, {"steps": 6}])
def test_a_length_can_be_given_in_any_one_place(length):
    """epochs=, steps= and Batches(epochs=) mean the same length."""
    by_data = fitted(network(), batches(epochs=2))
    assert 6 == len(by_data.steps) == len(fitted(network(), batches(), **length).steps)


def test_a_skipped_step_does_not_move_the_schedule():
    """The rate of a step is that of the updates really taken before it, and a skipped step leaves no trace."""
    data = rows()
    data["x"][8:16] = math.nan  # the second batch
    model = nn.Linear(4, 1)
    told: list[object] = []
    history = augend.fit(
        model,
        augend.Batches(data, batch_size=8, microbatch_size=3, shuffle=False),
        loss=mse,
        optimizer=torch.optim.SGD(model.parameters(), lr=9.0),
        epochs=1,
        schedule=lambda update: 0.5 / (update + 1),
        nonfinite="skip",
        listeners=[told.append],
    )
    assert [0.5, 0.25, 0.25] == [step.lr for step in history.steps]
    assert [False, True, False] == [step.skipped for step in history.steps]
    assert [1, 1, 2] == [step.update for step in history.steps]
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_a_batch_without_items_is_skipped_or_raises():
    """A batch that counts nothing leaves weights, moments and schedule alone with empty="skip"; else it raises."""
    data = rows()
    data["x"] = data["x"].clone()

    def hidden(model, microbatch):
        tally = mse(model, microbatch)
        return augend.Tally(tally.total * 0, tally.count * 0) if microbatch.step == 1 else tally

    for options in ({"empty": "skip"}, {}):
        model = nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        source = augend.Batches(data, batch_size=8, microbatch_size=3, shuffle=False)
        if not options:
            with pytest.raises(EmptyWindowError):
                augend.fit(model, source, loss=hidden, optimizer=optimizer, epochs=1)
            continue
        history = augend.fit(model, source, loss=hidden, optimizer=optimizer, epochs=1, **options)
        assert [False, True, False] == [step.skipped for step in history.steps]
        assert 2 == int(optimizer.state[model.weight]["step"])
        assert math.isnan(history.steps[1].loss.value)


def test_the_schedule_goes_on_with_an_accumulator_that_has_trained():
    """A second call with the same accumulator starts the schedule where the first one left it."""
    model, data = nn.Linear(4, 1), batches()
    options = {"accumulator": augend.Accumulator(model), "schedule": lambda update: 2.0**-update}
    rates = [[step.lr for step in fitted(model, data, steps=steps, **options).steps] for steps in (2, 4)]
    assert [[1.0, 0.5], [0.25, 0.125]] == rates


def test_without_a_schedule_the_rate_is_left_alone():
    """The recorded rate is the optimizer's own."""
    assert [0.05, 0.05] == [step.lr for step in fitted(network(), batches(), steps=2).steps]


def test_an_infinite_gradient_raises_by_default():
    """Without nonfinite="skip" an inf ends training with an error that names it."""
    data = rows()
    data["y"][0] = math.inf
    with pytest.raises(NonFiniteError):
        fitted(network(), augend.Batches(data, batch_size=8, microbatch_size=3), epochs=1)


@pytest.mark.parametrize("value", [1.0, math.nan])
def test_training_stops_after_patience_without_a_lower_loss(value):
    """A validation loss that never falls, or is NaN, stops after the first validation and two more."""

    def stuck(model, microbatch):
        tally = mse(model, microbatch)
        return tally if model.training else augend.Tally(tally.total * 0 + value, tally.count)

    options = {"loss": stuck, "validation": batches(seed=1), "validate_every": 1, "patience": 2}
    history = fitted(network(), batches(), steps=9, **options)
    assert 3 == len(history.steps) == len(history.validations)
    assert "no lower validation loss in 2 validations" == history.stopped


def test_a_falling_loss_is_not_stopped():
    """With patience 1 a loss that falls at each validation, even from NaN, trains to the end; a NaN then stops it."""
    values = iter([math.nan, 2.0, 1.0, 1.0, math.nan])

    def falling(model, microbatch):
        tally = mse(model, microbatch)
        return tally if model.training else augend.Tally(tally.total * 0 + next(values), tally.count)

    whole = augend.Batches(rows(1), batch_size=ROWS, microbatch_size=ROWS)
    options = {"loss": falling, "validation": whole, "validate_every": 1, "patience": 1}
    assert "all 3 steps are done" == fitted(network(), batches(), steps=3, **options).stopped
    assert "no lower validation loss in 1 validations" == fitted(network(), batches(), steps=3, **options).stopped


def test_listeners_hear_everything_in_order():
    """Begin, each step, each validation after its step, End with the history; every listener the same events."""
    first: list[object] = []
    second: list[object] = []
    history = fitted(
        network(), batches(), epochs=2, validation=batches(seed=1), listeners=(first.append, second.append)
    )
    assert [Begin, Step, Step, Step, Validation, Step, Step, Step, Validation, End] == [type(event) for event in first]
    assert first == second
    assert Begin(steps=6) == first[0]
    assert history == first[-1].history
    assert history.steps == tuple(event for event in first if isinstance(event, Step))
    assert history.validations == tuple(event for event in first if isinstance(event, Validation))
    assert all(step.seconds > 0 and step.rows == 8 for step in history.steps)


def test_steps_have_digests_where_they_are_due():
    """Every so many steps, counted from the first of the data, a step tells the parameters after it; others nothing."""
    model, data = network(), batches()
    assert [{}, {}, {}] == [step.digests for step in fitted(model, data, steps=3).steps]
    grads = augend.Accumulator(model)
    history = fitted(model, data, steps=6, digest_every=2, accumulator=grads)
    assert [3, 5] == [step.step for step in history.steps if step.digests]
    assert grads.digests() == history.steps[-1].digests
    assert grads.digests() != history.steps[0].digests
    assert [name for name, _ in model.named_parameters()] == list(history.steps[0].digests)


def test_a_history_can_be_read():
    """Printed, a history says how far it went, why it ended, and the losses with their errors."""
    history = fitted(network(), batches(), epochs=1, validation=batches(seed=1), metrics={"again": mse})
    first, last, end = history.steps[0].loss, history.steps[-1].loss, history.validations[-1].loss
    assert (
        "3 steps: all 3 steps are done\n"
        f"training loss {first} at first, {last} at last\n"
        f"validation loss {end}, again {end}" == str(history)
    )


def test_several_terms_need_an_accumulator_that_knows_them():
    """Named terms go with accumulator=Accumulator(model, terms=...), are told by name, and the first one leads."""

    def terms(model, microbatch):
        tally = mse(model, microbatch)
        return {"main": tally, "aux": augend.Tally(tally.total * 2, tally.count)}

    model = network()
    grads = augend.Accumulator(model, terms=("main", "aux"))
    history = fitted(model, batches(), loss=terms, steps=1, accumulator=grads, validation=batches(seed=1))
    step, validation = history.steps[0], history.validations[0]
    assert ["main", "aux"] == list(step.losses) == list(validation.estimates)
    assert step.losses["main"] == step.loss
    assert 2 * step.losses["main"].value == step.losses["aux"].value
    assert validation.estimates["main"] == validation.loss


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # by inductor itself
def test_only_the_model_is_compiled():
    """With compile=True the loss is given a compiled model that shares its parameters; the result is the same."""
    seen = []

    def loss(model, microbatch):
        seen.append(type(model))
        return mse(model, microbatch)

    plain, compiled = network(), network()
    with torch.compiler.set_stance("force_eager"):
        fitted(plain, batches(), loss=loss, steps=2, validation=batches(seed=1))
        assert {nn.Sequential} == set(seen)
        seen.clear()
        fitted(compiled, batches(), loss=loss, steps=2, validation=batches(seed=1), compile=True)
    assert {type(torch.compile(network()))} == set(seen)
    assert bits(plain) == bits(compiled)
    assert all(module.training for module in compiled.modules())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"data": rows(), "steps": 1}, "data must be an augend.Batches; got dict; wrap it"),
        ({}, r"exactly one of steps, epochs and Batches\(epochs=\); got none of them"),
        ({"steps": 1, "epochs": 2}, "exactly one of .* got steps = 1, epochs = 2"),
        ({"data": batches(epochs=3), "steps": 1}, r"exactly one of .* got steps = 1, Batches\(epochs=\) = 3"),
        ({"steps": 0}, "steps must be at least 1; got 0"),
        ({"steps": 1.5}, "steps must be a whole number of at least 1; got 1.5"),
        ({"steps": True}, "steps must be a whole number of at least 1; got True"),
        ({"epochs": 2.0}, "epochs must be a whole number of at least 1; got 2.0"),
        ({"epochs": -1}, "epochs must be at least 1; got -1"),
        ({"steps": 1, "patience": 2}, "patience = 2 needs validation="),
        ({"steps": 1, "validate_every": 2}, "validate_every = 2 needs validation="),
        ({"steps": 1, "validation": batches(), "patience": 0}, "patience must be at least 1; got 0"),
        ({"steps": 1, "validation": batches(), "validate_every": 0}, "validate_every must be at least 1; got 0"),
        ({"steps": 1, "digest_every": 0}, "digest_every must be at least 1; got 0"),
        ({"steps": 1, "validation": rows()}, "validation must be an augend.Batches; got dict"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_before_training(options, says):
    """Every misfit is a ContractError that names the argument and its value, and nothing was trained."""
    model = network()
    before = bits(model)
    with pytest.raises(ContractError, match=says):
        fitted(model, **{"data": batches(), **options})
    assert before == bits(model)


def test_calls_in_a_row_train_each_batch_once():
    """fit again and again over one Batches goes on where it was; no step comes twice, none is left out."""
    model, data, steps = network(), batches(), []
    for stop in (2, 4, 6):
        steps += [step.step for step in fitted(model, data, steps=stop).steps]
    assert list(range(6)) == steps


def test_after_an_exception_the_batch_is_offered_again():
    """An interrupted fit leaves no rows pending: the next call begins the same batch from its first row."""
    model, data = network(), batches()

    def failing(model, microbatch):
        if microbatch.step == 1 and microbatch.first_row > 0:
            raise ZeroDivisionError
        return mse(model, microbatch)

    with pytest.raises(ZeroDivisionError) as caught:  # whose traceback keeps fit's accumulator alive
        fitted(model, data, steps=4, loss=failing)
    history = fitted(model, data, steps=4)
    assert caught.tb is not None
    assert [1, 2, 3] == [step.step for step in history.steps]
    assert history.steps[0].rows == history.steps[0].losses["loss"].count
