"""The saved position: what it holds, and every reason to refuse one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from augend.data._plan import Plan
from augend.data._position import Position, Progress
from augend.errors import ContractError

VERSION: Final = 1
_FIELDS: Final = ("contract", "ledger", "microbatch_size", "step", "version")


def saved(plan: Plan, position: Position) -> dict[str, Any]:
    """Return the position in plain numbers and text."""
    return {
        "version": VERSION,
        "contract": plan.contract(),
        "microbatch_size": plan.microbatch_size,
        "step": position.step,
        "ledger": [[progress.rows_done, progress.closed] for progress in position.ledger],
    }


def checked(state: object, plan: Plan) -> tuple[int, list[Progress]]:
    """Return step and ledger of a saved position that fits the live data.

    Raises:
        ContractError: Anything about it does not; the message names the field.
    """
    if not isinstance(state, Mapping):
        raise ContractError(f"a data state is what state_dict() returned, a mapping; got {type(state).__name__}")
    version = state.get("version")
    if not _is_integer(version) or version != VERSION:
        raise ContractError(f"the data state has version {version!r}; this augend reads version {VERSION}")
    if set(state) != set(_FIELDS):
        different = sorted(str(field) for field in set(state) ^ set(_FIELDS))
        raise ContractError(f"the data state must have exactly the fields {list(_FIELDS)}; it differs in {different}")
    if not _is_integer(state["microbatch_size"]) or state["microbatch_size"] < 1:
        raise ContractError(f"microbatch_size of the data state must be at least 1; got {state['microbatch_size']!r}")
    _check_contract(state["contract"], plan.contract())
    step = _checked_step(state["step"], plan)
    return step, _checked_ledger(state["ledger"], plan.batch_rows(step) if step < plan.steps else 0)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_contract(found: object, live: Mapping[str, int | bool | str]) -> None:
    if not isinstance(found, Mapping) or set(found) != set(live):
        raise ContractError(f"contract of the data state must have exactly the fields {list(live)}; got {found!r}")
    for field, value in live.items():
        if type(found[field]) is not type(value) or found[field] != value:
            raise ContractError(
                f"the data state was saved with {field}={found[field]!r}, but this Batches has {value!r}; "
                "build Batches over the same rows with the same arguments"
            )


def _checked_step(step: object, plan: Plan) -> int:
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise ContractError(f"step of the data state must be a whole number of at least 0; got {step!r}")
    if step > plan.steps:
        raise ContractError(
            f"the data state is at step {step}, but epochs={plan.epochs} of {plan.steps_per_epoch} steps end at step "
            f"{plan.steps}; raise epochs"
        )
    return step


def _checked_ledger(ledger: object, rows: int) -> list[Progress]:
    if not isinstance(ledger, (list, tuple)):
        raise ContractError(f"ledger of the data state must be a list; got {type(ledger).__name__}")
    return [_checked_entry(ordinal, entry, rows) for ordinal, entry in enumerate(ledger)]


def _checked_entry(ordinal: int, entry: object, rows: int) -> Progress:
    match entry:
        case [int(rows_done), bool(closed)] if not isinstance(rows_done, bool) and 0 <= rows_done <= rows:
            return Progress(rows_done, closed)
        case _:
            raise ContractError(
                f"ledger[{ordinal}] of the data state must be [rows_done, closed]: 0 to {rows} rows of this step's "
                f"batch, and a boolean; got {entry!r}"
            )
