"""The saved form of a window, and everything that must hold before one is taken back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Final, cast, final

import torch
from torch import Tensor

from augend._accumulate._contract import DTYPES, Contract, TensorContract, compare_tensors
from augend._accumulate._exact_state import EXACT_KEYS, read_exact, write_exact
from augend._accumulate._reduce import Held, Reduced
from augend._accumulate._window import Window
from augend._numerics import COUNT_LIMIT, Moments, to_limbs
from augend.errors import ContractError, StateError

STATE_VERSION: Final = 1
_KEYS: Final = frozenset(
    {
        *("version", "contract", "microbatches", "step", "rows_done", "loose", "moments", "present", "sums"),
        *("updates", "finished"),
    }
)


@final
@dataclass(frozen=True, slots=True)
class AccumulatorState:
    """The counters of a window: what its sums were multiplied by, and what they must be divided by.

    Args:
        dtype: Work dtype of the sums.
        loss_scale: What every loss sum was multiplied by.
        count: Items (or weight) that the first term's sums cover.
        microbatches: How many were made, those that counted nothing included.
        moments: The exact moments of every term, its count among them.
        scales: Of exact sums, term to parameter to k: a sum is its whole number times ``2**-k``.
    """

    dtype: str
    loss_scale: float
    count: int | float
    microbatches: int
    moments: Mapping[str, Moments] = field(default_factory=dict, repr=False)
    scales: Mapping[str, Mapping[str, int]] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(contract: Contract, reduced: Reduced) -> AccumulatorState:
        """Return the counters of all ranks' window."""
        count = plain_count(reduced.moments[contract.terms[0]].count)
        scales = {
            term: {name: one for name, one in named.items() if one is not None}
            for term, named in reduced.scales.items()
        }
        return AccumulatorState(
            contract.dtype, contract.loss_scale, count, reduced.microbatches, reduced.moments, scales
        )


def plain_count(count: Fraction) -> int | float:
    """Return an exact count as an int where it is whole, else as the nearest float."""
    return int(count) if count.denominator == 1 else float(count)


def write_state(held: Held, reduced: Reduced) -> dict[str, object]:
    """Return a copy of all ranks' window: tensors under ``"sums"``, plain numbers, strings and lists elsewhere.

    ``updates`` and ``finished`` are the accumulator's own and added by it. Collective.
    """
    window = held.window
    sums = {}
    for term, names in reduced.present.items():
        complete = complete_sums(held, term, names)
        copied = {name: one.clone() if one is window.sums[term].get(name) else one for name, one in complete.items()}
        sums[term] = {name: held.placement.spread(name, one) for name, one in copied.items()}
    plain = _plain(held.contract, reduced.microbatches, reduced.moments, sums)
    exact = {} if window.scales is None else write_exact(window.scales, window.before, reduced, held.fingerprint.now())
    offer = {"offer": window.offer} if window.offer or exact else {}  # of others only where exact ones went along
    return {**plain, **exact, **offer, "step": window.step, "rows_done": window.rows_done, "loose": reduced.loose}


def complete_sums(held: Held, term: str, names: Sequence[str]) -> dict[str, Tensor]:
    """Return this rank's parts of the sums over all ranks; what is complete already is the window's own. Collective."""
    sums = held.window.sums[term]
    mine = {name: sums[name] if name in sums else held.zeros(name) for name in names}
    return held.placement.complete(mine)


def _plain(
    contract: Contract,
    microbatches: int,
    moments: Mapping[str, Moments],
    sums: Mapping[str, Mapping[str, Tensor]],
) -> dict[str, object]:
    return {
        "version": STATE_VERSION,
        "contract": contract.to_plain(),
        "microbatches": microbatches,
        "step": None,
        "rows_done": 0,
        "loose": microbatches > 0,
        "moments": {term: one.to_plain() for term, one in moments.items()},
        "present": {term: sorted(named) for term, named in sums.items()},
        "sums": sums,
    }


def read_state(state: Mapping[str, object], contract: Contract, limit: int) -> tuple[Window, int, object]:
    """Build a new window from a saved one, after checking every field; the given state is only read.

    The window's sums are the state's own tensors: copy them before they are added to. Returned with it are the number
    of updates and the record of the last finish, unread.

    Args:
        state: What ``write_state`` returned, perhaps from another process.
        contract: The live contract, which the saved one must equal.
        limit: The most micro-batches that a window may hold.

    Raises:
        StateError: A field is missing, unknown, of another type, or out of its domain; names it.
        ContractError: The saved contract differs from the live one; says in what.
    """
    _check_dtype(state, contract)
    _check_keys("the state", state, _KEYS | (EXACT_KEYS if contract.exact else {"offer"} & set(state)))
    if state["version"] != STATE_VERSION or isinstance(state["version"], bool):
        raise StateError(f"version must be {STATE_VERSION}; got {state['version']!r}: written by another augend")
    _check_contract(state["contract"], contract)
    window = Window(contract.terms, contract.dtypes)
    window.microbatches = window.rounds = _whole("microbatches", state["microbatches"], limit)
    window.rows_done = _whole("rows_done", state["rows_done"], COUNT_LIMIT)
    if state["step"] is not None:
        window.step = _whole("step", state["step"], COUNT_LIMIT)
    if (window.step is None) != (window.rows_done == 0):
        raise StateError(f"step is {window.step}, and {window.rows_done} rows of that batch are done")
    window.loose = _flag("loose", state["loose"])
    moments = _table("moments", state["moments"], contract.terms)
    present = _table("present", state["present"], contract.terms)
    sums = _table("sums", state["sums"], contract.terms)
    for term in contract.terms:
        saved = _moments(term, moments[term])
        window.add_moments({term: saved})
        window.sums[term] = _sums(term, sums[term], present[term], contract, window.held)
        window.used[term] = set(window.sums[term])
        _check_counters(term, saved, window)
    window.offer = _whole("offer", state.get("offer", 0), 1)
    if contract.exact:
        read_exact(state, contract, window)
    return window, _whole("updates", state["updates"], COUNT_LIMIT), state["finished"]


def state_of_sums(
    gradients: Mapping[str, Tensor] | Mapping[str, Mapping[str, Tensor]], counters: AccumulatorState, contract: Contract
) -> dict[str, object]:
    """Return the state of a window that holds sums which were drained from another.

    Raises:
        ContractError: The counters' dtype or loss scale is not the contract's.
    """
    for name in ("dtype", "loss_scale"):
        if getattr(counters, name) != getattr(contract, name):
            raise ContractError(
                f"the sums' {name} is {getattr(counters, name)}, the contract's {getattr(contract, name)}"
            )
    by_term = cast(
        "Mapping[str, Mapping[str, Tensor]]",
        gradients if len(contract.terms) > 1 else {contract.terms[0]: gradients},
    )
    sums = {term: {name: one.clone() for name, one in named.items()} for term, named in by_term.items()}
    plain = _plain(contract, counters.microbatches, counters.moments, sums)
    exact: dict[str, object] = {}
    if contract.exact:
        scales = {term: dict(counters.scales.get(term, {})) for term in contract.terms}
        none: dict[str, object] = {term: {} for term in contract.terms}
        exact = {"scales": scales, "before": none, "largest": none, "offer": 0, "bits": {}}
    return {**plain, **exact, "updates": 0, "finished": None}


def _check_keys(what: str, got: object, expected: frozenset[str] | set[str]) -> None:
    if not isinstance(got, Mapping):
        raise StateError(f"{what} must be a dictionary; got {type(got).__name__}")
    if missing := expected - got.keys():
        raise StateError(f"{what} lacks {min(missing)!r}")
    if extra := got.keys() - expected:
        raise StateError(f"{what} has an unknown entry {min(map(str, extra))!r}")


def _table(what: str, got: object, terms: tuple[str, ...]) -> Mapping[str, object]:
    _check_keys(what, got, set(terms))
    return cast("Mapping[str, object]", got)


def _whole(name: str, value: object, limit: int) -> int:
    if type(value) is not int or not 0 <= value <= limit:
        raise StateError(f"{name} must be a whole number from 0 to {limit}; got {value!r}")
    return value


def _flag(name: str, value: object) -> bool:
    if type(value) is not bool:
        raise StateError(f"{name} must be true or false; got {value!r}")
    return value


def _check_dtype(state: Mapping[str, object], live: Contract) -> None:
    """Compare first what decides which fields there are."""
    contract = state.get("contract") if isinstance(state, Mapping) else None
    saved = contract.get("dtype") if isinstance(contract, Mapping) else live.dtype
    if isinstance(saved, str) and saved != live.dtype and saved in DTYPES:
        raise ContractError(f"dtype {saved!r} was saved, and the accumulator has {live.dtype!r}")


def _check_contract(saved: object, live: Contract) -> None:
    """Compare field by field, so that the message names what differs rather than printing two contracts."""
    expected = live.to_plain()
    _check_keys("contract", saved, set(expected))
    plain = cast("Mapping[str, object]", saved)
    for name in (one for one in expected if one != "tensors"):
        if not _equal(plain[name], expected[name]):
            raise ContractError(f"{name} {plain[name]!r} was saved, and the accumulator has {expected[name]!r}")
    compare_tensors(_read_tensors(plain["tensors"]), live.tensors, "the accumulator's model")


def _equal(saved: object, live: object) -> bool:
    """Compare plain values by type too: True is not 1.0."""
    if isinstance(live, dict):
        return isinstance(saved, dict) and saved.keys() == live.keys() and all(_equal(saved[k], live[k]) for k in live)
    return type(saved) is type(live) and saved == live


def _read_tensors(plain: object) -> dict[str, TensorContract]:
    if not isinstance(plain, Mapping):
        raise StateError(f"contract.tensors must be a dictionary; got {type(plain).__name__}")
    tensors = {}
    for name, one in plain.items():
        _check_keys(f"contract.tensors[{name!r}]", one, {"shape", "dtype", "trainable", "tied"})
        if not isinstance(one["shape"], list) or not isinstance(one["tied"], list):
            raise StateError(f"contract.tensors[{name!r}]: shape and tied must be lists")
        for size in one["shape"]:
            _whole(f"a size in contract.tensors[{name!r}].shape", size, COUNT_LIMIT)
        trainable = _flag(f"contract.tensors[{name!r}].trainable", one["trainable"])
        tensors[str(name)] = TensorContract(tuple(one["shape"]), one["dtype"], trainable, tuple(one["tied"]))
    return tensors


def _moments(term: str, plain: object) -> Moments:
    if not isinstance(plain, dict):
        raise StateError(f"moments[{term!r}] must be a dictionary; got {type(plain).__name__}")
    try:
        moments = Moments.from_plain(plain)
    except ValueError as error:
        raise StateError(f"moments[{term!r}]: {error}") from error
    if (moments.count * 2**40).denominator != 1:
        raise StateError(f"the count of term {term!r} must be a multiple of 2^-40; got {moments.count}")
    if moments.count > COUNT_LIMIT:
        raise StateError(f"the count of term {term!r} must be at most 2^63 - 1; got {moments.count}")
    try:
        to_limbs(moments)  # ranks could not add it up
    except ValueError as error:
        raise StateError(f"moments[{term!r}]: {error}") from error
    return moments


def _sums(term: str, got: object, present: object, contract: Contract, held: torch.dtype) -> dict[str, Tensor]:
    if not isinstance(present, list) or not all(isinstance(name, str) for name in present):
        raise StateError(f"present[{term!r}] must be a list of parameter names; got {present!r}")
    if len(set(present)) != len(present):
        raise StateError(f"present[{term!r}] names a parameter twice: {present!r}")
    where = f"sums[{term!r}]"
    _check_keys(where, got, set(present))
    sums = {}
    for name, tensor in cast("Mapping[str, object]", got).items():
        agreed = contract.tensors.get(name)
        if agreed is None or not agreed.trainable:
            kind = "unknown" if agreed is None else "frozen"
            raise StateError(f"{where} holds a tensor for the {kind} parameter {name!r}")
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            raise StateError(f"{where}[{name!r}] must be a dense tensor; got {type(tensor).__name__}")
        if tensor.dtype != held or tuple(tensor.shape) != agreed.shape:
            expected = f"{held} of shape {list(agreed.shape)}"
            raise StateError(f"{where}[{name!r}] must be {expected}; got {tensor.dtype} of {list(tensor.shape)}")
        sums[name] = tensor.detach()
    return sums


def _check_counters(term: str, moments: Moments, window: Window) -> None:
    """Refuse counters without sums and sums without counters."""
    if window.microbatches == 0 and (window.sums[term] or moments != Moments() or window.rows_done or window.loose):
        raise StateError(f"no micro-batch was made, yet term {term!r} has sums or counts")
    if moments.count and not window.sums[term]:
        raise StateError(f"term {term!r} counts {moments.count} items and has no sum of gradients")
