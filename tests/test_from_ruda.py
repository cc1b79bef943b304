"""What ruda-optim's fully sharded accumulation has is here too: the page that says so, and tests that show it.

``golden/ruda_items.json`` lists its public types, fields, methods, variants and error texts. Each has a row in
``docs/from-ruda.md``: its name in augend, which must exist, what differs, and the tests that show it, which must exist.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import pytest
import torch
from torch import Tensor

import augend
import reference
from augend.errors import ContractError, EmptyWindowError, StateError, TallyError
from item_pages import ROOT, items_of, problems

PAGE = ROOT / "docs" / "from-ruda.md"
ITEMS = items_of("ruda_items.json")
HEADER = ["ruda-optim", "augend", "what differs", "shown by"]

# ------------------------------------------------------------------ the page


def test_every_item_has_its_row() -> None:
    """Each item of the seed has one row, each row is of an item, and its objects and tests exist."""
    assert [] == problems(PAGE.read_text("utf-8"), ITEMS, HEADER)


GOOD = (
    "| `State.count` | `augend.Accumulator.state.count` | nothing | `tests/test_from_ruda.py::test_a_bad_page_fails` |"
)


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("", "", None),
        ("Accumulator.state.count", "Accumulator(sync='last').finish_mean(empty='one').gradients", None),
        ("augend.Accumulator.state.count", "augend.errors.StateError", None),
        (GOOD, "", "State.count has no row"),
        ("`State.count`", "`State.total`", "State.total is no item"),
        (GOOD, f"{GOOD}\n{GOOD}", "State.count has 2 rows"),
        ("| nothing ", "", "not a row of an item"),
        ("nothing", "", "not a row of an item"),
        ("`augend.Accumulator.state.count`", "the count", "names no object"),
        ("state.count", "state.total", "total"),
        ("state.count", "states", "states"),
        ("state.count", "state.count.real.real", "has no attributes to look into"),
        ("state.count", "state()", "cannot be called"),
        ("augend.Accumulator.state.count", "augend.nothing", "No module named 'augend.nothing'"),
        ("augend.Accumulator.state.count", "torch.Tensor", "no chain of augend's"),
        ("augend.Accumulator.state.count", "augend.Accumulator[", "does not exist"),
        ("Accumulator.state.count", "Accumulator(mash=None)", "Accumulator takes no mash="),
        ("Accumulator.state.count", "Accumulator(sync='never')", "sync= is one of ('every', 'last')"),
        ("a_bad_page_fails", "nothing", "there is no test tests/test_from_ruda.py::test_nothing"),
        ("tests/test_from_ruda.py", "tests/test_nothing.py", "there is no test"),
        ("test_a_bad_page_fails", "GOOD", "there is no test"),
    ],
)
def test_a_bad_page_fails(old: str, new: str, fault: str | None) -> None:
    """Whatever is wrong with a row is found, and a right one passes: the check is not blind."""
    page = f"| {' | '.join(HEADER)} |\n| --- | --- | --- | --- |\n{GOOD}\n\nAnd so on.\n\n| another | table |\n"
    found = problems(page.replace(old, new) if old else page, ["State.count"], HEADER)
    assert found == [] if fault is None else any(fault in one for one in found), found


# ------------------------------------------------------------------ the behaviour


class Slope(torch.nn.Module):
    """A weight whose row with slope x has the loss w·x and so the gradient x, an idle one, and a frozen one."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.used = torch.nn.Parameter(torch.ones((), dtype=dtype))
        self.idle = torch.nn.Parameter(torch.ones(3, dtype=dtype))
        self.frozen = torch.nn.Parameter(torch.ones(2, dtype=dtype), requires_grad=False)

    def tally(self, *rows: tuple[float, float]) -> augend.Tally:
        """Return the tally of rows of (gradient, count)."""
        slopes, counts = zip(*rows, strict=True)
        return augend.Tally(self.used * torch.tensor(slopes, dtype=self.used.dtype), torch.tensor(counts))


def opened(
    *microbatches: list[tuple[float, float]], storage: torch.dtype = torch.float32, **options: object
) -> tuple[augend.Accumulator, Slope]:
    """Return an accumulator with these micro-batches in its window, and its model."""
    model = Slope(storage)
    grads = augend.Accumulator(model, **options)
    for rows in microbatches:
        grads.backward(model.tally(*rows))
    return grads, model


def test_each_cause_has_its_error() -> None:
    """The seed's six kinds of error are classes under one root, each also the built-in that fits."""
    kinds = {
        "GradientError": ValueError,
        "PlacementError": ValueError,
        "ContractError": ValueError,
        "TallyError": ValueError,
        "CounterOverflowError": OverflowError,
        "EmptyWindowError": RuntimeError,
        "StateError": RuntimeError,
    }
    for name, built_in in kinds.items():
        assert (augend.errors.AugendError, built_in) == getattr(augend.errors, name).__bases__


def test_counters_are_exact() -> None:
    """Counts [5, 10], [20, 3] and an empty micro-batch are 38 items in 3 micro-batches; 2^53 + 1 stays that."""
    grads, _ = opened([(1, 5), (1, 10)], [(1, 20), (1, 3)], [(0, 0)], loss_scale=8.0)
    state = grads.state
    assert ("float32", 8.0, 38, 3) == (state.dtype, state.loss_scale, state.count, state.microbatches)
    grads, _ = opened([(1, 2**53)], [(1, 1)])
    assert 2**53 + 1 == grads.state.count


def test_one_division_by_the_count_of_the_window() -> None:
    """A sum of 9 over three items and one of 7 over one item have the mean 16 / 4 = 4.0; the mean of means is 5.0."""
    grads, _ = opened([(9, 3)], [(7, 1)])
    assert 4.0 == float(grads.finish_mean().gradients["used"])


def test_scale_and_count_divide_at_once() -> None:
    """The mean is the float32 nearest to sum / (scale · count); dividing twice, as the seed does, rounds twice."""
    twice = [
        (s, c)
        for s in (3, 5, 7)
        for c in range(1, 50)
        if float(np32(1) / np32(s) / np32(c)) != float(np32(1 / (s * c)))
    ]
    assert twice
    for scale, count in twice:
        model = Slope()
        grads = augend.Accumulator(model, loss_scale=float(scale))
        grads.add({"used": torch.tensor(1.0)}, count)
        assert np32(1 / (scale * count)) == grads.finish_mean().gradients["used"]


def np32(value: float) -> Tensor:
    """Return a number as a float32 tensor."""
    return torch.tensor(value, dtype=torch.float32)


def test_a_contract_is_read_from_metadata_alone() -> None:
    """Another instance fits, with nan weights or on a device without memory; frozen parameters belong to it too."""
    grads, model = opened([(1, 1)])
    with torch.no_grad():
        model.used.fill_(torch.nan)
    grads.contract.validate(model)
    grads.contract.validate(Slope().to("meta"))
    assert ["used", "idle", "frozen"] == list(grads.contract.tensors)
    assert [True, True, False] == [one.trainable for one in grads.contract.tensors.values()]


@pytest.mark.parametrize("how", ["sums", "mean"])
def test_a_finish_hands_over_the_window_that_made_it(how: str) -> None:
    """Gradients come with their window's counters, what nothing used stays absent, and the next window is empty."""
    grads, _ = opened([(9, 3)], [(7, 1)], loss_scale=4.0)
    before = grads.state
    taken = grads.finish_sums() if how == "sums" else grads.finish_mean()
    assert before == taken.state
    assert {"used": 64.0 if how == "sums" else 4.0} == {name: float(one) for name, one in taken.gradients.items()}
    assert (4.0, 0, 0, {}) == (grads.state.loss_scale, grads.state.count, grads.state.microbatches, dict(grads.pending))


def test_pending_sums_are_borrowed() -> None:
    """Looking at pending sums copies nothing, holds only what had a gradient, and lets nobody replace one."""
    grads, model = opened([(9, 3)])
    seen = grads.pending["used"]
    grads.backward(model.tally((7, 1)))
    assert (16.0, ["used"]) == (float(seen), list(grads.pending))
    assert not isinstance(grads.pending, dict)
    with pytest.raises(TypeError, match="does not support item assignment"):
        grads.pending["used"] = seen


@pytest.mark.parametrize("summed", [False, True])
def test_given_gradients_are_of_the_scaled_sum(summed: bool) -> None:
    """add() takes gradients of loss_scale times the SUM as they are: 12 under scale 4 over three items is 1.0."""
    model = Slope()
    grads = augend.Accumulator(model, loss_scale=4.0)
    grads.add({"used": torch.tensor(12.0)}, 3, summed=summed)
    assert (12.0, 1) == (float(grads.pending["used"]), grads.state.microbatches)
    assert 1.0 == float(grads.finish_mean().gradients["used"])


def test_narrow_losses_are_summed_wide() -> None:
    """Two float16 losses of 40,000, whose sum float16 cannot hold, have the mean 40,000 and the right gradient."""
    model = Slope(torch.float16)
    grads = augend.Accumulator(model, loss_scale=8.0)
    grads.backward(augend.Tally(model.used + torch.full((2,), 39_999.0, dtype=torch.float16), torch.tensor([1, 1])))
    assert 16.0 == float(grads.pending["used"])
    assert 40_000.0 == grads.finish().loss.value


def test_a_count_of_zero_does_not_hold_a_gradient_back() -> None:
    """Nothing counted, yet backward runs and adds, and the micro-batch is one: the next count covers it too."""
    grads, model = opened([(3, 0)])
    assert (3.0, 0, 1) == (float(grads.pending["used"]), grads.state.count, grads.state.microbatches)
    grads.backward(model.tally((5, 2)))
    assert 4.0 == float(grads.finish_mean().gradients["used"])


@pytest.mark.parametrize(("empty", "expected"), [("one", 3.0), ("zero", 0.0), ("skip", None)])
def test_a_window_that_counted_nothing_has_one_rule(empty: str, expected: float | None) -> None:
    """By default it raises and is kept; "one" divides by one, which is the seed's max(count, 1), "zero" is zero."""
    grads, _ = opened([(3, 0)], loss_scale=2.0)
    with pytest.raises(EmptyWindowError, match='choose empty="skip", "one" or "zero"'):
        grads.finish_mean()
    assert {"used": 6.0} == {name: float(one) for name, one in grads.pending.items()}
    gradients = grads.finish_mean(empty=empty).gradients
    assert ({} if expected is None else {"used": expected}) == {name: float(one) for name, one in gradients.items()}


def test_only_sums_can_be_taken_of_no_microbatch() -> None:
    """Without any micro-batch finish_sums() gives nothing and zero counters; a mean of it raises, whatever the rule."""
    grads, _ = opened()
    taken = grads.finish_sums()
    assert ({}, 0, 0) == (dict(taken.gradients), taken.state.count, taken.state.microbatches)
    for empty in ("raise", "one", "zero"):
        with pytest.raises(EmptyWindowError, match="0 micro-batches were made"):
            grads.finish_mean(empty=empty)
        with pytest.raises(EmptyWindowError, match="0 micro-batches were made"):
            grads.finish(empty=empty)


def test_the_only_narrowing_is_into_grad() -> None:
    """256 + 1 of a bfloat16 parameter are 257 in the mean, and the bfloat16 nearest to it in .grad, rounded once."""
    for taken in ("mean", "grad"):
        grads, model = opened([(256, 1)], [(1, 0)], storage=torch.bfloat16)
        if taken == "mean":
            mean = grads.finish_mean().gradients["used"]
            assert (torch.float32, 257.0, None) == (mean.dtype, float(mean), model.used.grad)
        else:
            grads.finish()
            assert torch.equal(torch.tensor(257.0).bfloat16(), model.used.grad)


def plain_keys(state: object) -> Iterator[str]:
    """Yield every key of nested dictionaries."""
    if isinstance(state, Mapping):
        for key, value in state.items():
            yield str(key)
            yield from plain_keys(value)


def test_a_state_knows_no_rank_and_no_world() -> None:
    """Nothing in a state depends on how many ranks made it: no key speaks of ranks, worlds, shards or padding."""
    grads, _ = opened([(9, 3)])
    keys = set(plain_keys(grads.state_dict()))
    assert {"contract", "moments", "sums", "version"} <= keys
    assert [] == [key for key in keys if re.search("rank|world|shard|mesh|placement|pad", key)]


def test_a_state_comes_back_with_its_own_counters() -> None:
    """Counters are the record's, whatever the live ones were; dtype and scale must be those of the accumulator."""
    grads, _ = opened([(9, 3)], loss_scale=2.0)
    saved = grads.state_dict()
    live, _ = opened([(1, 1)], [(1, 1)], loss_scale=2.0)
    live.load_state_dict(saved)
    assert reference.digest(saved) == reference.digest(live.state_dict())
    for options in ({"loss_scale": 4.0}, {"loss_scale": 2.0, "dtype": "float64"}):
        other, _ = opened([(1, 1)], **options)
        before = reference.digest(other.state_dict())
        with pytest.raises(ContractError, match="was saved, and the accumulator has"):
            other.load_state_dict(saved)
        assert before == reference.digest(other.state_dict())


@pytest.mark.parametrize(("shape", "error"), [([2**63], StateError), ([2**40, 2**40], ContractError)])
def test_sizes_beyond_every_memory_are_refused(shape: list[int], error: type[Exception]) -> None:
    """A state whose parameter has more elements than can be counted is refused by name, and no memory is asked for."""
    grads, _ = opened([(9, 3)])
    saved = grads.state_dict()
    saved["contract"]["tensors"]["used"]["shape"] = shape
    with pytest.raises(error, match="used"):
        grads.load_state_dict(saved)


def to_half(model: Slope) -> None:
    """Change the storage of a parameter."""
    model.used.data = model.used.data.half()


def to_frozen(model: Slope) -> None:
    """Freeze a parameter."""
    model.used.requires_grad_(requires_grad=False)


def to_thawed(model: Slope) -> None:
    """Thaw a parameter."""
    model.frozen.requires_grad_()


def to_tied(model: Slope) -> None:
    """Make one parameter of two."""
    model.idle = model.used


def to_fewer(model: Slope) -> None:
    """Take a parameter away."""
    del model.idle


def to_more(model: Slope) -> None:
    """Add a parameter."""
    model.more = torch.nn.Parameter(torch.zeros(1))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (to_half, "'used': dtype float32 was expected, and the model now has float16"),
        (to_frozen, "'used': trainable True was expected, and the model now has False"),
        (to_thawed, "'frozen': trainable False was expected, and the model now has True"),
        (to_tied, "'idle' is in the contract but not in the model now"),
        (to_fewer, "'idle' is in the contract but not in the model now"),
        (to_more, "'more' is in the model now but not in the contract"),
    ],
)
def test_a_model_that_changes_in_a_window_is_refused(change: object, words: str) -> None:
    """Storage, trainability, ties and membership are compared before anything is added: the window stays as it was."""
    grads, model = opened([(9, 3)])
    before = reference.digest(grads.pending)
    change(model)
    for call in (lambda: grads.backward(Slope().tally((1, 1))), grads.finish, grads.finish_mean, grads.state_dict):
        with pytest.raises(ContractError, match=words):
            call()
    assert before == reference.digest(grads.pending)


def test_weights_below_one_are_not_clamped() -> None:
    """Fractional weights divide as they are: 1 over 0.25 is 4.0; their sum is exact; a negative one is refused."""
    grads, model = opened([(1.0, 0.25)])
    assert (0.25, 4.0) == (grads.state.count, float(grads.finish_mean().gradients["used"]))
    for _ in range(10):
        grads.backward(model.tally((1.0, 2.0**-40)))
    assert 10 * 2.0**-40 == grads.state.count
    grads.backward(model.tally((1.0, -0.5)))
    with pytest.raises(TallyError, match=r"a count of term 'loss' is -0\.5"):
        grads.finish_mean()


def test_the_norm_is_read_before_clipping_and_clips_only_what_is_longer() -> None:
    """norm() and finish() report 4.0 unclipped; the scale is min(1, max_norm / (norm + eps)), with an eps of 0."""
    for options, scale in ({"max_norm": 1.0}, 0.25), ({"max_norm": 8.0}, 1.0), ({"max_norm": 1.0, "eps": 4.0}, 0.125):
        grads, model = opened([(9, 3)], [(7, 1)])
        assert 4.0 == grads.norm()
        done = grads.finish(**options)
        assert (4.0, scale, 4.0 * scale) == (done.norm, done.scale, float(model.used.grad))
        assert (None, None) == (model.idle.grad, model.frozen.grad)
