"""The exact norm is the float64 nearest to the true one, and no partition of the elements can change it."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

import reference
from augend._numerics._exact_norm import exact_norm

TINY = 2.0**-149
MOST = 2.0**128 - 2.0**104
LARGE = 2**20  # elements
ANY = st.floats(allow_nan=False, allow_infinity=False, width=32)
SUBNORMAL = st.integers(-(2**23), 2**23).map(lambda n: n * TINY)
WIDE = st.builds(
    math.ldexp, st.floats(-1, 1, width=32).filter(lambda x: x == 0 or abs(x) >= 2**-20), st.integers(-100, 100)
)
ELEMENTS = st.one_of(ANY, SUBNORMAL, WIDE, st.sampled_from([0.0, 1.0, 2.0**53, 2.0**27, TINY, MOST]))
MIDDLE = [2.0**53, 2.0**27, 1.0]  # its norm is 2^53 + 1, half-way between two float64


def norm_of(values: Sequence[float] | Tensor) -> float:
    """Return the norm of one tensor."""
    tensor = values if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.float32)
    return exact_norm([tensor], tensor.numel())


# ------------------------------------------------------------------ correctly rounded


@given(st.lists(ELEMENTS, min_size=1))
@example(MIDDLE)
@example([*MIDDLE, TINY])
@example([TINY])
@example([MOST] * 5)
@example([MOST, TINY])
@example([0.0, -0.0])
@example([2.0**-149, 2.0**-148, -(2.0**-149)])
def test_the_norm_is_correctly_rounded(values: list[float]) -> None:
    """Of any finite float32 numbers: what rational arithmetic and one rounding, ties to even, give."""
    tensor = torch.tensor(values)
    assert reference.exact_norm(tensor.numpy()) == norm_of(tensor)


def random_elements(spread: int) -> Tensor:
    """Return normal numbers over 2 · spread binades."""
    generator = torch.Generator().manual_seed(spread)
    powers = torch.randint(-spread, spread + 1, (LARGE,), generator=generator)
    return torch.randn(LARGE, generator=generator) * torch.exp2(powers.double()).float()


def with_head(*head: float, rest: float = 0.0) -> Tensor:
    """Return a few elements, and as many of one kind as make 2^20."""
    tensor = torch.full((LARGE,), rest)
    tensor[LARGE // 3 : LARGE // 3 + len(head)] = torch.tensor(head)
    return tensor


def with_dust(last: float) -> Tensor:
    """Return elements whose squares sum to (2^53 + 1)^2, of which 2^41 in pieces of 2^22, and one more element.

    With 2^20 elements two limbs end at 2^24, so that every such piece is left to the bound.
    """
    head = [2.0**53, *(one * 2.0**20 for one in (127, 15, 5, 1, 1, 1)), 1.0, last]
    assert 2**54 - 2**41 == 2**40 * (127**2 + 15**2 + 5**2 + 3)
    tensor = with_head(*head)
    tensor[: 2**18] = tensor[-(2**18) :] = 2.0**11
    return tensor


HARD: dict[str, Callable[[], Tensor]] = {
    "normal": lambda: random_elements(0),
    "over 20 binades": lambda: random_elements(10),
    "over 160 binades": lambda: random_elements(80),
    "1e-30 to 1e30": lambda: torch.logspace(-30, 30, LARGE, dtype=torch.float64).float(),
    "zeros": lambda: with_head(0.0),
    "one number": lambda: with_head(1 / 3),
    "one among zeros is the least": lambda: with_head(TINY),
    "all are the least": lambda: with_head(rest=TINY),
    "subnormal": lambda: torch.randint(-(2**23), 2**23, (LARGE,), generator=torch.Generator().manual_seed(1)) * TINY,
    "all are the largest": lambda: with_head(rest=MOST),
    "all are 1/3": lambda: with_head(rest=1 / 3),
    "all are 1e-30": lambda: with_head(rest=1e-30),
    "one huge among tiny": lambda: with_head(1e30, rest=1e-30),
    "one huge among the least": lambda: with_head(MOST, rest=TINY),
    "one above small ones that count together": lambda: with_head(1.0, rest=2.0**-37),
    "a tie": lambda: with_head(*MIDDLE),
    "a tie decided by the least": lambda: with_head(*MIDDLE, TINY),
    "a tie decided by a million of the least": lambda: with_head(*MIDDLE, rest=TINY),
    "a tie decided by one far below": lambda: with_head(*MIDDLE, 2.0**-70),
    "a tie decided by what two limbs leave": lambda: with_dust(TINY),
    "a tie that needs all that two limbs leave": lambda: with_dust(0.0),
    "just below a tie": lambda: with_head(2.0**53, 2.0**27, float(np.nextafter(np.float32(1), np.float32(0)))),
    "a tie of small numbers": lambda: with_head(*(one * 2.0**-149 for one in MIDDLE)),
    "a tie of large numbers": lambda: with_head(*(one * 2.0**74 for one in MIDDLE), TINY),
    "an exact root": lambda: with_head(3.0, 4.0),
    "half steps of every limb": lambda: with_head(rest=float(np.float32(1 + 2.0**-12))),
}


@pytest.mark.parametrize("name", HARD)
def test_the_norm_of_a_million_elements_is_correctly_rounded(name: str) -> None:
    """2^20 random and adversarial elements: the norm of rational arithmetic, and the same in 1, 3 and 7 tensors."""
    tensor = HARD[name]().float()
    assert LARGE == tensor.numel()
    expected = reference.exact_norm(tensor.numpy())
    for groups in (1, 3, 7):
        assert expected == exact_norm(tensor.tensor_split(groups), LARGE)


def test_the_twin_rounds_as_it_should() -> None:
    """The reference itself, by hand: ties go to even, and the least above a tie goes up."""
    assert 2.0**53 == reference.exact_norm(np.float32(MIDDLE))
    assert 2.0**53 + 2 == reference.exact_norm(np.float32([*MIDDLE, TINY]))
    assert 5.0 == reference.exact_norm(np.float32([3, -4]))
    assert TINY == reference.exact_norm(np.float32([TINY]))
    assert 2.0**10 * MOST == reference.exact_norm(np.full(LARGE, MOST, dtype=np.float32))
    # three elements, whose square is a Fraction: the rounding agrees with that of a root of 200 digits
    elements = np.float32([0.1, 1e-3, 7.7])
    assert sum(Fraction(float(x)) ** 2 for x in elements) == Fraction(reference.square_sum(elements), 2**298)


# ------------------------------------------------------------------ partitions


def norms_of_ranks(parts: Sequence[Sequence[Tensor]], elements: int) -> tuple[list[float], int]:
    """Return what each rank finds, all at once in threads that add up each other's numbers, and how often they do."""
    told: list[dict[int, Sequence[int]]] = []
    together = threading.Barrier(len(parts))

    def find(rank: int) -> float:
        rounds = iter(range(99))

        def gather(numbers: Sequence[int]) -> list[Sequence[int]]:
            index = next(rounds)
            if together.wait(60) == 0:
                told.append({})
            together.wait(60)
            told[index][rank] = numbers
            together.wait(60)
            return [told[index][other] for other in range(len(parts))]

        def maximum(numbers: Sequence[int]) -> list[int]:
            return torch.tensor(gather(numbers), dtype=torch.int64).amax(dim=0).tolist()

        def total(numbers: Sequence[int]) -> list[int]:
            return torch.tensor(gather(numbers), dtype=torch.int64).sum(dim=0).tolist()  # as ranks do: it could wrap

        return exact_norm(parts[rank], elements, maximum, total)

    with ThreadPoolExecutor(len(parts)) as executor:
        return list(executor.map(find, range(len(parts)))), len(told)


@given(st.data(), st.lists(ELEMENTS, min_size=1, max_size=12))
@example(None, [*MIDDLE, TINY, TINY])
def test_ranks_find_the_norm_of_all_their_elements(data, values: list[float]) -> None:
    """Elements in any order, in any tensors of any ranks, some with none: everybody has the norm of one process."""
    if data is None:
        order, ranks, cuts = [4, 2, 0, 3, 1], 4, [0, 1, 1, 3, 4, 5, 5, 5]
    else:
        order = data.draw(st.permutations(range(len(values))))
        ranks = data.draw(st.integers(1, 4))
        cuts = sorted(data.draw(st.lists(st.integers(0, len(values)), min_size=2 * ranks, max_size=2 * ranks)))
    flat = torch.tensor([values[at] for at in order])
    pieces = [flat[a:b] for a, b in zip([0, *cuts[1:-1]], [*cuts[1:-1], len(values)], strict=True)]
    parts = [pieces[rank::ranks] for rank in range(ranks)]
    assert len(values) == sum(one.numel() for part in parts for one in part)
    found, _ = norms_of_ranks(parts, len(values))
    assert [reference.exact_norm(np.float32(values))] * ranks == found


@pytest.mark.parametrize("name", ["normal", "1e-30 to 1e30", "a tie decided by the least", "subnormal", "zeros"])
def test_a_million_elements_on_ranks(name: str) -> None:
    """Three uneven ranks, one of which has a single element and one none, find the norm of one process."""
    tensor = HARD[name]().float()
    pieces = tensor.split([LARGE // 3, 1, LARGE - LARGE // 3 - 1])
    found, _ = norms_of_ranks([[pieces[0]], [pieces[1]], [pieces[2], torch.empty(0)], []], LARGE)
    assert [reference.exact_norm(tensor.numpy())] * 4 == found


@given(st.lists(ELEMENTS, min_size=1, max_size=6), st.integers(0, 2**38))
def test_any_bound_on_the_number_of_elements_gives_the_same_norm(values: list[float], more: int) -> None:
    """The grid of the limbs depends on how many elements there may be; what is rounded does not."""
    tensor = torch.tensor(values)
    assert reference.exact_norm(tensor.numpy()) == exact_norm([tensor], len(values) + more)


def test_any_layout_counts_every_element_once() -> None:
    """0-d, transposed, strided, expanded tensors, long and empty ones, with and without a graph."""
    square = torch.arange(12.0).reshape(3, 4)
    tensors = [
        torch.tensor(2.0),
        square.T,
        square[:, ::2],
        torch.tensor(3.0).expand(5),
        torch.empty(0, 4),
        torch.ones(2, requires_grad=True),
        torch.full((2**16 + 1,), 0.1),
    ]
    flat = torch.cat([one.detach().reshape(-1) for one in tensors])
    assert reference.exact_norm(flat.numpy()) == exact_norm(tensors, flat.numel())


# ------------------------------------------------------------------ limbs


def counted(values: list[float], elements: int) -> tuple[float, list[int]]:
    """Return a norm, and how many limbs were added up each time."""
    limbs: list[int] = []

    def total(numbers: Sequence[int]) -> Sequence[int]:
        limbs.append(len(numbers))
        return numbers

    return exact_norm([torch.tensor(values)], elements, total=total), limbs


@pytest.mark.parametrize(
    ("elements", "limbs"),
    [(1, 2), (2**20, 2), (2**22, 2), (2**22 + 1, 3), (2**32, 3), (2**32 + 1, 4), (2**38, 4)],
)
def test_few_limbs_decide_hardly_ever_more(elements: int, limbs: int) -> None:
    """Two limbs up to 2^22 elements, three to 2^32, four to 2^38, added up once."""
    for seed in range(20):
        values = torch.randn(min(elements, 500), generator=torch.Generator().manual_seed(seed)).tolist()
        norm, found = counted(values, elements)
        assert reference.exact_norm(np.float32(values)) == norm
        assert [limbs] == found


def test_where_few_limbs_do_not_decide_more_are_taken() -> None:
    """A tie, decided by an element of 2^-149 or by none: two limbs cannot tell, and all there are can."""
    for values, expected in ((MIDDLE, 2.0**53), ([*MIDDLE, TINY], 2.0**53 + 2), ([*MIDDLE, 2.0**-20], 2.0**53 + 2)):
        norm, limbs = counted(values, len(values))
        assert expected == norm
        assert list(range(2, 2 + len(limbs))) == limbs
        assert len(limbs) > 1
    # no limb ever needs to go below the square of the least float32
    assert 8 >= max(counted([*MIDDLE, TINY], 4)[1])


def test_sums_of_limbs_fit_an_int64_at_the_extreme() -> None:
    """2^38 equal elements just below a power of two: 2^18 ranks of 2^20, every sum of limbs within 2^62."""
    value = float(np.nextafter(np.float32(1), np.float32(0)))
    tensor = torch.full((LARGE,), value)

    def total(numbers: Sequence[int]) -> list[int]:
        sums = [one * 2**18 for one in numbers]
        assert all(abs(one) <= 2**62 for one in sums)
        return sums

    assert value * 2.0**19 == exact_norm([tensor], 2**38, total=total)


# ------------------------------------------------------------------ what is no number


@pytest.mark.parametrize("ranks", [1, 2])
def test_inf_and_nan_are_said(ranks: int) -> None:
    """An inf makes it inf, a nan makes it nan, also beside an inf, on whichever rank it is."""
    for values, expected in (([1.0, -math.inf], "inf"), ([math.nan, 1.0], "nan"), ([math.inf, -math.nan], "nan")):
        parts = [[one] for one in torch.tensor(values).tensor_split(ranks)]
        found, _ = norms_of_ranks(parts, 2)
        assert [expected] * ranks == [repr(one) for one in found]
        assert expected == repr(exact_norm([one for part in parts for one in part], 2))


@pytest.mark.parametrize("tensors", [[], [torch.empty(0)], [torch.zeros(3)], [torch.zeros(2), torch.empty(0, 4)]])
def test_the_norm_of_nothing_and_of_zeros_is_zero(tensors: list[Tensor]) -> None:
    """No tensors, no elements, only zeros, on one process and on ranks: 0.0."""
    assert "0.0" == repr(exact_norm(tensors, 5))
    assert [0.0, 0.0] == norms_of_ranks([tensors, []], 5)[0]


def test_the_norm_leaves_its_tensors_alone() -> None:
    """What is read is not written."""
    tensor = torch.tensor([*MIDDLE, TINY])
    norm_of(tensor)
    assert torch.equal(torch.tensor([*MIDDLE, TINY]), tensor)
