"""Where a fit is: which epoch, which physical batch of it, what was measured, and what was best."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, final

from torch import Tensor

from augend.errors import ContractError
from augend.ggml._given import floats, mapping, whole_number
from augend.ggml._graph import Graph
from augend.ggml._history import Epoch, History
from augend.ggml._result import Result
from augend.ggml._rules import Compat

_VERSION: Final = 1
_KEYS: Final = ("version", "plan", "batch", "ended", "epochs", "train", "best", "seconds")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a fit must still be when it goes on after an interruption.

    Args:
        rows: Of the data set.
        split: How many of them are trained on.
        logical: Rows of an update.
        physical: Rows of an evaluation.
        keeps_best: Whether the weights of the best epoch are kept.
    """

    rows: int
    split: int
    logical: int
    physical: int
    keeps_best: bool

    def to_plain(self) -> dict[str, int | bool]:
        """Return numbers that can be saved."""
        return {
            "rows": self.rows,
            "split": self.split,
            "logical_batch": self.logical,
            "physical_batch": self.physical,
            "keeps_best": self.keeps_best,
        }

    def check(self, saved: object) -> None:
        """Refuse another plan.

        Raises:
            ContractError: Other rows would be trained on, or cut otherwise, or the plan is damaged.
        """
        own = self.to_plain()
        for name, value in mapping("the plan of a saved fit", saved, own).items():
            if value != own[name]:
                raise ContractError(
                    f"the saved fit has {name} {value!r:.80}, and this one {own[name]}: go on with the same, or anew"
                )


@final
class Course:
    """The part of a fit that is neither the graph, nor the optimizer, nor the data set.

    Args:
        graph: Whose best weights are kept.
        plan: What does not change in a fit.
        planned: How many epochs are wanted.
        patience: After how many epochs without a better one to stop; None for never.
        compat: Of the results.
    """

    def __init__(self, graph: Graph, plan: Plan, planned: int, patience: int | None, compat: Compat | None) -> None:
        self.plan = plan
        self.planned = planned
        self.batch = 0  # physical batches of the training part that are done
        self.ended = False  # by a callback
        self.epochs: list[Epoch] = []
        self.train = Result(compat=compat)
        self.validation = Result(compat=compat)
        self._compat: Compat | None = compat
        self._graph = graph
        self._patience = patience
        self._best: dict[str, Tensor] = {}
        self._earlier = 0.0  # seconds of this epoch before it was interrupted
        self._began = time.monotonic()

    @property
    def number(self) -> int:
        """The epoch that is under way, from 1."""
        return len(self.epochs) + 1

    @property
    def batches(self) -> int:
        """Physical batches of a training part."""
        return -(-self.plan.split // self.plan.physical)

    @property
    def why(self) -> str | None:
        """Why the fit is over; None while it is not."""
        if self.ended and not self.batch:
            return f"a callback ended it in epoch {len(self.epochs)}"
        best = _best(self.epochs)
        if self._patience is not None and self.epochs:
            since = len(self.epochs) - (best.number if best else 0)
            if since >= self._patience:
                return f"no better epoch than number {best.number if best else 0} in {since}"
        return f"all {self.planned} epochs are made" if len(self.epochs) >= self.planned else None

    def end_epoch(self, updates: int) -> None:
        """Record the epoch, and begin the next.

        Args:
            updates: Made so far.
        """
        seconds = self._earlier + time.monotonic() - self._began
        self.epochs.append(Epoch.of(self.number, self.train, self.validation, updates, seconds))
        if self.plan.keeps_best and _best(self.epochs) is self.epochs[-1]:
            self._best = {name: tensor.clone() for name, tensor in self._graph.state_dict().items()}
        self.batch, self._earlier, self._began = 0, 0.0, time.monotonic()
        self.train.reset()
        self.validation.reset()

    def restore_best(self) -> None:
        """Give the graph the weights of the best epoch, where they were kept."""
        if self._best:
            self._graph.load_state_dict(self._best)

    def state_dict(self) -> dict[str, Any]:
        """Return where the fit is."""
        return {
            "version": _VERSION,
            "plan": self.plan.to_plain(),
            "batch": self.batch,
            "ended": self.ended,
            "epochs": [one.to_plain() for one in self.epochs],
            "train": self.train.state_dict(),
            "best": dict(self._best),
            "seconds": self._earlier + time.monotonic() - self._began,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; the validation of an epoch that was interrupted is made anew.

        Raises:
            ContractError: It is of another fit, or damaged. Nothing was changed.
        """
        mapping("the state of a fit", state, _KEYS)
        if (
            state["version"] != _VERSION
            or not isinstance(state["ended"], bool)
            or not isinstance(state["epochs"], list)
        ):
            raise ContractError(f"the state of a fit is of another version, or damaged: {dict(state)!r:.200}")
        self.plan.check(state["plan"])
        batch = whole_number("the batch of a saved fit", state["batch"], 0, self.batches)
        seconds = state["seconds"]
        if not isinstance(seconds, float) or not 0 <= seconds < math.inf:
            raise ContractError(f"the seconds of a saved fit must be a number of at least 0; got {seconds!r:.80}")
        epochs = [Epoch.from_plain(one) for one in state["epochs"]]
        if [one.number for one in epochs] != [*range(1, len(epochs) + 1)]:
            raise ContractError(f"the epochs of a saved fit are numbered from 1; got {[one.number for one in epochs]}")
        best = self._checked_best(state["best"])
        train = Result(compat=self._compat)
        train.load_state_dict(state["train"])
        self.batch, self.ended, self.epochs, self._best = batch, state["ended"], epochs, best
        self.train.load_state_dict(state["train"])
        self.validation.reset()
        self._earlier, self._began = seconds, time.monotonic()

    def _checked_best(self, saved: object) -> dict[str, Tensor]:
        own = self._graph.state_dict()
        if isinstance(saved, Mapping) and not saved:
            return {}
        best = {name: floats(f"the best {name}", one) for name, one in mapping("the best weights", saved, own).items()}
        for name, tensor in best.items():
            if tensor.shape != own[name].shape:
                raise ContractError(f"the best {name!r} is {list(tensor.shape)}; here it is {list(own[name].shape)}")
        return best


def _best(epochs: list[Epoch]) -> Epoch | None:
    return History(epochs=tuple(epochs), stopped="").best
