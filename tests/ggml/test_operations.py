"""The operations of a graph: shapes by ggml's rules, values and gradients as plain loops say, any number of rows."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from operation_cases import Case, cases, shapes
from operation_references import REFERENCES

from augend.errors import ContractError
from augend.ggml._operations import OPERATIONS, rank_of
from augend.ggml._shapes import stretched

PAIR = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1)}
POOL = {"kind": "max", "kernel": (2, 2), "stride": (2, 2), "padding": (0, 0)}


def run(case: Case) -> torch.Tensor:
    """Run the operation on the case's own values."""
    return OPERATIONS[case.operation].run([torch.from_numpy(each) for each in case.inputs()], case.settings)


def refusal(operation: str, given_shapes: list[tuple[int, ...]], **options: Any) -> str:
    """Return why shapes, filled up with ones, or settings are refused."""
    filled = [(*shape, *(1,) * (4 - len(shape))) for shape in given_shapes]
    with pytest.raises(ContractError) as caught:
        OPERATIONS[operation].shape(filled, options)
    return str(caught.value)


def test_every_operation_has_a_reference() -> None:
    """The table has the operations that are compared here, no more and no fewer."""
    assert sorted(REFERENCES) == sorted(OPERATIONS)


@pytest.mark.parametrize("operation", sorted(OPERATIONS))
@given(data=st.data())
@settings(max_examples=20)
def test_an_operation_is_its_plain_loop(operation: str, data: st.DataObject) -> None:
    """Shape and values are those of loops over ggml's definition in float64, within the bound of a float32 kernel."""
    case = data.draw(cases(operation))
    value, bound = REFERENCES[operation](case.inputs(), case.settings)
    actual = run(case)
    assert value.shape == tuple(actual.shape)
    assert value.shape[::-1] == OPERATIONS[operation].shape(case.shapes, case.settings)
    assert len(case.shapes) == OPERATIONS[operation].arity
    assert torch.float32 == actual.dtype
    assert (abs(value - actual.double().numpy()) <= bound).all()


@pytest.mark.parametrize("operation", sorted(OPERATIONS))
@given(data=st.data())
@settings(max_examples=5)
def test_gradients_are_differences(operation: str, data: st.DataObject) -> None:
    """Autograd's gradient is that of finite differences in float64, for every input that is not a row number."""
    case = data.draw(cases(operation))
    inputs = [torch.from_numpy(each) for each in case.inputs()]
    wide = [each.double().requires_grad_() if each.is_floating_point() else each for each in inputs]
    assert torch.autograd.gradcheck(lambda *each: OPERATIONS[operation].run(each, case.settings), wide)


@pytest.mark.parametrize("operation", sorted(OPERATIONS))
@given(data=st.data())
@settings(max_examples=5)
def test_inputs_are_left_alone(operation: str, data: st.DataObject) -> None:
    """No operation writes to its inputs, and two runs give the same bits."""
    case = data.draw(cases(operation))
    inputs = [torch.from_numpy(each) for each in case.inputs()]
    kept = [each.clone() for each in inputs]
    first = OPERATIONS[operation].run(inputs, case.settings)
    again = OPERATIONS[operation].run(inputs, case.settings)
    assert torch.equal(first, again)
    assert all(torch.equal(old, new) for old, new in zip(kept, inputs, strict=True))


def test_a_copy_is_contiguous_and_its_own() -> None:
    """What cont gives lies in memory in its own order, and does not change with what it was made of."""
    leaf = torch.arange(6.0).reshape(1, 1, 2, 3)
    turned = OPERATIONS["permute"].run([leaf], {"axes": (1, 0, 2, 3)})
    copies = [OPERATIONS["cont"].run([each], {}) for each in (turned, leaf)]
    leaf.zero_()
    assert all(copy.is_contiguous() for copy in copies)
    assert [0.0, 3.0, 1.0, 4.0, 2.0, 5.0] == copies[0].flatten().tolist()
    assert [0.0, 1.0, 2.0, 3.0, 4.0, 5.0] == copies[1].flatten().tolist()


@given(shape=shapes)
def test_rank_counts_up_to_the_last_that_is_not_one(shape: tuple[int, ...]) -> None:
    """A rank is at least one, and what it leaves out is ones."""
    rank = rank_of(shape)
    assert 1 <= rank <= 4
    assert all(extent == 1 for extent in shape[rank:])
    assert rank == 1 or shape[rank - 1] != 1


@pytest.mark.parametrize(("operation", "declared", "options"), [
    ("add", [(3, 4), (3,)], {}),
    ("mul", [(3, 4), (3, 2)], {}),
    ("scale", [(3, 4)], {"factor": 2.0}),
    ("mul_mat", [(3, 2), (3, 4)], {}),
    ("soft_max", [(3, 4)], {}),
    ("rms_norm", [(3, 4)], {"eps": 1e-6}),
    ("mean", [(3, 4)], {}),
    ("reshape", [(6, 4)], {"shape": (3, 2, 1, 4)}),
    ("reshape", [(6, 4)], {"shape": (2, 3, 4)}),
    ("reshape", [(6, 1)], {"shape": (2, 3, 1)}),
    ("reshape", [(6, 1)], {"shape": (2, 3, 1, 1)}),
])  # fmt: skip
@given(rows=st.sampled_from([2, 4, 6, 10]))
def test_fewer_and_more_rows_than_declared(
    operation: str, declared: list[tuple[int, ...]], options: dict[str, Any], rows: int
) -> None:
    """What a declared row gives does not depend on how many rows there are: the first rows of many are those of few."""
    batch = 0 if operation != "mul_mat" else 1
    inputs = [torch.randn(*(1,) * (4 - len(shape)), *shape[::-1]) for shape in declared]
    many = torch.randn(1, 1, 12, declared[batch][0])
    inputs[batch] = many
    whole = OPERATIONS[operation].run(inputs, options)
    inputs[batch] = many[:, :, :rows]
    part = OPERATIONS[operation].run(inputs, options)
    assert part.numel() * 12 == whole.numel() * rows
    torch.testing.assert_close(whole.flatten()[: part.numel()], part.flatten(), rtol=2**-20, atol=2**-20)


def test_a_reshape_puts_more_rows_outermost() -> None:
    """Pictures declared for one row become as many pictures as come, not one that is higher."""
    pictures = OPERATIONS["reshape"].run([torch.zeros(1, 1, 500, 784)], {"shape": (28, 28, 1, 1)})
    assert (500, 1, 28, 28) == tuple(pictures.shape)
    assert (5, 300, 1, 1) == stretched((5, 500), 1500)
    assert (4, 2, 5, 2) == stretched((4, 2, 5, 1), 80)
    assert (4, 2, 6, 1) == stretched((4, 2, 5, 1), 48)
    assert (1, 1, 3, 1) == stretched((1, 1, 1), 3)


def test_rows_that_do_not_divide_are_refused_when_they_come() -> None:
    """A number of elements, or of rows to repeat into, that does not fit the declared rows raises with the shapes."""
    with pytest.raises(ContractError, match=re.escape("7 elements do not divide into rows of [2, 3]")):
        OPERATIONS["reshape"].run([torch.zeros(1, 1, 1, 7)], {"shape": (2, 3, 4)})
    with pytest.raises(ContractError, match="repeat: each dimension of"):
        OPERATIONS["add"].run([torch.zeros(1, 1, 5, 3), torch.zeros(1, 1, 2, 3)], {})
    with pytest.raises(ContractError, match="mul_mat: .* must agree in ne0"):
        OPERATIONS["mul_mat"].run([torch.zeros(1, 2, 4, 3), torch.zeros(1, 3, 4, 3)], {})


@pytest.mark.parametrize("ids", [[-1], [4], [0, 7]])
def test_row_numbers_outside_the_table_are_refused(ids: list[int]) -> None:
    """A row number that is negative or too large raises before anything is read."""
    with pytest.raises(ContractError, match="row numbers must be from 0 to 3; got"):
        OPERATIONS["get_rows"].run([torch.zeros(1, 1, 4, 2), torch.tensor([[[ids]]], dtype=torch.int32)], {})


def test_row_numbers_are_integers() -> None:
    """Row numbers in float32 are refused with what to do."""
    with pytest.raises(ContractError, match="must be torch.int32; got torch.float32"):
        OPERATIONS["get_rows"].run([torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 1, 2)], {})


@pytest.mark.parametrize(("operation", "given_shapes", "options", "reason"), [
    ("add", [(4, 3), (3,)], {}, "each dimension of [3, 1, 1, 1] must divide that of [4, 3, 1, 1]"),
    ("mul", [(4,), (4, 2)], {}, "each dimension of [4, 2, 1, 1] must divide"),
    ("repeat", [(4, 3), (4, 4)], {}, "repeat: each dimension of [4, 3, 1, 1] must divide that of [4, 4, 1, 1]"),
    ("mul_mat", [(4, 3), (3, 4)], {}, "must agree in ne0"),
    ("mul_mat", [(4, 3, 2), (4, 3, 3)], {}, "ne2 and ne3 of the first must divide"),
    ("mul_mat", [(4, 3, 1, 2), (4, 3, 1, 3)], {}, "ne2 and ne3 of the first must divide"),
    ("get_rows", [(4, 3, 2), (5,)], {}, "for a table [4, 3, 2, 1] the row numbers must be [any, 2, 1, 1]"),
    ("get_rows", [(4, 3), (5, 1, 1, 2)], {}, "the row numbers must be [any, 1, 1, 1]; got [5, 1, 1, 2]"),
    ("reshape", [(4, 3)], {"shape": (5, 2)}, "[5, 2] has 10 elements; [4, 3, 1, 1] has 12"),
    ("reshape", [(4,)], {"shape": ()}, "must have 1 to 4 dimensions"),
    ("reshape", [(4,)], {"shape": (4, 1, 1, 1, 1)}, "must have 1 to 4 dimensions"),
    ("reshape", [(4,)], {"shape": (-2, -2)}, "shape must be whole numbers of at least 1"),
    ("reshape", [(4,)], {"shape": (4.0,)}, "shape must be whole numbers"),
    ("reshape", [(4,)], {"shape": (True, 4)}, "shape must be whole numbers"),
    ("reshape", [(4,)], {"shape": 4}, "shape must be whole numbers"),
    ("permute", [(4, 3)], {"axes": (1, 0)}, "axes must be 0, 1, 2 and 3 in some order"),
    ("permute", [(4, 3)], {"axes": (0, 0, 1, 2)}, "each once; got [0, 0, 1, 2]"),
    ("permute", [(4, 3)], {"axes": (1, 2, 3, 4)}, "each once; got [1, 2, 3, 4]"),
    ("scale", [(4,)], {"factor": float("inf")}, "factor must be a finite number that float32 can hold; got inf"),
    ("scale", [(4,)], {"factor": float("nan")}, "got nan"),
    ("scale", [(4,)], {"factor": 1e39}, "that float32 can hold; got 1e+39"),
    ("scale", [(4,)], {"factor": "2"}, "got '2'"),
    ("rms_norm", [(4,)], {"eps": -1e-6}, "eps must be a finite number of at least 0 that float32 can hold; got -1e-06"),
    ("norm", [(4,)], {"eps": float("nan")}, "got nan"),
    ("conv_2d", [(3, 3, 2, 1), (8, 8, 3)], PAIR, "the kernel has 2 channels in"),
    ("conv_2d", [(9, 1), (8, 8)], PAIR, "kernel is larger than the padded data, [8, 8, 1, 1]"),
    ("conv_2d", [(3, 3), (5, 4)], PAIR | {"dilation": (2, 2)}, "the result would be [1, 0]"),
    ("conv_2d", [(3, 3), (8, 8)], PAIR | {"stride": (0, 1)}, "stride must be whole numbers of at least 1; got (0, 1)"),
    ("conv_2d", [(3, 3), (8, 8)], PAIR | {"padding": (1,)}, "padding must be two numbers"),
    ("conv_2d", [(3, 3), (8, 8)], PAIR | {"padding": (-1, 0)}, "padding must be whole numbers of at least 0"),
    ("pool_2d", [(8, 8)], POOL | {"kind": "min"}, 'kind must be "max" or "avg"; got \'min\''),
    ("pool_2d", [(8, 8)], POOL | {"padding": (0, 2)}, "the padding must be less than the kernel, [2, 2]"),
    ("pool_2d", [(1, 8)], POOL, "kernel is larger than the padded data"),
    ("pool_2d", [(8, 8)], POOL | {"kernel": (0, 1)}, "kernel must be whole numbers of at least 1"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(
    operation: str, given_shapes: list[tuple[int, ...]], options: dict[str, Any], reason: str
) -> None:
    """Shapes and settings by which ggml would abort, or compute nothing that is meant, raise and say what fits."""
    message = refusal(operation, given_shapes, **options)
    assert reason in message
    assert operation in message
