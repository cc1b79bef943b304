"""ggml itself, by ctypes: the shared libraries of the wheel libggml-python, on one thread.

Never imported by a test: where ggml is misused it ends the process. ``ggml_process.py`` runs it in one of its own.
Arrays are in torch's order, [ne3, ne2, ne1, ne0].
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Mapping, Sequence
from ctypes import POINTER, Structure, c_bool, c_float, c_int, c_int32, c_int64, c_size_t, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

TYPES = {np.dtype(np.float32): 0, np.dtype(np.int32): 26}
MEMORY_BYTES = 64 << 20
GRAPH_NODES = 2048
POOLINGS = {"max": 0, "avg": 1}


class Memory(Structure):
    """ggml_init_params."""

    _fields_ = (("bytes", c_size_t), ("buffer", c_void_p), ("only_shapes", c_bool))


class TensorHead(Structure):
    """The first fields of ggml_tensor."""

    _fields_ = (("type", c_int), ("buffer", c_void_p), ("ne", c_int64 * 4), ("nb", c_size_t * 4))


class OptimizerParameters(Structure):
    """ggml_opt_optimizer_params: alpha, beta1, beta2, eps, wd of AdamW; alpha, wd of SGD."""

    _fields_ = (("values", c_float * 7),)


class Options(Structure):
    """ggml_opt_params."""

    _fields_ = (
        ("scheduler", c_void_p),
        ("context", c_void_p),
        ("inputs", c_void_p),
        ("outputs", c_void_p),
        ("loss", c_int),
        ("build", c_int),
        ("period", c_int32),
        ("parameters", c_void_p),
        ("parameters_argument", c_void_p),
        ("kind", c_int),
    )


# A structure of more than 16 bytes is returned where the hidden first argument points to, in the calling convention of
# Linux on x86_64; ctypes cannot return one from a callback, but it can fill it in.
Schedule = ctypes.CFUNCTYPE(c_void_p, POINTER(OptimizerParameters), POINTER(c_int64))
UNARY = ["relu", "gelu", "silu", "soft_max", "cont", "sum", "mean", "sqr"]
BINARY = ["add", "sub", "mul", "div", "mul_mat", "get_rows", "repeat"]
P = c_void_p
SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    **{f"ggml_{name}": (P, [P, P]) for name in UNARY},
    **{f"ggml_{name}": (P, [P, P, P]) for name in BINARY},
    "ggml_scale": (P, [P, P, c_float]),
    "ggml_norm": (P, [P, P, c_float]),
    "ggml_rms_norm": (P, [P, P, c_float]),
    "ggml_permute": (P, [P, P, *[c_int] * 4]),
    "ggml_reshape_1d": (P, [P, P, c_int64]),
    "ggml_reshape_2d": (P, [P, P, *[c_int64] * 2]),
    "ggml_reshape_3d": (P, [P, P, *[c_int64] * 3]),
    "ggml_reshape_4d": (P, [P, P, *[c_int64] * 4]),
    "ggml_conv_2d": (P, [P, P, P, *[c_int] * 6]),
    "ggml_pool_2d": (P, [P, P, *[c_int] * 5, c_float, c_float]),
    "ggml_cpu_init": (None, []),
    "ggml_init": (P, [Memory]),
    "ggml_free": (None, [P]),
    "ggml_new_tensor": (P, [P, c_int, c_int, POINTER(c_int64)]),
    "ggml_get_data": (P, [P]),
    "ggml_set_param": (None, [P]),
    "ggml_set_loss": (None, [P]),
    "ggml_set_input": (None, [P]),
    "ggml_set_output": (None, [P]),
    "ggml_new_graph_custom": (P, [P, c_size_t, c_bool]),
    "ggml_build_forward_expand": (None, [P, P]),
    "ggml_build_backward_expand": (None, [P, P, P]),
    "ggml_graph_reset": (None, [P]),
    "ggml_graph_get_grad": (P, [P, P]),
    "ggml_graph_compute_with_ctx": (c_int, [P, P, c_int]),
    "ggml_backend_cpu_init": (P, []),
    "ggml_backend_cpu_set_n_threads": (None, [P, c_int]),
    "ggml_backend_alloc_ctx_tensors": (P, [P, P]),
    "ggml_backend_tensor_set": (None, [P, P, c_size_t, c_size_t]),
    "ggml_backend_tensor_get": (None, [P, P, c_size_t, c_size_t]),
    "ggml_backend_sched_new": (P, [POINTER(P), P, c_int, c_size_t, c_bool, c_bool]),
    "ggml_opt_dataset_init": (P, [c_int, c_int, *[c_int64] * 4]),
    "ggml_opt_dataset_data": (P, [P]),
    "ggml_opt_dataset_labels": (P, [P]),
    "ggml_opt_dataset_shuffle": (None, [P, P, c_int64]),
    "ggml_opt_default_params": (Options, [P, c_int]),
    "ggml_opt_init": (P, [Options]),
    "ggml_opt_result_init": (P, []),
    "ggml_opt_result_reset": (None, [P]),
    "ggml_opt_result_loss": (None, [P, POINTER(ctypes.c_double), POINTER(ctypes.c_double)]),
    "ggml_opt_result_accuracy": (None, [P, POINTER(ctypes.c_double), POINTER(ctypes.c_double)]),
    "ggml_opt_epoch": (None, [P, P, P, P, c_int64, P, P]),
    "ggml_opt_fit": (None, [P, P, P, P, P, c_int, c_int, Schedule, c_int64, c_int64, c_float, c_bool]),
}


@cache
def library() -> ctypes.CDLL:
    """Load ggml with its tables, and tell ctypes its signatures."""
    folder = Path(importlib.util.find_spec("libggml").submodule_search_locations[0]) / "lib64"
    ctypes.CDLL(str(folder / "libggml-base.so.0"), ctypes.RTLD_GLOBAL)
    ggml = ctypes.CDLL(str(folder / "libggml-cpu.so.0"))  # which finds the functions of the base, too
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(ggml, name)
        function.restype, function.argtypes = result, arguments
    ggml.ggml_cpu_init()
    return ggml


def new_context(*, only_shapes: bool) -> int:
    """Make a context, with or without memory for the values of its tensors."""
    return library().ggml_init(Memory(MEMORY_BYTES, None, only_shapes))


def new_tensor(context: int, shape: Sequence[int], dtype: np.dtype) -> int:
    """Make a tensor; the shape is in torch's order."""
    return library().ggml_new_tensor(context, TYPES[dtype], len(shape), (c_int64 * len(shape))(*shape[::-1]))


def view(tensor: int) -> np.ndarray:
    """Return a tensor that lies in this process's memory, strides and all, as [ne3, ne2, ne1, ne0]."""
    head = TensorHead.from_address(tensor)
    dtype = next(dtype for dtype, number in TYPES.items() if number == head.type)
    strides = tuple(head.nb)[::-1]
    shape = tuple(head.ne)[::-1]
    length = dtype.itemsize + sum(step * (extent - 1) for step, extent in zip(strides, shape, strict=True))
    memory = (ctypes.c_char * length).from_address(library().ggml_get_data(tensor))
    return np.ndarray(shape, dtype, memory, strides=strides)


def apply(context: int, operation: str, inputs: Sequence[int], settings: Mapping[str, Any]) -> int:
    """Add an operation to what a context knows, by the name that augend gives it."""
    name, numbers = operation, list(settings.values())
    match operation:
        case "permute":
            numbers = settings["axes"]
        case "reshape":
            name, numbers = f"reshape_{len(settings['shape'])}d", settings["shape"]
        case "conv_2d":
            numbers = [*settings["stride"], *settings["padding"], *settings["dilation"]]
        case "pool_2d":
            kind = POOLINGS[settings["kind"]]
            numbers = [kind, *settings["kernel"], *settings["stride"], *settings["padding"]]
    return getattr(library(), f"ggml_{name}")(context, *inputs, *numbers)


def operate(
    operation: str, inputs: Sequence[np.ndarray], settings: Mapping[str, Any], weights: np.ndarray | None
) -> dict[str, Any]:
    """Run one operation, and with weights also the gradients of the weighted sum of its result."""
    ggml, context = library(), new_context(only_shapes=False)
    leaves = [new_tensor(context, each.shape, each.dtype) for each in inputs]
    for leaf, values in zip(leaves, inputs, strict=True):
        view(leaf)[...] = values.reshape(view(leaf).shape)
    trained = [leaf for leaf, each in zip(leaves, inputs, strict=True) if each.dtype == np.float32]
    result = last = apply(context, operation, leaves, settings)
    if weights is not None:
        for leaf in trained:
            ggml.ggml_set_param(leaf)
        factors = new_tensor(context, weights.shape, weights.dtype)
        view(factors)[...] = weights
        last = ggml.ggml_sum(context, ggml.ggml_mul(context, ggml.ggml_cont(context, result), factors))
        ggml.ggml_set_loss(last)
    graph = ggml.ggml_new_graph_custom(context, GRAPH_NODES, weights is not None)
    ggml.ggml_build_forward_expand(graph, last)
    if weights is not None:
        ggml.ggml_build_backward_expand(context, graph, None)
        ggml.ggml_graph_reset(graph)
    status = ggml.ggml_graph_compute_with_ctx(context, graph, 1)
    gradients = [ggml.ggml_graph_get_grad(graph, leaf) for leaf in trained] if weights is not None else []
    answer = {
        "status": status,
        "value": view(result).copy(),
        "gradients": [None if each is None else view(each).copy() for each in gradients],
    }
    ggml.ggml_free(context)
    return answer


def shape(operation: str, shapes: Sequence[Sequence[int]], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the shape that an operation would give; both in ggml's order."""
    context = new_context(only_shapes=True)
    dtypes = [np.float32, np.int32 if operation == "get_rows" else np.float32]
    leaves = [new_tensor(context, each[::-1], np.dtype(kind)) for each, kind in zip(shapes, dtypes, strict=False)]
    answer = {"shape": list(TensorHead.from_address(apply(context, operation, leaves, settings)).ne)}
    library().ggml_free(context)
    return answer


class Training:
    """A perceptron, its data set, and ggml's two ways to train it.

    Args:
        data: [rows, width].
        labels: [rows, label width].
        weights: A matrix [out, in] and a bias [out] for each layer, by turns; ReLU between layers.
        loss: ggml's number of the loss.
        kind: ggml's number of the optimizer.
        physical: Rows in a physical batch.
        logical: Rows in a logical batch.
        split: The part of the rows that validates.
        schedule: The seven parameters, for each epoch.
        shard: Rows that are shuffled as one.
        threads: That ggml computes with. They spin while they wait, so more than one needs a core for each.
    """

    def __init__(
        self,
        *,
        data: np.ndarray,
        labels: np.ndarray,
        weights: Sequence[np.ndarray],
        loss: int,
        kind: int,
        physical: int,
        logical: int,
        split: float,
        schedule: Sequence[Sequence[float]],
        shard: int = 1,
        threads: int = 1,
    ) -> None:
        ggml, statics = library(), new_context(only_shapes=True)
        self.context = new_context(only_shapes=True)
        self.loss, self.kind, self.physical, self.logical = loss, kind, physical, logical
        self.split, self.schedule, self.rows = split, schedule, len(data)
        self.trained = [new_tensor(statics, each.shape, each.dtype) for each in weights]
        self.inputs = new_tensor(statics, (physical, data.shape[1]), data.dtype)
        ggml.ggml_set_input(self.inputs)
        backend = ggml.ggml_backend_cpu_init()
        ggml.ggml_backend_cpu_set_n_threads(backend, threads)
        ggml.ggml_backend_alloc_ctx_tensors(statics, backend)
        for tensor, values in zip(self.trained, weights, strict=True):
            ggml.ggml_set_param(tensor)
            ggml.ggml_backend_tensor_set(tensor, values.ctypes.data, 0, values.nbytes)
        self.outputs = self.inputs
        for layer in range(0, len(weights), 2):
            hidden = ggml.ggml_relu(self.context, self.outputs) if layer else self.outputs
            product = ggml.ggml_mul_mat(self.context, self.trained[layer], hidden)
            self.outputs = ggml.ggml_add(self.context, product, self.trained[layer + 1])
        ggml.ggml_set_output(self.outputs)
        self.dataset = ggml.ggml_opt_dataset_init(0, 0, data.shape[1], labels.shape[1], self.rows, shard)
        view(ggml.ggml_opt_dataset_data(self.dataset))[...] = data
        view(ggml.ggml_opt_dataset_labels(self.dataset))[...] = labels
        self.scheduler = ggml.ggml_backend_sched_new((c_void_p * 1)(backend), None, 1, GRAPH_NODES, False, True)

    def weights(self) -> list[np.ndarray]:
        """Read the weights as they are now."""
        arrays = [np.empty(tuple(TensorHead.from_address(each).ne)[::-1], np.float32) for each in self.trained]
        for tensor, array in zip(self.trained, arrays, strict=True):
            library().ggml_backend_tensor_get(tensor, array.ctypes.data, 0, array.nbytes)
        return [array.squeeze() for array in arrays]

    def fit(self) -> list[np.ndarray]:
        """Train by ggml_opt_fit, and return the weights."""

        def parameters(result: Any, epoch: Any) -> int:
            result.contents.values[:] = self.schedule[epoch.contents.value - 1]
            return ctypes.addressof(result.contents)

        library().ggml_opt_fit(
            self.scheduler, self.context, self.inputs, self.outputs, self.dataset, self.loss, self.kind,
            Schedule(parameters), len(self.schedule), self.logical, self.split, True,
        )  # fmt: skip
        return self.weights()

    def by_hand(self) -> dict[str, Any]:
        """Train as ggml_opt_fit does, by the calls that it makes, and return the losses and accuracies it hides."""
        ggml = library()
        argument = OptimizerParameters()
        options = ggml.ggml_opt_default_params(self.scheduler, self.loss)
        options.context, options.inputs, options.outputs = self.context, self.inputs, self.outputs
        options.period, options.kind = self.logical // self.physical, self.kind
        constant = ctypes.cast(ggml.ggml_opt_get_constant_optimizer_params, c_void_p)
        options.parameters, options.parameters_argument = constant, ctypes.addressof(argument)
        optimizer = ggml.ggml_opt_init(options)
        batches = np.float32(np.float32(1) - np.float32(self.split)) * np.float32(self.rows // self.logical)
        trained_rows = int(batches) * self.logical
        if self.logical < self.rows:
            ggml.ggml_opt_dataset_shuffle(optimizer, self.dataset, -1)
        results = [ggml.ggml_opt_result_init() for _ in range(2)]
        losses, accuracies = [], []
        for values in self.schedule:
            argument.values[:] = values
            if self.logical < trained_rows:
                ggml.ggml_opt_dataset_shuffle(optimizer, self.dataset, trained_rows)
            for result in results:
                ggml.ggml_opt_result_reset(result)
            ggml.ggml_opt_epoch(optimizer, self.dataset, *results, trained_rows, None, None)
            losses.append([measured(ggml.ggml_opt_result_loss, result) for result in results])
            accuracies.append([measured(ggml.ggml_opt_result_accuracy, result) for result in results])
        return {"losses": losses, "accuracies": accuracies, "weights": self.weights()}


def measured(function: Any, result: int) -> tuple[float, float]:
    """Read a value and its uncertainty from a result."""
    value, uncertainty = ctypes.c_double(), ctypes.c_double()
    function(result, ctypes.byref(value), ctypes.byref(uncertainty))
    return value.value, uncertainty.value


def train(**options: Any) -> dict[str, Any]:
    """Train twice from the same start: by ggml_opt_fit, and by the calls that it makes."""
    return {"fit": Training(**options).fit(), **Training(**options).by_hand()}
