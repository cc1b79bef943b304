"""What one accumulator holds between two finishes, and how things get in: checks first, then the change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Final, Literal, TypeVar, final

import torch
from torch import Tensor

from augend._accumulate._bits import Bits, Fingerprint, read_bits
from augend._accumulate._buffers import Buffers
from augend._accumulate._contract import DTYPES, EXACT, Contract
from augend._accumulate._course import BatchLike, Course, MicrobatchLike
from augend._accumulate._given import agreed_names, check_given, parts_of
from augend._accumulate._gradients import Taker
from augend._accumulate._reduce import Reduced, Unused, agree_contract, agree_sizes
from augend._accumulate._scales import Scales
from augend._accumulate._slots import Slots
from augend._accumulate._terms import Gradients, Terms
from augend._accumulate._window import Window
from augend._placement import Placement
from augend._tally import Tally
from augend.errors import GradientError, StateError, TallyError

T = TypeVar("T")
Named = Mapping[str, Gradients]
Counts = Mapping[str, Fraction]
_FAILED: Final = "an exception left backward() or add(), so one micro-batch may be half added"


@final
class Pending:
    """Parameters, contract, window and way through the batch of one accumulator.

    Args:
        placement: The module to train, and where its parameters lie.
        dtype: Name of the work dtype.
        loss_scale: What every loss sum is multiplied by.
        terms: Names of the loss terms.
        unused: Whether a parameter that only some ranks used is an error.
        foreign: What to do with a gradient that somebody else left in ``.grad``.
        other_bits: What to do where exact sums go on that were begun where bits come out otherwise.
        max_microbatches: The most micro-batches of one window, over all ranks.

    Raises:
        ContractError: A parameter cannot be trained, or ranks were given different models or arguments.
        GradientError: The model makes sparse gradients.
    """

    def __init__(
        self,
        placement: Placement,
        *,
        dtype: str,
        loss_scale: float,
        terms: tuple[str, ...],
        unused: Unused,
        foreign: Literal["error", "drop"],
        other_bits: Literal["warn", "error"],
        max_microbatches: int,
    ) -> None:
        self.work = DTYPES[dtype].work
        self.placement = placement
        self.unused = unused
        self.slots = placement.group.agreed("the look at the parameters", lambda: Slots(placement, self.work))
        head_room = max_microbatches if dtype == EXACT else None
        self.contract = Contract(dtype, loss_scale, terms, self.slots.tensors, head_room)
        settings: dict[str, object] = {
            "unused": unused,
            "foreign": foreign,
            "other_bits": other_bits,
            "max_microbatches": max_microbatches,
        }
        device = next(iter(self.slots.parameters.values())).device
        self.fingerprint = Fingerprint(device, other_bits, tells=placement.group.rank == 0)
        if self.contract.exact:
            settings |= self.fingerprint.now()
        agree_contract(placement.group, self.contract, settings)
        placement.check_replicas()
        self.terms = Terms(terms)
        self.buffers = Buffers(placement.model)
        self.taker = Taker(self.slots, foreign)
        self.course = Course()
        self.max_microbatches = max_microbatches
        self.window = self.fresh(Scales.none(terms, max_microbatches) if self.contract.exact else None)
        self._seen: tuple[int, ...] | None = None  # how large gradients were in the pass that was judged last

    def backward(self, tallies: Mapping[str, Tally], *, retain_graph: bool) -> None:
        """Differentiate each term's loss sum and keep gradients and rows; of a filler nothing."""
        microbatch = self._ready()
        self._watch_buffers(microbatch)
        real = microbatch is None or microbatch.real_rows > 0
        _check_rows(tallies, microbatch)
        self._check_whole(tallies)
        if self.placement.sharded:
            _check_graphs(tallies)
        self._begin()
        last = self.terms.names[-1]
        what = f"the end of backward {self.window.rounds}{self.course.place()}"
        for term, tally in tallies.items():
            keep = retain_graph or term != last
            loss = (
                tally.total.to(self.work).sum() * self.contract.loss_scale if tally.total.requires_grad else None
            )  # []
            taken = self.taker.run(loss, self.window, term, what, retain_graph=keep, real=real)
            if real:
                self.window.add_tally(term, tally, gradients=taken)
        self.placement.check_delivered()
        self._end(real=real)

    def _check_whole(self, tallies: Mapping[str, Tally]) -> None:
        for term, tally in tallies.items():
            if self.placement.is_spread(tally.total) or self.placement.is_spread(tally.count):
                raise TallyError(
                    f"the tally of term {term!r} is spread over a mesh; give every rank its rows as plain tensors: "
                    "call full_tensor() on the output, or let the last layer make a local one"
                )

    def add(self, given: Callable[[], tuple[Named, Counts]], *, summed: bool) -> None:
        """Copy gradients that were made elsewhere; ``given`` returns every term's, and its count, or refuses them."""
        what = f"an add(){self.course.place()}"
        group = self.placement.group
        gradients, counts = group.agreed(what, lambda: self._checked(*given()))
        names = agreed_names(gradients, self.slots, what)
        self._begin()
        for term, named in gradients.items():
            brought = {name: named.get(name) for name in names[term]}
            for name, part in parts_of(brought, term, self.window, self.slots, summed=summed).items():
                self.window.add_gradient(term, name, part, self.placement.like(name))
            self.window.used[term].update(names[term])
            if not summed or group.rank == 0:
                self.window.add_count(term, counts[term])
        self._end(real=not summed or group.rank == 0)

    def _checked(self, gradients: Named, counts: Counts) -> tuple[Named, Counts]:
        for term, named in gradients.items():
            check_given(named, self.slots)
            if counts[term] and not named:
                raise GradientError(f"term {term!r} counts {counts[term]} items and brings no gradient")
        self._ready()
        return gradients, counts

    def like(self, name: str, tensor: Tensor) -> Tensor:
        """Return a copy in the dtype of the sums, in the memory layout of the parameter ``name``."""
        return torch.empty_like(self.placement.like(name), dtype=self.window.held).copy_(tensor.detach())

    def zeros(self, name: str) -> Tensor:
        """Return this rank's part of a sum of nothing."""
        return torch.zeros_like(self.placement.like(name), dtype=self.window.held)

    def fresh(self, scales: Scales | None) -> Window:
        """Return an empty window."""
        return Window(self.contract.terms, self.contract.dtypes, scales)

    def held(self, window: Window) -> Window:
        """Return what this rank holds of a window of all ranks, copied. Collective where its sums are spread.

        Its counters, and sums that are still to be added up over ranks, are held by the first rank.
        """
        mine = self.fresh(window.scales)  # maxima know no ranks
        mine.rounds, mine.rows_done, mine.step, mine.loose = window.rounds, window.rows_done, window.step, window.loose
        mine.offer, mine.before, mine.resumed = window.offer, window.before, window.rounds > 0
        if self.placement.group.rank == 0:
            mine.microbatches = window.microbatches
            mine.add_moments(window.moments())
        for term, sums in window.sums.items():
            mine.used[term] = set(sums)
            for name in self.slots.parameters:
                part = self.placement.part(name, sums[name]) if name in sums else None
                if part is not None:
                    mine.sums[term][name] = self.like(name, part)
        return mine

    def compare_bits(self, state: Mapping[str, object]) -> Bits:
        """Return the fingerprint of a saved state, after comparing it.

        Raises:
            StateError: It is none.
            ContractError: It is another, and that is an error.
        """
        bits = read_bits(state["bits"]) if self.contract.exact else {}
        self.fingerprint.compare(bits)
        return bits

    def check_alike(self, what: str, state: Mapping[str, object]) -> None:
        """Raise StateError, on all ranks, if ranks were given different states: all but tensors is compared."""
        plain = {name: value for name, value in state.items() if name != "sums"}
        self.placement.group.same(what, {f"{name} of the saved state": value for name, value in plain.items()})

    def enter(self, owner: object, batch: BatchLike[MicrobatchLike], turn: object) -> None:
        """Enter a batch, or go on in it; with exact sums, take note of what their bits depend on.

        Raises:
            StateError: As ``Course.enter``.
            ContractError: A loaded state was made with micro-batches of another size, and that is an error.
        """
        self.course.enter(owner, batch, self.window, turn)
        if self.contract.exact:
            self.fingerprint.enter(batch.plan.get("microbatch_size"))

    def hand_out(self, microbatch: MicrobatchLike) -> None:
        """Make a micro-batch the current one."""
        self.course.hand_out(microbatch)
        if self.contract.exact:
            self.buffers.begin()
            self.buffers.see()

    def _watch_buffers(self, microbatch: MicrobatchLike | None) -> None:
        """Refuse what a forward was seen to write; outside of the loop only what later ones have written."""
        if self.contract.exact:
            if microbatch is not None or self.window.loose:
                self.buffers.check()
            self.buffers.begin()

    def check_buffers(self, what: str) -> None:
        """Raise StateError, on all ranks alike, if a buffer holds other values than when the window began."""
        if self.contract.exact and not self.course.replayed:
            self.placement.group.agreed(what, self.buffers.check_contents)

    def check_drain(self, ask: Callable[[], T]) -> T:
        """Raise, on all ranks alike, if the window cannot be finished: broken, rows not offered, or a changed model.

        Args:
            ask: What the finish is asked for; it too may refuse.
        """

        def checked() -> T:
            asked = ask()
            self.window.guard()
            self.course.check_finishable()
            self.slots.check()
            if self.contract.exact and not self.course.replayed:
                self.buffers.check_contents()
            return asked

        return self.placement.group.agreed(f"the end of the batch{self.course.place()}", checked)

    def drain(self, reduced: Reduced) -> None:
        """Empty the window of what it held; the batch stays open until it is closed."""
        scales = self.window.scales
        self.window = self.fresh(None if scales is None else scales.after(reduced.sizes))
        self.buffers.forget()

    def drop(self) -> None:
        """Drop what the window holds, which therefore teaches no grids; but for those that it could not do without."""
        scales, unfit = self.window.before or self.window.scales, self.window.unfit
        if scales is not None:
            scales = scales.again() if unfit is None else scales.after(unfit, expected=unfit)
        self.swap(self.fresh(scales))

    def judge(self) -> Scales | None:
        """Return the grids with which the batch must be offered again; None if it need not be. Collective if exact.

        Raises:
            StateError: Offered again, its gradients are others.
        """
        scales = self.window.scales
        if scales is None or self.course.replayed:
            return None
        pass_ = agree_sizes(self, f"the end of the loop{self.course.place()}")
        sizes = scales.and_expected(pass_.sizes)
        unfit = scales.unfit(sizes)
        if self.window.offer and (unfit is not None or self.window.seen not in (None, pass_.seen)):
            raise StateError(
                "the batch was offered again, and its gradients are others than before: something in them follows "
                "neither from the rows nor from the seeded generators of torch, numpy and random, or is computed in "
                "another order each time; see torch.use_deterministic_algorithms()"
            )
        self._seen = None if self.window.resumed else pass_.seen
        if unfit is None or pass_.loose:  # what is loose cannot be had again: the finish refuses it
            return None
        return scales.after(sizes, expected=scales.expected)

    def begin_again(self, scales: Scales | None) -> None:
        """Drop what the window holds of the batch, which is offered once more, with new grids if there are any."""
        first = self.window
        again = None if first.scales is None else first.scales.again()
        self.window = self.fresh(again if scales is None else scales)
        self.window.offer, self.window.before = first.offer + 1, again
        self.window.seen, self._seen = self._seen, None
        self.course.rewind()

    def swap(self, window: Window) -> None:
        """Put another window in the place of this one."""
        if self.window.broken is not None:
            self.taker.drop()  # a backward that failed may have left gradients behind
        self.window = window
        self.buffers.forget()

    def _ready(self) -> MicrobatchLike | None:
        """Check all that can be checked without reading values; nothing is changed."""
        self.window.guard()
        self.slots.check()
        microbatch = self.course.current()
        if self.window.rounds >= self.max_microbatches:  # the same on all ranks; their sum is checked at the end
            raise StateError(f"the window holds {self.max_microbatches} micro-batches, which is max_microbatches")
        self.taker.check_foreign()
        return microbatch

    def _begin(self) -> None:
        self.taker.drop()
        self.window.broken = _FAILED

    def _end(self, *, real: bool) -> None:
        self.window.broken = None
        self.window.microbatches += real
        self.window.rounds += 1
        at = self.course.advance()
        if at is None:
            self.window.loose = True
            if self.contract.exact:
                self.buffers.see()
        else:
            self.window.step, self.window.rows_done = at


def _check_rows(tallies: Mapping[str, Tally], microbatch: MicrobatchLike | None) -> None:
    """A tally of other rows than the micro-batch's would give a wrong standard error, silently."""
    if microbatch is None or microbatch.real_rows == 0:
        return
    for term, tally in tallies.items():
        if tally.total.dim() == 1 and len(tally.total) != microbatch.real_rows:
            raise TallyError(
                f"the tally of term {term!r} has {len(tally.total)} rows and the micro-batch {microbatch.real_rows}: "
                "error bars need one number a row. Sum what belongs to one row, or give a 0-d total and count if the "
                "loss has no rows"
            )


def _check_graphs(tallies: Mapping[str, Tally]) -> None:
    """Without a graph there is no backward, and the other ranks would wait for this one in theirs."""
    for term, tally in tallies.items():
        if not tally.total.requires_grad:
            raise TallyError(
                f"the total of term {term!r} has no graph, and every rank must run the backward of sharded modules: "
                "build it from the model's output, also where nothing counts"
            )
