"""Accumulator: whole sums of the gradients of a batch, however it is cut.

The story in order: ``microbatches`` offers the parts of a batch, ``backward`` (or ``add``) puts each into the window,
``step`` (or ``finish``, ``finish_mean``, ``finish_sums``) ends the batch, ``state_dict`` saves what is pending.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from types import MappingProxyType
from typing import Final, Literal, TypeVar, Unpack, final

import torch
from torch import Tensor, nn

from augend._accumulate import (
    DTYPES,
    AccumulatorState,
    BatchLike,
    Contract,
    MicrobatchLike,
    Pending,
    Reduced,
    Window,
    check_limits,
    check_numbers,
    check_words,
    complete_sums,
    offer,
    read_state,
    reduce_window,
    state_of_sums,
    write_state,
)
from augend._finish import (
    Empty,
    Finished,
    FinishOptions,
    Means,
    NonFinite,
    Optimizers,
    Policy,
    Proven,
    Sums,
    as_optimizers,
    check_sums,
    end_batch,
    judge_narrowing,
    mean_of,
)
from augend._group import Mesh
from augend._placement import Dtypes, Sync, place
from augend._tally import Tally
from augend.errors import ContractError, StateError

M = TypeVar("M", bound=MicrobatchLike)
Gradients = Mapping[str, Tensor]
_MICROBATCHES: Final = 65_536


@final
class Accumulator:
    """Sums the gradients of loss sums over a batch, and divides once, at its end, by the global count.

    One sum per parameter in the work dtype, whatever the parameter's own dtype. Gradients are moved into the sums as
    autograd produces them, so only one micro-batch's activations and about one live gradient are held at a time; where
    replicas share the sums (``sync="every"``), the gradients of one micro-batch.

    Args:
        model: The module to train. Its trainable parameters are fixed from here on; tied ones count once.
        dtype: Of the sums: ``"float32"``, ``"float64"``, or ``"exact"``: whole numbers on a grid for each parameter, so
            that the update has the same bits however the batch is cut and dealt, on one kind of machine.
        loss_scale: Every loss sum is multiplied by this before backward, and the mean divided by it; for 16-bit
            backward passes whose small gradients would vanish. Positive and finite in the work dtype.
        mesh: The mesh of all ranks. None: that of the parameters, or all ranks of the default process group. Needed
            where parameters do not tell all of it: with tensor parallelism, or replicas of shards.
        sync: When the sums of replicated plain parameters are added up over ranks: in every micro-batch, each rank
            keeping its share of them (as ZeRO-2 does), or once at the end, each rank keeping all of them.
        terms: Names of the loss terms. Each keeps its own sums and count and costs one more backward.
        unused: What to do with a parameter that some ranks used in a batch and others did not: raise, naming it, or
            count zeros there. One that no rank used has no gradient, no optimizer state and no decay either way.
        foreign: What to do with a gradient that something else left in ``.grad``: refuse it by name, or drop it (for
            loops in which another model's loss flows through this one).
        max_microbatches: The most micro-batches of one batch, over all ranks. Exact sums keep head-room for as many.
        other_bits: What to do where exact sums go on, after a load, that were begun where bits come out otherwise
            (another torch, device, number of threads, size of micro-batches; see ``bits``): warn, or refuse.

    Raises:
        ContractError: An argument is out of its domain, or a parameter cannot be trained; with exact sums also if the
            ranks' bits come out differently.
        GradientError: The model makes sparse gradients.
        PlacementError: Parameters lie as nothing here can serve, or FSDP2 would average or round their gradients; with
            exact sums also under tensor parallelism.

    On several ranks the construction is collective, as every method that says so; a model sharded by ``fully_shard``
    is switched to plain sums for good.

    Numerics:
        Against the exact sum of the micro-batch gradients gᵢ that autograd produced, per element, without clipping:
        ``|error| <= γ(k) · Σ|gᵢ| / N`` with k = micro-batches + ranks + 3, γ(k) = k·u / (1 - k·u), u = 2⁻²⁴ in float32
        and 2⁻⁵³ in float64 (Higham 2002, §4.2). With several terms k = micro-batches + ranks + terms + 6.

        With exact sums ``|error| <= micro-batches · s / (2 · N · loss_scale) + (2⁻²⁴ + 2⁻⁵¹) · |mean|``, s the grid's
        step: a power of two of at most 2⁻²⁴ of the largest element that the parameter's (scaled) gradients had in the
        batch, and, for up to 65,536 micro-batches, of 2⁻³³ or less where that did not shrink since the batch before.
        With several terms the errors of the terms' means add up.
        Clipping multiplies by one more factor of 1 ± 2⁻²³. The norm is correctly rounded.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> grads = augend.Accumulator(model)
        >>> for x, count in ((3.0, 1), (8.0, 4)):  # gradient sums 3 and 8 over 1 and 4 items
        ...     total = model(torch.tensor([[x]])).sum(dim=1)  # [rows]
        ...     grads.backward(augend.Tally(total, torch.tensor([count])))
        >>> grads.finish().count
        5
        >>> model.weight.grad  # (3 + 8) / 5, not the mean of 3/1 and 8/4
        tensor([[2.2000]])
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        dtype: str = "float32",
        loss_scale: float = 1.0,
        mesh: Mesh | None = None,
        sync: Sync = "every",
        terms: Sequence[str] = ("loss",),
        unused: Literal["error", "zero"] = "error",
        foreign: Literal["error", "drop"] = "error",
        max_microbatches: int = _MICROBATCHES,
        other_bits: Literal["warn", "error"] = "warn",
    ) -> None:
        names = (terms,) if isinstance(terms, str) else tuple(terms)

        def dtypes() -> Dtypes:
            check_words(sync=(sync, ("every", "last")), unused=(unused, ("error", "zero")))
            check_words(foreign=(foreign, ("error", "drop")), other_bits=(other_bits, ("warn", "error")))
            check_numbers(dtype, float(loss_scale), names, max_microbatches)
            return DTYPES[dtype]

        placement = place(model, mesh=mesh, sync=sync, dtypes=dtypes)
        self._pending = Pending(
            placement,
            dtype=dtype,
            loss_scale=float(loss_scale),
            terms=names,
            unused=unused,
            foreign=foreign,
            other_bits=other_bits,
            max_microbatches=max_microbatches,
        )
        self._proven = Proven()
        self._updates = 0
        self._last: Finished | None = None

    # ---------------------------------------------------------------- a batch, part by part

    def microbatches(self, batch: BatchLike[M], together: Sequence[Accumulator] = ()) -> Iterator[M]:
        """Offer the micro-batches of a batch that are not done yet, each to exactly one ``backward`` (or ``add``).

        Marks the current micro-batch, seeds the random generators for it, and keeps the position of the data. After
        a resume only what was not done is offered; a batch that was finished before the save offers nothing.

        With exact sums the whole batch is offered once more, as ``offer`` 1 with the same random state, where grids
        must first be made for its gradients: in the first batch of a training, and where a parameter's largest
        gradient has grown by more than 2^12 or shrunk by more than about 2^10 since the batch before (for up to 65,536
        micro-batches; by less where ``max_microbatches`` is larger).

        Collective: every rank runs the loop's body for each micro-batch that it is offered.

        Args:
            batch: The batch at the data's position.
            together: Other accumulators that also get one backward for each of these micro-batches.

        Raises:
            StateError: The batch is over, the window does not agree with it, or a micro-batch got no backward; with
                exact sums also if the batch, offered again, has other gradients, or a forward changed a buffer.
            ContractError: ``other_bits="error"``, and a loaded state was made with micro-batches of another size.
        """
        return offer(batch, [(one, one._pending) for one in (self, *together)])  # noqa: SLF001  # of its own class

    def backward(self, tally: Tally | Mapping[str, Tally], retain_graph: bool = False) -> None:  # noqa: FBT001, FBT002  # DESIGN's signature, as torch's
        """Run backward on the loss sum of one micro-batch and add its gradients, totals and counts to the window.

        The loss sum is cast to the work dtype, multiplied by the loss scale, and differentiated. Values are judged at
        finish, so that a GPU never waits here.

        Collective: every rank calls it equally often, also with a count of 0. What is refused before anything is
        computed is refused on the rank that it is wrong on; the others find out at the latest by their time-out.

        Args:
            tally: The loss of each row, ``[rows]``; with several terms, every term's by name.
            retain_graph: Keep the graph, as in ``torch.Tensor.backward``.

        Raises:
            TallyError: Not a tally, not every term's, or not one number for each row of the micro-batch.
            GradientError: A parameter holds a foreign ``.grad``.
            ContractError: The model's parameters are not those that the accumulator was made for.
            StateError: A second backward for one micro-batch, too many micro-batches, or a window that cannot go on;
                with exact sums also if a forward changed a buffer of the model.
        """
        self._pending.backward(self._pending.terms.tallies(tally), retain_graph=retain_graph)

    def add(
        self,
        gradients: Gradients | Mapping[str, Gradients],
        count: float | Fraction | Mapping[str, float | Fraction],
        *,
        summed: bool = False,
    ) -> None:
        """Add gradients that were made elsewhere; counts as one micro-batch.

        Its loss is not known, so the window's ``losses`` become NaN; gradients, count and norm stay exact.

        Collective: as ``backward``.

        Args:
            gradients: Name to gradient of ``loss_scale`` times a loss SUM, shaped like the parameter and of any real
                floating dtype; copied, and for exact sums rounded to float32 first. A plain one is this rank's own. A
                DTensor must be given on every rank of its mesh; along an axis of replicas each rank's copy counts.
                With several terms, term to such a mapping.
            count: The items (a whole number) or the weight that they cover; with several terms, one for each.
            summed: The gradients, and the count, are already summed over ranks: the same on each.

        Raises:
            GradientError: A gradient is of an unknown or frozen parameter or does not fit it, a count comes without
                any gradient, or a parameter holds a foreign ``.grad``.
            TallyError: A count is negative or not finite, or a term is missing or unknown.
            ContractError, StateError: As ``backward``.
        """
        terms = self._pending.terms
        self._pending.add(lambda: (terms.gradients(gradients), terms.counts(count)), summed=summed)

    # ---------------------------------------------------------------- the end of a batch

    def finish_sums(self) -> Sums:
        """Hand over the undivided, still scaled sums and empty the window; allowed on an empty one.

        Collective.

        Raises:
            StateError: Rows of the open batch were not offered, or the batch was finished before a resume.
            TallyError, GradientError, CounterOverflowError: A value was refused; the window cannot go on.
            NonFiniteError: Exact sums were given an inf or a nan, which they cannot hold. The same.
        """
        pending = self._pending
        pending.check_drain(self._check_replay)
        reduced = reduce_window(pending, self._what(), pending.unused)
        check_sums(pending, reduced)
        sums = {
            term: pending.placement.handed_over(complete_sums(pending, term, names))
            for term, names in reduced.present.items()
        }
        self._close(reduced)
        only = sums if pending.terms.several else next(iter(sums.values()))
        return Sums(only, AccumulatorState.of(self.contract, reduced))

    def finish_mean(
        self,
        *,
        term_weights: Mapping[str, float] | None = None,
        empty: Empty = "raise",
        nonfinite: NonFinite = "raise",
    ) -> Means:
        """Hand over the mean gradient in the work dtype, unclipped, and empty the window; ``.grad`` is untouched.

        Collective. Arguments and errors are those of ``finish``, with one more StateError: the batch was finished
        before a resume.
        """
        pending = self._pending

        def ask() -> Policy:
            self._check_replay()
            return Policy(term_weights=term_weights, empty=empty, nonfinite=nonfinite)

        policy = pending.check_drain(ask)
        mean = mean_of(pending, policy, self._what(), pending.unused)
        mean = judge_narrowing(mean, 1.0, dict.fromkeys(mean.sums, pending.work), policy, pending)
        state = AccumulatorState.of(self.contract, mean.reduced)
        self._close(mean.reduced)
        gradients = {} if mean.skipped else pending.placement.handed_over(mean.form(1.0))
        return Means(gradients, state, skipped=mean.skipped)

    def finish(
        self,
        *,
        max_norm: float | None = None,
        eps: float = 0.0,
        term_weights: Mapping[str, float] | None = None,
        empty: Empty = "raise",
        nonfinite: NonFinite = "raise",
    ) -> Finished:
        """Write the clipped mean gradient to ``.grad``, in each parameter's dtype, and empty the window.

        The gradient is the caller's until the next ``backward``, which drops it.

        Collective: every rank, equally often.

        Args:
            max_norm: Largest allowed 2-norm of the mean gradient; None leaves it alone.
            eps: The scale is ``min(1, max_norm / (norm + eps))``; torch's own clipping has 1e-6 here.
            term_weights: Factor of each term in the sum of the terms' means; 1.0 where not given.
            empty: When nothing was counted: raise (and keep the window), skip the batch, divide by one, or write
                exact zeros.
            nonfinite: When a gradient or a row's total is inf or nan: raise (the window is kept but cannot go on),
                skip the batch, or go on with it.

        Returns:
            Count, norm before clipping, scale, and every term's loss with its standard error.

        Raises:
            EmptyWindowError: Nothing was counted.
            NonFiniteError: A gradient or total is inf or nan, or a mean does not fit its parameter's dtype; names it.
            TallyError, GradientError, CounterOverflowError: A count was negative or not finite, came without any
                gradient, or sums to more than 2^63 - 1. The window cannot go on.
            StateError: Rows of the open batch were not offered yet.
            ContractError: An argument is out of its domain, or the model changed.

        Numerics:
            The factor is formed in float64 and rounded once; see the class for the bound. The norm's relative error
            is at most 1e-12, whatever the magnitudes.
        """
        options = FinishOptions(max_norm=max_norm, eps=eps, term_weights=term_weights, empty=empty, nonfinite=nonfinite)
        return self._finish(list, options)

    def step(self, optimizer: Optimizers, **options: Unpack[FinishOptions]) -> Finished:
        """Finish the batch, step the optimizer (or several) once, and leave no ``.grad`` behind.

        Collective: every rank, equally often.

        Args:
            optimizer: A torch optimizer, or several that together hold every trained parameter once.
            **options: Those of ``finish``.

        Returns:
            As ``finish``; ``update`` counts this step unless a policy skipped it.

        Raises:
            ContractError: A trained parameter is held by no optimizer or by two, or an optimizer needs a closure; with
                exact sums also if its step mixes elements, or depends on where a tensor is cut. Otherwise as
                ``finish``.
        """
        return self._finish(lambda: self._optimizers(optimizer), options)

    def check_optimizer(self, optimizer: Optimizers) -> None:
        """Raise what ``step`` would refuse an optimizer (or several) for, before a batch is spent on it.

        With exact sums its step is tried on this machine, slices against the whole, once for its options. Not
        collective.

        Raises:
            ContractError: As ``step``.
        """
        self._optimizers(optimizer)

    def _optimizers(self, optimizer: Optimizers) -> list[torch.optim.Optimizer]:
        parameters = self._pending.slots.parameters
        optimizers = as_optimizers(optimizer, parameters)
        return self._proven.check(optimizers, parameters) if self.contract.exact else optimizers

    def _finish(self, optimizers: Callable[[], list[torch.optim.Optimizer]], options: FinishOptions) -> Finished:
        if self._pending.course.replayed and self._last is not None:
            self._pending.course.close()  # the batch was finished before the save: its record, and no second update
            return self._last

        def ask() -> tuple[list[torch.optim.Optimizer], Policy]:
            self._check_replay()
            return optimizers(), Policy(**options)

        done = end_batch(self._pending, ask, updates=self._updates)
        self._last, self._updates = done, done.update
        return done

    def _close(self, reduced: Reduced) -> None:
        self._pending.drain(reduced)
        self._pending.course.close()

    def _check_replay(self) -> None:
        if self._pending.course.replayed:
            raise StateError(
                "this batch was finished before it was loaded, and its sums were handed over then; call "
                "data.register(accumulator) before loading, and the data goes on with the next batch"
            )

    # ---------------------------------------------------------------- looking in

    def norm(self) -> float:
        """Return the 2-norm of the pending mean gradient (terms weighted 1.0), or nan if nothing was counted.

        Collective. Read-only; waits for the device; raises as ``finish`` on refused values, and StateError where exact
        sums are only measured, or are to be made anew.
        """
        return mean_of(self._pending, Policy(empty="skip", nonfinite="allow"), self._what(), "zero", check_limits).norm

    def digests(self) -> dict[str, str]:
        """Return a 64-bit digest of each trained parameter's value, as 16 hexadecimal digits, in the model's order.

        Equal values have equal digests however they are placed and on any number of ranks; of different ones, one
        pair in 2^64 is expected to have equal digests. They are no protection against an adversary.

        Collective. Read-only; waits for the device; reads every parameter once.

        Example:
            >>> import torch
            >>> model = torch.nn.Linear(2, 1, bias=False)
            >>> _ = model.weight.data.fill_(1.0)
            >>> augend.Accumulator(model).digests()
            {'weight': 'cc6e4749259407ed'}
        """
        return self._pending.placement.digests("the digests of the parameters")

    @property
    def pending(self) -> Mapping[str, Tensor] | Mapping[str, Mapping[str, Tensor]]:
        """Name to pending sum, for parameters that had a gradient; with several terms, term to such a mapping.

        On several ranks: what this rank holds of each, and of sharded modules also zeros for what nobody used; the
        complete sums are in ``state_dict()``. Read-only; the tensors are live and belong to the accumulator.
        """
        views = {term: MappingProxyType(sums) for term, sums in self._pending.window.sums.items()}
        return MappingProxyType(views) if self._pending.terms.several else next(iter(views.values()))

    def sum_like(self, name: str) -> Tensor:
        """Return an empty tensor that lies as a complete sum of a parameter does: for a saved one to be read into.

        Plain and whole, or spread over a mesh where each rank holds a part.

        Args:
            name: The parameter.

        Raises:
            ContractError: It is none that is trained.
        """
        if name not in self._pending.slots.parameters:
            raise ContractError(f"{name!r} is no parameter that this accumulator sums gradients of")
        return self._pending.placement.spread(name, self._pending.zeros(name))

    @property
    def contract(self) -> Contract:
        """What the sums belong to: parameters, work dtype, loss scale and terms."""
        return self._pending.contract

    @property
    def state(self) -> AccumulatorState:
        """The counters of all ranks' window, exactly. Collective; raises as ``finish`` on refused values."""
        return AccumulatorState.of(self.contract, self._reduced())

    @property
    def bits(self) -> Mapping[str, str | int | bool]:
        """What the bits of sums depend on besides data and code, as it is now; saved with exact ones."""
        return self._pending.fingerprint.now()

    @property
    def updates(self) -> int:
        """Steps really taken so far: the clock of a schedule, saved with the state."""
        return self._updates

    @property
    def gradients_left(self) -> bool:
        """Whether ``.grad`` still holds what the last ``finish`` wrote: an update that perhaps nobody took yet."""
        return self._pending.taker.holds_written()

    @property
    def uses_batches(self) -> bool:
        """Whether it ever went through a batch: then the position of that data belongs to what is saved of it."""
        return self._pending.course.entered

    # ---------------------------------------------------------------- dropping, saving, loading

    def reset(self) -> None:
        """Drop the window; the open batch, if any, counts as not begun and can be offered again."""
        self._pending.drop()
        self._pending.course.restart()

    def state_dict(self) -> dict[str, object]:
        """Return a copy of all that is pending: sums, counts, moments, the last finish.

        Tensors stand under ``"sums"`` only, keyed by term and parameter name; everything else is plain numbers,
        strings, lists and dictionaries that JSON keeps exactly. A micro-batch without its backward is not in it.

        Collective; raises as ``finish`` on refused values.
        """
        self._pending.check_buffers(self._what())
        last = None if self._last is None else self._last.to_plain()
        return {**write_state(self._pending, self._reduced()), "updates": self._updates, "finished": last}

    def _reduced(self) -> Reduced:
        return reduce_window(self._pending, self._what(), "zero")

    def _what(self) -> str:
        return f"the sums{self._pending.course.place()}"

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Replace all that is pending by a saved state, after checking every part of it against the live model.

        A refused state leaves the accumulator as it was, to the bit. What an earlier ``finish`` left in ``.grad`` is
        cleared: it belongs to no loaded batch.

        Collective.

        Args:
            state: What ``state_dict`` returned; only read.

        Raises:
            StateError: A field is missing, unknown, of another type, or out of its domain; names it.
            ContractError: Model, dtype, loss scale or terms differ; names what. With exact sums and
                ``other_bits="error"`` also if they were begun where bits come out otherwise; else that is a warning.
        """
        self.prepare_load(state)()

    def prepare_load(self, state: Mapping[str, object]) -> Callable[[], None]:
        """Check a saved state as ``load_state_dict`` does, and change nothing yet.

        Collective.

        Returns:
            What swaps the state in, and cannot fail.

        Raises:
            StateError, ContractError: As ``load_state_dict``.
        """
        pending = self._pending

        def read() -> tuple[Window, int, Finished | None]:
            pending.slots.check()
            window, updates, last = read_state(state, self.contract, pending.max_microbatches)
            return window, updates, None if last is None else Finished.from_plain(last, self.contract.terms)

        saved, updates, finished = pending.placement.group.agreed("a load", read)
        pending.check_alike("a load", state)
        bits = pending.placement.group.agreed("a load", lambda: pending.compare_bits(state))
        pending.fingerprint.tell()
        window = pending.held(saved)

        def commit() -> None:
            self._pending.taker.drop_written()
            self._pending.swap(window)
            self._pending.course.forget()
            self._pending.fingerprint.expect(bits)
            self._updates, self._last = updates, finished

        return commit

    @classmethod
    def from_sums(
        cls, model: nn.Module, sums: Sums, contract: Contract, *, mesh: Mesh | None = None, sync: Sync = "every"
    ) -> Accumulator:
        """Make an accumulator that goes on from drained sums.

        Collective.

        Args:
            model: A module that fits the contract.
            sums: What ``finish_sums`` returned, perhaps of another process.
            contract: The contract under which the sums were made.
            mesh: As for the class.
            sync: As for the class.

        Raises:
            ContractError: The model does not fit the contract, or the sums' dtype or loss scale is another.
            StateError: Sums and counters do not fit each other.
        """
        contract.validate(model)
        made = cls(
            model,
            dtype=contract.dtype,
            loss_scale=contract.loss_scale,
            terms=contract.terms,
            mesh=mesh,
            sync=sync,
            max_microbatches=contract.max_microbatches or _MICROBATCHES,
        )
        made.load_state_dict(state_of_sums(sums.gradients, sums.state, contract))
        return made
