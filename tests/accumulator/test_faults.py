"""Faults that users of other systems met, as kinds: what is not covered by a claim elsewhere."""

from __future__ import annotations

import copy
import gc
import weakref

import numpy as np
import pytest
import torch
from test_finish import OPTIMIZERS

import augend
import reference
from models import rows, tally, tower


def integer_rows(count: int) -> dict[str, torch.Tensor]:
    """Return rows of small integers, so that every sum is exact."""
    generator = torch.Generator().manual_seed(4)
    return {
        "x": torch.randint(-4, 5, (count, 3), generator=generator).float(),
        "count": torch.randint(0, 4, (count,), generator=generator),
    }


def integer_model() -> torch.nn.Linear:
    """Return a linear model of integer weights."""
    model = torch.nn.Linear(3, 1, bias=False)
    torch.nn.init.constant_(model.weight, 2.0)
    return model


def integer_tally(model: torch.nn.Module, microbatch) -> augend.Tally:
    """Return half the squared outputs, counted."""
    return augend.Tally(model(microbatch["x"])[:, 0] ** 2 * microbatch["count"], microbatch["count"])


def test_every_split_of_a_batch_of_64_makes_the_same_first_update() -> None:
    """The formula holds for every micro-batch size, not for the ones that were tried: same bits for 1 to 64."""
    outcomes = set()
    for size in range(1, 65):
        model = integer_model()
        grads = augend.Accumulator(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        data = augend.Batches(integer_rows(64), batch_size=64, microbatch_size=size, epochs=1)
        for batch in data:
            for microbatch in grads.microbatches(batch):
                grads.backward(integer_tally(model, microbatch))
            done = grads.step(optimizer, max_norm=7.0)
        outcomes.add((reference.digest(model.weight), done.norm, done.scale, str(done.loss), done.count))
    assert 1 == len(outcomes)


def test_training_and_evaluation_agree() -> None:
    """The loss that a step reports and the loss that evaluate reports of the same rows and weights are one number."""
    model = integer_model()
    grads = augend.Accumulator(model)
    data = augend.Batches(integer_rows(30), batch_size=30, microbatch_size=7, epochs=1, shuffle=False)
    evaluated = augend.evaluate(model, data, loss=integer_tally)["loss"]
    for batch in data:
        for microbatch in grads.microbatches(batch):
            grads.backward(integer_tally(model, microbatch))
        trained = grads.finish().loss
    assert (trained.value, trained.error, trained.count) == (evaluated.value, evaluated.error, evaluated.count)


def test_only_one_microbatch_is_alive() -> None:
    """The graph of a micro-batch is gone when its backward is: memory is that of one, not of the window."""
    model = tower()
    grads = augend.Accumulator(model)
    alive: list[weakref.ref] = []
    kept: list[torch.Tensor] = []
    model.head.register_forward_pre_hook(lambda module, inputs: kept.append(inputs[0]))
    for seed in range(4):
        x, y = rows(4, seed=seed)
        out = model(x)
        alive.append(weakref.ref(out))
        alive.append(weakref.ref(kept[0]))  # an activation that the graph holds
        grads.backward(augend.losses.cross_entropy(out, y))
        del out
        kept.clear()
        gc.collect()
        assert all(one() is None for one in alive)


@pytest.mark.parametrize("groups", [1, 2, 7])
def test_the_norm_does_not_depend_on_grouping(groups: int) -> None:
    """The same bfloat16 gradients in 1, 2 or 7 parameters have one norm, not one for each grouping."""
    gradient = torch.randn(700, generator=torch.Generator().manual_seed(1)).bfloat16()
    parts = gradient.tensor_split(groups)
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros_like(one)) for one in parts])
    grads = augend.Accumulator(model)
    grads.add({str(i): one for i, one in enumerate(parts)}, 1)
    exact = reference.norm({"all": gradient})
    assert abs(grads.norm() - exact) <= 1e-12 * exact


def test_a_norm_is_not_rounded_to_the_parameters_dtype() -> None:
    """A norm of 1.003 is reported as such for bfloat16 parameters, not as 1.0."""
    model = torch.nn.Linear(2, 1, bias=False, dtype=torch.bfloat16)
    grads = augend.Accumulator(model)
    grads.add({"weight": torch.tensor([[1.003, 0.0]])}, 1)
    assert float(torch.tensor(1.003)) == grads.finish().norm


def test_optimizers_may_come_as_an_iterator() -> None:
    """Optimizers given as a generator are not used up by the checks before they are stepped."""
    model = integer_model()
    grads = augend.Accumulator(model)
    grads.add({"weight": torch.ones(1, 3)}, 1)
    grads.step(iter([torch.optim.SGD(iter(model.parameters()), lr=1.0)]))
    assert [[1.0, 1.0, 1.0]] == model.weight.tolist()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_loss_scale_leaves_every_optimizer_alone(name: str) -> None:
    """Twenty steps with a loss scale of 2^16 end with bitwise the weights of twenty without, for every optimizer."""
    outcomes = []
    for scale in (1.0, 65536.0):
        model = tower()
        grads = augend.Accumulator(model, loss_scale=scale)
        optimizer = OPTIMIZERS[name](model.parameters())
        for step in range(20):
            grads.backward(tally(model, *rows(4, seed=step)))
            grads.step(optimizer, max_norm=0.5)
        outcomes.append(reference.digest(dict(model.named_parameters())))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_implementations_of_an_optimizer_agree(kind: type[torch.optim.Optimizer]) -> None:
    """Single, foreach and fused steps of the same means stay within one part in 10^6 over 20 steps, as torch says.

    They order operations differently, which costs AdamW at most a few roundings of the update a step; the update is
    lr, so 20 steps move apart by less than 20 · lr · γ(32) and the rounding of the weights themselves, 20 · u · |w|.
    """
    outcomes = []
    for options in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        torch.manual_seed(0)
        model = torch.nn.Linear(50, 20)
        grads = augend.Accumulator(model, loss_scale=256.0)
        optimizer = kind(model.parameters(), lr=0.01, **options)
        for step in range(20):
            generator = torch.Generator().manual_seed(step)
            grads.add({"weight": 256 * torch.randn(20, 50, generator=generator), "bias": torch.ones(20)}, 3)
            grads.step(optimizer, max_norm=1.0)
        outcomes.append(model.weight.detach().double())
    bound = 20 * (0.01 * reference.gamma(32, torch.float32) + 2.0**-24)
    for other in outcomes[1:]:
        assert float((outcomes[0] - other).abs().max()) <= bound


def test_reading_an_optimizer_state_steps_nothing() -> None:
    """MasterWeights' state can be read and loaded before the first step; the first step is the same."""
    moved = []
    for read in (False, True):
        model = torch.nn.Linear(2, 1, bias=False, dtype=torch.bfloat16)
        torch.nn.init.ones_(model.weight)
        make = lambda groups: torch.optim.AdamW(groups, lr=0.125, weight_decay=0.5)  # noqa: E731  # as a user writes it
        optimizer = augend.optim.MasterWeights(model.parameters(), make)
        if read:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        grads = augend.Accumulator(model)
        grads.add({"weight": torch.ones(1, 2)}, 1)
        grads.step(optimizer)
        moved.append(reference.digest(optimizer.state_dict(), model.weight))
    assert moved[0] == moved[1]


class Adapter(torch.nn.Module):
    """A frozen layer with a trained low-rank correction, as LoRA has."""

    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.Linear(6, 6).requires_grad_(requires_grad=False)
        self.down, self.up = torch.nn.Linear(6, 2, bias=False), torch.nn.Linear(2, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def test_adapters_train_and_resume_and_the_base_stays() -> None:
    """Four layers: after a step all eight adapter tensors moved and no base did; resumed in mid-batch, same bits."""
    outcomes = []
    for resumed in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[Adapter() for _ in range(4)])
        start = copy.deepcopy(model.state_dict())
        grads = augend.Accumulator(model)
        for seed in range(3):
            x = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))
            grads.backward(augend.Tally((model(x) ** 2).sum(dim=1), torch.full((5,), 6)))
            if resumed and seed == 1:
                state = grads.state_dict()
                grads = augend.Accumulator(model)
                grads.load_state_dict(state)
        grads.step(torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01))
        moved = {name for name, one in model.state_dict().items() if not torch.equal(start[name], one)}
        assert {f"{i}.{part}.weight" for i in range(4) for part in ("down", "up")} == moved
        outcomes.append(reference.digest(model.state_dict()))
    assert outcomes[0] == outcomes[1]


def test_a_loss_that_only_a_custom_function_knows() -> None:
    """A pairwise loss in one part and in four gives one gradient: nothing else divides."""
    generator = torch.Generator().manual_seed(0)
    better = torch.randint(-3, 4, (8, 3), generator=generator).float()
    worse = torch.randint(-3, 4, (8, 3), generator=generator).float()
    means = []
    for parts in (1, 4, 8):
        model = integer_model()
        grads = augend.Accumulator(model)
        for a, b in zip(better.chunk(parts), worse.chunk(parts), strict=True):
            margin = torch.relu(1 - (model(a) - model(b)))[:, 0]  # [rows]
            grads.backward(augend.losses.mean(margin))
        means.append(grads.finish_mean().gradients["weight"].tolist())
    assert means[0] == means[1] == means[2]


class Shared(torch.nn.Module):
    """Two parameters whose gradients autograd may hand out in one memory, through views."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.a.unsqueeze(0) + self.b.unsqueeze(0)) * x


def test_gradients_that_share_memory_have_sums_of_their_own() -> None:
    """Autograd hands one storage to both parameters; each has its own sum, and dividing one leaves the other."""
    model = Shared()
    grads = augend.Accumulator(model)
    for size in (1.0, 2.0):
        grads.backward(augend.Tally(model(torch.full((1, 3), size)).sum(dim=1), torch.tensor([1])))
    assert grads.pending["a"].data_ptr() != grads.pending["b"].data_ptr()
    grads.finish()
    assert [[1.5] * 3] * 2 == [model.a.grad.tolist(), model.b.grad.tolist()]


def test_a_callers_buffers_can_be_used_again() -> None:
    """Counts and totals are read at finish, and are then what they were at backward."""
    model = integer_model()
    grads = augend.Accumulator(model)
    count = torch.empty(2, dtype=torch.int64)
    for items in (1, 3):
        count.fill_(items)
        total = model(torch.ones(2, 3))[:, 0] * items  # 6 a row and item
        grads.backward(augend.Tally(total, count))
        with torch.no_grad():
            total.zero_()
    done = grads.finish()
    assert (8, 6.0) == (done.count, done.loss.value)


def test_a_mean_beyond_the_work_dtype_is_judged() -> None:
    """A small weight can make a finite float32 sum an infinite mean: named, skipped, or let through knowingly."""
    for policy in ("raise", "skip", "allow"):
        for finish in ("finish", "finish_mean"):
            model = integer_model()
            grads = augend.Accumulator(model)
            total = model(torch.full((2, 3), 1e35))[:, 0]
            grads.backward(augend.Tally(total, torch.full((2,), 2.0**-20)))
            if policy == "raise":
                with pytest.raises(
                    augend.errors.NonFiniteError, match=r"'weight' reaches 1\.0\d*e\+41, which torch.flo"
                ):
                    getattr(grads, finish)()
            else:
                assert (policy == "skip") == getattr(grads, finish)(nonfinite=policy).skipped


def test_parameters_with_gaps_or_borrowed_memory_are_refused() -> None:
    """A slice with gaps, a trained parameter over a frozen one's memory, and memory shared later are all named."""
    base = torch.zeros(4, 6)
    with pytest.raises(augend.errors.ContractError, match=r"'0' of strides \[6, 1\] has gaps in memory"):
        augend.Accumulator(torch.nn.ParameterList([torch.nn.Parameter(base[:, :3])]))
    flat = torch.zeros(8)
    frozen = torch.nn.Parameter(flat, requires_grad=False)
    with pytest.raises(augend.errors.ContractError, match="two objects over the same memory"):
        augend.Accumulator(torch.nn.ParameterList([torch.nn.Parameter(flat[2:4]), frozen]))
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(3)) for _ in range(2)])
    grads = augend.Accumulator(model)
    model[0].data = torch.zeros(3)  # new memory of its own is fine
    grads.add({"0": torch.ones(3)}, 1)
    model[1].data = model[0].data
    with pytest.raises(augend.errors.ContractError, match="'0' and '1' are two objects over the same memory"):
        grads.add({"0": torch.ones(3)}, 1)


def test_counts_may_be_numbers_of_numpy() -> None:
    """A count given to add may be any real number, numpy's too."""
    model = integer_model()
    grads = augend.Accumulator(model)
    for count in (np.int64(3), np.float32(0.5), 2, 0.5):
        grads.add({"weight": torch.ones(1, 3)}, count)
    assert 6 == grads.state.count


def test_an_optimizer_that_needs_a_closure_is_refused_before_anything_changes() -> None:
    """Whatever its name: a step with a required argument cannot be called, and the window is kept."""

    class Needy(torch.optim.SGD):
        def step(self, closure):
            return super().step(closure)

    model = integer_model()
    grads = augend.Accumulator(model)
    grads.add({"weight": torch.ones(1, 3)}, 1)
    with pytest.raises(augend.errors.ContractError, match="Needy evaluates the model again"):
        grads.step(Needy(model.parameters(), lr=0.1))
    assert 1 == grads.finish().count
