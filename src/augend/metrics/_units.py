"""The exact sums of sampling units: rows, or groups of rows that may come in any number of pieces."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any, final

import torch
from torch import Tensor

from augend._numerics import Moments, fixed, fraction, on_grid, scaled
from augend._tally import Tally
from augend.errors import ContractError, TallyError


@final
class Units:
    """Moments of the rows that are units of their own, and the sums of every group.

    A group may be cut over micro-batches, so its moments exist only when all of its rows have come.
    """

    __slots__ = ("_groups", "_moments")

    def __init__(self) -> None:
        self._moments = Moments()
        self._groups: dict[int, tuple[Fraction, Fraction]] = {}  # total and count of each

    @staticmethod
    def of(tally: Tally, groups: Tensor | None) -> Units:
        """Read the rows of one tally.

        Raises:
            TallyError: A count is negative or not finite, or the groups do not fit.
        """
        total, count = tally.total.detach(), tally.count
        bad = ~(torch.isfinite(count) & (count >= 0)).reshape(-1)
        if bool(bad.any()):
            row = int(bad.nonzero()[0])
            value = count.reshape(-1)[row].item()
            raise TallyError(f"counts and weights must be finite and not negative; got {value} in row {row}")
        units = Units()
        moments = Moments.of(total, count)
        if groups is None:
            units._moments = moments
            return units
        if groups.dtype != torch.int64 or groups.dim() != 1 or groups.shape != total.shape:
            got = f"{groups.dtype} {list(groups.shape)} for totals {list(total.shape)}"
            raise TallyError(f"groups must be int64 [rows], one group a row; got {got}")
        units._moments = Moments(finite=moments.finite)
        units._groups = _group_sums(total, count, groups)
        return units

    def add(self, other: Units) -> None:
        """Add disjoint rows, exactly."""
        self._moments += other._moments
        for group, (total, count) in other._groups.items():
            mine = self._groups.get(group, (Fraction(0), Fraction(0)))
            self._groups[group] = mine[0] + total, mine[1] + count

    def moments(self) -> Moments:
        """Return the exact moments of all units."""
        return self._moments + Moments.of_units(self._groups.values())

    def to_plain(self) -> dict[str, Any]:
        """Return what JSON keeps exactly."""
        groups = [[group, str(total), str(count)] for group, (total, count) in sorted(self._groups.items())]
        return {"moments": self._moments.to_plain(), "groups": groups}

    @staticmethod
    def from_plain(plain: object) -> Units:
        """Read what ``to_plain`` wrote.

        Raises:
            ContractError: It is something else.
        """
        if not isinstance(plain, Mapping) or plain.keys() != {"moments", "groups"}:
            raise ContractError(f"units need the fields 'moments' and 'groups'; got {plain!r:.80}")
        moments, groups = plain["moments"], plain["groups"]
        if not isinstance(moments, Mapping) or not isinstance(groups, list):
            raise ContractError(f"units are a mapping of moments and a list of groups; got {plain!r:.80}")
        units = Units()
        try:
            units._moments = Moments.from_plain(dict(moments))
            for entry in groups:
                units._read_group(entry)
        except ValueError as error:
            raise ContractError(f"the sums of a metric cannot be read: {error}") from error
        return units

    def _read_group(self, entry: object) -> None:
        if not isinstance(entry, list) or [type(part) for part in entry] != [int, str, str]:
            raise ValueError(f"a group is its number, its total and its count; got {entry!r:.80}")
        group, total, count = entry
        if group in self._groups:
            raise ValueError(f"group {group} is there twice")
        self._groups[group] = fraction("total", total), fraction("count", count)
        if self._groups[group][1] < 0:
            raise ValueError(f"the count of group {group} is negative: {count}")


def _group_sums(total: Tensor, count: Tensor, groups: Tensor) -> dict[int, tuple[Fraction, Fraction]]:
    usable = torch.isfinite(total)
    totals, low_total = fixed(torch.where(usable, total, torch.zeros_like(total)))
    counts, low_count = fixed(on_grid(count) if count.is_floating_point() else count)
    sums: dict[int, tuple[int, int]] = {}
    for group, one_total, one_count in zip(groups.tolist(), totals.tolist(), counts.tolist(), strict=True):
        mine = sums.get(group, (0, 0))
        sums[group] = mine[0] + one_total, mine[1] + one_count
    return {group: (scaled(s, low_total), scaled(c, low_count)) for group, (s, c) in sums.items()}
