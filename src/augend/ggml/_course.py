"""Where a fit is: which epoch, which physical batch of it, what was measured, and what was best."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, final

from torch import Tensor

from augend.errors import ContractError
from augend.ggml._graph import Graph
from augend.ggml._history import Epoch, History
from augend.ggml._result import Result
from augend.ggml._rules import Compat


@final
class Course:
    """The part of a fit that is neither the graph, nor the optimizer, nor the data set.

    Args:
        graph: Whose best weights are kept.
        planned: How many epochs are wanted.
        patience: After how many epochs without a better one to stop; None for never.
        compat: Of the results.
    """

    def __init__(self, graph: Graph, planned: int, patience: int | None, compat: Compat | None) -> None:
        self.planned = planned
        self.batch = 0  # physical batches of the training part that are done
        self.epochs: list[Epoch] = []
        self.train = Result(compat=compat)
        self.validation = Result(compat=compat)
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
    def why(self) -> str | None:
        """Why the fit is over; None while it is not."""
        best = History(epochs=tuple(self.epochs), stopped="").best
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
        if self._patience is not None and History(epochs=tuple(self.epochs), stopped="").best is self.epochs[-1]:
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
            "batch": self.batch,
            "epochs": [one.to_plain() for one in self.epochs],
            "train": self.train.state_dict(),
            "best": dict(self._best),
            "seconds": self._earlier + time.monotonic() - self._began,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; the validation of an epoch that was interrupted is made anew.

        Raises:
            ContractError: The best weights are not of this graph.
        """
        if state["best"] and state["best"].keys() != self._graph.state_dict().keys():
            raise ContractError("the saved best weights are not of this graph")
        self.train.load_state_dict(state["train"])
        self.validation.reset()
        self.epochs = [Epoch.from_plain(one) for one in state["epochs"]]
        self.batch, self._best = state["batch"], dict(state["best"])
        self._earlier, self._began = state["seconds"], time.monotonic()
