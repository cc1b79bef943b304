"""One model's placement: how gradients get into sums, and sums become what an optimizer takes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from augend._group import Group
from augend._placement._axes import Axes
from augend._placement._chunks import Chunks
from augend._placement._digests import written
from augend._placement._explain import explain_forwards
from augend._placement._fsdp import FullySharded, Receiver
from augend._placement._order import ForwardOrder
from augend._placement._place import Place
from augend._placement._tensors import laid, local_of, placed, spread
from augend.errors import ContractError, GradientError, TallyError

_HASH_BYTES: Final = 8


@final
class Placement:
    """Where the parameters of a model and their sums lie.

    Args:
        model: The module, without a wrapper around it.
        places: Every trained parameter's place, by name.
        axes: The full mesh.
        group: All its ranks.
        fsdp: The sharded modules, if there are any.
        chunks: Who deals the sums of replicated parameters, if ranks share them.
    """

    def __init__(
        self,
        model: nn.Module,
        places: Mapping[str, Place],
        axes: Axes,
        group: Group,
        *,
        fsdp: FullySharded | None,
        chunks: Chunks | None,
    ) -> None:
        self.model = model
        self.group = group
        self.share = axes.share()  # rank and world among those that share a batch
        self.counts = axes.first(axes.tensor)  # of ranks that run the same rows, one counts them
        self.sharded = fsdp is not None
        self._places = dict(places)
        self._axes = axes
        self._fsdp = fsdp
        self._chunks = chunks
        self._owing = False  # a forward of sharded modules whose backward has not come
        self._order = None if fsdp is None else ForwardOrder(fsdp.modules, group)
        if group.world > 1:
            explain_forwards(model, group)

    # ---------------------------------------------------------------- parameters

    def canonical(self) -> dict[int, nn.Parameter]:
        """Return, by the identity of each gathered parameter, the sharded one that it stands for."""
        return {} if self._fsdp is None else self._fsdp.canonical()

    def memory(self, parameter: nn.Parameter) -> Tensor | None:
        """Return what of a parameter is in this process; None where there is nothing that has memory."""
        here = local_of(parameter)
        return here if type(here) is Tensor and here.numel() and not here.is_meta else None

    def like(self, name: str) -> Tensor:
        """Return this rank's part of a parameter, cut as its sum is; shares memory."""
        return self._places[name].like()

    def counted(self, name: str) -> bool:
        """Tell whether this rank's part of a sum enters a norm: every element does on one rank."""
        return self._places[name].counted(self._axes)

    # ---------------------------------------------------------------- gradients into sums

    def takes_whole(self, name: str) -> bool:
        """Tell whether a parameter's own gradient is what is to be taken, and not what FSDP2 makes of it."""
        return self._fsdp is None or name not in self._fsdp.owned

    def local(self, name: str, gradient: Tensor) -> Tensor:
        """Return the part of a gradient that is here, in the form its parameter has. Collective where it is partial."""
        lies = placed(self._places[name].parameter)
        return local_of(gradient if lies is None else laid(gradient, lies[1]))

    @contextmanager
    def taking(self, receiver: Receiver, what: str) -> Iterator[None]:
        """Give the gradients that a backward in this block makes to a receiver.

        Args:
            receiver: Its ``use`` sees gradients before ranks are added up, its ``take`` this rank's part of them after.
            what: The backward, in words.

        Raises:
            UnusedError: Ranks went through different modules.
        """
        if self._fsdp is None or self._order is None:
            yield
            return
        self._fsdp.check()
        self._fsdp.drop()
        self._owing = self._owing or self._order.entered
        with self._order.compared(what), self._fsdp.received_by(receiver):
            yield
        self._owing = self._owing and not self._fsdp.delivered

    def check_delivered(self) -> None:
        """Raise TallyError if sharded modules ran forwards, and no backward since then came to any of them."""
        owing, self._owing = self._owing, False
        if owing:
            raise TallyError(
                "the tally's graph does not lead through the sharded model, whose forward ran: other ranks wait for "
                "this one in its backward. Build the total from the model's output, also where nothing counts"
            )

    def deal(self, gradients: Mapping[str, Tensor], receiver: Receiver) -> None:
        """Give every rank its part of the sum over ranks of whole gradients, where ranks share them. Collective."""
        if self._chunks is not None:
            for name, part in self._chunks.scatter(gradients, receiver.write):
                receiver.take(name, part)

    def dealt(self, name: str) -> bool:
        """Tell whether a parameter's gradients are dealt."""
        return self._chunks is not None and self._places[name].lies is not None

    def check_foreign(self) -> None:
        """Raise GradientError if another backward left gradients inside the sharded modules."""
        if self._fsdp is not None:
            self._fsdp.check_foreign()

    def drop(self) -> None:
        """Drop what another backward left inside the sharded modules."""
        if self._fsdp is not None:
            self._fsdp.drop()

    # ---------------------------------------------------------------- sums out

    def complete(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return sums over all ranks, each rank its part; those given are not changed. Collective.

        Args:
            sums: The same names on every rank.
        """
        with self.group.explained("the sums of all ranks"):
            return self._axes.add_up(sums, {name: self._places[name].partial for name in sums})

    def handed_over(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return complete gradients in the form that their parameters have. Collective.

        Args:
            parts: This rank's part of each; the same names on every rank.
        """
        dealt = {name: part for name, part in parts.items() if self.dealt(name)}
        with self.group.explained("the other ranks' shares"):
            wholes = {} if self._chunks is None else self._chunks.gather(dealt)
        return {
            name: wholes[name] if name in wholes else self._places[name].spread(part) for name, part in parts.items()
        }

    def spread(self, name: str, part: Tensor) -> Tensor:
        """Return this rank's part of a complete sum as a tensor that others can place anew; shares memory."""
        return self._places[name].spread(part)

    def formed(self, gradient: Tensor, target: Tensor) -> Tensor:
        """Return a gradient as one that a target takes: its dtype and memory layout, rounded once."""
        here, there = local_of(gradient), local_of(target)
        fits = here.dtype == there.dtype and here.stride() == there.stride()
        if not fits:
            here = torch.empty_like(there).copy_(here)
        lies = placed(target)
        return here if lies is None else spread(here, target.shape, *lies)

    def part(self, name: str, tensor: Tensor) -> Tensor | None:
        """Return what this rank keeps of a complete sum; None if another replica keeps it. Collective if spread.

        Args:
            name: The parameter.
            tensor: The whole sum, plain or spread over any mesh.
        """
        one = self._places[name]
        with self.group.explained(f"all of {name!r}"):
            part = one.part(tensor)
        return part if self._axes.first(one.partial) else None

    def is_spread(self, tensor: Tensor) -> bool:
        """Tell whether a tensor is spread over a mesh."""
        return placed(tensor) is not None

    def check_spread(self, name: str, gradient: Tensor) -> None:
        """Raise GradientError if a gradient that was made elsewhere is spread otherwise than its parameter."""
        lies = placed(gradient)
        mine = placed(self._places[name].parameter)
        if lies is not None and (mine is None or lies[0] != mine[0]):
            raise GradientError(
                f"the gradient of {name!r} is spread over {lies[0]}, and its parameter over {mine and mine[0]}; give "
                "this rank's own whole gradient as a plain tensor, or one that is spread as the parameter is"
            )

    def shared(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this rank's part of the sum over ranks of whole, plain gradients, each rank its own. Collective.

        Args:
            gradients: The same names on every rank.
        """
        over = dict.fromkeys(gradients, self._axes.data)
        with self.group.explained("the gradients of all ranks"):
            every = self._axes.add_up(gradients, over)
        return {name: part for name, tensor in every.items() if (part := self.part(name, tensor)) is not None}

    def digests(self, what: str) -> dict[str, str]:
        """Return 64 bits of each parameter, the same for every placement and world. Collective.

        Args:
            what: What ranks wait for here, in words.
        """
        with self.group.explained(what):
            mine = [one.digest(self._axes) for one in self._places.values()]
        self.group.agree(what, None)
        every = self.group.total(what, mine)
        return {name: written(number) for name, number in zip(self._places, every, strict=True)}

    def check_replicas(self) -> None:
        """Raise ContractError, on all ranks alike, if ranks hold a parameter of which they should hold the same bits.

        Collective; the models must have the same parameters.
        """
        if self.group.world == 1:
            return
        what = "the comparison of replicas"
        sharded = self.canonical()
        held = {name: sharded.get(id(one), one) for name, one in self.model.named_parameters()}  # frozen ones too
        hashes = self.group.agreed(what, lambda: {name: _hash(name, one) for name, one in held.items()})
        kinds: dict[tuple[tuple[str, ...], torch.device], list[str]] = {}
        for name, one in held.items():
            split = self._axes.split(placed(one))
            alike = tuple(axis for axis in self._axes.names if axis not in split)
            kinds.setdefault((alike, one.device), []).append(name)
        different: list[str] = []
        for (alike, device), names in kinds.items():
            mine = torch.tensor([hashes[name] for name in names], device=device)
            with self.group.explained(what):
                highest, lowest = self._axes.reduce_(torch.stack([mine, -mine]), alike, dist.ReduceOp.MAX).tolist()
            different.extend(name for name, a, b in zip(names, highest, lowest, strict=True) if a != -b)
        error = None
        if different:
            error = ContractError(
                f"parameter {different[0]!r} is not the same on all ranks that hold it; build the model from one seed, "
                "load one checkpoint, or broadcast it, before the Accumulator is made"
            )
        self.group.agree(what, error)


def _hash(name: str, parameter: nn.Parameter) -> int:
    local = local_of(parameter)
    if local.is_meta:
        raise ContractError(
            f"parameter {name!r} has no memory yet (meta device); call to_empty() and initialise it first"
        )
    content = local.contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
    return int.from_bytes(hashlib.sha256(content.data).digest()[:_HASH_BYTES], "little") >> 2
