"""The run file as frozen dataclasses: every key, its type, its default and its meaning, in one place."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Final, Literal, TypeAlias, final, get_args

from msgspec import Meta

Arguments: TypeAlias = Mapping[str, object]  # TOML values by name
Names: TypeAlias = tuple[str, ...]
AtLeastOne: TypeAlias = Annotated[int, Meta(ge=1)]
AtLeastTwo: TypeAlias = Annotated[int, Meta(ge=2)]
AboveZero: TypeAlias = Annotated[float, Meta(gt=0)]
FiniteAboveZero: TypeAlias = Annotated[float, Meta(gt=0, le=sys.float_info.max)]


def _key(meaning: str, *, example: object = None) -> Meta:
    """Return what a key is for; the example stands in error messages where there is no default to show."""
    return Meta(description=meaning, examples=[example])


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """The model to train."""

    name: Annotated[
        str,
        _key(
            "`mlp`, `llama`, `gguf:PATH`, the model of a GGUF file, or `module:factory`, a function that returns an "
            "`nn.Module`",
            example="llama",
        ),
    ]
    freeze: Annotated[
        Names | None,
        _key(
            "names of parameters that are not trained, or patterns of them; absent: none",
            example=["model.embed_tokens.*"],
        ),
    ] = None
    dtype: Annotated[
        Literal["bfloat16", "float16"] | None,
        _key(
            "what losses and metrics are computed in, by `torch.autocast`; all else keeps the parameters' dtype; "
            "absent: that",
            example="bfloat16",
        ),
    ] = None
    arguments: Arguments = field(default_factory=dict)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """Adapters of low rank, which are trained in place of the model's own parameters."""

    rank: Annotated[AtLeastOne, _key("inner size of the adapters", example=8)]
    alpha: Annotated[
        FiniteAboveZero | None, _key("`alpha / rank` multiplies what they add; absent: the rank", example=16.0)
    ] = None
    targets: Annotated[Names, _key("names of the linear layers that have one, or patterns of them")] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    dropout: Annotated[
        float, Meta(ge=0, lt=1), _key("the probability of zeroing an element of their input in training")
    ] = 0.0


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """Where the rows come from, and which part of them is held out."""

    source: Annotated[
        str,
        _key(
            "`docstrings`, `digits`, `text`, `pairs`, or `module:function`, a function that returns a `Source`",
            example="docstrings",
        ),
    ]
    validation: Annotated[
        float, Meta(ge=0, lt=1), _key("the fraction of the rows that is held out; 0 holds out none")
    ] = 0.05
    pack: Annotated[
        AtLeastTwo | None,
        _key(
            "tokens of a row of the model that short rows of the data share, kept apart; absent: none is shared",
            example=512,
        ),
    ] = None
    arguments: Arguments = field(default_factory=dict)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Optimizer:
    """What turns the mean gradient into an update."""

    name: Annotated[
        str, _key("an optimizer of `torch.optim` in lower case, or `module:factory`, which takes parameters and `lr`")
    ] = "adamw"
    lr: Annotated[
        FiniteAboveZero,
        _key("the learning rate: the schedule's `rate`, which is the largest one, but a factor for `noam`"),
    ] = 1e-3
    arguments: Arguments = field(default_factory=dict)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """How the learning rate moves with the number of updates taken."""

    name: Annotated[str, _key("a function of `augend.schedules`")] = "constant"
    arguments: Arguments = field(default_factory=dict)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Accumulator:
    """How the gradients of a batch's micro-batches are summed."""

    dtype: Annotated[
        Literal["float32", "float64", "exact"],
        _key("the dtype of the sums; `exact`: whole numbers, and the same bits however the work is cut"),
    ] = "float32"
    loss_scale: Annotated[FiniteAboveZero, _key("a factor on every loss before its backward, divided out again")] = 1.0
    max_microbatches: Annotated[
        AtLeastOne, _key("the most micro-batches of one batch, over all ranks; fewer make a finer grid with `exact`")
    ] = 65_536


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What happens to the mean gradient before the optimizer takes it."""

    max_norm: Annotated[
        AboveZero | None, _key("the largest 2-norm of the mean gradient; absent: no clipping", example=1.0)
    ] = None
    empty: Annotated[
        Literal["raise", "skip"], _key("what a batch without a supervised item does: stop the run, or skip the update")
    ] = "raise"
    nonfinite: Annotated[
        Literal["raise", "skip"], _key("what an inf or a nan in the sums does: stop the run, or skip the update")
    ] = "raise"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """When the run is saved, so that `augend resume` can go on with it."""

    every_seconds: Annotated[
        FiniteAboveZero, _key("seconds between two checkpoints, which may fall between two micro-batches")
    ] = 60.0
    every_steps: Annotated[
        AtLeastOne | None, _key("steps between two checkpoints, beside `every_seconds`; absent: none", example=100)
    ] = None
    keep: Annotated[AtLeastOne, _key("how many checkpoints are kept, the newest ones")] = 2


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Parallel:
    """How many processes share the work, and how."""

    ranks: Annotated[AtLeastOne, _key("processes that train together; under `torchrun` its own number counts")] = 1
    mode: Annotated[
        Literal["replicated", "fsdp", "hsdp"],
        _key("what of the model a rank holds: all of it, its share, or its share of one of `replicas` copies"),
    ] = "fsdp"
    replicas: Annotated[
        AtLeastOne | None, _key("copies of the model with `hsdp`, and 2 where absent; no key of the others", example=2)
    ] = None
    threads: Annotated[
        AtLeastOne | None,
        _key(
            'processor threads of each rank; absent: `1` with `accumulator.dtype = "exact"`, else those that there are',
            example=1,
        ),
    ] = None
    timeout_seconds: Annotated[
        float, Meta(ge=1, le=1e6), _key("how long a rank waits for the others before it takes them for lost")
    ] = 30.0


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Validate:
    """When the held-out rows are looked at."""

    every_steps: Annotated[
        AtLeastOne | None, _key("steps between two validations; absent: at the end of every epoch", example=100)
    ] = None
    patience: Annotated[
        AtLeastOne | None,
        _key("validations in a row without a lower loss before the run stops; absent: never", example=5),
    ] = None


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Digest:
    """When the parameters are written to the metrics in 64 bits each, so that two runs can be compared."""

    every_steps: Annotated[
        AtLeastOne | None,
        _key('steps between two with digests; absent: `10` with `accumulator.dtype = "exact"`, else none', example=10),
    ] = None


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class RunFile:
    """One whole run: what ``augend fit`` reads, completes, and writes back as ``config.toml``."""

    steps: Annotated[AtLeastOne | None, _key("optimizer steps to train; excludes `epochs`", example=400)] = None
    epochs: Annotated[
        AtLeastOne | None, _key("passes over the training rows; 1 where `steps` is absent too", example=3)
    ] = None
    seed: Annotated[
        int, Meta(ge=0, le=2**63 - 1), _key("decides initial weights, split, order of the rows, and dropout")
    ] = 0
    batch_size: Annotated[AtLeastOne, _key("rows of one optimizer step, over all ranks")] = 64
    microbatch_size: Annotated[
        AtLeastOne | None,
        _key("rows of one forward and backward; absent: 8, or `batch_size` where that is smaller", example=8),
    ] = None
    model: Model
    adapter: Adapter | None = None
    data: Data
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    accumulator: Accumulator = field(default_factory=Accumulator)
    step: Step = field(default_factory=Step)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    parallel: Parallel = field(default_factory=Parallel)
    validate: Validate = field(default_factory=Validate)
    digest: Digest = field(default_factory=Digest)


TABLES: Final = (Model, Adapter, Data, Optimizer, Schedule, Accumulator, Step, Checkpoint, Parallel, Validate, Digest)


def table_of(hint: object) -> type | None:
    """Return the table that an annotation of `RunFile` is of, also where the table may be absent; None for a key."""
    return next((each for each in (hint, *get_args(hint)) if each in TABLES), None)
