from augend import data as data
from augend import errors as errors
from augend import ggml as ggml
from augend import gguf as gguf
from augend import losses as losses
from augend import metrics as metrics
from augend import models as models
from augend import optim as optim
from augend import schedules as schedules
from augend import sources as sources
from augend import testing as testing
from augend._accumulator import Accumulator as Accumulator
from augend._checkpoint import Checkpoint as Checkpoint
from augend._checkpoint import Comparison as Comparison
from augend._checkpoint import Inspection as Inspection
from augend._checkpoint import Position as Position
from augend._checkpoint import compare as compare
from augend._checkpoint import inspect as inspect
from augend._checkpoint import verify as verify
from augend._finish import Finished as Finished
from augend._fit import History as History
from augend._fit import evaluate as evaluate
from augend._fit import fit as fit
from augend._tally import Tally as Tally
from augend.data import Batches as Batches
from augend.data import split as split
from augend.metrics import Accuracy as Accuracy
from augend.metrics import Estimate as Estimate
from augend.metrics import Mean as Mean
from augend.metrics import Perplexity as Perplexity

__version__: str

__all__ = [
    "Accumulator",
    "Accuracy",
    "Batches",
    "Checkpoint",
    "Comparison",
    "Estimate",
    "Finished",
    "History",
    "Inspection",
    "Mean",
    "Perplexity",
    "Position",
    "Tally",
    "compare",
    "data",
    "errors",
    "evaluate",
    "fit",
    "ggml",
    "gguf",
    "inspect",
    "losses",
    "metrics",
    "models",
    "optim",
    "schedules",
    "sources",
    "split",
    "testing",
    "verify",
]
