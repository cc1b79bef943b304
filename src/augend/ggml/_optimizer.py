"""Optimizer: a graph, its loss and its window of gradients, evaluated one physical batch at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast, final

import torch
from torch import Tensor

from augend import Accumulator
from augend.errors import ContractError, StateError
from augend.ggml._dataset import Dataset
from augend.ggml._given import whole_number
from augend.ggml._graph import Graph
from augend.ggml._losses import Measured, check_rows, items_of, measure
from augend.ggml._nodes import Node
from augend.ggml._parameters import (
    Build,
    Kind,
    Loss,
    Moment,
    Parameters,
    adamw_vector,
    check_parameters,
)
from augend.ggml._predictions import count_correct, predict
from augend.ggml._random import Random
from augend.ggml._result import Result
from augend.ggml._rules import Compat, rules_of
from augend.ggml._run import DIMENSIONS, widened
from augend.ggml._saved import VERSION, read_state
from augend.ggml._steps import step_adamw_, step_sgd_
from augend.ggml._training import Training, check_training, tell_unused

_DATAPOINTS: Final = 2  # of [ne3, ne2, ne1, ne0]


@final
class Optimizer:
    """Evaluates a graph on physical batches, gathers gradients over a window of them, and updates the parameters.

    Write a physical batch into ``training.inputs`` and ``labels_tensor`` with ``graph.set_values``, between
    ``allocate``, which says what will be done, and ``evaluate``, which does it. ``epoch`` and ``fit`` do it for a
    whole ``Dataset``.

    The gradients of a window are summed by an ``augend.Accumulator`` and divided once, by what was counted: neither
    the size of the physical batches nor a short last one changes the update. An evaluation without gradients changes
    nothing of the training. With ``compat`` both are as in ggml, or in its port.

    Args:
        graph: Whose parameters are trained: all that ``training.outputs`` is made of.
        training: What is trained, on what, and how.
        random: What ``shuffle`` draws from; seeded with 5489 if None, as in ggml.
        compat: Whose numbers to reproduce; None for the right ones.

    Raises:
        ContractError: A node is of another graph, nothing is trained, a step stands in the graph, the period or the
            parameters are out of bounds, or outputs of a cross entropy are no matrix.

    Example:
        >>> from augend.ggml import Graph, Kind, Loss, Optimizer, Parameters, Training
        >>> graph = Graph()
        >>> x, w = graph.tensor((2, 2)), graph.tensor((2,), parameter=True)
        >>> b = graph.tensor(1, parameter=True)
        >>> graph.set_values(w, [1.0, 1.0])
        >>> training = Training(
        ...     inputs=x,
        ...     outputs=graph.add(graph.mul(x, w), b),
        ...     loss=Loss.MEAN_SQUARED_ERROR,
        ...     kind=Kind.SGD,
        ...     period=2,
        ...     parameters=Parameters(sgd=[0.1, 0.0]),
        ... )
        >>> optimizer = Optimizer(graph, training)
        >>> for _ in range(2):
        ...     optimizer.allocate(backward=True)
        ...     graph.set_values(x, [[1.0, 2.0], [3.0, 4.0]])
        ...     optimizer.evaluate()
        3.75
        3.75
        >>> graph.values(w), graph.values(b)
        (tensor([0.5000, 0.0000]), tensor([-0.5000]))
    """

    def __init__(
        self, graph: Graph, training: Training, *, random: Random | None = None, compat: Compat | None = None
    ) -> None:
        self._rules = rules_of(compat)
        check_training(graph, training, compat)
        self.graph = graph
        self.training = training
        self.compat: Compat | None = compat
        self.module = graph.module(training.inputs, training.outputs)
        self.random = Random() if random is None else random
        self._nodes = graph.parameters(training.outputs)
        self._names = {node: name for name, node in self._nodes.items()}
        self._grads = Accumulator(self.module)
        self._moments: dict[str, tuple[Tensor, Tensor]] = {}
        if training.kind is Kind.ADAMW:
            weights = {name: graph.storage(node).detach() for name, node in self._nodes.items()}
            self._moments = {name: (torch.zeros_like(one), torch.zeros_like(one)) for name, one in weights.items()}
        self._loss = graph.scratch((1,), "loss")
        outputs = training.outputs
        self._labels = graph.scratch(outputs.shape[: outputs.rank], "labels") if training.loss.has_labels else None
        inputs = training.inputs
        self._across = _DATAPOINTS if inputs.shape[2:] == (1, 1) else DIMENSIONS - inputs.rank  # images: the outermost
        self._rows = inputs.shape[DIMENSIONS - 1 - self._across]
        self.epoch = 0
        self._iteration = 1
        self._index = 0
        self._mode = Build.UPDATE
        self._ready = False
        self._used: Mapping[str, Tensor] | None = None  # the gradients that the last update was made of
        self._told: set[str] = set()  # parameters of which was said that they have no gradients
        self._predictions: Tensor | None = None
        self._correct: int | None = None

    # ------------------------------------------------------------------ looking

    @property
    def kind(self) -> Kind:
        """Which optimizer makes the updates."""
        return self.training.kind

    @property
    def period(self) -> int:
        """Physical batches in a window."""
        return self.training.period

    @property
    def iteration(self) -> int:
        """The number of the next update, from 1."""
        return self._iteration

    @property
    def index(self) -> int:
        """How many physical batches of the window are done."""
        return self._index

    @property
    def loss_tensor(self) -> Node:
        """The leaf that has the loss of the last evaluation, scaled by 1 / period unless it is a sum."""
        return self._loss

    @property
    def labels_tensor(self) -> Node | None:
        """The leaf that takes the labels, of the shape of the outputs; None where the loss has none."""
        return self._labels

    def predictions(self) -> Tensor | None:
        """Return the classes that the last evaluation predicted, ``[rows]``, int32; None without a cross entropy."""
        return self._predictions

    def correct(self) -> int | None:
        """Return how many predictions of the last evaluation were right; None without a cross entropy."""
        return self._correct

    def gradient(self, parameter: Node) -> Tensor:
        """Return a copy of a parameter's gradient: what the window has gathered, scaled as ggml's accumulators are.

        After an update it is what the update was made of, until the next evaluation with gradients.

        Raises:
            ContractError: The node is no parameter that is trained here.
            StateError: With ``compat`` there are no gradients to look at where a window is one physical batch.
        """
        name = self._name_of(parameter)
        if self.period == 1 and not self._rules.holds_gradients:
            raise StateError("with compat, gradients are kept only for windows of more than one physical batch")
        gathered = cast("Mapping[str, Tensor]", self._grads.pending).get(name) if self._used is None else None
        if self._used is not None and name in self._used:
            return self._used[name].clone()
        if gathered is None:  # nothing of it reaches the outputs, or nothing was gathered yet
            return torch.zeros(parameter.torch_shape, dtype=torch.float32, device="cpu")
        if self._rules.lazy_gradients or self.training.loss is Loss.SUM:
            return gathered.clone()
        shape = self.training.outputs.shape
        return gathered / (self.period * shape[1] * items_of(self.training.loss, shape))

    def moments(self, parameter: Node) -> tuple[Tensor, Tensor]:
        """Return copies of the first and second moment of a parameter.

        Raises:
            ContractError: The node is no parameter that is trained here, or the optimizer has no moments.
        """
        name = self._name_of(parameter)
        if name not in self._moments:
            raise ContractError(f"{self.kind} keeps no moments; AdamW does")
        m, v = self._moments[name]
        return m.clone(), v.clone()

    def _name_of(self, parameter: Node) -> str:
        if parameter not in self._names:
            raise ContractError(f"{parameter!r} is no parameter that is trained here; those are {[*self._nodes]}")
        return self._names[parameter]

    # ------------------------------------------------------------------ working

    def allocate(self, backward: bool, *, last: bool = False) -> None:  # noqa: FBT001  # ggml's name and order
        """Choose what the next evaluation does: look, gather gradients, or gather them and update.

        Args:
            backward: Whether gradients are gathered; the last physical batch of a window also updates.
            last: This physical batch ends the window, however many it has; not with ``compat``.

        Raises:
            StateError: The evaluation that was allocated before was not made, or the optimizer was built for less.
        """
        if self._ready:
            raise StateError("the optimizer already waits for evaluate(); allocate once for each evaluation")
        if backward and self.training.build is Build.FORWARD:
            raise StateError("this optimizer was built to evaluate only (Build.FORWARD): it has no gradients")
        if last and self._rules.lazy_gradients:
            raise StateError("with compat a window has always as many physical batches as its period says")
        if backward or self._rules.forward_moves:
            self._used = None
        if not backward:
            self._mode = Build.FORWARD
        elif self.training.build is Build.UPDATE and (last or self._index + 1 == self.period):
            self._mode = Build.UPDATE
        else:
            self._mode = Build.GRADIENT
        self._ready = True

    def write(self, data: Tensor, labels: Tensor | None) -> None:
        """Write a physical batch of a data set into inputs and labels: all rows, or the first of them.

        Args:
            data: ``[rows, width]``.
            labels: ``[rows, width]``; None where the loss has none.
        """
        with torch.no_grad():
            for table, given in zip(self._tables(), (data, labels), strict=True):
                if table is not None and given is not None:
                    table[: len(given)] = given

    def read(self, dataset: Dataset, rows: int, batch: int) -> int:
        """Read a physical batch of a data set into inputs and labels; returns how many rows it has."""
        inputs, labels = self._tables()
        return dataset.read(rows, batch, inputs, labels)

    def _tables(self) -> tuple[Tensor, Tensor | None]:
        """Return inputs and labels as ``[rows, width]``, sharing their storage."""
        inputs, labels = self.training.inputs, self._labels
        table = self.graph.storage(inputs).view(-1, inputs.shape[0])
        return table, None if labels is None else self.graph.storage(labels).view(-1, labels.shape[0])

    def evaluate(self, result: Result | None = None, *, rows: int | None = None) -> float:
        """Evaluate the physical batch that the inputs and labels hold, and do what was allocated.

        Args:
            result: Takes the loss and the predictions.
            rows: Only so many of the first datapoints are there, as in a short last batch; all if None.

        Returns:
            The value of ``loss_tensor``.

        Raises:
            StateError: Nothing was allocated, or an earlier evaluation failed: ``reset`` the optimizer.
            ContractError: The parameters of the update are out of bounds, or ``rows`` is, or the result holds another
                kind of loss. Nothing was done.
            NonFiniteError: A gradient of the window is inf or nan, and ``compat`` is None: nothing was updated; the
                window cannot go on, ``reset`` empties it.
        """
        if not self._ready:
            raise StateError("evaluate() does what allocate() chose: call allocate first")
        whole = self._rows
        if rows is not None:
            whole_number("rows", rows, whole if self._rules.whole_batches else 1, whole)
        if result is not None:
            outputs = self.training.outputs.shape[1]
            result.check(outputs if rows is None else rows, self.period, self.training.loss)
        parameters = self._parameters() if self._mode is Build.UPDATE else None
        self._ready = False
        measured = self._measure(whole if rows is None else rows)
        if self._mode is not Build.FORWARD:
            with torch.enable_grad():
                self._grads.backward(measured.offered)
        if parameters is not None:
            self._update(parameters)
        self.graph.storage(self._loss).fill_(measured.loss)
        if result is not None:
            self._record(result, measured)
        if self._mode is Build.UPDATE:
            self._index = 0
        elif self._mode is Build.GRADIENT or self._rules.forward_moves:
            self._index = (self._index + 1) % self.period
        return measured.loss

    def _parameters(self) -> Parameters:
        given = self.training.parameters
        parameters = given if isinstance(given, Parameters) else given(Moment(self.epoch, self._iteration))
        check_parameters(parameters, self.kind, self.compat)
        return parameters

    def _measure(self, rows: int) -> Measured:
        training, graph = self.training, self.graph
        graph.drop_computed()  # the activations of the batch before, while this one makes its own
        with torch.set_grad_enabled(self._mode is not Build.FORWARD):
            inputs = widened(graph.storage(training.inputs)).narrow(self._across, 0, rows)
            values = self.module.results([inputs])
            outputs = values[training.outputs]
            check_rows(outputs, training.outputs, rows, self._rows)
            labels = None
            if self._labels is not None:
                labels = widened(graph.storage(self._labels)).narrow(_DATAPOINTS, 0, outputs.shape[_DATAPOINTS])
            measured = measure(outputs, labels, training.loss, self.period, self._rules)
        graph.keep(values)
        if labels is not None and training.loss is Loss.CROSS_ENTROPY:
            self._predictions = predict(outputs.detach()[0, 0], self._rules)
            self._correct = count_correct(self._predictions, labels[0, 0], self._rules)
        return measured

    def _update(self, parameters: Parameters) -> None:
        if self._rules.lazy_gradients:
            used = cast("Mapping[str, Tensor]", self._grads.finish_sums().gradients)  # of one term
        else:
            used = self._grads.finish_mean(empty="one").gradients
            self._told |= tell_unused(self._nodes.keys() - used.keys() - self._told)
        self._used = used
        with torch.no_grad():
            for name, gradient in used.items():
                weight = self.graph.storage(self._nodes[name])
                if self.kind is Kind.ADAMW:
                    step_adamw_(weight, gradient, *self._moments[name], adamw_vector(parameters.adamw, self._iteration))
                else:
                    step_sgd_(weight, gradient, (parameters.sgd.alpha, parameters.sgd.wd))
        self._iteration += 1

    def _record(self, result: Result, measured: Measured) -> None:
        result.record(
            rows=self.training.outputs.shape[1] if measured.rows is None else len(measured.rows.total),
            loss=measured.loss,
            period=self.period,
            loss_kind=self.training.loss,
            tally=measured.rows,
            predictions=self._predictions,
            correct=self._correct,
        )

    def reset(self, optimizer: bool = False) -> None:  # noqa: FBT001, FBT002  # ggml's
        """Clear the gradients of the window, which begins anew (with ``compat``, where it was).

        Args:
            optimizer: Whether moments and the number of the next update are cleared, too.
        """
        self._grads.reset()
        self._used = None
        if not self._rules.forward_moves:
            self._index = 0
        if optimizer:
            self._iteration = 1
            for one in self._moments.values():
                one[0].zero_()
                one[1].zero_()

    def shuffle(self, dataset: Dataset, rows: int | None = None) -> None:
        """Shuffle a data set with this optimizer's random numbers; see ``Dataset.shuffle``."""
        dataset.shuffle(self.random, rows)

    # -------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Return all that training depends on besides the graph's parameters: also gradients of an open window.

        Raises:
            StateError: An evaluation was allocated and not made.
        """
        if self._ready:
            raise StateError("an evaluation was allocated: make it, and save then")
        return {
            "version": VERSION,
            **self._identity(),
            "epoch": self.epoch,
            "iteration": self._iteration,
            "index": self._index,
            "mode": self._mode.name,
            "random": self.random.state_dict(),
            "gradients": self._grads.state_dict(),
            "moments": {name: {"m": m.clone(), "v": v.clone()} for name, (m, v) in self._moments.items()},
        }

    def _identity(self) -> dict[str, int | str]:
        training = self.training
        return {
            "kind": training.kind.name,
            "loss": training.loss.name,
            "period": training.period,
            "compat": self.compat or "",
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state, bit for bit.

        Raises:
            ContractError: It is that of another kind, loss, period, compat or graph, or damaged. Nothing was changed.
            StateError: Its gradients are damaged, or a parameter is another than when the optimizer was made. The same.
        """
        saved = read_state(state, self._identity(), self._moments, self.period)
        Random().load_state_dict(saved.random)  # refuses what the optimizer's own would
        swap_in = self._grads.prepare_load(saved.gradients)
        swap_in()
        self.random.load_state_dict(saved.random)
        for name, (m, v) in self._moments.items():
            m.copy_(saved.moments[name][0])
            v.copy_(saved.moments[name][1])
        self.epoch, self._iteration, self._index, self._mode = saved.epoch, saved.iteration, saved.index, saved.mode
        self._ready, self._used = False, None
