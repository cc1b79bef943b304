"""Small models with what makes placements go wrong: narrow, tied, frozen, adapted, conditional, expert, 0-d, 16-bit.

The parameters and data of most are small integers: every sum is then exact in float32, in any order, so that results
are bitwise equal however the work was cut and spread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import augend

ROWS = 17  # two batches of 10 and 7 rows, in micro-batches of 3, 3, 3, 1 and 3, 3, 1
BATCH = 10
MICROBATCH = 3


class Gain(nn.Module):
    """A factor for each feature: the simplest layer that sequence parallelism replicates."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Narrow(nn.Module):
    """Layers of 7, 5, 3 and 1 rows: few or none of them on some ranks; two parameters that are never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 7)
        self.second = nn.Linear(7, 5)
        self.third = nn.Linear(5, 3)
        self.last = nn.Linear(3, 1)
        self.idle = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.first.weight.dtype)
        return self.last(torch.relu(self.third(torch.relu(self.second(torch.relu(self.first(x)))))))


class Smooth(Narrow):
    """The same layers with tanh between them, and three classes: rounding everywhere."""

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Tied(nn.Module):
    """An embedding that is also the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.body = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.embed(x[:, 0].long() % 5)))


class Frozen(nn.Module):
    """A layer that does not learn, between two that do, and a bias that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.fixed = nn.Linear(5, 5).requires_grad_(requires_grad=False)
        self.last = nn.Linear(5, 1)
        self.last.bias.requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.fixed(self.first(x))))


class Adapter(nn.Module):
    """A frozen layer with a trained low-rank path beside it."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.base = nn.Linear(features, features).requires_grad_(requires_grad=False)
        self.down = nn.Linear(features, 1, bias=False)
        self.up = nn.Linear(1, features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Adapted(nn.Module):
    """Four frozen layers, adapters on all of them: nothing else learns."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[Adapter(4) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)[:, :1].clone()  # a view of it, FSDP2 warns, could be changed in place


class Conditional(nn.Module):
    """Two branches, of which each micro-batch takes one; their parameters are of one size, and one group."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.even = nn.Linear(4, 3)
        self.odd = nn.Linear(4, 3)
        self.idle = nn.Linear(4, 3)

    def forward(self, x: Tensor, branch: int = 0) -> Tensor:
        return (self.even, self.odd)[branch](torch.relu(self.first(x)))[:, :1].clone()


class Expert(nn.Module):
    """One layer, wrapped by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Experts(nn.Module):
    """Two experts, of which each micro-batch needs one.

    Args:
        skip: Whether the other one is left out, which a sharded model must not do, or called with zero rows.
    """

    def __init__(self, *, skip: bool = False) -> None:
        super().__init__()
        self.skip = skip
        self.first = nn.Linear(4, 4)
        self.experts = nn.ModuleList([Expert(), Expert()])
        self.last = nn.Linear(4, 1)

    def forward(self, x: Tensor, branch: int = 0) -> Tensor:
        x = torch.relu(self.first(x))
        if self.skip:
            return self.last(self.experts[branch](x))
        parts = [expert(x if which == branch else x[:0]) for which, expert in enumerate(self.experts)]
        return self.last(torch.cat(parts))


class Scaled(nn.Module):
    """A layer and a temperature: a parameter without a dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.temperature


class Columns(nn.Module):
    """A pair of layers for column and row parallelism on sequences [rows, 2, 4], and layers that stay whole."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)
        self.down = nn.Linear(6, 4)
        self.gain = Gain(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.stack([x, x.flip(1)], dim=1)  # [rows, 2, 4]
        return self.head(self.gain(self.down(torch.relu(self.up(x)))))[:, 0, :1].clone()


def integers(model: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Fill a model with small integers, the same every time."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-2, 3, parameter.shape, generator=generator))
    return model.to(dtype)


def reals(model: nn.Module) -> nn.Module:
    """Fill a model with numbers of a layer's usual size, the same every time."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    return model


def counted(model: nn.Module, microbatch: Mapping[str, Tensor]) -> augend.Tally:
    """Return the outputs as losses, as often as each row counts."""
    count = microbatch["count"]
    return augend.Tally(model(microbatch["x"]).sum(1) * count, count)


def branched(model: nn.Module, microbatch: Mapping[str, Tensor]) -> augend.Tally:
    """Return the outputs of the branch that the micro-batch's first row is for."""
    count = microbatch["count"]
    return augend.Tally(model(microbatch["x"], int(microbatch["branch"][0])).sum(1) * count, count)


def classified(model: nn.Module, microbatch: Mapping[str, Tensor]) -> augend.Tally:
    """Return the cross entropy of rows, some of which have no label."""
    return augend.losses.cross_entropy(model(microbatch["x"]), microbatch["label"])


def classified_once(model: nn.Module, microbatch: Mapping[str, Tensor]) -> augend.Tally:
    """Return the outputs of an embedding for each class, weighted: integers again."""
    count = microbatch["count"]
    weights = torch.tensor([1.0, -1.0, 2.0, 0.0, 1.0])
    return augend.Tally((model(microbatch["x"]) * weights).sum(1) * count, count)


def rows(total: int = ROWS) -> dict[str, Tensor]:
    """Return integer inputs, counts that leave out a whole micro-batch, labels with gaps, and a branch for each row."""
    generator = torch.Generator().manual_seed(3)
    count = torch.randint(0, 4, (total,), generator=generator)
    count[3:6] = 0
    label = torch.randint(0, 3, (total,), generator=generator)
    label[count == 0] = -100
    return {
        "x": torch.randint(-2, 3, (total, 4), generator=generator).float(),
        "count": count,
        "label": label,
        "branch": torch.arange(total) // MICROBATCH % 2,
    }


@dataclass(frozen=True)
class Kind:
    """A model of the zoo.

    Attributes:
        build: Makes it, equal every time.
        loss: Its loss for a micro-batch.
        blocks: Modules that ``fully_shard`` wraps one by one, before the whole.
        exact: Whether all its sums are exact.
        unused: Of its accumulator: where rows decide what they use, ranks use different things.
    """

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Mapping[str, Tensor]], augend.Tally] = counted
    blocks: tuple[str, ...] = ()
    exact: bool = True
    unused: str = "error"


KINDS = {
    "narrow": Kind(lambda: integers(Narrow()), blocks=("second", "third")),
    "smooth": Kind(lambda: reals(Smooth()), classified, blocks=("second",), exact=False),
    "tied": Kind(lambda: integers(Tied()), classified_once, blocks=("body",)),
    "frozen": Kind(lambda: integers(Frozen()), blocks=("fixed",)),
    "adapted": Kind(lambda: integers(Adapted()), blocks=("layers.0", "layers.1", "layers.2", "layers.3")),
    "conditional": Kind(lambda: integers(Conditional()), branched, unused="zero"),
    "experts": Kind(lambda: integers(Experts()), branched, blocks=("experts.0", "experts.1"), unused="zero"),
    "skipping": Kind(lambda: integers(Experts(skip=True)), branched, blocks=("experts.0", "experts.1"), unused="zero"),
    "scaled": Kind(lambda: integers(Scaled())),
    "columns": Kind(lambda: integers(Columns())),
    "rounded": Kind(lambda: reals(Columns()), exact=False),
    "half": Kind(lambda: integers(Narrow(), torch.bfloat16), blocks=("second",)),
}
