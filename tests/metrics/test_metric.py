"""What all metrics share: any cut, any order, any number of offers, any interruption."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from augend import Accuracy, Mean, Perplexity, Tally
from augend.errors import ContractError, TallyError

METRICS = [Mean, Perplexity, Accuracy]
ROW = st.tuples(st.integers(0, 20), st.integers(0, 20), st.integers(-2, 2))  # hits, misses, group
ROWS = st.lists(ROW, max_size=12)
CUTS = st.lists(st.integers(0, 12))


@dataclass(frozen=True)
class Microbatch:
    """What a metric reads of a micro-batch."""

    real_rows: int = 1
    epoch: int = 0
    step: int = 0
    offer: int = 0


def tally_of(rows: list[tuple[int, ...]], *, weighted: bool = False) -> Tally:
    """Make a tally of (hits, misses, ...) rows; weighted, in thirds of an item."""
    total = torch.tensor([float(hits) for hits, *_ in rows], dtype=torch.float64)
    count = torch.tensor([hits + misses for hits, misses, *_ in rows], dtype=torch.int64)
    return Tally(total / 3, count.double() / 3) if weighted else Tally(total, count)


def groups_of(rows: list[tuple[int, ...]]) -> torch.Tensor:
    """Return the groups of rows."""
    return torch.tensor([group for *_, group in rows], dtype=torch.int64)


def feed(metric, tally, **where):
    """Update any of the three with a tally."""
    (metric.update_tally if isinstance(metric, Accuracy) else metric.update)(tally, **where)


def filled(kind, parts, **how):
    """Return one metric a part, each updated once."""
    metrics = []
    for part in parts:
        metric = kind()
        feed(metric, tally_of(part, **how))
        metrics.append(metric)
    return metrics


def cut(rows, cuts):
    """Cut rows at any places, empty parts included."""
    places = [0, *sorted(min(place, len(rows)) for place in cuts), len(rows)]
    return [rows[start:stop] for start, stop in itertools.pairwise(places)]


def values(tally: list[float], counts: list[int] | None = None) -> Tally:
    """Make a tally of totals over counts, or over one item each."""
    return Tally(torch.tensor(tally, dtype=torch.float64), torch.tensor(counts or [1] * len(tally)))


@pytest.mark.parametrize("kind", METRICS)
@given(rows=ROWS, cuts=CUTS, shuffler=st.randoms(use_true_random=False), weighted=st.booleans())
def test_any_cut_order_and_merge_gives_the_same_bits(kind, rows, cuts, shuffler, weighted):
    """Rows at once, cut into updates of one metric, or merged from many in any order: the same Estimate, bitwise."""
    expected = repr(filled(kind, [rows], weighted=weighted)[0].compute())
    shuffler.shuffle(rows)
    one = kind()
    for part in cut(rows, cuts):
        feed(one, tally_of(part, weighted=weighted))
    assert expected == repr(one.compute())
    many = filled(kind, cut(rows, cuts), weighted=weighted)
    shuffler.shuffle(many)
    merged = kind()
    for metric in many:
        assert merged.merge(metric) is merged
    assert expected == repr(merged.compute())


@pytest.mark.parametrize("kind", METRICS)
@given(rows=ROWS, cuts=CUTS, shuffler=st.randoms(use_true_random=False))
@example([(1, 0, 0), (0, 1, 1), (3, 4, 0)], [1, 2], None)
def test_a_group_may_be_cut_like_anything_else(kind, rows, cuts, shuffler):
    """Rows of one group are one unit, in whatever pieces they come: as if each group had been one row."""
    sums: dict[int, tuple[int, int]] = {}
    for hits, misses, group in rows:
        mine = sums.get(group, (0, 0))
        sums[group] = mine[0] + hits, mine[1] + misses
    expected = repr(filled(kind, [list(sums.values())])[0].compute())
    if shuffler is not None:
        shuffler.shuffle(rows)
    metric, other = kind(), kind()
    for index, part in enumerate(cut(rows, cuts)):
        feed(metric if index % 2 else other, tally_of(part), groups=groups_of(part), microbatch=Microbatch(step=index))
    assert expected == repr(metric.merge(other).compute())


def test_a_row_without_a_group_is_a_unit_of_its_own():
    """Grouped and other rows may be mixed: two groups and one row are three units."""
    mixed, plain = Mean(), Mean()
    mixed.update(values([1.0, 2.0, 3.0]), groups=torch.tensor([7, 8, 7]))
    mixed.update(values([5.0]))
    plain.update(values([4.0, 2.0, 5.0], [2, 1, 1]))
    assert plain.compute() == mixed.compute()


def test_weights_and_bad_totals_in_groups():
    """Grouped weights are rounded a row at a time like others; a NaN in a group makes the value NaN."""
    grouped, plain = Mean(), Mean()
    weighted = Tally(torch.ones(3), torch.tensor([1 / 3, 0.1, 0.7], dtype=torch.float64))
    grouped.update(weighted, groups=torch.tensor([0, 1, 2]))
    plain.update(weighted)
    assert plain.compute() == grouped.compute()
    grouped.update(values([math.nan]), groups=torch.tensor([0]))
    assert math.isnan(grouped.compute().value)


# Offers and fillers


def test_a_filler_is_not_counted():
    """Values 1, 2, 3, 4, 10 dealt to two ranks, with the first as a filler: 20/5 = 4.0, never 3.5."""
    ranks = [Mean(), Mean()]
    for index, value in enumerate([1.0, 2.0, 3.0, 4.0, 10.0]):
        ranks[index % 2].update(values([value]), Microbatch())
    ranks[1].update(values([1.0]), Microbatch(real_rows=0))
    estimate = ranks[0].merge(ranks[1]).compute()
    assert (4.0, 5) == (estimate.value, estimate.count)


@pytest.mark.parametrize("kind", METRICS)
def test_a_later_offer_replaces_the_earlier_one(kind):
    """A batch offered twice counts once, as it came last; the batches before and after it are not touched."""
    metric, expected = kind(), kind()
    feed(metric, values([3.0], [4]), microbatch=Microbatch(step=0))
    feed(metric, values([1.0], [2]), microbatch=Microbatch(step=1))
    feed(metric, values([9.0], [9]), microbatch=Microbatch(step=1))
    feed(metric, values([2.0], [2]), microbatch=Microbatch(step=1, offer=1))
    feed(metric, values([5.0], [6]), microbatch=Microbatch(step=1, offer=1))
    feed(metric, values([4.0], [8]), microbatch=Microbatch(step=2))
    feed(expected, values([3.0, 2.0, 5.0, 4.0], [4, 2, 6, 8]))
    assert expected.compute() == metric.compute()


def test_an_offer_is_one_of_its_batch_and_epoch():
    """The same step of another epoch is another batch, and so is a lower offer: a second pass over the data."""
    mean = Mean()
    mean.update(values([1.0]), Microbatch(epoch=0, offer=1))
    mean.update(values([2.0]), Microbatch(epoch=1, offer=2))
    mean.update(values([4.0]), Microbatch(epoch=1, offer=0))
    assert (7 / 3, 3) == (mean.compute().value, mean.compute().count)


def test_a_filler_announces_its_offer_and_adds_nothing():
    """A rank that has only fillers left still learns that its rows of the earlier offer are void."""
    mean = Mean()
    mean.update(values([1.0]), Microbatch())
    mean.update(Tally(torch.tensor([math.nan]), torch.tensor([-1.0])), Microbatch(real_rows=0, offer=1))
    assert mean.compute().count == 0


@pytest.mark.parametrize(
    ("mine", "theirs", "count"),
    [
        ((0, 0, 0), (0, 0, 0), 11),  # one offer, rows of two ranks
        ((0, 0, 0), (0, 0, 1), 10),  # the later offer is kept
        ((0, 0, 1), (0, 0, 0), 1),
        ((0, 0, 1), (0, 1, 0), 11),
        ((1, 0, 0), (0, 9, 5), 11),
        (None, (0, 0, 1), 10),
        ((0, 0, 1), None, 1),
    ],
)
def test_merging_keeps_the_later_offer_of_one_batch(mine, theirs, count):
    """Merged metrics hold every batch once, at its latest offer, in whichever order they are merged."""
    held = []
    for position, items in ((mine, 1), (theirs, 10)):
        mean = Mean()
        if position is not None:
            epoch, step, offer = position
            mean.update(values([1.0], [items]), Microbatch(epoch=epoch, step=step, offer=offer))
        held.append(mean)
    assert count == Mean().merge(held[0]).merge(held[1]).compute().count
    assert count == Mean().merge(held[1]).merge(held[0]).compute().count


def test_a_merged_batch_can_still_be_offered_again():
    """After a merge the latest batch stays open: its next offer replaces the rows of both."""
    first, second = Mean(), Mean()
    first.update(values([1.0]), Microbatch(step=3))
    second.update(values([2.0]), Microbatch(step=3))
    first.merge(second).update(values([5.0]), Microbatch(step=3, offer=1))
    assert (5.0, 1) == (first.compute().value, first.compute().count)
    assert second.compute().value == 2.0


def test_kinds_do_not_merge():
    """A Mean and a Perplexity hold sums of different things."""
    with pytest.raises(ContractError, match="Mean merges with its own kind; got Perplexity"):
        Mean().merge(Perplexity())


@pytest.mark.parametrize("kind", METRICS)
def test_a_metric_does_not_merge_with_itself(kind):
    """Its rows would count twice; it is refused and left as it was."""
    metric = filled(kind, [[(1, 2)]])[0]
    before = metric.state_dict()
    with pytest.raises(ContractError, match=f"{kind.__name__} cannot merge with itself"):
        metric.merge(metric)
    assert before == metric.state_dict()


# State


@pytest.mark.parametrize("kind", METRICS)
@given(rows=ROWS, more=ROWS, grouped=st.booleans(), opened=st.booleans())
@example([(3, 4, 1)], [(1, 2, 1)], True, True)
def test_a_state_goes_through_json_and_on(kind, rows, more, grouped, opened):
    """Saved, written, read and continued: the same bits as without the interruption, also within an offer."""
    where = {"microbatch": Microbatch(step=2, offer=1) if opened else None}
    never, saved, loaded = kind(), kind(), kind()
    feed(loaded, values([1.0], [1]))  # which the load must drop
    for metric in (never, saved):
        feed(metric, tally_of(rows), groups=groups_of(rows) if grouped else None, **where)
    state = json.loads(json.dumps(saved.state_dict()))
    loaded.load_state_dict(state)
    assert state == loaded.state_dict()
    for metric in (never, loaded):
        feed(metric, tally_of(more), groups=groups_of(more) if grouped else None, **where)
    assert repr(never.compute()) == repr(loaded.compute())


def damaged(**changes):
    """Return the state of a mean with a group, an open batch and a change."""
    mean = Mean()
    mean.update(values([1.5, 2.0]), groups=torch.tensor([1, 2]))
    mean.update(values([1.0]), Microbatch())
    state = mean.state_dict()
    for path, value in changes.items():
        place = state
        *front, last = path.split("__")
        for key in front:
            place = place[key]
        place[last] = value
    return state


REFUSED = [
    {"version": 2},
    {"metric": "Accuracy"},
    {"more": 1},
    {"position": None},
    {"position": [0, 0]},
    {"position": [0, 0, -1]},
    {"position": [0, 0, 1.0]},
    {"position": "000"},
    {"open": None},
    {"open": {"moments": {}}},
    {"open__moments": []},
    {"open__moments": {}},
    {"open__moments__count": "-1"},
    {"open__moments__total": "nan"},
    {"closed__groups": {}},
    {"closed__groups": [[1, "1"]]},
    {"closed__groups": ["1"]},
    {"closed__groups": [["1", "1", "1"]]},
    {"closed__groups": [[True, "1", "1"]]},
    {"closed__groups": [[1, "1", "-1"]]},
    {"closed__groups": [[1, "1/3", "1"]]},
    {"closed__groups": [[1, "1", "1"], [1, "1", "1"]]},
]


@pytest.mark.parametrize("changes", REFUSED)
def test_a_damaged_state_is_refused_and_changes_nothing(changes):
    """Versions, kinds, keys, positions and sums out of their domain are refused; the metric is left as it was."""
    mean = Mean()
    mean.update(values([4.0, 5.0]), Microbatch(step=7))
    before = mean.state_dict()
    with pytest.raises(ContractError):
        mean.load_state_dict(damaged(**changes))
    assert before == mean.state_dict()
    mean.load_state_dict(damaged())
    assert mean.compute().count == 3


# Values that are refused


@pytest.mark.parametrize("kind", METRICS)
@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_a_bad_count_is_refused_and_adds_nothing(kind, bad):
    """Negative, NaN and infinite counts are named with their row; nothing is added and no offer begins."""
    metric = kind()
    feed(metric, values([1.0]), microbatch=Microbatch())
    before = metric.state_dict()
    with pytest.raises(TallyError, match=r"in row 1"):
        feed(metric, Tally(torch.zeros(2), torch.tensor([1.0, bad])), microbatch=Microbatch(offer=1))
    assert before == metric.state_dict()


@pytest.mark.parametrize(
    "groups",
    [torch.tensor([1]), torch.tensor([1.0, 2.0]), torch.tensor([[1, 2]]), torch.tensor([1, 2], dtype=torch.int32)],
)
def test_groups_that_do_not_fit_are_refused(groups):
    """Groups are int64, one a row."""
    with pytest.raises(TallyError, match="one group a row"):
        Mean().update(values([1.0, 2.0]), groups=groups)


def test_a_sum_over_unknown_rows_has_no_groups():
    """A 0-d tally has no rows to group; without groups it has a value and no error."""
    mean = Mean()
    loose = Tally(torch.tensor(3.0), torch.tensor(2))
    with pytest.raises(TallyError, match="one group a row"):
        mean.update(loose, groups=torch.tensor(1))
    mean.update(loose)
    assert mean.compute().value == 1.5
    assert math.isnan(mean.compute().error)
