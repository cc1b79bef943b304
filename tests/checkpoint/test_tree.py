"""Any state of numbers, text, containers and tensors comes back as it was; anything else is refused where it stands."""

from __future__ import annotations

import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict, namedtuple
from decimal import Decimal
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from augend._checkpoint._tree import DTYPES, join, split
from augend.errors import CheckpointError, ContractError

MARKS = ["$tensor", "$float", "$tuple", "$pairs", "$counter", "$", "$$", "$tensor "]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Draw tensors of every dtype, with any bits, of 0 to 3 dims, empty, strided or a view of more."""
    dtype = draw(st.sampled_from([*DTYPES.values()]))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    count = math.prod(shape)
    content = draw(st.binary(min_size=2 * count * dtype.itemsize, max_size=2 * count * dtype.itemsize))
    if dtype == torch.bool:
        content = bytes(byte % 2 for byte in content)
    whole = torch.frombuffer(bytearray(content or bytes(dtype.itemsize)), dtype=dtype)
    tensor = whole[: 2 * count : 2].reshape(shape)
    view = draw(st.sampled_from(["as it is", "transposed", "parameter"]))
    if view == "transposed":
        return tensor.transpose(0, -1) if shape else tensor
    return torch.nn.Parameter(tensor, requires_grad=False) if view == "parameter" else tensor


numbers = st.one_of(st.integers(), st.integers(-(2**2047), 2**2047), st.floats(), st.booleans(), st.none())
texts = st.one_of(st.text(max_size=5), st.sampled_from(MARKS))
keys = st.one_of(texts, st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False), st.tuples(st.integers()))
leaves = st.one_of(numbers, texts, tensors())


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Draw containers of all kinds."""
    return st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(texts, inner, max_size=4).map(OrderedDict),
        st.dictionaries(keys, st.integers(), max_size=4).map(Counter),
        st.lists(st.integers(0, 9), max_size=3).map(torch.Size),
    )


trees = st.recursive(leaves, containers, max_leaves=12)


def picture(tree: Any) -> Any:
    """Return what tells two trees apart to the bit: kinds, orders, signs of zeros, bits of floats and tensors."""
    if isinstance(tree, torch.Tensor):
        dense = tree.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
        return "tensor", tree.dtype, tuple(tree.shape), bytes(dense.tolist())
    if isinstance(tree, dict):
        kind = "counter" if isinstance(tree, Counter) else "dict"
        return kind, [(picture(key), picture(value)) for key, value in tree.items()]
    if isinstance(tree, list | tuple):
        return "tuple" if isinstance(tree, tuple) else "list", [picture(one) for one in tree]
    if isinstance(tree, float):
        return "float", "nan" if math.isnan(tree) else struct.pack("<d", tree)
    return type(tree).__name__, tree


def through_json(tree: object) -> Any:
    """Send a tree apart, through JSON, and together again."""
    plain, live = split({"it": tree}, "part")
    text = json.dumps(plain, allow_nan=False)
    return join(json.loads(text), {name: tensor.clone() for name, tensor in live.items()})["it"]


@given(trees)
def test_every_tree_comes_back_as_it_was(tree: Any) -> None:
    """Apart, through JSON, together: every kind, order, sign, bit, whatever the keys look like."""
    try:
        back = through_json(tree)
    except ContractError as error:  # two tensors may draw one name
        assume("two tensors" not in str(error))
        raise
    assert picture(tree) == picture(back)


@given(trees)
def test_tensors_stay_live_and_are_named_by_their_keys(tree: Any) -> None:
    """Taking apart copies nothing and changes nothing; names are the keys on the way, with dots."""
    before = picture(tree)
    try:
        _, live = split(tree, "part")
    except ContractError as error:
        assume("two tensors" not in str(error) and "has the key ''" not in str(error))
        raise
    assert before == picture(tree)
    if isinstance(tree, dict) and not isinstance(tree, Counter):
        for key, value in tree.items():
            if isinstance(value, torch.Tensor):
                assert value.data_ptr() == live[str(key)].data_ptr()
    assert not any(tensor.requires_grad for tensor in live.values())


def test_the_names_of_a_model_are_its_own() -> None:
    """A flat state dict keeps its keys as names, so that files can be read without augend."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    assert list(model.state_dict()) == list(split(model.state_dict(), "model")[1])
    nested = {"state": {"a.b": {"step": torch.tensor(1.0), 0: torch.ones(2)}}, "list": [None, torch.ones(1)]}
    assert ["state.a.b.step", "state.a.b.0", "list.1"] == list(split(nested, "optimizer")[1])


class Number(IntEnum):
    """A number with a name."""

    TWO = 2


def test_numbers_of_other_classes_come_back_as_numbers() -> None:
    """What is an int, a float or a text by inheritance is kept as that."""
    saved = {"enum": Number.TWO, "numpy": np.float64(0.1), "text": np.str_("a"), "inf": np.float64("-inf")}
    assert {"enum": 2, "numpy": 0.1, "text": "a", "inf": -math.inf} == through_json(saved)
    assert [int, float, str, float] == [type(value) for value in through_json(saved).values()]


def itself() -> list[Any]:
    """Return a list that holds itself."""
    tree: list[Any] = []
    tree.append(tree)
    return tree


def nested(levels: int) -> dict[str, Any]:
    """Return dictionaries one in another."""
    return {"a": nested(levels - 1)} if levels else {}


Pair = namedtuple("Pair", "a b")  # noqa: PYI024  # the old kind is meant
REFUSED = {
    "a set": {1},
    "bytes": b"x",
    "a function": print,
    "an object": object(),
    "a class": int,
    "a complex number": 1j,
    "a decimal": Decimal(1),
    "an array": np.ones(2),
    "a number of numpy": np.int64(1),
    "a generator": torch.Generator(),
    "a dtype": torch.float32,
    "a device": torch.device("cpu"),
    "a named tuple": Pair(1, 2),
    "a dictionary with a default": defaultdict(list),
    "a number of thousands of digits": 10**5000,
    "a negative one": -(1 << 4000),
    "itself": itself(),
    "too deep": nested(70),
    "a sparse tensor": torch.eye(2).to_sparse(),
    "a complex tensor": torch.ones(2, dtype=torch.complex64),
    "a tensor of nothing": torch.ones(2, device="meta"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_kept_is_refused_where_it_stands(what: str) -> None:
    """In a list in a dictionary, or as a key: ContractError names part and place."""
    with pytest.raises(ContractError, match=r"mine: .*here\.1|mine: here"):
        split({"here": [0, REFUSED[what]]}, "mine")
    if what in {"bytes", "a complex number", "a decimal", "a named tuple"}:
        with pytest.raises(ContractError, match="mine: here.key is a"):
            split({"here": {REFUSED[what]: 0}}, "mine")
    with pytest.raises(ContractError, match="mine: "):
        split(REFUSED[what], "mine")


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_quantised_tensor_is_refused() -> None:
    """Its numbers mean nothing without its scale."""
    with pytest.raises(ContractError, match="the tensor 'here' is .*quint8"):
        split({"here": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)}, "mine")


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (torch.ones(1), "has the key ''"),
        ({"": torch.ones(1)}, "has the key ''"),
        ({"__metadata__": torch.ones(1)}, "has the key '__metadata__'"),
        ({"\ud800": torch.ones(1)}, r"has the key '\\ud800'"),
        ({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, "two tensors of its state are called 'a.b'"),
        ({1: torch.ones(1), "1": torch.ones(1)}, "two tensors of its state are called '1'"),
    ],
)
def test_a_tensor_that_no_file_can_name_is_refused(tree: object, message: str) -> None:
    """Names must be text of their own: two under one name would be one in the file."""
    with pytest.raises(ContractError, match=message):
        split(tree, "mine")


def test_as_deep_as_allowed_comes_back() -> None:
    """What may be saved can be loaded: the deepest of every kind."""
    for wrap in (lambda one: {"a": one}, lambda one: [one], lambda one: (one,), lambda one: {1: one}):
        tree: Any = 1
        for _ in range(63):
            tree = wrap(tree)
        assert picture(tree) == picture(through_json(tree))
        with pytest.raises(ContractError, match="nested deeper than 64 levels"):
            split(wrap(wrap(tree)), "mine")


@pytest.mark.parametrize(
    "plain",
    [
        *({"$tensor": "none"}, {"$tensor": 1}, {"$tensor": None}, {"$tensor": ["a"]}, {"$tensor": {"a": 1}}),
        *({"$float": "1"}, {"$float": 1}, {"$float": None}, {"$float": "NaN"}, {"$float": []}, {"$float": 10**400}),
        *({"$tuple": 1}, {"$tuple": "ab"}, {"$tuple": {"a": 1}}, {"$tuple": None}),
        *({"$pairs": 1}, {"$pairs": [1]}, {"$pairs": [[1]]}, {"$pairs": [[1, 2, 3]]}, {"$pairs": ["ab"]}),
        *({"$pairs": [[[], 1]]}, {"$pairs": [{"a": 1, "b": 2}]}, {"$pairs": {"a": 1}}, {"$counter": [[{}, 1]]}),
        *({"$counter": None}, {"$class": "os.system"}, {"$class": []}, {"$": []}, {"$tuple": [], "$pairs": []}),
        *({"$tuple": [], "more": 1}, {"more": 1, "$more": 1}, [[{"$new": []}]], {"a": {"$new": []}}),
    ],
)
def test_what_split_does_not_make_is_not_joined(plain: object) -> None:
    """Marks with other values, other marks, marks beside keys: CheckpointError."""
    with pytest.raises(CheckpointError, match="cannot be read"):
        join(plain, {"a": torch.ones(1)})


def containers_of_json(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Draw containers of JSON, with marks among their keys."""
    one = st.sampled_from(MARKS).flatmap(lambda mark: inner.map(lambda value: {mark: value}))
    return st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3), one)


@given(st.recursive(st.one_of(st.none(), st.integers(), texts), containers_of_json, max_leaves=10))
def test_any_json_is_joined_or_refused(plain: Any) -> None:
    """No JSON brings an exception that is not augend's."""
    try:
        join(plain, {"a": torch.ones(1)})
    except CheckpointError:
        return


@pytest.mark.parametrize("begin", [[], {}, ()])
def test_nothing_is_joined_that_is_too_deep_to_have_been_split(begin: object) -> None:
    """Depth is an error in words, not Python's recursion."""
    plain: Any = begin
    for _ in range(100_000):
        plain = [plain]
    with pytest.raises(CheckpointError, match="nested deeper than any state"):
        join(plain, {})
    while isinstance(plain, list) and plain:  # Python itself cannot take it down at once
        plain = plain[0]
