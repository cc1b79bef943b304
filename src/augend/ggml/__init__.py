"""ggml-opt in Python: training graphs, sharded datasets, optimizers, results and fit, with ggml's semantics."""

from augend.ggml._dataset import Dataset
from augend.ggml._epoch import Callback, Progress, epoch
from augend.ggml._files import Weights, load, load_into, save
from augend.ggml._fit import Fit, fit
from augend.ggml._graph import Graph
from augend.ggml._history import Epoch, History
from augend.ggml._limits import Limits
from augend.ggml._line import Bar, progress_line
from augend.ggml._module import GraphModule
from augend.ggml._nodes import Node
from augend.ggml._optimizer import Optimizer
from augend.ggml._parameters import SGD, AdamW, Build, Kind, Loss, Moment, Parameters, Schedule
from augend.ggml._random import Random
from augend.ggml._result import Result
from augend.ggml._rules import Compat
from augend.ggml._training import Training

__all__ = [
    "SGD",
    "AdamW",
    "Bar",
    "Build",
    "Callback",
    "Compat",
    "Dataset",
    "Epoch",
    "Fit",
    "Graph",
    "GraphModule",
    "History",
    "Kind",
    "Limits",
    "Loss",
    "Moment",
    "Node",
    "Optimizer",
    "Parameters",
    "Progress",
    "Random",
    "Result",
    "Schedule",
    "Training",
    "Weights",
    "epoch",
    "fit",
    "load",
    "load_into",
    "progress_line",
    "save",
]
