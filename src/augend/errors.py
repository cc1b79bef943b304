"""Every error that augend raises on purpose.

The tree, each with the built-in that it also is::

    AugendError
    ├── TallyError            ValueError     a tally's shape, dtype or values do not fit
    ├── GradientError         ValueError     a gradient that is foreign, missing, unknown or of the wrong kind
    ├── ContractError         ValueError     a model, a state or an argument does not fit what was agreed
    ├── PlacementError        ValueError     a mesh or a world that this call cannot serve
    ├── SplitError            ValueError     rows that cannot be split or dealt as asked
    ├── ConfigError           ValueError     a run file, an option or a source that cannot be used
    ├── GGUFError             ValueError     a GGUF file that cannot be written, read or trusted
    ├── CheckpointError       RuntimeError   a checkpoint that cannot be written, read or trusted
    ├── StateError            RuntimeError   a call out of order
    ├── UnusedError           RuntimeError   ranks disagree on which parameters were used
    ├── LostRankError         RuntimeError   a rank is gone, late, or somewhere else
    ├── EmptyWindowError      RuntimeError   nothing was counted
    ├── NonFiniteError        RuntimeError   an inf or a nan, with the place it was found
    └── CounterOverflowError  OverflowError  a count beyond 2^63 - 1

Each is also the built-in that fits, so ``except ValueError`` works as everywhere.
Every message says what was expected, what came, where, and what to do.
"""

__all__ = [
    "AugendError",
    "CheckpointError",
    "ConfigError",
    "ContractError",
    "CounterOverflowError",
    "EmptyWindowError",
    "GGUFError",
    "GradientError",
    "LostRankError",
    "NonFiniteError",
    "PlacementError",
    "SplitError",
    "StateError",
    "TallyError",
    "UnusedError",
]


class AugendError(Exception):
    """The root of all errors that augend raises on purpose."""


class TallyError(AugendError, ValueError):
    """A tally's shape, dtype or values do not fit."""


class GradientError(AugendError, ValueError):
    """A gradient is foreign, missing, of an unknown parameter, or of the wrong shape or kind."""


class ContractError(AugendError, ValueError):
    """A model, a state or an argument does not fit what was agreed."""


class PlacementError(AugendError, ValueError):
    """A mesh or a world that this call cannot serve."""


class SplitError(AugendError, ValueError):
    """Rows cannot be split, cut or dealt as asked."""


class ConfigError(AugendError, ValueError):
    """A run file, a command-line option or a data source cannot be used."""


class GGUFError(AugendError, ValueError):
    """A GGUF file cannot be written, read or trusted; the message names the file."""


class CheckpointError(AugendError, RuntimeError):
    """A checkpoint cannot be written, read or trusted; the message names the file."""


class StateError(AugendError, RuntimeError):
    """A call came out of order."""


class UnusedError(AugendError, RuntimeError):
    """Ranks disagree on which parameters, or which sharded modules, a batch went through."""


class LostRankError(AugendError, RuntimeError):
    """A rank is gone, late, or at another place; the message says which, and what the others waited for."""


class EmptyWindowError(AugendError, RuntimeError):
    """Nothing was counted since the last finish."""


class NonFiniteError(AugendError, RuntimeError):
    """An inf or a nan was found; the message says where."""


class CounterOverflowError(AugendError, OverflowError):
    """A count is beyond 2^63 - 1."""
