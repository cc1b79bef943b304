"""A window can be saved after any micro-batch, and nothing but a right state is taken back."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import augend
import reference
from augend.errors import ContractError, StateError
from models import fingerprint, replace_any_part, rows, tally, terms_of, tower

WORK = ["float32", "float64"]
STORED = [torch.float32, torch.bfloat16, torch.float16]


def through_json(state: dict[str, object]) -> dict[str, object]:
    """Send all but the tensors through JSON, as a checkpoint does."""
    plain = json.loads(json.dumps({name: value for name, value in state.items() if name != "sums"}))
    return {**plain, "sums": copy.deepcopy(state["sums"])}


def run(dtype: torch.dtype, work: str, stop: int | None, terms: tuple[str, ...] = ("loss",)) -> tuple[str, list[str]]:
    """Train three batches of four micro-batches; at micro-batch `stop`, go on in new objects from the saved state."""
    model = tower(dtype)
    grads = augend.Accumulator(model, dtype=work, terms=terms, loss_scale=8.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3)  # 1e-8 is 0 in float16
    losses, made = [], 0
    for batch in range(3):
        for part in range(4):
            x, y = rows(5, seed=10 * batch + part, dtype=dtype)
            grads.backward(terms_of(model, x, y, terms))
            made += 1
            if made == stop:
                saved = through_json(grads.state_dict())
                before = reference.digest(grads._pending.window.sums)
                fresh = tower(dtype)
                fresh.load_state_dict(model.state_dict())
                other = torch.optim.AdamW(fresh.parameters(), lr=0.05, eps=1e-3)  # 1e-8 is 0 in float16
                other.load_state_dict(optimizer.state_dict())
                model, optimizer = fresh, other
                grads = augend.Accumulator(model, dtype=work, terms=terms, loss_scale=8.0)
                grads.load_state_dict(saved)
                assert before == reference.digest(grads._pending.window.sums)
        losses.append(repr(grads.step(optimizer, max_norm=0.5)))
    return reference.digest(dict(model.named_parameters()), losses), losses


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("dtype", STORED)
def test_a_run_resumed_anywhere_ends_with_the_same_bits(dtype: torch.dtype, work: str) -> None:
    """Saved after any of twelve micro-batches, reloaded through JSON into new objects: same weights, same records."""
    expected, losses = run(dtype, work, None)
    for stop in range(1, 13):
        assert (expected, losses) == run(dtype, work, stop), stop


def test_several_terms_resume_to_the_bit() -> None:
    """The same with a term of its own count beside the loss."""
    assert run(torch.float32, "float32", None, ("loss", "size")) == run(torch.float32, "float32", 6, ("loss", "size"))


def filled(work: str = "float32", terms: tuple[str, ...] = ("loss",)) -> tuple[augend.Accumulator, torch.nn.Module]:
    """Return an accumulator with one finished batch behind it and two micro-batches pending."""
    model = tower()
    grads = augend.Accumulator(model, dtype=work, terms=terms)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in range(3):
        grads.backward(terms_of(model, *rows(4, seed=seed), terms))
        if seed == 0:
            grads.step(optimizer)
    return grads, model


def test_a_saved_state_is_a_copy() -> None:
    """What comes after a save does not change it."""
    grads, model = filled()
    state = grads.state_dict()
    before = reference.digest(state)
    grads.backward(tally(model, *rows(4, seed=9)))
    grads.reset()
    assert before == reference.digest(state)


def test_loading_does_not_share_memory_with_the_state() -> None:
    """A state can be loaded twice: going on does not write into it."""
    grads, model = filled()
    state = grads.state_dict()
    before = reference.digest(state)
    grads.load_state_dict(state)
    grads.backward(tally(model, *rows(4, seed=9)))
    assert before == reference.digest(state)


def test_reading_changes_nothing() -> None:
    """state_dict, state, norm, pending and contract leave a window as it was, and give the same again."""
    grads, model = filled()
    grads.state_dict()
    before = fingerprint(grads, model)
    first = reference.digest(grads.state_dict()), repr(grads.state), grads.norm()
    assert before == fingerprint(grads, model)
    assert first == (reference.digest(grads.state_dict()), repr(grads.state), grads.norm())


def changed(path: str, value: object) -> Callable[[dict], None]:
    """Return a change that puts a value at a path of keys, given as a/b/c."""

    def change(state: dict) -> None:
        *keys, last = path.split("/")
        for key in keys:
            state = state[key]
        state[last] = value

    return change


def without(path: str) -> Callable[[dict], None]:
    """Return a change that removes what is at a path of keys."""

    def change(state: dict) -> None:
        *keys, last = path.split("/")
        for key in keys:
            state = state[key]
        del state[last]

    return change


def both(*changes: Callable[[dict], None]) -> Callable[[dict], None]:
    """Return several changes as one."""

    def change(state: dict) -> None:
        for one in changes:
            one(state)

    return change


W = "contract/tensors/head.weight"
S = "sums/loss/head.weight"
M = "moments/loss"
BAD = {
    "version 2": (changed("version", 2), StateError, "version must be 1; got 2"),
    "version true": (changed("version", value=True), StateError, "version must be 1; got True"),
    "version text": (changed("version", "1"), StateError, "version must be 1; got '1'"),
    "no version": (without("version"), StateError, "lacks 'version'"),
    "unknown field": (changed("colour", 1), StateError, "unknown entry 'colour'"),
    "contract list": (changed("contract", []), StateError, "contract must be a dictionary"),
    "contract field": (without("contract/terms"), StateError, "contract lacks 'terms'"),
    "dtype": (changed("contract/dtype", "float64"), ContractError, "dtype 'float64' was saved"),
    "scale": (changed("contract/loss_scale", {"kind": "fixed", "value": 2.0}), ContractError, "loss_scale"),
    "scale nan": (changed("contract/loss_scale", {"kind": "fixed", "value": float("nan")}), ContractError, "loss_sc"),
    "scaler": (changed("contract/loss_scale", {"kind": "dynamic", "value": 1.0}), ContractError, "loss_scale"),
    "terms": (changed("contract/terms", ["nll"]), ContractError, "terms"),
    "tensors list": (changed("contract/tensors", []), StateError, "contract.tensors must be a dictionary"),
    "no parameter": (without(W), ContractError, "'head.weight' is in the accumulator's model but not in the contract"),
    "more parameters": (
        changed("contract/tensors/x", {"shape": [1], "dtype": "float32", "trainable": True, "tied": []}),
        ContractError,
        "'x' is in the contract but not in the accumulator's model",
    ),
    "tensor field": (without(f"{W}/tied"), StateError, "lacks 'tied'"),
    "tensor types": (changed(f"{W}/shape", "ab"), StateError, "shape and tied must be lists"),
    "shape": (changed(f"{W}/shape", [4, 3]), ContractError, "'head.weight': shape"),
    "stored dtype": (changed(f"{W}/dtype", "bfloat16"), ContractError, "'head.weight': dtype bfloat16"),
    "trainable": (changed(f"{W}/trainable", value=False), ContractError, "'head.weight': trainable False"),
    "trainable 1": (changed(f"{W}/trainable", 1), StateError, "trainable must be true or false"),
    "untied": (changed("contract/tensors/first.weight/tied", []), ContractError, "'first.weight': tied ()"),
    "microbatches": (changed("microbatches", -1), StateError, "microbatches must be a whole number from 0 to 65536"),
    "microbatches 1.0": (changed("microbatches", 1.0), StateError, "microbatches must be a whole number"),
    "microbatches true": (changed("microbatches", value=True), StateError, "microbatches must be a whole number"),
    "too many": (changed("microbatches", 65_537), StateError, "microbatches must be a whole number from 0 to 65536"),
    "step": (changed("step", 0), StateError, "step is 0, and 0 rows of that batch are done"),
    "step text": (changed("step", "0"), StateError, "step must be a whole number"),
    "rows of no batch": (changed("rows_done", 3), StateError, "step is None, and 3 rows of that batch are done"),
    "scale of another type": (
        changed("contract/loss_scale", {"kind": "fixed", "value": True}),
        ContractError,
        "loss_scale",
    ),
    "shape of bools": (changed(f"{W}/shape", [True, 4]), StateError, "must be a whole number"),
    "named twice": (
        changed("present/loss", ["first.weight", "first.weight", "first.bias", "head.weight", "head.bias"]),
        StateError,
        "names a parameter twice",
    ),
    "count off the grid": (
        both(changed(f"{M}/count", f"1/{2**100}"), changed(f"{M}/total_count", "0")),
        StateError,
        "must be a multiple of 2^-40",
    ),
    "total off the grid": (
        both(changed(f"{M}/total", f"1/{2**1080}"), changed(f"{M}/total_count", "0")),
        StateError,
        "'total' is no sum of float64 numbers",
    ),
    "meta tensor": (changed(S, torch.zeros(3, 4, device="meta")), StateError, "must be a dense tensor"),
    "finished of another term": (
        changed("finished/losses", {"nll": {"value": 1.0, "error": 1.0, "count": 1}}),
        StateError,
        "must have the losses",
    ),
    "finished count": (changed("finished/count", "many"), StateError, "'many' is no count"),
    "finished count true": (changed("finished/losses/loss/count", value=True), StateError, "True is no count"),
    "finished below 0": (changed("finished/microbatches", -3), StateError, "microbatches must be a whole number"),
    "finished skipped": (changed("finished/skipped", 0), StateError, "skipped must be true or false"),
    "rows done": (changed("rows_done", None), StateError, "rows_done must be a whole number"),
    "loose": (changed("loose", 0), StateError, "loose must be true or false"),
    "updates": (changed("updates", -3), StateError, "updates must be a whole number"),
    "moments list": (changed("moments", []), StateError, "moments must be a dictionary"),
    "no term": (without(M), StateError, "moments lacks 'loss'"),
    "term text": (changed(M, "a"), StateError, "moments['loss'] must be a dictionary"),
    "no moment": (without(f"{M}/total"), StateError, "moments"),
    "count nan": (changed(f"{M}/count", "nan"), StateError, "moments['loss']"),
    "count float nan": (changed(f"{M}/count", float("nan")), StateError, "moments['loss']"),
    "count below 0": (changed(f"{M}/count", "-1"), StateError, "'count' cannot be negative; got -1"),
    "count above": (
        both(changed(f"{M}/count", str(2**63)), changed(f"{M}/count_count", str(2**126))),
        StateError,
        "the count of term 'loss' must be at most 2^63 - 1",
    ),
    "count alone": (changed(f"{M}/count", "9999"), StateError, "no rows have these moments: 'count' is 9999"),
    "count / 0": (changed(f"{M}/count", "1/0"), StateError, "moments['loss']"),
    "rows below 0": (changed(f"{M}/rows", -1), StateError, "cannot be negative"),
    "squares below 0": (changed(f"{M}/total_total", "-1"), StateError, "cannot be negative"),
    "present text": (changed("present/loss", "head.weight"), StateError, "must be a list of parameter names"),
    "missing tensor": (without(S), StateError, "sums['loss'] lacks 'head.weight'"),
    "extra tensor": (changed("sums/loss/idle.weight", torch.zeros(2, 2)), StateError, "unknown entry 'idle.weight'"),
    "unknown tensor": (
        both(
            changed("sums/loss/x", torch.zeros(1)),
            changed("present/loss", ["x", "first.weight", "first.bias", "head.weight", "head.bias"]),
        ),
        StateError,
        "unknown parameter 'x'",
    ),
    "frozen tensor": (
        both(
            changed("sums/loss/fixed.bias", torch.zeros(4)),
            changed("present/loss", ["fixed.bias", "first.weight", "first.bias", "head.weight", "head.bias"]),
        ),
        StateError,
        "frozen parameter 'fixed.bias'",
    ),
    "tensor dtype": (changed(S, torch.zeros(3, 4, dtype=torch.float64)), StateError, "must be torch.float32"),
    "tensor shape": (changed(S, torch.zeros(4, 3)), StateError, "of shape [3, 4]; got"),
    "tensor list": (changed(S, [1.0]), StateError, "must be a dense tensor; got list"),
    "sparse": (changed(S, torch.zeros(3, 4).to_sparse()), StateError, "must be a dense tensor"),
    "sums without counters": (changed("microbatches", 0), StateError, "no micro-batch was made, yet"),
    "counters without sums": (
        both(changed("sums/loss", {}), changed("present/loss", [])),
        StateError,
        "and has no sum of gradients",
    ),
    "finished text": (changed("finished", "no"), StateError, "the saved record of the last finish"),
    "finished field": (without("finished/norm"), StateError, "the saved record of the last finish"),
    "finished no float": (changed("finished/norm", 1), StateError, "1 is no float"),
    "finished type": (changed("finished/update", 1.5), StateError, "the last finish's update must be a whole number"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_state_is_refused_by_name_and_changes_nothing(name: str) -> None:
    """Each field out of its domain or against the live contract: the error names it, and not a bit has changed."""
    change, error, words = BAD[name]
    grads, model = filled()
    state = through_json(grads.state_dict())
    change(state)
    grads.backward(tally(model, *rows(4, seed=5)))
    before = fingerprint(grads, model)
    with pytest.raises(error) as caught:
        grads.load_state_dict(state)
    assert words in str(caught.value)
    assert before == fingerprint(grads, model)
    grads.backward(tally(model, *rows(4, seed=6)))  # and the old window goes on


@given(st.data())
def test_a_state_with_any_part_replaced_is_refused_or_whole(data) -> None:
    """Whatever stands at a random place of a state, loading it raises one of our errors or loads completely."""
    grads, model = filled(terms=("loss", "size"))
    state = through_json(grads.state_dict())
    replace_any_part(data, state)
    before = fingerprint(grads, model)
    try:
        grads.load_state_dict(state)
    except (StateError, ContractError):
        assert before == fingerprint(grads, model)


def test_a_changed_live_model_is_refused() -> None:
    """A parameter frozen, replaced or added after construction refuses load and backward by name."""
    for change, words in (
        (lambda m: m.head.weight.requires_grad_(requires_grad=False), "'head.weight': trainable"),
        (lambda m: setattr(m.head, "weight", torch.nn.Parameter(torch.zeros(3, 4))), "'head.weight' was replaced"),
        (lambda m: setattr(m, "more", torch.nn.Linear(1, 1)), "'more.bias' is in the model now"),
        (lambda m: delattr(m, "idle"), "'idle.bias' is in the contract but not in the model now"),
        (lambda m: setattr(m.again, "weight", torch.nn.Parameter(torch.zeros(4, 4))), "'again.weight' is in the model"),
        (lambda m: m.to(torch.bfloat16), "dtype float32 was expected, and the model now has bfloat16"),
    ):
        grads, model = filled()
        state = grads.state_dict()
        change(model)
        before = fingerprint(grads, model)
        some = augend.Tally(torch.zeros(2, requires_grad=True) + 1, torch.ones(2))
        for call, arguments in ((grads.load_state_dict, [state]), (grads.backward, [some]), (grads.finish, [])):
            with pytest.raises(ContractError, match="parameter") as caught:
                call(*arguments)
            assert words in str(caught.value)
            assert before == fingerprint(grads, model)


@pytest.mark.parametrize("terms", [("loss",), ("loss", "size")])
def test_drained_sums_make_an_accumulator_again(terms: tuple[str, ...]) -> None:
    """finish_sums and from_sums are inverse: same sums, counters and moments, in another accumulator."""
    grads, model = filled(terms=terms)
    expected = grads.state_dict()
    sums = grads.finish_sums()
    assert (0, 0) == (grads.state.count, grads.state.microbatches)
    fresh = tower()
    fresh.load_state_dict(model.state_dict())
    made = augend.Accumulator.from_sums(fresh, sums, grads.contract)
    state = made.state_dict()
    for part in ("contract", "microbatches", "moments", "present", "sums"):
        assert reference.digest(expected[part]) == reference.digest(state[part]), part


def test_sums_of_another_contract_are_refused() -> None:
    """Another model, work dtype or loss scale cannot take the sums over; empty sums make an empty window."""
    grads, model = filled()
    empty = augend.Accumulator(model, dtype="float64").finish_sums()
    with pytest.raises(ContractError, match="dtype is float64, the contract's float32"):
        augend.Accumulator.from_sums(model, empty, grads.contract)
    scaled = augend.Accumulator(model, loss_scale=2.0).finish_sums()
    with pytest.raises(ContractError, match="loss_scale is 2.0"):
        augend.Accumulator.from_sums(model, scaled, grads.contract)
    with pytest.raises(ContractError, match="is in the contract but not in the model"):
        augend.Accumulator.from_sums(torch.nn.Linear(1, 1), grads.finish_sums(), grads.contract)
    none = augend.Accumulator(model).finish_sums()
    assert 0 == augend.Accumulator.from_sums(model, none, grads.contract).state.microbatches


def test_the_contract_validates_a_model_by_name() -> None:
    """contract.validate accepts an equal model and names what differs in another."""
    grads, _ = filled()
    grads.contract.validate(tower())
    other = tower()
    other.idle = torch.nn.Linear(2, 3)
    with pytest.raises(ContractError, match=r"'idle.weight': shape \(2, 2\) was expected, and the model has \(3, 2\)"):
        grads.contract.validate(other)


def test_prepare_load_changes_nothing_until_it_is_called() -> None:
    """A state that was prepared is swapped in by the call that came back, and not before."""
    model = tower()
    grads = augend.Accumulator(model)
    grads.backward(tally(model, *rows(5)))
    saved = through_json(grads.state_dict())
    held = fingerprint(grads, model)
    grads.reset()
    empty = fingerprint(grads, model)
    commit = grads.prepare_load(saved)
    assert empty == fingerprint(grads, model)
    commit()
    assert held == fingerprint(grads, model)


def test_gradients_left_tells_of_an_update_that_nobody_took() -> None:
    """True from finish() on until .grad is cleared, replaced or dropped; a step leaves nothing."""
    model = tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grads = augend.Accumulator(model)
    seen = [grads.gradients_left]
    for clear in (optimizer.zero_grad, lambda: grads.backward(tally(model, *rows(5)))):
        grads.backward(tally(model, *rows(5)))
        grads.finish()
        seen.append(grads.gradients_left)
        clear()
        seen.append(grads.gradients_left)
    grads.step(optimizer)
    assert [False, True, False, True, False, False] == [*seen, grads.gradients_left]
