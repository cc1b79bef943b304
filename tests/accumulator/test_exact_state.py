"""Exact sums are saved and taken back at any moment, with their grids, maxima, offer and fingerprint."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from exactly import Dealt, carried, feed, one_row, tally_of
from hypothesis import given
from hypothesis import strategies as st
from test_state import both, changed, through_json, without
from torch import Tensor

import augend
import reference
from augend._accumulate._bits import machine_bits
from augend.errors import ContractError, StateError
from models import fingerprint, replace_any_part, rows, tally, terms_of, tower

CPU = torch.device("cpu")
ROWS, BATCH, MICRO = 21, 8, 3  # three batches, the last of 5 rows; micro-batches of 3, 3, 2


class Net(torch.nn.Module):
    """A network with dropout, so that random state matters, and dimensions that divide nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.drop = torch.nn.Linear(4, 7), torch.nn.Linear(7, 3), torch.nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.drop(torch.tanh(self.a(x))))


def source() -> dict[str, Tensor]:
    """Return 21 rows; the loss of one in the second batch counts ten million times."""
    generator = torch.Generator().manual_seed(3)
    factor = torch.ones(ROWS)
    factor[BATCH + 4] = 1e7
    x, y = torch.randn(ROWS, 4, generator=generator), torch.randint(0, 3, (ROWS,), generator=generator)
    return {"x": x, "y": y, "factor": factor}


def loss(model: torch.nn.Module, part) -> augend.Tally:
    """Return the cross entropy of rows, times what their loss counts."""
    plain = augend.losses.cross_entropy(model(part["x"]), part["y"])
    return augend.Tally(plain.total * part["factor"], plain.count)


class Job:
    """Model, optimizer, exact accumulator and data of one process, and a checkpoint of them by hand."""

    def __init__(self, size: int = MICRO, **options: object) -> None:
        torch.manual_seed(1)
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.grads = augend.Accumulator(self.model, dtype="exact", **options)
        self.data = augend.Batches(source(), batch_size=BATCH, microbatch_size=size, seed=5, epochs=1, shuffle=False)
        self.log: list[str] = []

    def save(self) -> dict[str, object]:
        state = self.grads.state_dict()
        plain = json.dumps({"data": self.data.state_dict(), **{k: v for k, v in state.items() if k != "sums"}})
        tensors = (self.model.state_dict(), self.optimizer.state_dict(), state["sums"])
        return {"plain": plain, "tensors": copy.deepcopy(tensors), "log": list(self.log)}

    def load(self, saved: dict[str, object]) -> None:
        plain = json.loads(saved["plain"])
        model, optimizer, sums = copy.deepcopy(saved["tensors"])
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        self.data.load_state_dict(plain.pop("data"))
        self.grads.load_state_dict({**plain, "sums": sums})
        self.log = list(saved["log"])

    def moments(self) -> Iterator[tuple[int, int, int] | None]:
        """Train to the end, pausing wherever a checkpoint could be taken: at a step, an offer and its rows done."""
        yield None
        for batch in self.data:
            for microbatch in self.grads.microbatches(batch):
                self.grads.backward(loss(self.model, microbatch))
                yield batch.step, microbatch.offer, microbatch.rows_done
            done = self.grads.step(self.optimizer, max_norm=1.0)
            if self.log[-1:] != [f"{batch.step} {done}"]:
                self.log.append(f"{batch.step} {done}")
            yield None

    def outcome(self) -> tuple[str, list[str]]:
        return reference.digest(dict(self.model.named_parameters()), self.optimizer.state_dict()), self.log


def finished(job: Job) -> tuple[str, list[str]]:
    """Train to the end and return what came out."""
    for _ in job.moments():
        pass
    return job.outcome()


def test_resumed_at_any_moment_of_three_batches() -> None:
    """In the measuring pass, with an offer pending, inside offer 1, after a step: resumed, the same bits and records.

    The first batch is measured, the second has a spike, and the third is small after it: all three are offered twice.
    """
    expected = finished(Job())
    assert ["offers=2" in one for one in expected[1]] == [True] * 3
    seen = list(Job().moments())
    assert 1 + 2 * (3 + 3 + 2) + 3 == len(seen)
    for at, moment in enumerate(seen):
        job = Job()
        for _ in zip(range(at + 1), job.moments(), strict=False):
            pass
        saved = job.save()
        plain = json.loads(saved["plain"])
        if moment is not None:
            step, offer, rows_done = moment
            assert (step, offer, rows_done) == (plain["step"], plain["offer"], plain["rows_done"])
            measuring = step == 0 and offer == 0
            sums = saved["tensors"][2]["loss"]
            assert measuring == (not any(total.any() for total in sums.values()))
            assert measuring == (plain["scales"] == {"loss": {}})
            assert sums.keys() == plain["largest"]["loss"].keys()
        other = Job()
        other.load(saved)
        assert expected == finished(other), moment


def test_resumed_twice_in_a_row() -> None:
    """A state saved right after a load is the same state, fingerprint and all, and ends where none was taken."""
    expected = finished(Job())
    for stop in (2, 4, 5, 7, 9, 11, 13):
        job = Job()
        for _ in zip(range(stop), job.moments(), strict=False):
            pass
        first = job.save()
        for _ in range(2):
            hop = Job()
            hop.load(job.save())
            assert first["plain"] == hop.save()["plain"]
            job = hop
        for _ in zip(range(2), job.moments(), strict=False):
            pass
        hop = Job()
        hop.load(job.save())
        assert expected == finished(hop), stop


def test_loaded_into_a_running_loop() -> None:
    """States of either offer can be loaded into objects that are in the middle of one."""
    expected = finished(Job())
    job = Job()
    running = job.moments()
    saved = []
    for _ in range(10):
        next(running)
        saved.append(job.save())
    job.load(saved[2])
    with pytest.raises(StateError, match="inside the loop"):
        next(running)
    for state in reversed(saved):
        job.load(state)
        assert expected == finished(job)


def test_a_reset_after_a_resume_starts_the_batch_anew() -> None:
    """A window of either offer is dropped with its offer; the batch starts at 0 and ends with the same bits."""
    expected = finished(Job())
    for stop in (2, 4, 6, 9):
        job = Job()
        for _ in zip(range(stop), job.moments(), strict=False):
            pass
        other = Job()
        other.load(job.save())
        other.grads.reset()
        plain = json.loads(other.save()["plain"])
        assert (0, 0, {"loss": {}}) == (plain["offer"], plain["microbatches"], plain["largest"])
        assert expected == finished(other)


class Two:
    """An exact and a float32 accumulator in one loop, each over a model of its own, and their checkpoint by hand."""

    def __init__(self, dtypes: tuple[str, str]) -> None:
        torch.manual_seed(1)
        self.models = [Net(), Net()]
        self.members = [augend.Accumulator(net, dtype=one) for net, one in zip(self.models, dtypes, strict=True)]
        self.data = augend.Batches(source(), batch_size=BATCH, microbatch_size=MICRO, seed=5, epochs=1, shuffle=False)
        for member in self.members:
            self.data.register(member)
        self.log: list[str] = []

    def moments(self) -> Iterator[None]:
        first, second = self.members
        for batch in self.data:
            for microbatch in first.microbatches(batch, together=[second]):
                for member, net in zip(self.members, self.models, strict=True):
                    member.backward(loss(net, microbatch))
                yield
            for member, net in zip(self.members, self.models, strict=True):
                done = member.step(torch.optim.SGD(net.parameters(), lr=1e-3), max_norm=1.0)
                self.log.append(repr(done))

    def resumed(self) -> Two:
        other = Two((self.members[0].contract.dtype, self.members[1].contract.dtype))
        for net, saved in zip(other.models, self.models, strict=True):
            net.load_state_dict(copy.deepcopy(saved.state_dict()))
        other.data.load_state_dict(self.data.state_dict())
        for member, saved in zip(other.members, self.members, strict=True):
            member.load_state_dict(through_json(saved.state_dict()))
        other.log = list(self.log)
        return other

    def outcome(self) -> tuple[str, list[str]]:
        return reference.digest([net.state_dict() for net in self.models]), self.log


@pytest.mark.parametrize("dtypes", [("exact", "float32"), ("float32", "exact"), ("exact", "exact")])
def test_members_of_one_loop_are_resumed_together(dtypes: tuple[str, str]) -> None:
    """Saved in either offer or between them, both are loaded and end with the bits and records of no resume."""
    whole = Two(dtypes)
    assert 2 * (3 + 3 + 2) == sum(1 for _ in whole.moments())
    for stop in (1, 3, 4, 6, 9, 10):  # of the second batch, too, an offer is pending after the third
        job = Two(dtypes)
        for _ in zip(range(stop), job.moments(), strict=False):
            pass
        other = job.resumed()
        for _ in other.moments():
            pass
        assert whole.outcome() == other.outcome(), stop


def test_a_batch_that_is_not_finite_is_remembered_as_such() -> None:
    """Saved after an inf or a nan, and resumed before the batch's end: not offered again, skipped, teaches nothing."""
    for bad in (math.nan, math.inf, -math.inf):
        parts = one_row([{"a": torch.tensor([x])} for x in (1.0, bad, 1e9)])
        outcomes = []
        for stop in (None, 1, 2, 3):
            model = carried({"a": torch.zeros(1)})
            grads = augend.Accumulator(model, dtype="exact")
            feed(grads, model, Dealt(one_row([{"a": torch.tensor([2.0])}])))
            grads.finish()
            batch = Dealt(parts, step=1)
            for at, microbatch in enumerate(grads.microbatches(batch)):
                if at == stop:
                    break
                grads.backward(tally_of(model, microbatch))
            if stop is not None:
                progress, state = batch.progress(grads), through_json(grads.state_dict())
                told = json.dumps(state["largest"])
                assert ("Infinity" in told, "NaN" in told) == (False, False)
                grads = augend.Accumulator(model, dtype="exact")
                grads.load_state_dict(state)
                batch._progress = {id(grads): progress}
                feed(grads, model, batch)
            done = grads.finish(nonfinite="skip")
            outcomes.append((repr(done), grads.state_dict()["scales"]))
        assert all(outcomes[0] == one for one in outcomes)
        assert outcomes[0][1] == {"loss": {"held.a": 32}}


# ------------------------------------------------------------------ what a state is


def filled(**options: object) -> tuple[augend.Accumulator, torch.nn.Module]:
    """Return an accumulator with one finished batch behind it and two micro-batches pending."""
    model = tower()
    terms = options.pop("terms", ("loss",))
    grads = augend.Accumulator(model, dtype="exact", terms=terms, **options)
    parts = [dict(zip(("x", "y"), rows(4, seed=seed), strict=True)) for seed in range(2)]
    for microbatch in grads.microbatches(Dealt(parts)):
        grads.backward(terms_of(model, microbatch["x"], microbatch["y"], terms))
    grads.step(torch.optim.SGD(model.parameters(), lr=0.1))
    for seed in range(2, 4):
        grads.backward(terms_of(model, *rows(4, seed=seed), terms))
    return grads, model


def marks(grads: augend.Accumulator, model: torch.nn.Module) -> str:
    """Hash all that is pending: what the other modes have, and grids, maxima and offer."""
    window = grads._pending.window
    keys = [(term, name) for term in window.sums for name in grads._pending.slots.parameters]
    scales = window.scales
    return reference.digest(fingerprint(grads, model), scales.known, scales.ordered(keys), window.offer, window.unfit)


def test_a_state_holds_whole_numbers_and_what_they_mean() -> None:
    """Sums are int64; besides come scales, largest gradients, offer and fingerprint, which JSON keeps exactly."""
    grads, _ = filled()
    state = grads.state_dict()
    assert {torch.int64} == {one.dtype for one in state["sums"]["loss"].values()}
    names = {"first.weight", "first.bias", "head.weight", "head.bias"}
    assert names == set(state["scales"]["loss"]) == set(state["largest"]["loss"])
    assert all(type(one) is int for one in state["scales"]["loss"].values())
    assert all(type(one) is float for one in state["largest"]["loss"].values())
    assert (0, 65_536) == (state["offer"], state["contract"]["max_microbatches"])
    assert dict(grads.bits) == state["bits"]
    plain = {name: value for name, value in state.items() if name != "sums"}
    assert plain == json.loads(json.dumps(plain, allow_nan=False))
    assert not {"scales", "before", "largest", "offer", "bits"} & augend.Accumulator(tower()).state_dict().keys()


def test_a_saved_state_is_a_copy() -> None:
    """What comes after a save does not change it, and a state can be loaded twice."""
    grads, model = filled()
    state = grads.state_dict()
    before = reference.digest(state)
    grads.backward(tally(model, *rows(4, seed=9)))
    grads.reset()
    grads.load_state_dict(state)
    grads.backward(tally(model, *rows(4, seed=9)))
    assert before == reference.digest(state)
    grads.load_state_dict(state)
    assert before == reference.digest(grads.state_dict())


def test_reading_changes_nothing() -> None:
    """state_dict, state, norm, bits and digests leave a window as it was, and give the same again."""
    grads, model = filled()
    grads.state_dict()
    before = marks(grads, model)
    first = reference.digest(grads.state_dict()), repr(grads.state), grads.norm(), dict(grads.bits), grads.digests()
    assert before == marks(grads, model)
    again = reference.digest(grads.state_dict()), repr(grads.state), grads.norm(), dict(grads.bits), grads.digests()
    assert first == again


def test_prepare_load_changes_nothing_until_it_is_called() -> None:
    """A state that was prepared is swapped in by the call that came back, and not before."""
    grads, model = filled()
    saved = through_json(grads.state_dict())
    held = marks(grads, model)
    grads.reset()
    empty = marks(grads, model)
    commit = grads.prepare_load(saved)
    assert empty == marks(grads, model)
    commit()
    assert held == marks(grads, model)


# ------------------------------------------------------------------ what is refused

H = "head.weight"
BAD = {
    "no scales": (without("scales"), StateError, "the state lacks 'scales'"),
    "scales list": (changed("scales", []), StateError, "scales must be a dictionary"),
    "scales of no term": (changed("scales", {}), StateError, "scales"),
    "scales of another term": (changed("scales/nll", {}), StateError, "scales"),
    "scales of a term as a list": (changed("scales/loss", []), StateError, "scales['loss'] must be a dictionary"),
    "scale of an unknown tensor": (changed("scales/loss/x", 30), StateError, "scales['loss'] names 'x'"),
    "scale of a frozen tensor": (changed("scales/loss/fixed.bias", 30), StateError, "'fixed.bias'"),
    "scale of an alias": (changed("scales/loss/again.weight", 30), StateError, "'again.weight'"),
    "scale as a float": (changed(f"scales/loss/{H}", 30.0), StateError, f"scales['loss']['{H}'] must be a whole"),
    "scale as a text": (changed(f"scales/loss/{H}", "30"), StateError, f"scales['loss']['{H}'] must be a whole"),
    "scale true": (changed(f"scales/loss/{H}", value=True), StateError, f"scales['loss']['{H}'] must be a whole"),
    "no number for a scale": (changed(f"scales/loss/{H}", None), StateError, f"scales['loss']['{H}'] must be a whole"),
    "scale too fine": (changed(f"scales/loss/{H}", 10**6), StateError, f"scales['loss']['{H}'] must be a whole"),
    "scale too coarse": (changed(f"scales/loss/{H}", -(10**6)), StateError, f"scales['loss']['{H}'] must be a whole"),
    "no scales before": (without("before"), StateError, "the state lacks 'before'"),
    "scales before as a list": (both(changed("offer", 1), changed("before", [])), StateError, "before must be a dict"),
    "scale before as a float": (
        both(changed("offer", 1), changed(f"before/loss/{H}", 30.0)),
        StateError,
        f"before['loss']['{H}'] must be a whole number",
    ),
    "scale before of an unknown tensor": (
        both(changed("offer", 1), changed("before/loss/x", 30)),
        StateError,
        "before['loss'] names 'x'",
    ),
    "no largest": (without("largest"), StateError, "the state lacks 'largest'"),
    "largest text": (changed("largest", "1"), StateError, "largest must be a dictionary"),
    "largest of no term": (without("largest/loss"), StateError, "largest"),
    "largest of a term as a number": (changed("largest/loss", 1.0), StateError, "largest['loss'] must be a dictionary"),
    "largest of an unknown tensor": (changed("largest/loss/x", 1.0), StateError, "largest['loss'] names 'x'"),
    "largest of a frozen tensor": (changed("largest/loss/fixed.weight", 1.0), StateError, "'fixed.weight'"),
    "largest 0": (changed(f"largest/loss/{H}", 0.0), StateError, f"largest['loss']['{H}'] must be a positive"),
    "largest below 0": (changed(f"largest/loss/{H}", -1.0), StateError, f"largest['loss']['{H}'] must be a positive"),
    "largest as an int": (changed(f"largest/loss/{H}", 1), StateError, f"largest['loss']['{H}'] must be a positive"),
    "largest true": (changed(f"largest/loss/{H}", value=True), StateError, f"largest['loss']['{H}'] must be a pos"),
    "largest inf": (changed(f"largest/loss/{H}", math.inf), StateError, f"largest['loss']['{H}'] must be a positive"),
    "largest nan": (changed(f"largest/loss/{H}", math.nan), StateError, f"largest['loss']['{H}'] must be a positive"),
    "largest -inf": (changed(f"largest/loss/{H}", "-inf"), StateError, f"largest['loss']['{H}'] must be a positive"),
    "largest list": (changed(f"largest/loss/{H}", [1.0]), StateError, f"largest['loss']['{H}'] must be a positive"),
    "no offer": (without("offer"), StateError, "the state lacks 'offer'"),
    "offer below 0": (changed("offer", -1), StateError, "offer must be a whole number from 0 to 1; got -1"),
    "a third offer": (changed("offer", 2), StateError, "offer must be a whole number from 0 to 1; got 2"),
    "offer as a float": (changed("offer", 0.0), StateError, "offer must be a whole number"),
    "offer true": (changed("offer", value=True), StateError, "offer must be a whole number"),
    "offer text": (changed("offer", "0"), StateError, "offer must be a whole number"),
    "no bits": (without("bits"), StateError, "the state lacks 'bits'"),
    "bits list": (changed("bits", ["threads"]), StateError, "bits must be a dictionary"),
    "bits of lists": (changed("bits/threads", [1]), StateError, "bits must be a dictionary of numbers and strings"),
    "bits of nothing": (changed("bits/torch", None), StateError, "bits must be a dictionary of numbers and strings"),
    "unknown field": (changed("margin", 12), StateError, "unknown entry 'margin'"),
    "no head-room": (without("contract/max_microbatches"), StateError, "contract lacks 'max_microbatches'"),
    "other head-room": (changed("contract/max_microbatches", 1024), ContractError, "max_microbatches 1024 was saved"),
    "head-room true": (changed("contract/max_microbatches", value=True), ContractError, "max_microbatches True"),
    "other dtype": (changed("contract/dtype", "float32"), ContractError, "dtype 'float32' was saved"),
    "no dtype": (changed("contract/dtype", "int64"), ContractError, "dtype 'int64' was saved"),
    "dtype list": (changed("contract/dtype", ["exact"]), ContractError, "dtype ['exact'] was saved"),
    "sums on no grid": (
        both(changed("scales/loss", {}), changed("largest/loss", {})),
        StateError,
        "is not zero, and no scale of term 'loss' is known",
    ),
    "floating sums": (changed(f"sums/loss/{H}", torch.zeros(3, 4)), StateError, f"sums['loss']['{H}'] must be torch.i"),
    "short sums": (changed(f"sums/loss/{H}", torch.zeros(3, 4, dtype=torch.int32)), StateError, "must be torch.int64"),
    "sums of another shape": (changed(f"sums/loss/{H}", torch.zeros(2, 2, dtype=torch.int64)), StateError, "[3, 4]"),
    "sums without counters": (changed("microbatches", 0), StateError, "no micro-batch was made, yet"),
    "finished before it was offered": (changed("finished/offers", 0), StateError, "the last finish's offers must be"),
    "finished offers true": (changed("finished/offers", value=True), StateError, "the last finish's offers must be"),
    "a float32 state": (
        both(changed("contract/dtype", "float32"), without("scales"), without("largest"), without("offer")),
        ContractError,
        "dtype 'float32' was saved, and the accumulator has 'exact'",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_state_is_refused_by_name_and_changes_nothing(name: str) -> None:
    """Each field out of its domain or against the live contract: the error names it, and not a bit has changed."""
    change, error, words = BAD[name]
    grads, model = filled()
    state = through_json(grads.state_dict())
    change(state)
    grads.backward(tally(model, *rows(4, seed=5)))
    before = marks(grads, model)
    with pytest.raises(error) as caught:
        grads.load_state_dict(state)
    assert words in str(caught.value)
    assert before == marks(grads, model)
    grads.backward(tally(model, *rows(4, seed=6)))  # and the old window goes on


@pytest.mark.filterwarnings("ignore:.* was .* and is .*:UserWarning")
@given(st.data())
def test_a_state_with_any_part_replaced_is_refused_or_whole(data) -> None:
    """Whatever stands at a random place of a state, loading it raises one of our errors or loads completely."""
    grads, model = filled(terms=("loss", "size"))
    state = through_json(grads.state_dict())
    replace_any_part(data, state)
    before = marks(grads, model)
    try:
        grads.load_state_dict(state)
    except (StateError, ContractError):
        assert before == marks(grads, model)
    else:
        grads.state_dict()


def test_states_of_other_dtypes_are_refused_either_way() -> None:
    """A float32 or float64 state into an exact accumulator, and an exact one into those: refused, naming the dtype."""
    states = {}
    for dtype in ("float32", "float64", "exact"):
        model = torch.nn.Linear(2, 1)
        grads = augend.Accumulator(model, dtype=dtype)
        states[dtype] = through_json(grads.state_dict())
    for saved, state in states.items():
        for live in states:
            grads = augend.Accumulator(torch.nn.Linear(2, 1), dtype=live)
            if saved == live:
                grads.load_state_dict(state)
                continue
            with pytest.raises(ContractError, match=f"dtype '{saved}' was saved, and the accumulator has '{live}'"):
                grads.load_state_dict(state)


def test_another_head_room_is_refused() -> None:
    """Sums with another max_microbatches lie on other grids: refused on load and by from_sums; named in both."""
    grads, model = filled()
    state = through_json(grads.state_dict())
    other = augend.Accumulator(tower(), dtype="exact", max_microbatches=1024)
    with pytest.raises(ContractError, match="max_microbatches 65536 was saved, and the accumulator has 1024"):
        other.load_state_dict(state)
    made = augend.Accumulator.from_sums(tower(), grads.finish_sums(), grads.contract)
    assert 65_536 == made.contract.max_microbatches
    del model


# ------------------------------------------------------------------ the fingerprint


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Run torch with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def test_another_number_of_threads_is_told() -> None:
    """Two threads instead of one: a UserWarning that names it, and the load goes on; with the same, no word."""
    grads, model = filled()
    state = through_json(grads.state_dict())
    assert 1 == state["bits"]["threads"]
    grads.load_state_dict(state)
    held = marks(grads, model)
    grads.reset()
    with threads(2):
        with pytest.warns(UserWarning, match="threads was 1 and is 2: from here on the bits may be others") as told:
            grads.load_state_dict(state)
        assert 1 == len(told)
        assert held == marks(grads, model)
        assert 2 == grads.bits["threads"]
        grads.load_state_dict(grads.state_dict())


def test_another_number_of_threads_is_refused_if_asked() -> None:
    """other_bits="error": a ContractError that names it, and not a bit has changed."""
    grads, model = filled(other_bits="error")
    state = through_json(grads.state_dict())
    grads.load_state_dict(state)
    before = marks(grads, model)
    with threads(2), pytest.raises(ContractError, match='threads was 1 and is 2.*or pass other_bits="warn"'):
        grads.load_state_dict(state)
    assert before == marks(grads, model)
    with pytest.raises(ContractError, match="other_bits must be one of 'warn', 'error'; got 'ignore'"):
        augend.Accumulator(tower(), dtype="exact", other_bits="ignore")


def test_every_part_of_the_fingerprint_is_compared_and_named() -> None:
    """What a run depends on is told by name, several at once; what only one side knows is not compared."""
    grads, _ = filled()
    state = through_json(grads.state_dict())
    least = {"torch", "build", "device", "instructions", "threads", "deterministic", "precision", "subnormals"}
    assert least <= set(grads.bits)
    assert (torch.__version__, "cpu") == (grads.bits["torch"], grads.bits["device"])
    for name, value in grads.bits.items():
        other = copy.deepcopy(state)
        other["bits"][name] = f"not {value}" if isinstance(value, str) else 1 - value
        with pytest.warns(UserWarning, match=f"{name} was .* and is "):
            grads.load_state_dict(other)
    other = copy.deepcopy(state)
    other["bits"] |= {"threads": 7, "deterministic": False, "colour": "red"}
    del other["bits"]["torch"]
    with pytest.warns(UserWarning, match="deterministic was False and is True") as told:
        grads.load_state_dict(other)
    assert "threads was 7 and is 1" in str(told[0].message)
    assert "colour" not in str(told[0].message)
    grads.load_state_dict({**state, "bits": {}})


def test_switches_of_torch_are_in_the_fingerprint() -> None:
    """Deterministic algorithms, the precision of products and subnormal numbers are recorded as they are now."""
    grads, _ = filled()
    before = dict(grads.bits)
    torch.use_deterministic_algorithms(mode=False)
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    flushes = torch.set_flush_denormal(True)
    try:
        now = dict(grads.bits)
    finally:
        torch.use_deterministic_algorithms(mode=True)
        torch.backends.mkldnn.matmul.fp32_precision = "none"
        torch.set_flush_denormal(False)
    switched = {"deterministic", "precision", *(["subnormals"] if flushes else [])}
    assert switched == {name for name, value in before.items() if value != now[name]}
    assert before == dict(grads.bits)
    assert (True, True) == (before["deterministic"], before["subnormals"])


def test_on_a_gpu_its_kind_and_libraries_are_in_the_fingerprint(monkeypatch) -> None:
    """What decides how a GPU rounds is recorded where the parameters are on one, and JSON keeps all of it."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    bits = machine_bits(torch.device("cuda"))
    assert ("cuda", "a GPU") == (bits["device"], bits["accelerator"])
    assert {"cuda", "cudnn", "cudnn_benchmark", "cudnn_deterministic"} <= bits.keys() - machine_bits(CPU).keys()
    assert bits == json.loads(json.dumps(bits))
    assert all(isinstance(value, str | int | bool) for value in bits.values())


@pytest.mark.parametrize("other_bits", ["warn", "error"])
def test_another_microbatch_size_is_told_when_its_batch_is_entered(other_bits: str) -> None:
    """Micro-batches of another size round otherwise: told, or refused, at the first batch after a load, and once."""
    job = Job()
    for _ in zip(range(2), job.moments(), strict=False):
        pass
    assert MICRO == job.grads.bits["microbatch_size"]
    saved = job.save()
    same = Job(other_bits=other_bits)
    same.load(saved)
    next(same.grads.microbatches(next(iter(same.data))))
    other = Job(size=2, other_bits=other_bits)
    other.load(saved)
    loop = other.grads.microbatches(next(iter(other.data)))
    if other_bits == "error":
        with pytest.raises(ContractError, match="microbatch_size was 3 and is 2"):
            next(loop)
        return
    with pytest.warns(UserWarning, match="microbatch_size was 3 and is 2"):
        microbatch = next(loop)
    other.grads.backward(loss(other.model, microbatch))
    for microbatch in loop:
        other.grads.backward(loss(other.model, microbatch))
    other.grads.step(other.optimizer)
    assert 2 == other.grads.bits["microbatch_size"]
    next(other.grads.microbatches(next(iter(other.data))))


def test_the_size_that_counts_is_that_of_the_batch_to_come() -> None:
    """An accumulator that went through micro-batches of another size before its load goes on without a word."""
    expected = finished(Job())
    job = Job()
    for _ in zip(range(2), job.moments(), strict=False):
        pass
    used = Job(size=2)
    for _ in zip(range(3), used.moments(), strict=False):
        pass
    used.data = Job().data
    used.load(job.save())
    assert expected == finished(used)


def test_the_size_survives_a_load_that_enters_no_batch() -> None:
    """Loaded, saved again before any batch, and loaded once more: another size is still told."""
    job = Job()
    for _ in zip(range(2), job.moments(), strict=False):
        pass
    hop = Job()
    hop.load(job.save())
    other = Job(size=2)
    other.load(hop.save())
    with pytest.warns(UserWarning, match="microbatch_size was 3 and is 2"):
        next(other.grads.microbatches(next(iter(other.data))))


def test_a_fingerprint_is_not_compared_in_float32() -> None:
    """Float32 and float64 sums promise no bits: their state has no fingerprint, and more threads are fine."""
    for dtype in ("float32", "float64"):
        grads = augend.Accumulator(torch.nn.Linear(1, 1), dtype=dtype, other_bits="error")
        state = grads.state_dict()
        assert "bits" not in state
        with threads(2):
            grads.load_state_dict(state)
