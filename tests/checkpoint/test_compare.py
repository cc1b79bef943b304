"""compare: every bit of weights and optimizer state of two checkpoints, and the first that differs."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from little import Little
from torch import Tensor, nn

import augend
from augend._checkpoint import _compare
from augend.errors import CheckpointError

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]
DTYPES += [torch.float8_e4m3fn]


class Held(nn.Module):
    """Tensors of any dtype, under names that sort in another order than the model has them."""

    def __init__(self, **tensors: Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


@pytest.fixture
def folders(tmp_path) -> Iterator[Iterator[Path]]:
    """New directories, one after another."""
    return (tmp_path / str(number) for number in count())


def saved(directory: Path, **parts) -> Path:
    """Save parts."""
    with augend.Checkpoint(directory, background=False, **parts) as checkpoint:
        return checkpoint.save()


def compared(first: nn.Module, second: nn.Module) -> augend.Comparison:
    """Save two modules, and compare what was saved."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [saved(Path(folder) / name, model=one) for name, one in (("a", first), ("b", second))]
        return augend.compare(*paths)


def drawn(shape: list[int], dtype: torch.dtype, seed: int) -> Tensor:
    """Return a tensor of any bits that a number of its dtype has."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    drawn = torch.randint(0, 256, [*shape, dtype.itemsize], dtype=torch.uint8, generator=generator)
    return drawn.view(dtype).reshape(shape)


@given(
    shape=st.lists(st.integers(1, 4), max_size=3),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
    draw=st.data(),
)
def test_it_finds_the_first_bit_that_differs(shape, dtype, seed, draw):
    """Any set of flipped bits in a tensor of any dtype, nan and -0.0 too: the first element, both bits, how many."""
    first = drawn(shape, dtype, seed)
    elements = first.numel()
    flipped = sorted(draw.draw(st.sets(st.integers(0, elements - 1), max_size=4)))
    second = first.clone()
    bits = second.view(-1).view(torch.uint8).view(elements, dtype.itemsize)
    bits[flipped, draw.draw(st.integers(0, dtype.itemsize - 1))] ^= 1
    found = compared(Held(same=first, it=first), Held(same=first, it=second))
    assert (2, 2 * elements, ()) == (found.tensors, found.elements, found.unlike)
    assert (not flipped) == found.equal
    if flipped:
        (one,) = found.differences
        name = str(dtype).removeprefix("torch.")
        assert ("model", "it", name, len(flipped), elements) == (
            *(one.part, one.tensor, one.dtype),
            *(one.differing, one.elements),
        )
        assert flipped[0] == one.flat
        assert flipped[0] == int(torch.arange(elements).view(shape)[one.index])
        expected = [
            bytes(each.view(-1)[one.flat : one.flat + 1].view(torch.uint8).tolist()) for each in (first, second)
        ]
        assert expected == [bytes.fromhex(each)[::-1] for each in one.bits]
        assert [repr(each.view(-1)[one.flat].item()) for each in (first, second)] == list(map(repr, one.values))


def test_a_large_tensor_is_compared_piece_by_piece(monkeypatch):
    """The first difference and the count are those of the whole tensor, in whichever piece they lie."""
    monkeypatch.setattr(_compare, "_ELEMENTS", 4)
    first = torch.zeros(3, 5)
    second = first.clone().index_put_((torch.tensor([1, 2]), torch.tensor([2, 4])), torch.tensor(1.0))
    (one,) = compared(Held(it=first), Held(it=second)).differences
    assert ((1, 2), 7, 2) == (one.index, one.flat, one.differing)
    assert ("00000000", "3f800000") == one.bits


def test_tensors_come_in_the_order_of_the_model_and_then_those_of_the_optimizer(folders):
    """Not in the order of their names; the moments of AdamW come after all weights, in the model's order too."""

    def trained(seed: int) -> Path:
        torch.manual_seed(seed)
        model = nn.ModuleDict({"z": nn.Linear(2, 2), "a": nn.Linear(2, 1)})
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        return saved(next(folders), aside=optimizer, model=model)

    found = augend.compare(trained(1), trained(2))
    weights = ["z.weight", "z.bias", "a.weight", "a.bias"]
    moments = [f"state.{name}.{one}" for name in weights for one in ("exp_avg", "exp_avg_sq")]
    assert [("model", name) for name in weights] + [("aside", name) for name in moments] == [
        (one.part, one.tensor) for one in found.differences
    ]
    assert 16 == found.tensors  # a step of each parameter, too, which is the same


def test_what_only_one_has_or_has_otherwise_is_told():
    """A missing tensor, another shape and another dtype are named, and the rest is compared."""
    first = Held(both=torch.zeros(2), more=torch.zeros(1), shape=torch.zeros(2), kind=torch.zeros(2))
    second = Held(less=torch.zeros(1), shape=torch.zeros(3), kind=torch.zeros(2).double(), both=torch.zeros(2))
    found = compared(first, second)
    assert (1, 2, (), False) == (found.tensors, found.elements, found.differences, found.equal)
    assert (
        "model more is only in the first",
        "model shape is float32 [2] in the first and float32 [3] in the second",
        "model kind is float32 [2] in the first and float64 [2] in the second",
        "model less is only in the second",
    ) == found.unlike


def test_runs_are_compared_by_their_newest_good_checkpoints(tmp_path):
    """A directory stands for its newest good checkpoint; what is pending and where the data stands do not matter."""
    for name, more in (("a", 0), ("b", 1)):
        little = Little(tmp_path / name, keep=3)
        little.train(3 + more)  # a whole batch, whose step the first checkpoint of b only has pending
        little.run.save()
        little.grads.reset() if more else little.grads.step(little.optimizer)
        little.run.close()
    found = augend.compare(tmp_path / "a", tmp_path / "b")
    assert (0, 1) == found.steps
    assert {"model", "optimizer"} == {one.part for one in found.differences} | {
        text.split()[0] for text in found.unlike
    }
    shutil.copytree(found.paths[0], tmp_path / "a" / "00000002-step-7")
    (tmp_path / "a" / "00000002-step-7" / "manifest.json").unlink()
    assert found == augend.compare(tmp_path / "a", found.paths[1])


def test_the_fingerprints_of_exact_sums_are_there(folders):
    """What the bits depend on comes from each checkpoint; sums that are rounded have none."""
    model = nn.Linear(1, 1)
    exact, rounded = augend.Accumulator(model, dtype="exact"), augend.Accumulator(model)
    paths = [saved(next(folders), model=model, grads=grads) for grads in (exact, rounded)]
    assert (dict(exact.bits), None) == augend.compare(*paths).fingerprints
    assert [dict(exact.bits), None] == [augend.inspect(path).bits for path in paths]


def test_a_damaged_or_missing_checkpoint_is_refused(folders):
    """What cannot be trusted is not compared: the refusal names the file."""
    good, bad = (saved(next(folders), model=nn.Linear(2, 2)) for _ in range(2))
    (weights,) = (bad / "model").iterdir()
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(CheckpointError, match=weights.name):
        augend.compare(good, bad)
    with pytest.raises(CheckpointError, match="does not exist"):
        augend.compare(bad.parent.parent / "none", good)


@pytest.mark.parametrize("times", [1, 99])
def test_a_checkpoint_that_is_removed_meanwhile_is_looked_for_again(folders, monkeypatch, times):
    """A running job that replaces its checkpoint is waited for, for a while."""
    directory, other = next(folders), saved(next(folders), model=nn.Linear(2, 2))
    saved(directory, model=nn.Linear(2, 2))
    original = _compare.read_state
    calls = []

    def read(path: Path, manifest: object) -> object:
        calls.append(path)
        if path.parent == directory and len(calls) <= times:
            newer = path.with_name(f"{int(path.name[:8]) + 1:08d}-step-0")
            path.rename(newer)
            raise CheckpointError("it is gone")
        return original(path, manifest)

    monkeypatch.setattr(_compare, "read_state", read)
    if times == 1:
        assert not augend.compare(directory, other).equal
    else:
        with pytest.raises(CheckpointError, match="removed faster than they can be read"):
            augend.compare(directory, other)


def test_a_fault_that_stays_is_no_removal(folders, monkeypatch):
    """What cannot be read although it is there is refused at once."""

    def read(path: Path, manifest: object) -> object:
        raise CheckpointError(f"{path}: a fault")

    paths = [saved(next(folders), model=nn.Linear(1, 1)) for _ in range(2)]
    monkeypatch.setattr(_compare, "read_state", read)
    with pytest.raises(CheckpointError, match="a fault"):
        augend.compare(*paths)
