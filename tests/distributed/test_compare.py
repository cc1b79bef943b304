"""compare: checkpoints of different worlds and placements are compared as whole tensors."""

from __future__ import annotations

from pathlib import Path

import placed
import pytest
import torch
import zoo
from placed import PLACES
from ranks import Ranks

import augend


def saved(place: str, directory: Path, changed: float) -> str:
    """Train a step, save, change one weight by a little, and save again; return both paths."""
    one = zoo.KINDS["narrow"]
    there = PLACES[place](one.build(), one.blocks)
    grads = there.grads()
    optimizer = torch.optim.SGD(there.model.parameters(), lr=0.5, momentum=0.5)
    data = there.batches(zoo.rows(), batch_size=zoo.ROWS, microbatch_size=zoo.MICROBATCH, epochs=1)
    parts = {"model": there.model, "optimizer": optimizer}
    with augend.Checkpoint(directory, background=False, keep=2, **parts) as checkpoint:
        for batch in data:
            for microbatch in grads.microbatches(batch):
                grads.backward(one.loss(there.model, microbatch))
            grads.step(optimizer)
        checkpoint.save()
        weight = dict(placed.parameters(there.model))["second.weight"]
        whole = placed.whole(weight)
        whole[3, 2] += changed
        with torch.no_grad():
            placed.local({"it": weight})["it"].copy_(placed.local({"it": _like(whole, weight)})["it"])
        return str(checkpoint.save())


def _like(whole: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if isinstance(weight, placed.DTensor):
        return torch.distributed.tensor.distribute_tensor(whole, weight.device_mesh, weight.placements)
    return whole


@pytest.mark.parametrize("place", ["replicated", "fsdp", "hsdp of 2 replicas"])
def test_any_world_is_compared_with_any_other(ranks2: Ranks, tmp_path: Path, place: str) -> None:
    """Weights and momenta of two ranks are those of one process, to the bit; one element that differs is found."""
    changed = Path(ranks2.run(saved, place, tmp_path / "two", 0.25)[0])
    saved("alone", tmp_path / "one", 0.0)
    first = changed.with_name("00000001-step-0")
    equal = augend.compare(first, tmp_path / "one")
    assert (True, 18) == (equal.equal, equal.tensors)  # 10 parameters, 2 of them never used, and 8 momenta
    (found,) = augend.compare(changed, tmp_path / "one").differences
    assert ("second.weight", (3, 2), 3 * 7 + 2, 1) == (found.tensor, found.index, found.flat, found.differing)
    assert 0.25 == found.values[0] - found.values[1]
