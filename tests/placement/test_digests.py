"""Digests of parameters: 64 bits that know every bit and its place, and nothing of how a tensor is cut."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import augend
from augend._placement._digests import digest, written

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SHAPES = st.lists(st.integers(0, 5), max_size=4)
MASK = 2**64 - 1


def plainly(values: list[int], indices: list[int]) -> int:
    """Compute the digest of bits and indices as it is written in the literature, in Python's integers."""
    total = 0
    for value, index in zip(values, indices, strict=True):
        mixed = (value * 0xD1342543DE82EF95 + index * 0x9E3779B97F4A7C15) & MASK
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MASK
        total += mixed ^ (mixed >> 31)
    return total & MASK


def of(part: Tensor, shape: list[int] | None = None, begins: list[int] | None = None) -> str:
    """Write the digest of a whole tensor, or of a part of one."""
    shape = list(part.shape) if shape is None else shape
    return written(int(digest(part, shape, [0] * len(shape) if begins is None else begins)))


def bits(tensor: Tensor) -> list[int]:
    """Return the elements' bits as integers."""
    size = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(size).reshape(-1).tolist()


@given(shape=SHAPES, dtype=st.sampled_from(DTYPES), seed=st.integers(0, 9))
def test_it_is_the_sum_of_a_well_known_mixer(shape: list[int], dtype: torch.dtype, seed: int) -> None:
    """Torch's wrapping arithmetic gives what Python's whole numbers give, for every dtype and shape, 0-d and empty."""
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    assert f"{plainly(bits(tensor), list(range(tensor.numel()))):016x}" == of(tensor)


@given(
    shape=st.lists(st.integers(0, 6), min_size=1, max_size=3),
    dim=st.integers(0, 2),
    cuts=st.lists(st.integers(0, 6), max_size=4),
    seed=st.integers(0, 9),
)
def test_any_cut_along_any_dim_has_one_digest(shape: list[int], dim: int, cuts: list[int], seed: int) -> None:
    """The sums of parts add up to that of the whole, modulo 2^64, empty parts included."""
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    dim %= len(shape)
    edges = sorted([0, *(min(cut, shape[dim]) for cut in cuts), shape[dim]])
    total = 0
    for begin, end in pairwise(edges):
        begins = [begin if one == dim else 0 for one in range(len(shape))]
        total += int(digest(tensor.narrow(dim, begin, end - begin), shape, begins))
    assert of(tensor) == written(total)


@given(shape=SHAPES.filter(math.prod), dtype=st.sampled_from(DTYPES), draw=st.data())
def test_one_flipped_bit_changes_it(shape: list[int], dtype: torch.dtype, draw: st.DataObject) -> None:
    """Any one bit of any one element shows."""
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    before = of(tensor)
    flat = tensor.view(-1).view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    index, bit = draw.draw(st.integers(0, len(flat) - 1)), draw.draw(st.integers(0, 8 * dtype.itemsize - 1))
    flat[index] ^= torch.tensor(1, dtype=flat.dtype) << bit
    assert before != of(tensor)
    flat[index] ^= torch.tensor(1, dtype=flat.dtype) << bit
    assert before == of(tensor)


@given(first=st.integers(0, 11), second=st.integers(0, 11))
def test_two_elements_that_change_places_change_it(first: int, second: int) -> None:
    """It knows where every element is: the same elements in another order are another tensor."""
    tensor = torch.arange(12.0).reshape(3, 4)
    changed = tensor.clone().view(-1)
    changed[[first, second]] = changed[[second, first]]
    assert (first == second) == (of(tensor) == of(changed.view(3, 4)))


def test_zeros_of_both_signs_differ() -> None:
    """It goes by bits and not by values: -0.0 is not 0.0, and one nan is itself."""
    assert of(torch.tensor([0.0, 1.0])) != of(torch.tensor([-0.0, 1.0]))
    assert of(torch.tensor([math.nan, 1.0])) == of(torch.tensor([math.nan, 1.0]))


@pytest.mark.parametrize("elements", [2**16 - 1, 2**16, 2**16 + 1, 3 * 2**16 + 7])
def test_it_is_taken_piece_by_piece(elements: int) -> None:
    """A tensor of more elements than are mixed at a time has the digest of its halves together."""
    tensor = torch.randn(elements, generator=torch.Generator().manual_seed(1))
    halves = zip((0, elements // 3), tensor.split([elements // 3, elements - elements // 3]), strict=True)
    total = sum(int(digest(part, tensor.shape, [begin])) for begin, part in halves)
    assert of(tensor) == written(total)


def test_memory_in_another_order_does_not_show() -> None:
    """A transposed tensor has the digest of its row-major copy, and is left alone."""
    tensor = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)).t()
    before = tensor.clone()
    assert of(tensor.contiguous()) == of(tensor)
    assert torch.equal(before, tensor)


def test_an_accumulator_tells_those_of_trained_parameters_in_the_models_order() -> None:
    """Tied parameters have one, frozen ones none, and reading them changes nothing."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2))
    model[1].weight = model[0].weight
    model[2].bias.requires_grad_(requires_grad=False)
    grads = augend.Accumulator(model)
    expected = {name: of(one) for name, one in model.named_parameters() if one.requires_grad}
    assert list(expected.items()) == list(grads.digests().items())
    assert grads.digests() == grads.digests()
