"""Losses as tallies: against torch in float64, for any cut of the rows, and with anything behind a mask."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from augend import losses
from augend.errors import TallyError

U32 = 2.0**-24
U64 = 2.0**-53
NOTHING = -100


def gamma(steps, unit):
    """Higham 2002, section 3.1: the relative error of a chain of `steps` roundings."""
    return steps * unit / (1 - steps * unit)


def close(expected, actual, magnitudes, steps, unit=U64):
    """Whether two sums of the same numbers, each of at most `steps` roundings, agree within their bound."""
    bound = 2 * gamma(steps, unit) * float(magnitudes.detach().abs().sum())
    return bool((expected - actual).detach().abs().max() <= bound) if expected.numel() else actual.numel() == 0


@st.composite
def scored(draw, *, dtype=torch.float64, max_rows=6):
    """Draw logits [rows, items, classes] and labels [rows, items], of which any part is masked."""
    rows, items = draw(st.integers(1, max_rows)), draw(st.integers(1, 40))
    classes = draw(st.sampled_from([2, 3, 16, 17]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    logits = torch.randn(rows, items, classes, generator=generator, dtype=torch.float64).mul(4).to(dtype)
    labels = torch.randint(0, classes, (rows, items), generator=generator)
    kept = draw(st.sampled_from([0.0, 0.3, 1.0]))
    labels[torch.rand(rows, items, generator=generator) >= kept] = NOTHING
    return logits, labels


def weights_like(labels, seed=0):
    """Return weights with exact zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 5, labels.shape, generator=generator).double() / 4


ELEMENTWISE = {
    "mse": losses.mse,
    "l1": losses.l1,
    "binary_cross_entropy": lambda a, b, **kw: losses.binary_cross_entropy(a, b.sigmoid(), **kw),
    "mean": lambda a, b, **kw: losses.mean(a * b, **kw),
}
# What the rounding errors of one item are relative to: its loss, and what cancels on the way to it.
MAGNITUDES = {
    "mse": lambda a, b: (a.abs() + b.abs()).square(),
    "l1": lambda a, b: a.abs() + b.abs(),
    "binary_cross_entropy": lambda a, b: 2 * a.abs() + 1,
    "mean": lambda a, b: (a * b).abs(),
}
BY_TORCH = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "binary_cross_entropy": lambda a, b, **kw: F.binary_cross_entropy_with_logits(a, b.sigmoid(), **kw),
    "mean": lambda a, b, reduction: (a * b).mean() if reduction == "mean" else (a * b).sum(),
}


class TestCrossEntropy:
    """`losses.cross_entropy`."""

    @given(scored(), st.booleans(), st.sampled_from([0.0, 0.1, 1.0]))
    def test_equals_torch(self, drawn, weighted, smoothing):
        """Total over count is torch's reduction="mean", and the total its "sum", with class weights and smoothing."""
        logits, labels = drawn
        classes = logits.shape[-1]
        by_class = (torch.arange(classes).double() + 1) / 4 if weighted else None
        tally = losses.cross_entropy(logits, labels, class_weights=by_class, label_smoothing=smoothing)
        expected = [
            F.cross_entropy(logits.flatten(0, 1), labels.flatten(), by_class, reduction=how, label_smoothing=smoothing)
            for how in ("sum", "mean")
        ]
        # A rounding for each item added, and per item those of the kernel's sums over classes with their weights.
        steps = labels.numel() + 3 * classes + 8
        magnitudes = tally.total.sum() + tally.count.sum()
        assert close(expected[0], tally.total.sum(), magnitudes, steps)
        if tally.count.sum() == 0:
            assert math.isnan(expected[1])
            assert torch.equal(torch.zeros_like(tally.total), tally.total)
        else:
            assert close(expected[1], tally.mean(), magnitudes / tally.count.sum(), 2 * steps)

    @given(scored())
    def test_item_weights_are_those_of_the_sum(self, drawn):
        """Weights multiply losses and are summed as the count, in float64; a weight of 0 is not scored."""
        logits, labels = drawn
        weights = weights_like(labels)
        by_class = torch.ones(logits.shape[-1], dtype=torch.float64) * 2
        tally = losses.cross_entropy(logits, labels, item_weights=weights)
        both = losses.cross_entropy(logits, labels, item_weights=weights, class_weights=by_class)
        each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape) * weights
        kept = weights * (labels != NOTHING)
        assert close(each.sum(1), tally.total, each, labels.shape[1] + 2)
        assert torch.equal(kept.sum(1), tally.count)  # multiples of 1/4: exact
        assert torch.float64 == tally.count.dtype
        assert torch.equal(2 * tally.total, both.total)  # doubling is exact
        assert torch.equal(2 * tally.count, both.count)

    @given(scored())
    def test_masks_and_integer_weights_keep_an_integer_count(self, drawn):
        """A bool weight is a mask, an integer weight repeats an item: the count stays int64."""
        logits, labels = drawn
        mask = weights_like(labels) > 0.5
        once = losses.cross_entropy(logits, labels.masked_fill(~mask, NOTHING))
        masked = losses.cross_entropy(logits, labels, item_weights=mask)
        thrice = losses.cross_entropy(logits, labels, item_weights=mask * 3)
        assert torch.equal(once.total, masked.total)
        assert torch.equal(once.count, masked.count)
        assert torch.equal(3 * once.count, thrice.count)
        assert torch.int64 == thrice.count.dtype
        assert close(3 * once.total, thrice.total, 3 * once.total, labels.shape[1] + 2)

    @given(scored(), st.booleans())
    def test_row_weights_are_spread_over_the_row(self, drawn, integer):
        """Weights [rows] mean the same as [rows, items] with equal items, bit for bit."""
        logits, labels = drawn
        by_row = weights_like(labels[:, 0]) * 4
        by_row = by_row.long() if integer else by_row
        spread = losses.cross_entropy(logits, labels, item_weights=by_row[:, None].expand(labels.shape))
        tally = losses.cross_entropy(logits, labels, item_weights=by_row)
        assert torch.equal(spread.total, tally.total)
        assert torch.equal(spread.count, tally.count)

    def test_another_ignore_index(self):
        """The ignored label is the caller's; it may also be one of the classes."""
        logits, labels = torch.randn(2, 3, 4), torch.tensor([[0, 1, 2], [1, 1, 3]])
        tally = losses.cross_entropy(logits, labels, ignore_index=1)
        assert torch.equal(torch.tensor([2, 1]), tally.count)
        assert torch.equal(losses.cross_entropy(logits, labels.masked_fill(labels == 1, NOTHING)).total, tally.total)

    def test_labels_of_one_item_a_row(self):
        """Plain classification: logits [rows, classes], labels [rows] of any integer dtype."""
        logits, labels = torch.randn(5, 3), torch.tensor([0, 2, 1, 1, 0])
        tally = losses.cross_entropy(logits, labels.to(torch.uint8))
        assert torch.equal(F.cross_entropy(logits, labels, reduction="none"), tally.total)
        assert torch.equal(torch.ones(5, dtype=torch.int64), tally.count)

    def test_a_label_that_is_no_class_is_an_error(self):
        """A label beyond the classes is found on the CPU, and nothing is scored instead."""
        with pytest.raises(IndexError, match="7"):
            losses.cross_entropy(torch.randn(2, 3), torch.tensor([0, 7]))


class TestCausalLm:
    """`losses.causal_lm`."""

    def test_the_count_is_what_was_scored(self):
        """Two rows of five labels have eight next tokens; a loss sum of 16 has the mean 2.0, not 1.6."""
        logits = torch.zeros(2, 5, 3)
        labels = torch.tensor([[0, 1, 2, 0, 1], [2, 2, 1, 0, 0]])
        logits[:, :-1].scatter_(2, labels[:, 1:, None], 200.0)  # e^-200 is 0 beside 1: a loss of exactly 0
        logits[0, 0] = torch.tensor([16.0, 0.0, -200.0])  # and one of exactly 16, because 1 + e^-16 adds half an ulp
        tally = losses.causal_lm(logits, labels)
        assert torch.equal(torch.tensor([16.0, 0.0]), tally.total)
        assert torch.equal(torch.tensor([4, 4]), tally.count)
        assert 2.0 == tally.mean()

    @given(scored())
    def test_equals_the_shift_by_hand(self, drawn):
        """Scoring logits[:, :-1] against labels[:, 1:] gives the same bits of every row, and the same gradient."""
        logits, labels = drawn
        ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
        tally = losses.causal_lm(ours, labels)
        by_hand = losses.cross_entropy(theirs[:, :-1], labels[:, 1:])
        assert torch.equal(by_hand.count, tally.count)
        assert close(by_hand.total, tally.total, by_hand.total, labels.shape[1])
        tally.total.sum().backward()
        by_hand.total.sum().backward()
        assert torch.equal(theirs.grad, ours.grad)

    def test_a_prompt_and_a_row_of_one_token_count_nothing(self):
        """Only labels that follow something and are not ignored are scored."""
        labels = torch.tensor([[NOTHING, NOTHING, 1, 2, NOTHING]])
        assert torch.equal(torch.tensor([2]), losses.causal_lm(torch.randn(1, 5, 3), labels).count)
        alone = losses.causal_lm(torch.randn(1, 1, 3), torch.tensor([[1]]))
        assert torch.equal(torch.tensor([0]), alone.count)
        assert torch.equal(torch.tensor([0.0]), alone.total)


class TestElementwise:
    """Losses whose every element is an item."""

    @pytest.mark.parametrize("name", ELEMENTWISE)
    @given(drawn=scored())
    def test_equals_torch(self, name, drawn):
        """The total is torch's "sum", total over count its "mean"."""
        prediction, target = drawn[0], drawn[0].flip(0, 1) / 3
        tally = ELEMENTWISE[name](prediction, target)
        steps, magnitudes = prediction.numel() + 16, MAGNITUDES[name](prediction, target).sum()
        assert prediction.numel() == tally.count.sum()
        assert close(BY_TORCH[name](prediction, target, reduction="sum"), tally.total.sum(), magnitudes, steps)
        expected = BY_TORCH[name](prediction, target, reduction="mean")
        assert close(expected, tally.mean(), magnitudes / prediction.numel(), steps + 1)

    @pytest.mark.parametrize("name", ELEMENTWISE)
    @given(drawn=scored())
    def test_weights(self, name, drawn):
        """A mask gives the total and integer count of what it shows; fractional weights are summed as the count."""
        prediction, target = drawn[0], drawn[0].flip(0, 1) / 3
        weights = weights_like(drawn[1])
        masked = ELEMENTWISE[name](prediction, target, item_weights=weights > 0)
        weighted = ELEMENTWISE[name](prediction, target, item_weights=weights)
        each = ELEMENTWISE[name](prediction.reshape(-1), target.reshape(-1)).total.view(prediction.shape)
        steps = each[0].numel() + 2
        assert close((each * (weights > 0)[..., None]).sum((1, 2)), masked.total, each, steps)
        assert torch.equal((weights > 0).sum(1) * prediction.shape[-1], masked.count)
        assert torch.int64 == masked.count.dtype
        assert close((each * weights[..., None]).sum((1, 2)), weighted.total, each, steps)
        assert torch.equal(weights.sum(1) * prediction.shape[-1], weighted.count)

    def test_sum_counts_rows(self):
        """`losses.sum` is for what is added within a row and averaged over rows."""
        tally = losses.sum(torch.tensor([[1.0, 5.0], [2.0, 2.0]], dtype=torch.bfloat16))
        assert torch.equal(torch.tensor([6.0, 4.0]), tally.total)
        assert torch.equal(torch.tensor([1, 1]), tally.count)
        assert 5.0 == tally.mean()


class TestKlDiv:
    """`losses.kl_div`."""

    @given(scored())
    def test_equals_torch(self, drawn):
        """The direction is KL(target || prediction), and total over count is torch's "batchmean" over items."""
        logits = drawn[0].flatten(0, 1)
        target = logits.flip(0, 1).softmax(-1)
        tally = losses.kl_div(logits, target)
        log_prediction = logits.log_softmax(-1)
        expected = F.kl_div(log_prediction, target, reduction="batchmean")
        magnitudes = torch.xlogy(target, target).abs() + (target * log_prediction).abs()
        assert torch.equal(torch.ones(len(logits), dtype=torch.int64), tally.count)
        assert close(expected, tally.mean(), magnitudes.sum() / len(logits), logits.numel() + 8)
        assert torch.all(tally.total >= -gamma(logits.numel() + 8, U64) * magnitudes.sum())
        assert torch.equal(
            losses.kl_div(drawn[0], drawn[0].softmax(-1)).count, torch.tensor([*drawn[1].shape[1:]] * len(drawn[1]))
        )

    def test_a_class_that_cannot_be_costs_nothing(self):
        """A target of 0 on a logit of -inf adds 0 to the total and to the gradient."""
        logits = torch.tensor([[0.0, 0.0, -math.inf]], requires_grad=True)
        tally = losses.kl_div(logits, torch.tensor([[1.0, 0.0, 0.0]]))
        tally.total.sum().backward()
        assert torch.equal(torch.tensor([2.0]).log(), tally.total)
        assert torch.equal(torch.tensor([[-0.5, 0.5, 0.0]]), logits.grad)

    def test_weights(self):
        """Weights stand for items, not classes."""
        logits, target = torch.zeros(2, 2, 2), torch.tensor([1.0, 0.0]).expand(2, 2, 2)
        tally = losses.kl_div(logits, target, item_weights=torch.tensor([[0.5, 0.0], [0.0, 0.0]]))
        assert torch.equal(torch.tensor([2.0, 1.0]).log() / 2, tally.total)
        assert torch.equal(torch.tensor([0.5, 0.0], dtype=torch.float64), tally.count)


class TestFromReductionNone:
    """`losses.from_reduction_none`."""

    @given(scored())
    def test_functions_and_modules(self, drawn):
        """A torch function and a torch module become the same tally, and keyword arguments pass through."""
        prediction, target = drawn[0], drawn[0].flip(0, 1)
        of_function = losses.from_reduction_none(F.huber_loss)(prediction, target, delta=0.5)
        of_module = losses.from_reduction_none(torch.nn.HuberLoss(reduction="none", delta=0.5))(prediction, target)
        expected = F.huber_loss(prediction, target, reduction="sum", delta=0.5)
        assert torch.equal(of_function.total, of_module.total)
        assert close(expected, of_function.total.sum(), expected, prediction.numel() + 4)
        assert prediction.numel() == of_function.count.sum()

    @given(scored())
    def test_ignored_targets(self, drawn):
        """With classes in dim 1, as torch has them, an ignored target counts nothing."""
        logits, labels = drawn
        wrapped = losses.from_reduction_none(F.cross_entropy, ignore_index=NOTHING)(logits.movedim(-1, 1), labels)
        ours = losses.cross_entropy(logits, labels)
        assert torch.equal(ours.count, wrapped.count)
        assert close(ours.total, wrapped.total, ours.total, labels.shape[1] + 2 * logits.shape[-1] + 8)

    def test_an_ignored_value_of_a_regression_sends_no_gradient(self):
        """A sentinel among real targets is cut off from total and gradient."""
        prediction = torch.tensor([[1.0, 2.0]], requires_grad=True)
        tally = losses.from_reduction_none(F.mse_loss, ignore_index=-1)(prediction, torch.tensor([[3.0, -1.0]]))
        tally.total.sum().backward()
        assert torch.equal(torch.tensor([4.0]), tally.total)
        assert torch.equal(torch.tensor([1]), tally.count)
        assert torch.equal(torch.tensor([[-4.0, 0.0]]), prediction.grad)

    def test_16_bit_arguments_are_widened(self):
        """The wrapped function sees float32, so the squares of bfloat16 differences are not rounded to 8 bits."""
        tally = losses.from_reduction_none(F.mse_loss)(torch.tensor([[1.0078125]]).bfloat16(), torch.zeros(1, 1))
        assert torch.equal(torch.tensor([1.0078125**2]), tally.total)


LOSSES = {
    "cross_entropy": losses.cross_entropy,
    "cross_entropy, smoothed": partial(losses.cross_entropy, label_smoothing=0.1),
    "cross_entropy, item weights": lambda x, y: losses.cross_entropy(x, y, item_weights=(y % 3 + 1) / 3),
    "cross_entropy, class weights": lambda x, y: losses.cross_entropy(
        x, y, class_weights=torch.arange(x.shape[-1]).float() / 3, item_weights=(y % 3 + 1) / 3
    ),
    "causal_lm": losses.causal_lm,
    "binary_cross_entropy": lambda x, y: losses.binary_cross_entropy(x, x.flip(-1).softmax(-1), item_weights=y % 3),
    "mse": lambda x, y: losses.mse(x, x.flip(-1) / 3, item_weights=(y % 3) / 3),
    "l1": lambda x, y: losses.l1(x, x.flip(-1) / 3),
    "kl_div": lambda x, y: losses.kl_div(x, x.flip(-1).softmax(-1)),
    "mean": lambda x, y: losses.mean(x),
    "sum": lambda x, y: losses.sum(x),
    "from_reduction_none": lambda x, y: losses.from_reduction_none(F.huber_loss)(x, x.flip(-1)),
}


class TestCuts:
    """The rows are a sum over rows, however they are cut."""

    @pytest.mark.parametrize("name", LOSSES)
    @given(drawn=scored(dtype=torch.float32), data=st.data())
    def test_rows_do_not_depend_on_their_neighbours(self, name, drawn, data):
        """Any order and any cut of the rows gives bitwise the same totals, counts and gradients of every row."""
        logits, labels = drawn
        order = torch.tensor(data.draw(st.permutations(range(len(logits)))))
        cut = data.draw(st.integers(0, len(logits)))
        whole, moved = logits.clone().requires_grad_(), logits[order].requires_grad_()
        expected = LOSSES[name](whole, labels)
        expected.total.sum().backward()
        parts = [
            LOSSES[name](x, y)
            for x, y in zip(moved.tensor_split([cut]), labels[order].tensor_split([cut]), strict=True)
        ]
        for part in parts:
            part.total.sum().backward()
        assert torch.equal(expected.total[order], torch.cat([part.total for part in parts]))
        assert torch.equal(expected.count[order], torch.cat([part.count for part in parts]))
        assert torch.equal(whole.grad[order], moved.grad)

    @pytest.mark.parametrize("threads", [1, 2])
    def test_a_long_row_alone(self, threads):
        """A single row of many items is added as among others: torch would share its sum out among threads."""
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            values = torch.randn(3, 100_003, generator=torch.Generator().manual_seed(0))
            alone = torch.cat([losses.mean(row).total for row in values.split(1)])
            together = losses.mean(values).total
        finally:
            torch.set_num_threads(before)
        assert torch.equal(together, alone)

    def test_the_layout_of_the_input_does_not_matter(self):
        """Items that lie apart in memory are added in the same order as items side by side."""
        values = torch.randn(37, 5, generator=torch.Generator().manual_seed(0))
        assert torch.equal(losses.mean(values).total, losses.mean(values.t().contiguous().t()).total)

    @pytest.mark.parametrize("name", LOSSES)
    def test_no_rows(self, name):
        """A micro-batch without rows has a tally without rows, and its graph."""
        logits = torch.zeros(0, 3, 4, requires_grad=True)
        tally = LOSSES[name](logits, torch.zeros(0, 3, dtype=torch.int64))
        tally.total.sum().backward()
        assert [0] == list(tally.total.shape)
        assert [0] == list(tally.count.shape)
        assert logits.shape == logits.grad.shape


MASKED = {
    "cross_entropy": lambda x, hidden: losses.cross_entropy(
        x, torch.zeros(hidden.shape, dtype=torch.int64).masked_fill(hidden, NOTHING)
    ),
    "cross_entropy, smoothed": lambda x, hidden: losses.cross_entropy(
        x, torch.zeros(hidden.shape, dtype=torch.int64).masked_fill(hidden, NOTHING), label_smoothing=0.1
    ),
    "cross_entropy, item weights": lambda x, hidden: losses.cross_entropy(
        x, torch.zeros(hidden.shape, dtype=torch.int64), item_weights=torch.ones(hidden.shape).masked_fill(hidden, 0)
    ),
    "cross_entropy, both weights": lambda x, hidden: losses.cross_entropy(
        x,
        torch.zeros(hidden.shape, dtype=torch.int64).masked_fill(hidden, NOTHING),
        item_weights=torch.ones(hidden.shape).masked_fill(hidden, math.nan),
        class_weights=torch.ones(x.shape[-1]),
    ),
    "causal_lm": lambda x, hidden: losses.causal_lm(
        x, torch.zeros(hidden.shape, dtype=torch.int64).masked_fill(hidden, NOTHING).roll(1, 1)
    ),
    "binary_cross_entropy": lambda x, hidden: losses.binary_cross_entropy(x, torch.ones(x.shape), item_weights=~hidden),
    "mse": lambda x, hidden: losses.mse(x, torch.ones(x.shape), item_weights=~hidden),
    "mse, target": lambda x, hidden: losses.mse(torch.ones(x.shape), x, item_weights=~hidden),
    "l1": lambda x, hidden: losses.l1(x, torch.ones(x.shape), item_weights=(~hidden).float()),
    "kl_div": lambda x, hidden: losses.kl_div(x, torch.ones(x.shape) / x.shape[-1], item_weights=~hidden),
    "kl_div, target": lambda x, hidden: losses.kl_div(x, x.detach().square(), item_weights=~hidden),
    "mean": lambda x, hidden: losses.mean(x, item_weights=~hidden),
}


class TestMasks:
    """What is not scored is not there."""

    @pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("name", MASKED)
    @settings(max_examples=15)
    @given(drawn=scored(dtype=torch.float32))
    def test_poison_behind_a_mask_stays_there(self, name, poison, drawn):
        """Inf and nan at hidden items change no bit of total, count and gradient, and get a gradient of exactly 0."""
        clean, hidden = drawn[0], drawn[1] == NOTHING
        if name == "causal_lm":
            hidden[:, -1] = True  # the last logits have nothing to predict
        results = []
        for values in (clean.clone(), clean.masked_fill(hidden[..., None], poison)):
            values.requires_grad_()
            tally = MASKED[name](values, hidden)
            tally.total.sum().backward()
            results.append((tally.total.detach(), tally.count, values.grad))
        assert not results[1][2][hidden].any()
        for expected, actual in zip(*results, strict=True):
            kept = ~hidden if expected.dim() == 3 else slice(None)
            assert torch.equal(expected[kept], actual[kept])

    @pytest.mark.parametrize("name", MASKED)
    def test_all_masked(self, name):
        """Rows without any scored item are exact zeros, never 0/0, and keep their graph."""
        logits = torch.full((2, 3, 4), math.nan, requires_grad=True)
        tally = MASKED[name](logits, torch.ones(2, 3, dtype=torch.bool))
        tally.total.sum().backward()
        assert tally.total.requires_grad
        assert torch.equal(torch.zeros(2), tally.total.detach())
        assert not tally.count.any()
        assert torch.equal(torch.zeros(2, 3, 4), logits.grad)

    @pytest.mark.parametrize("name", MASKED)
    @pytest.mark.parametrize("batched", ["both", "values", "mask"])
    @pytest.mark.parametrize("per_row", [True, False])
    def test_vmap(self, name, batched, per_row):
        """Under torch.func.vmap totals and gradients are those of a loop, whichever argument is batched."""
        values = torch.randn(3, 2, 5, 4, dtype=torch.float64)
        hidden = torch.rand(3, 2, 5) < 0.4
        dims = {"both": (0, 0), "values": (0, None), "mask": (None, 0)}[batched]
        values, hidden = (values if dims[0] == 0 else values[0]), (hidden if dims[1] == 0 else hidden[0])

        def total(values, hidden):
            return MASKED[name](values, hidden).total.sum()

        pairs = [(values if dims[0] is None else values[i], hidden if dims[1] is None else hidden[i]) for i in range(3)]
        if per_row:
            actual = torch.func.vmap(torch.func.grad(total), in_dims=dims)(values, hidden)
            expected = torch.stack([torch.func.grad(total)(*pair) for pair in pairs])
        else:
            leaf, other = values.clone().requires_grad_(), values.clone().requires_grad_()
            torch.func.vmap(total, in_dims=dims)(leaf, hidden).sum().backward()
            for i in range(3):
                total(other if dims[0] is None else other[i], pairs[i][1]).backward()
            actual, expected = leaf.grad, other.grad
        assert (expected - actual).abs().max() <= 64 * U64 * expected.abs().max()

    def test_a_second_derivative(self):
        """A gradient of the gradient passes the mask too: zero where hidden, torch's own elsewhere."""
        logits = torch.randn(1, 3, 4, dtype=torch.float64, requires_grad=True)
        labels = torch.tensor([[0, NOTHING, 1]])
        total = losses.cross_entropy(logits, labels).total
        (kept,) = torch.autograd.grad(total, logits, create_graph=True)
        (plain,) = torch.autograd.grad(losses.cross_entropy(logits, labels).total, logits)
        assert torch.equal(plain, kept)
        assert torch.autograd.gradgradcheck(lambda x: losses.cross_entropy(x, labels).total, logits)


LABELS = torch.tensor([[0, 1, 2, NOTHING, 1], [2, 0, 1, 1, NOTHING]])
NARROW = {
    "cross_entropy": lambda x: losses.cross_entropy(x, LABELS, class_weights=torch.arange(3).to(x.dtype)),
    "causal_lm": lambda x: losses.causal_lm(x, LABELS),
    "binary_cross_entropy": lambda x: losses.binary_cross_entropy(x, x.detach().flip(0)),
    "mse": lambda x: losses.mse(x, x.detach().flip(0)),
    "l1": lambda x: losses.l1(x, x.detach().flip(0)),
    "kl_div": lambda x: losses.kl_div(x, x.detach().flip(0)),
    "mean": lambda x: losses.mean(x, item_weights=x.detach()),
    "sum": losses.sum,
    "from_reduction_none": lambda x: losses.from_reduction_none(F.huber_loss)(x, x.detach().flip(0)),
}


class TestDtypes:
    """16-bit values are scored in float32."""

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("name", NARROW)
    def test_upcast(self, name, dtype):
        """A 16-bit input has the tally of its float32 copy, bit for bit, and the gradient of that, in its own dtype."""
        narrow = torch.rand(2, 5, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
        wide = narrow.float().requires_grad_()
        narrow.requires_grad_()
        expected, actual = NARROW[name](wide), NARROW[name](narrow)
        expected.total.sum().backward()
        actual.total.sum().backward()
        assert torch.float32 == actual.total.dtype
        assert torch.equal(expected.total, actual.total)
        assert torch.equal(expected.count, actual.count)
        assert torch.equal(wide.grad.to(dtype), narrow.grad)

    def test_float64_stays(self):
        """float64 is not narrowed."""
        assert torch.float64 == losses.mean(torch.ones(1, 2, dtype=torch.float64)).total.dtype


MISFITS = {
    "labels of another shape": (
        lambda: losses.cross_entropy(torch.zeros(2, 3, 4), torch.zeros(2, 4).long()),
        r"\[2, 3, 4\].*\[2, 4\].*last dim",
    ),
    "classes in dim 1": (lambda: losses.cross_entropy(torch.zeros(2, 4, 3), torch.zeros(2, 3).long()), "movedim"),
    "no classes": (lambda: losses.cross_entropy(torch.zeros(2), torch.zeros(()).long()), r"\[2\]"),
    "labels that are floats": (lambda: losses.cross_entropy(torch.zeros(2, 3), torch.zeros(2)), "float32"),
    "labels that are bool": (lambda: losses.cross_entropy(torch.zeros(2, 3), torch.zeros(2).bool()), "bool"),
    "labels that are complex": (lambda: losses.cross_entropy(torch.zeros(2, 3), torch.zeros(2) * 1j), "complex"),
    "integer logits": (lambda: losses.cross_entropy(torch.zeros(2, 3).long(), torch.zeros(2).long()), "int64"),
    "a mean": (lambda: losses.mean(torch.tensor(2.0)), "0-d"),
    "too much smoothing": (
        lambda: losses.cross_entropy(torch.zeros(1, 2), torch.tensor([0]), label_smoothing=1.5),
        "1.5",
    ),
    "nan as smoothing": (
        lambda: losses.cross_entropy(torch.zeros(1, 2), torch.tensor([0]), label_smoothing=math.nan),
        "nan",
    ),
    "class weights": (
        lambda: losses.cross_entropy(torch.zeros(1, 2), torch.tensor([0]), class_weights=torch.ones(3)),
        r"\[3\].*\[1, 2\]",
    ),
    "learned class weights": (
        lambda: losses.cross_entropy(
            torch.zeros(1, 2), torch.tensor([0]), class_weights=torch.ones(2, requires_grad=True)
        ),
        "class_weights.*detach",
    ),
    "learned item weights": (
        lambda: losses.mean(torch.zeros(1, 2), item_weights=torch.ones(1, requires_grad=True)),
        "item_weights.*detach",
    ),
    "item weights": (lambda: losses.mean(torch.zeros(2, 3), item_weights=torch.ones(3)), r"\[3\].*\[2, 3\]"),
    "a number as item weights": (
        lambda: losses.mean(torch.zeros(2, 3), item_weights=torch.tensor(1.0)),
        r"\[\].*\[2, 3\]",
    ),
    "logits of one row": (lambda: losses.causal_lm(torch.zeros(2, 3), torch.zeros(2).long()), r"\[2, 3\]"),
    "labels of another length": (
        lambda: losses.causal_lm(torch.zeros(2, 3, 4), torch.zeros(2, 2).long()),
        r"\[2, 3, 4\].*\[2, 2\]",
    ),
    "targets": (lambda: losses.binary_cross_entropy(torch.zeros(2, 3), torch.zeros(2)), r"\[2, 3\].*\[2\]"),
    "mse": (lambda: losses.mse(torch.zeros(2, 1), torch.zeros(2)), r"\[2, 1\].*\[2\]"),
    "l1": (lambda: losses.l1(torch.zeros(2, 1), torch.zeros(2)), r"\[2, 1\].*\[2\]"),
    "kl_div": (lambda: losses.kl_div(torch.zeros(2, 3), torch.zeros(2, 4)), r"\[2, 3\].*\[2, 4\]"),
    "kl_div without classes": (lambda: losses.kl_div(torch.zeros(2), torch.zeros(2)), r"\[2\]"),
    "a module that averages": (
        lambda: losses.from_reduction_none(torch.nn.MSELoss())(torch.zeros(2, 1), torch.zeros(2, 1)),
        "reduction='none'",
    ),
    "a target to ignore, by name": (
        lambda: losses.from_reduction_none(F.mse_loss, ignore_index=0)(torch.zeros(2), target=torch.zeros(2)),
        "NoneType",
    ),
    "a target of another shape": (
        lambda: losses.from_reduction_none(F.cross_entropy, ignore_index=0)(torch.zeros(2, 3), torch.ones(2, 3) / 3),
        r"\[2\].*\[2, 3\]",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_is_refused_with_its_shapes(name):
    """Every argument that does not fit is a TallyError that says what came."""
    call, message = MISFITS[name]
    with pytest.raises(TallyError, match=message):
        call()
