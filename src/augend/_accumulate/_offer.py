"""Offering the micro-batches of a batch: to several accumulators at once, and once more where exact sums need it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from augend._accumulate._course import BatchLike, M
from augend._accumulate._pending import Pending
from augend.errors import AugendError, PlacementError, StateError


def offer(batch: BatchLike[M], members: Sequence[tuple[object, Pending]]) -> Iterator[M]:
    """Offer what is left of a batch to several accumulators at once: the first one's share, one backward each.

    Args:
        batch: The batch.
        members: Each accumulator with what it holds.
    """
    turn = object()
    _enter(batch, members, turn)
    try:
        yield from _offer_once(batch, members)
        grids = [pending.judge() for _, pending in members]
        while any(one is not None for one in grids):
            _refuse_closed(members)
            for (_, pending), scales in zip(members, grids, strict=True):
                pending.begin_again(scales)
            yield from _offer_once(batch, members)
            grids = [pending.judge() for _, pending in members]
    finally:
        for _, pending in members:
            pending.course.leave(turn)


def _refuse_closed(members: Sequence[tuple[object, Pending]]) -> None:
    """A member that finished the batch before a load cannot go through it again for the others."""
    if any(pending.course.replayed for _, pending in members):
        raise StateError(
            "the batch must be offered again, and an accumulator that goes through it together with others finished it "
            "before it was loaded; go through it with those alone that have not"
        )


def _offer_once(batch: BatchLike[M], members: Sequence[tuple[object, Pending]]) -> Iterator[M]:
    owner, _ = members[0]
    for microbatch in batch.remaining(owner, max(pending.window.offer for _, pending in members)):
        for _, pending in members:
            pending.hand_out(microbatch)
        yield microbatch
        for _, pending in members:
            pending.course.check_done(microbatch)
        batch.check_live()


def _enter(batch: BatchLike[M], members: Sequence[tuple[object, Pending]], turn: object) -> None:
    """Enter a batch with every member, where all ranks can: at the same place, with equally many rounds to do."""
    group = members[0][1].placement.group
    rounds, rows_done, error = -1, -1, None
    try:
        for owner, pending in members:
            pending.window.guard()
            pending.slots.check()
            _check_share(batch, pending)
            pending.enter(owner, batch, turn)
        _check_alike(batch, [owner for owner, _ in members])
        rounds = batch.rounds_left(members[0][0])
        rows_done = members[0][1].window.rows_done
    except AugendError as refused:
        error = refused
    values = {
        "the batch": batch.step,
        "its number of rows": batch.rows,
        "the number of rows done": rows_done,
        "the number of micro-batches left": rounds,
        **{f"{name} of the data": value for name, value in batch.plan.items()},
    }
    group.same("the beginning of the next batch", values, error)
    for _, pending in members:
        pending.fingerprint.tell()


def _check_share(batch: BatchLike[M], pending: Pending) -> None:
    """A batch that is dealt otherwise than the accumulator adds up would count rows twice, or not at all."""
    if batch.share != pending.placement.share:
        (rank, world), (mine, ours) = batch.share, pending.placement.share
        raise PlacementError(
            f"the batch is dealt to rank {rank} of {world}, and the accumulator adds up as rank {mine} of {ours}: give "
            "Batches the mesh of the axes that share a batch (not those of tensor parallelism), "
            'as in Batches(..., mesh=mesh["data"])'
        )


def _check_alike(batch: BatchLike[M], owners: Sequence[object]) -> None:
    """One micro-batch for several is right only if all of them have done the same rows."""
    rows = []
    for owner in owners:
        progress = batch.progress(owner)
        rows.append(batch.rows if progress.closed else progress.rows_done)
    if len(set(rows)) > 1:
        raise StateError(
            f"accumulators that go through batch {batch.step} together have done {', '.join(map(str, rows))} of its "
            "rows; call reset() on each of them, and offer the batch again"
        )
