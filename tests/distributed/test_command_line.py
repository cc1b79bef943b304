"""What the command line's ranks decide together, and how they lay a model out."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from augend._cli._launch import Launch
from augend._cli._place import place
from augend._cli._ranks import Ranks
from augend._cli._train import check_rows
from augend._config import RunFile
from augend._config._schema import Data, Model, Parallel
from augend.errors import ConfigError, ContractError, SplitError


def ours() -> Ranks:
    """Return the ranks of this world."""
    return Ranks(Launch(rank=torch.distributed.get_rank(), world=torch.distributed.get_world_size(), torchrun=True))


def raising(error: Exception) -> None:
    """Raise an error."""
    raise error


def agreeing(failing: list[int]) -> tuple[str, str]:
    """Agree on a call that fails on some ranks; return what came of it, and what the first rank then says."""
    ranks = ours()
    mine = f"{ranks.rank} é"
    try:
        said = ranks.agreed(lambda: raising(SplitError(f"{mine}\nb")) if ranks.rank in failing else mine)
    except SplitError as error:
        said = str(error)
    return said, ranks.from_first(lambda: mine * 3)


@pytest.mark.parametrize(
    ("failing", "said"),
    [([], ["0 é", "1 é"]), ([0], ["0 é\nb"] * 2), ([0, 1], ["0 é\nb"] * 2), ([1], ["rank 1: 1 é\nb"] * 2)],
)
def test_all_ranks_hear_of_the_first_failure(ranks2, failing, said):
    """No failure: each its own result. Else the lowest rank's error on all, with its number unless it is the first."""
    assert [(one, "0 é" * 3) for one in said] == ranks2.run(agreeing, failing)


def refused_first() -> str:
    """Let the first rank refuse what only it looks at."""
    with pytest.raises(ConfigError) as caught:
        ours().from_first(lambda: raising(ConfigError("--run-dir a: holds something already")))
    return str(caught.value)


def test_what_the_first_rank_refuses_all_do(ranks2):
    """A refusal of the first rank alone is raised on all, in the words of one process."""
    assert ["--run-dir a: holds something already"] * 2 == ranks2.run(refused_first)


def laid_out(mode: str, replicas: int | None) -> tuple[str, list[list[object]]]:
    """Place a model of two equal layers and one other; return what is said of it, and where its weights lie."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 1))
    said = place(run(mode, replicas), model, ours())
    weights = [model[0][0].weight, model[1].weight]
    return said, [[one.device_mesh.ndim, str(one.placements)] if isinstance(one, DTensor) else [] for one in weights]


def run(mode: str, replicas: int | None = None) -> RunFile:
    """Return a run with a mode."""
    return RunFile(
        model=Model(name="mlp"), data=Data(source="digits"), parallel=Parallel(ranks=2, mode=mode, replicas=replicas)
    )


@pytest.mark.parametrize(
    ("mode", "replicas", "said", "where"),
    [
        ("replicated", None, "2, each with the whole model", []),
        ("fsdp", None, "2 share the model", [1, "(Shard(dim=0),)"]),
        ("hsdp", 2, "2: 2 copies of the model, each shared by 1", [2, "(Replicate(), Shard(dim=0))"]),
        ("hsdp", 3, "2 share the model", [1, "(Shard(dim=0),)"]),  # a rank was lost since
    ],
)
def test_a_model_lies_as_the_mode_says(ranks2, mode, replicas, said, where):
    """Replicated stays plain; fsdp shards over all ranks, hsdp within copies, layers and the rest alike."""
    assert [(said, [where, where])] * 2 == ranks2.run(laid_out, mode, replicas)


def scalar() -> str:
    """Try to shard a parameter without dimensions."""
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    model.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ConfigError) as caught:
        place(run("fsdp"), model, ours())
    return str(caught.value)


def test_what_cannot_be_sharded_is_refused_with_the_remedy(ranks2):
    """torch shards no parameter without dimensions: one line says so, and what to set."""
    first, second = ranks2.run(scalar)
    assert first == second
    assert first.startswith("parallel.mode = 'fsdp': the model cannot be sharded: ")
    assert first.endswith("; set parallel.mode = 'replicated'")


def drawn_by_rank(mode: str) -> str:
    """Lay out a model that each rank has drawn for itself."""
    torch.manual_seed(torch.distributed.get_rank())
    with pytest.raises(ContractError) as caught:
        place(run(mode), nn.Sequential(nn.Linear(2, 2)), ours())
    return str(caught.value)


@pytest.mark.parametrize("mode", ["fsdp", "replicated"])
def test_a_model_that_differs_is_refused_before_it_is_sharded(ranks2, mode):
    """Once it is, nobody could tell: it would be a mixture that no other number of ranks has."""
    for said in ranks2.run(drawn_by_rank, mode):
        assert "rank 1: the model's '0.bias' is not that of rank 0: build it from the run's seed" in said


def other_rows() -> str:
    """Compare the rows of a run, of which rank 1 has one more."""
    ranks = ours()
    mine = {"count": 12 + ranks.rank, "sha256": str(ranks.rank)}
    with pytest.raises(ConfigError) as caught:
        check_rows(run("replicated"), mine, ranks)
    return str(caught.value)


def test_other_rows_on_another_rank_are_refused(ranks2):
    """Some would be trained on twice and others never: said before anything is trained, with both numbers."""
    first, second = ranks2.run(other_rows)
    assert first == second
    assert first.startswith("rank 1: data.source = 'digits': its rows are not those of rank 0: 13 here, and 12 there;")
