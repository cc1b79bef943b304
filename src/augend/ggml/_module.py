"""GraphModule: a graph as an ordinary nn.Module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast, final

from torch import Tensor, nn

from augend.errors import ContractError
from augend.ggml._names import by_name
from augend.ggml._nodes import Node
from augend.ggml._run import narrowed, run, same_rows, widened


@final
class GraphModule(nn.Module):
    """Computes outputs of a graph from inputs; made by ``Graph.module``.

    Its parameters are the graph's own, under their names: ``fc1.weight`` is the parameter ``weight`` of a module
    ``fc1``. Any number of rows can run through it, not just the declared one. ``fully_shard`` replaces the parameters,
    which then are the module's alone.
    """

    def __init__(
        self,
        order: Sequence[Node],
        inputs: Sequence[Node],
        outputs: Node | tuple[Node, ...],
        leaves: Mapping[Node, Tensor],
    ) -> None:
        super().__init__()
        self._order = tuple(order)
        self._inputs = tuple(inputs)
        self._outputs = outputs
        self._names = {node.index: name for name, node in by_name(node for node in order if node.parameter).items()}
        self._constants = {node.index: f"constant_{node.index}" for node in leaves if not node.parameter}
        for node, tensor in leaves.items():
            if node.parameter:
                _register(self, self._names[node.index], tensor)
            else:
                self.register_buffer(self._constants[node.index], tensor, persistent=False)

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Compute the outputs.

        Args:
            inputs: One for each input node, in torch's order: ``[rows, width]`` for a node of ggml's shape
                ``[width, rows]``.

        Raises:
            ContractError: Their number, a shape or a dtype does not fit.
        """
        if len(inputs) != len(self._inputs):
            raise ContractError(f"the module takes {len(self._inputs)} inputs; got {len(inputs)}")
        results = self.results([widened(same_rows(node, one)) for node, one in zip(self._inputs, inputs, strict=True)])
        if isinstance(self._outputs, Node):
            return _given_out(results[self._outputs], self._outputs)
        return tuple(_given_out(results[node], node) for node in self._outputs)

    def results(self, inputs: Sequence[Tensor]) -> dict[Node, Tensor]:
        """Return the value of every node from inputs of four dimensions, all ``[ne3, ne2, ne1, ne0]``."""
        given = dict(zip(self._inputs, inputs, strict=True))
        return run(self._order, lambda leaf: given[leaf] if leaf in given else widened(self._own(leaf)))

    def _own(self, leaf: Node) -> Tensor:
        if leaf.parameter:
            return self.get_parameter(self._names[leaf.index])
        return self.get_buffer(self._constants[leaf.index])


def _given_out(value: Tensor, node: Node) -> Tensor:
    return narrowed(value, node.rank).clone()  # a view would lose FSDP2's hooks to the first operation in place


def _register(root: nn.Module, name: str, tensor: Tensor) -> None:
    *owners, last = name.split(".")
    owner = root
    for one in owners:
        if one not in owner._modules:  # noqa: SLF001  # what getattr finds may be a method
            _check_free(owner, one, name)
            owner.add_module(one, nn.Module())
        owner = owner.get_submodule(one)
    _check_free(owner, last, name)
    owner.register_parameter(last, cast("nn.Parameter", tensor))


def _check_free(owner: nn.Module, attribute: str, name: str) -> None:
    if attribute in dir(owner):
        raise ContractError(
            f"no module can have the parameter {name!r}: {attribute!r} is something else there; rename it"
        )
