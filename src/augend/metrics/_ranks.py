"""Ranks: what every rank has measured, as all of them have."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import final

from augend._group import Mesh, open_group
from augend.errors import ContractError
from augend.metrics._metric import Metric


@final
class Ranks:
    """The ranks that share rows: they merge what each has measured, exactly, and decide alike.

    Collective: making one, and every method, in one order on each rank. A process alone needs no process group.

    Args:
        mesh: The axes that share the rows, as ``Batches(mesh=)``; None for the default process group.

    Attributes:
        rank: Of this process among them.
        world: How many there are.

    Raises:
        LostRankError: A rank is gone, or did not come in time; so does every method.

    Example:
        >>> ranks = augend.metrics.Ranks()
        >>> loss = augend.Mean()
        >>> loss.update(augend.Tally(torch.tensor([1.0, 3.0]), torch.tensor([1, 1])))
        >>> print(ranks.world, ranks.merge({"loss": loss})["loss"].compute())
        1 2.00 ± 1.00
    """

    def __init__(self, mesh: Mesh | None = None) -> None:
        self._group = open_group(mesh, purpose="what was measured")
        self.rank = self._group.rank
        self.world = self._group.world

    def merge(self, metrics: Mapping[str, Metric], *, own: bool = True) -> dict[str, Metric]:
        """Return on every rank metrics that hold what all ranks have added. Those given stay as they are.

        Args:
            metrics: By name: the same names and kinds on every rank, in one order.
            own: Whether what this rank's metrics hold counts. A rank that only ran fillers gives metrics of the
                right kinds, and False.

        Raises:
            ContractError: Ranks give other names or kinds; on all of them.

        Numerics:
            Exact: the same bits as if one rank had added everything.
        """
        if self.world == 1:
            return copy.deepcopy(dict(metrics))
        states = {name: metric.state_dict() for name, metric in metrics.items()}
        note = json.dumps({"own": own, "states": states}).encode()
        notes = [json.loads(data) for data in self._group.exchange("what the other ranks have measured", note)]
        _check_alike([note["states"] for note in notes])
        counted = [note["states"] for note in notes if note["own"]]
        return {name: _merged(metric, [states[name] for states in counted]) for name, metric in metrics.items()}

    def same(self, what: str, values: Mapping[str, object]) -> None:
        """Do nothing if values are the same on all ranks.

        Args:
            what: What is compared, in words.
            values: Numbers, text, lists and dictionaries, by what they are called in messages.

        Raises:
            StateError: They differ; on all ranks, names the first one and each rank's.
        """
        self._group.same(what, values)

    def any(self, flag: bool, /) -> bool:  # noqa: FBT001 - the only argument
        """Return whether it is so on any rank."""
        return self._group.maximum("whether all ranks go on", [int(flag)]) != [0]

    def from_first(self, numbers: Sequence[float]) -> list[float]:
        """Return the numbers of rank 0, as float64; equally many on each rank."""
        return self._group.gather("the numbers of rank 0", numbers)[0]


def _check_alike(every: Sequence[Mapping[str, Mapping[str, object]]]) -> None:
    kinds = [[f"{name} ({state['metric']})" for name, state in states.items()] for states in every]
    for rank, mine in enumerate(kinds):
        if mine != kinds[0]:
            first, other = ", ".join(kinds[0]) or "nothing", ", ".join(mine) or "nothing"
            raise ContractError(f"rank 0 measures {first} and rank {rank} {other}; give each rank the same metrics")


def _merged(metric: Metric, states: Sequence[Mapping[str, object]]) -> Metric:
    """Return the sum of states, which are of the metric's kind."""
    parts = []
    for state in states:
        part = copy.deepcopy(metric)
        part.load_state_dict(state)
        parts.append(part)
    if not parts:
        raise ContractError("no rank has anything to add; at least one must have rows that count")
    total, *others = parts
    for part in others:
        total.merge(part)
    return total
