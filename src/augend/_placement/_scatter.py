"""Reduce-scatter in whole numbers, in the place of FSDP2's own: for sums that know no order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from augend.errors import PlacementError

Write = Callable[[str, Tensor, Tensor], None]


@final
class WholeScatter:
    """What a sharded module adds its ranks' gradients up with: of the shape of torch's ``ReduceScatter``.

    Where nobody has asked for whole numbers it does as torch does, since it stays with the module.
    """

    def __init__(self) -> None:
        self._asked: tuple[Mapping[str, int], Write, Callable[[Tensor], None]] | None = None

    def begin(self, widths: Mapping[str, int], write: Write, take: Callable[[Tensor], None]) -> None:
        """Ask for whole numbers from now on.

        Args:
            widths: Elements of a rank's padded part of each parameter, in the module's order.
            write: Writes a parameter's gradient as int64: its name, the gradient ``[ranks, width]``, and where to.
            take: Is given this rank's part of the sums, ``[elements]`` int64.
        """
        self._asked = widths, write, take

    def end(self) -> None:
        """Do as torch does from now on."""
        self._asked = None

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for torch to put its gradients together in."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, *, async_op: bool = False
    ) -> dist.Work | None:
        """Add up over ranks; what torch is given where somebody asked for whole numbers is zeros.

        Raises:
            PlacementError: The gradients are laid out otherwise than the parameters.
        """
        if self._asked is None:
            work: dist.Work | None = dist.reduce_scatter_single(
                output_tensor, input_tensor, op=op, group=group, async_op=async_op
            )
            return work
        widths, write, take = self._asked
        floats = input_tensor.view(group.size(), -1)  # [ranks, elements]
        if sum(widths.values()) != floats.shape[1]:
            raise PlacementError(
                f"a sharded module puts {floats.shape[1]} elements of gradients together for each rank, and its "
                f"parameters have {sum(widths.values())}: this torch lays them out in a way that this augend does not "
                "know"
            )
        whole = torch.zeros_like(floats, dtype=torch.int64)
        begin = 0
        for name, width in widths.items():
            write(name, floats[:, begin : begin + width], whole[:, begin : begin + width])
            begin += width
        mine = torch.empty(begin, dtype=torch.int64, device=whole.device)
        dist.reduce_scatter_single(mine, whole.view(-1), group=group)
        output_tensor.zero_()
        take(mine)
        return None
