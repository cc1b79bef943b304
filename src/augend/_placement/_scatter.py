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
    """What a sharded module adds its ranks' gradients up with in a backward: of the shape of torch's ``ReduceScatter``.

    Args:
        widths: Elements of a rank's padded part of each parameter, in the module's order.
        write: Writes a parameter's gradient as int64: its name, the gradient ``[ranks, width]``, and where to.
        take: Is given this rank's part of the sums, ``[elements]`` int64.
    """

    def __init__(self, widths: Mapping[str, int], write: Write, take: Callable[[Tensor], None]) -> None:
        self._widths = widths
        self._write = write
        self._take = take

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for torch to put its gradients together in."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,  # noqa: ARG002  # torch's own signature; it is told to add up
        *,
        async_op: bool = False,  # noqa: ARG002  # the same; nothing here is worth an overlap on a CPU
    ) -> None:
        """Add up over ranks in whole numbers; what torch is given for its own sums is zeros.

        Raises:
            PlacementError: The gradients are laid out otherwise than the parameters.
        """
        floats = input_tensor.view(group.size(), -1)  # [ranks, elements]
        if sum(self._widths.values()) != floats.shape[1]:
            raise PlacementError(
                f"a sharded module puts {floats.shape[1]} elements of gradients together for each rank, and its "
                f"parameters have {sum(self._widths.values())}: this torch lays them out in a way that this augend "
                "does not know"
            )
        whole = torch.zeros_like(floats, dtype=torch.int64)
        begin = 0
        for name, width in self._widths.items():
            self._write(name, floats[:, begin : begin + width], whole[:, begin : begin + width])
            begin += width
        mine = torch.empty(begin, dtype=torch.int64, device=whole.device)
        dist.reduce_scatter_single(mine, whole.view(-1), group=group)
        output_tensor.zero_()
        self._take(mine)
