"""FSDP2: the one file that knows what torch keeps private about ``fully_shard``.

Used of it: per module ``_get_fsdp_state()``, its ``_fsdp_param_groups`` and ``_is_root``; per group ``fsdp_params``,
``mesh_info`` and its ``shard_mesh_size``, ``mp_policy``, the switches, ``_all_reduce_hook``,
``_partial_reduce_output`` and ``_reduce_scatter_comm``, whose class is private; per parameter
``sharded_param``, ``_unsharded_param``, ``_sharded_post_forward_param``, ``unsharded_accumulated_grad``,
``sharded_size`` and ``padded_sharded_param_size``. A probe at construction and a check of every layout fail loudly
where that changes.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final, Protocol, final

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.utils.hooks import RemovableHandle

from augend._group import Mesh
from augend._placement._scatter import WholeScatter
from augend.errors import GradientError, PlacementError

_WIDTH: Final = {torch.bfloat16: 1, torch.float16: 1, torch.float32: 2, torch.float64: 3}


class Receiver(Protocol):
    """Whoever takes gradients while a backward runs."""

    def use(self, name: str, gradient: Tensor) -> None:
        """See the gradient of one parameter, whole, before ranks are added up; it may be overwritten."""

    def write(self, name: str, gradient: Tensor, whole: Tensor) -> None:
        """Write a gradient of this rank, ``[ranks, elements]``, in the dtype of the sums, where ranks add these up."""

    def take(self, name: str, local: Tensor) -> None:
        """Take this rank's part of a gradient that was added up over the ranks of the shards; only to be read."""


@final
class FullySharded:
    """The sharded modules of a model, and the gradients that come out of them, in the dtype they were added in.

    Args:
        modules: Every FSDP module, by its name in the model.
        names: The name of each trained parameter, by its identity.
        work: Dtype of gradients.
        held: Dtype of the sums; if it is one of whole numbers, ranks are added up in these.

    Raises:
        PlacementError: A module reduces in a dtype narrower than ``work``, or has several groups of parameters.
    """

    def __init__(
        self, modules: Mapping[str, FSDPModule], names: Mapping[int, str], work: torch.dtype, held: torch.dtype
    ) -> None:
        self.modules = dict(modules)
        self._groups: dict[str, Any] = {}
        for name, module in modules.items():
            groups = groups_of(module)
            if len(groups) > 1:
                raise PlacementError(
                    f"module {name!r} shards its parameters over several meshes; call fully_shard() on parts of it, "
                    "each over one mesh"
                )
            for group in groups:
                if not any(group is one for one in self._groups.values()):  # modules sharded together share one
                    _refuse_group(name, group, work)
                    self._groups[name] = group
        self.owned: dict[str, tuple[Mesh, int]] = {  # over which dim of which mesh each is sharded
            names[id(one.sharded_param)]: (group.mesh_info.mesh, group.mesh_info.shard_mesh_dim)
            for group in self._groups.values()
            for one in group.fsdp_params
            if id(one.sharded_param) in names
        }
        self._names = dict(names)
        self._receiver: Receiver | None = None
        self._seen: set[int] = set()  # gathered parameters that have a hook
        self._handles: list[RemovableHandle] = []
        weakref.finalize(self, _remove, self._handles).atexit = False
        self._used_of: set[str] = set()  # of the backward that runs: parameters that had a gradient
        self._taken_of: set[str] = set()  # and those whose gradients were added up
        self._in_whole: set[str] = set()  # modules of several shards, which are added up in whole numbers
        for name, group in self._groups.items():
            switch_to_sums(self.modules[name])
            if not held.is_floating_point and group.mesh_info.shard_mesh_size > 1:
                self._in_whole.add(name)

    @property
    def delivered(self) -> bool:
        """Whether the last backward came to any module."""
        return bool(self._taken_of)

    def check(self) -> None:
        """Raise PlacementError if somebody has set a module to averages since."""
        for name, group in self._groups.items():
            if not _sums(group):
                raise PlacementError(
                    f"module {name!r} does not add up its ranks' gradients now: one of set_gradient_divide_factor, "
                    "set_force_sum_reduction_for_comms, set_reduce_scatter_unused_params, set_requires_gradient_sync "
                    "and set_requires_all_reduce was called on it after the Accumulator was made; leave these to it"
                )

    def canonical(self) -> dict[int, nn.Parameter]:
        """Return, by the identity of each gathered parameter, the sharded one that it stands for."""
        found = {id(gathered): sharded for gathered, sharded in self._pairs()}
        for group in self._groups.values():
            for one in group.fsdp_params:
                partly = getattr(one, "_sharded_post_forward_param", None)  # with reshard_after_forward=int
                if partly is not None:
                    found[id(partly)] = one.sharded_param
        return found

    def check_foreign(self) -> None:
        """Raise GradientError if another backward left sums of its own behind."""
        for name, group in self._groups.items():
            if group._partial_reduce_output is not None or any(map(_holds_gradient, group.fsdp_params)):  # noqa: SLF001  # see the top of the file
                raise GradientError(
                    f"module {name!r} holds gradients that this accumulator did not make; they would be counted twice. "
                    'Run every backward through it, or pass foreign="drop"'
                )

    def drop(self) -> None:
        """Drop what another backward left behind."""
        for group in self._groups.values():
            group._partial_reduce_output = None  # noqa: SLF001  # see the top of the file
            for one in filter(_holds_gradient, group.fsdp_params):
                one.unsharded_accumulated_grad = None
                one._unsharded_param.grad = None  # noqa: SLF001  # the same

    @contextmanager
    def received_by(self, receiver: Receiver) -> Iterator[None]:
        """Give what a backward in this block produces to a receiver."""
        self._watch()
        self._receiver = receiver
        self._used_of, self._taken_of = set(), set()
        self._listen(_hook)
        own = self._scatter_by(receiver)
        try:
            yield
            for name, group in self._groups.items():
                if _is_hybrid(group) and group._partial_reduce_output is not None:  # noqa: SLF001  # as above
                    self._reduced(name, group._partial_reduce_output)  # noqa: SLF001  # as above
            self._check_delivered()
        except BaseException:
            self._abandon()
            raise
        finally:
            self._receiver = None
            self._listen(lambda _, __: None)
            for name, comm in own.items():
                self.modules[name].set_custom_reduce_scatter(comm)
            self.drop()

    def _scatter_by(self, receiver: Receiver) -> dict[str, Any]:
        """Let modules add up in whole numbers, and return what they have added up by, to be set again afterwards."""
        own = {}
        for name in self._in_whole:
            own[name] = self._groups[name]._reduce_scatter_comm  # noqa: SLF001  # see the top of the file
            widths = {one: padded for one, _, padded in self._layout(name)}
            comm = WholeScatter(widths, receiver.write, functools.partial(self._deal_out, name))
            self.modules[name].set_custom_reduce_scatter(comm)  # type: ignore[arg-type]  # torch's abstract class is private
        return own

    def _abandon(self) -> None:
        """Let torch forget a backward that failed in its midst; else its next one would not reduce, silently."""
        for module in self.modules.values():
            if module._get_fsdp_state()._is_root:  # noqa: SLF001  # see the top of the file
                with suppress(RuntimeError):  # where a rank is lost nothing can be tidied, nor used again
                    module.reset_iter_state()

    def _check_delivered(self) -> None:
        """A gradient that was made and not reduced would be missing without a word."""
        for name in sorted(self._used_of - self._taken_of):
            raise PlacementError(
                f"the gradient of parameter {name!r} was not added up over ranks: did a forward or backward outside of "
                "the accumulator fail before? After one, call reset_iter_state() on the outermost sharded module"
            )

    def _listen(self, hook: Callable[[weakref.WeakMethod[Callable[[str, Tensor], None]], str], Any]) -> None:
        """Set what each module gives its reduced gradients to: only while they are wanted, as others may come later."""
        for name, group in self._groups.items():
            if not _is_hybrid(group):
                self.modules[name].set_all_reduce_hook(hook(weakref.WeakMethod(self._reduced), name))

    def _reduced(self, module: str, flat: Tensor) -> None:
        """Take one module's flat reduce-scatter output, unless it went another way, as whole numbers."""
        if module not in self._in_whole:
            self._deal_out(module, flat)

    def _deal_out(self, module: str, flat: Tensor) -> None:
        """Take the parts of one module's flat sums: padded, and in the order of its parameters."""
        if self._receiver is None:
            return
        begin = 0
        for name, shape, padded in self._layout(module):
            self._taken_of.add(name)
            self._receiver.take(name, flat[begin : begin + shape.numel()].view(shape))
            begin += padded
        if begin != flat.numel():
            raise PlacementError(
                f"module {module!r} reduced {flat.numel()} elements, and its parameters have {begin} here: this torch "
                "lays gradients out in a way that this augend does not know"
            )

    def _layout(self, module: str) -> Iterator[tuple[str, torch.Size, int]]:
        """Yield name, shape and padded elements of this rank's part of each parameter that has a gradient."""
        for one in self._groups[module].fsdp_params:
            if one.sharded_param.requires_grad:
                padded = one.padded_sharded_param_size.numel()
                yield self._names[id(one.sharded_param)], one.sharded_size, padded

    def _watch(self) -> None:
        """See each gathered parameter's own gradient before it is added up: once for each, as soon as it exists."""
        for gathered, sharded in self._pairs():
            if id(gathered) not in self._seen and id(sharded) in self._names and sharded.requires_grad:
                self._seen.add(id(gathered))
                use = _hook(weakref.WeakMethod(self._used), self._names[id(sharded)])
                handle = gathered.register_post_accumulate_grad_hook(use)  # type: ignore[no-untyped-call]  # torch leaves it untyped
                self._handles.append(handle)

    def _pairs(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Yield each gathered parameter that exists, with the sharded one that it stands for."""
        for group in self._groups.values():
            for one in group.fsdp_params:
                gathered = getattr(one, "_unsharded_param", None)  # made by the first forward
                if gathered is not None:
                    yield gathered, one.sharded_param

    def _used(self, name: str, gathered: Tensor) -> None:
        if self._receiver is not None and gathered.grad is not None:
            if name in self._used_of:
                raise GradientError(
                    f"the gradient of {name!r} comes in several pieces, of which FSDP2 loses some, as with reentrant "
                    "activation checkpointing of a sharded module; pass use_reentrant=False"
                )
            self._used_of.add(name)
            self._receiver.use(name, gathered.grad)


def give_back(model: nn.Module) -> None:
    """Let sharded modules give back what they have gathered, so that parameters are those that optimizers hold.

    torch leaves the outermost module gathered after a forward without a backward. Nothing is sent.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def groups_of(module: FSDPModule) -> list[Any]:
    """Return torch's own record of what a sharded module shards."""
    return list(module._get_fsdp_state()._fsdp_param_groups)  # noqa: SLF001  # see the top of the file


def meshes_of(module: FSDPModule) -> list[Mesh]:
    """Return the meshes over which a module is sharded, or sharded and replicated."""
    return [group.mesh_info.mesh for group in groups_of(module)]


def switch_to_sums(module: FSDPModule) -> None:
    """Make a module's gradients plain sums over its shards, with zeros for what a rank did not use."""
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    module.set_reduce_scatter_unused_params(True, recurse=False)
    module.set_requires_gradient_sync(True, recurse=False)
    module.set_requires_all_reduce(False, recurse=False)


def _sums(group: Any) -> bool:
    return bool(
        group.gradient_divide_factor == 1.0
        and group.force_sum_reduction_for_comms
        and group.reduce_scatter_unused_params
        and group.reduce_grads
        and not group.all_reduce_grads
    )


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _holds_gradient(one: Any) -> bool:
    """Tell whether a parameter has a whole gradient that was not reduced: torch keeps these where nothing syncs."""
    gathered = getattr(one, "_unsharded_param", None)
    return gathered is not None and (one.unsharded_accumulated_grad is not None or gathered.grad is not None)


def _is_hybrid(group: Any) -> bool:
    return bool(group.mesh_info.mesh.ndim > 1)


def _refuse_group(name: str, group: Any, work: torch.dtype) -> None:
    if not isinstance(group.mesh_info, FSDPMeshInfo):
        raise PlacementError(f"module {name!r} is replicated without shards; give the plain module")
    if group._all_reduce_hook is not None:  # noqa: SLF001  # see the top of the file
        raise PlacementError(
            f"module {name!r} has an all-reduce hook of its own, whose sums nobody here knows; shard it over a mesh "
            "with an axis of replicas instead"
        )
    policy = group.mp_policy
    for one in group.fsdp_params:
        reduced = policy.reduce_dtype or policy.param_dtype or one.sharded_param.dtype
        if one.sharded_param.requires_grad and _WIDTH.get(reduced, 0) < _WIDTH[work]:
            raise PlacementError(
                f"module {name!r} adds its ranks' gradients up in {reduced}, and the sums are {work}: what is rounded "
                f"there is lost. Pass mp_policy=MixedPrecisionPolicy(..., reduce_dtype={work}) to fully_shard()"
            )


def _hook(receive: weakref.WeakMethod[Callable[[str, Tensor], None]], name: str) -> Callable[[Tensor], None]:
    """Return a hook that does not keep its owner alive."""

    def hook(tensor: Tensor) -> None:
        alive = receive()
        if alive is not None:
            alive(name, tensor)

    return hook
