"""Adapters: they change nothing at first, learn alone, and become part of the weights."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import augend
from augend.errors import ContractError
from augend.models import MLP, Llama, export, lora, lora_state, merge_lora

TINY = {"vocab_size": 11, "width": 16, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 24}
U = 2.0**-53
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def tokens(seed=0):
    """Draw rows of tokens."""
    return torch.randint(0, 11, (3, 6), generator=torch.Generator().manual_seed(seed))


def adapted(seed=0, **options):
    """Make a Llama whose adapters have left their zeros."""
    torch.manual_seed(seed)
    model = Llama(**TINY)
    lora(model, **{"rank": 3, "alpha": 5.0, **options})
    with torch.no_grad():
        for tensor in lora_state(model).values():
            tensor.normal_(std=0.2)
    return model


def trained(model, steps, *, dtype="float32", state=None, seed=0):
    """Take so many steps on rows of tokens, from a saved state where there is one, and return all that is left."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    grads = augend.Accumulator(model, dtype=dtype)
    data = augend.Batches(tokens(seed), batch_size=2, microbatch_size=1, seed=5)
    data.register(grads)
    if state is not None:
        model.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
        data.load_state_dict(state[2])
    batches = iter(data)
    for _ in range(steps):
        batch = next(batches)
        for microbatch in grads.microbatches(batch):
            grads.backward(augend.losses.causal_lm(model(microbatch[0]), microbatch[0]))
        grads.step(optimizer)
    return copy.deepcopy((model.state_dict(), optimizer.state_dict(), data.state_dict()))


class TestAdding:
    """What `lora` does to a model."""

    @given(st.integers(0, 99), st.lists(st.sampled_from(PROJECTIONS), min_size=1, unique=True))
    @settings(max_examples=15)
    def test_at_first_nothing_changes(self, seed, targets):
        """Outputs, names and values of all that was there are the same to the bit; what comes is two matrices each."""
        torch.manual_seed(seed)
        model = Llama(**TINY)
        before, out = copy.deepcopy(model.state_dict()), model(tokens())
        lora(model, rank=2, targets=targets)
        after = model.state_dict()
        assert torch.equal(out, model(tokens()))
        assert all(torch.equal(value, after[name]) for name, value in before.items())
        expected = {
            f"{name.removesuffix('.weight')}.lora_{part}.weight"
            for name in before
            for part in "ab"
            if name.split(".")[-2] in targets
        }
        assert expected == after.keys() - before.keys() == lora_state(model).keys()
        assert expected == {name for name, parameter in model.named_parameters() if parameter.requires_grad}

    def test_equals_its_formula(self):
        """In float64 a layer is W x + alpha / rank · B A x, up to the rounding of three sums of 16, 3 and 2 products.

        Each is off by at most γ(n) times the sum of the products' sizes (Higham 2002, §3.1), n ≤ 16 + 3 + 2 + 2 along
        the longest way; both sides round, hence twice that.
        """
        layer = nn.Sequential(nn.Linear(16, 8)).double()
        lora(layer, rank=3, alpha=7.0, targets=["0"])
        nn.init.normal_(layer[0].lora_b.weight)
        x = torch.randn(5, 16, dtype=torch.float64)
        a, b, w = layer[0].lora_a.weight, layer[0].lora_b.weight, layer[0].weight
        expected = x @ w.T + layer[0].bias + 7 / 3 * (x @ a.T @ b.T)
        sizes = x.abs() @ w.abs().T + layer[0].bias.abs() + 7 / 3 * (x.abs() @ a.abs().T @ b.abs().T)
        assert ((layer(x) - expected).abs() <= 2 * 23 * U / (1 - 23 * U) * sizes).all()

    def test_alpha_is_the_rank_where_it_is_not_given(self):
        """Then the adapter's output counts once."""
        model = MLP([4, 4])
        lora(model, rank=4, targets=["layers.0"])
        assert 1.0 == model.layers[0].scale

    def test_patterns_choose_among_full_names(self):
        """A pattern fits the last name, or the full one."""
        model = Llama(**TINY)
        lora(model, rank=1, targets=["model.layers.1.*.?_proj", "up_*"])
        names = {name.removesuffix(".lora_a.weight") for name in lora_state(model) if "lora_a" in name}
        expected = {f"model.layers.1.self_attn.{name}_proj" for name in "qkvo"}
        assert expected | {f"model.layers.{layer}.mlp.up_proj" for layer in range(2)} == names

    def test_a_layer_at_two_places_has_one_adapter(self):
        """Both places go on to share it, and share the plain layer again after merging."""
        layer = nn.Linear(3, 3)
        model = nn.Sequential(layer, nn.Tanh(), layer)
        lora(model, rank=1, targets=["*"])
        assert model[0] is model[2]
        merge_lora(model)
        assert model[0] is model[2] is layer

    def test_the_output_of_a_llama_may_be_adapted(self):
        """An untied output goes through its adapter."""
        model = Llama(**TINY, tied=False)
        lora(model, rank=2, targets=["lm_head"])
        model(tokens()).square().sum().backward()
        assert model.lm_head.lora_b.weight.grad.abs().max() > 0

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
    def test_adapters_are_of_their_layers_dtype(self, dtype):
        """As are their outputs; a layer without a bias stays one, and the mode is the layer's."""
        model = Llama(**TINY).to(dtype).eval()
        lora(model, rank=2)
        assert {dtype} == {parameter.dtype for parameter in model.parameters()}
        assert dtype == model(tokens()).dtype
        assert {False} == {module.training for module in model.modules()}

    def test_dropout_is_for_training(self):
        """Two passes differ in training, and only there."""
        model = adapted(dropout=0.5)
        assert not torch.equal(model(tokens()), model(tokens()))
        model.eval()
        assert torch.equal(model(tokens()), model(tokens()))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"rank": 0}, "rank must be at least 1; got 0"),
            ({"alpha": 0.0}, r"alpha must be positive and finite; got 0\.0"),
            ({"alpha": math.inf}, "alpha.*inf"),
            ({"dropout": 1.0}, r"dropout.*got 1\.0"),
            ({"targets": ["q_prj"]}, "'q_prj' fits no linear layer; did you mean q_proj[?] .*called: down_proj, gate"),
            ({"targets": ["q_proj", "norm"]}, "'norm' fits no linear layer"),
            ({"targets": []}, r"names of linear layers.*got \[\]"),
            ({"targets": "q_proj"}, "names of linear layers.*got 'q_proj'"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, options, message):
        """The message names it, and the model is as it was."""
        model = Llama(**TINY)
        with pytest.raises(ContractError, match=message):
            lora(model, **{"rank": 2, **options})
        assert all(parameter.requires_grad for parameter in model.parameters())
        assert 20 == len(model.state_dict())

    def test_adapters_upon_adapters_are_refused(self):
        """They would be merged into the wrong weights."""
        with pytest.raises(ContractError, match=r"layers\.0\.self_attn\.q_proj has an adapter already; call merge"):
            lora(adapted(), rank=2)

    def test_a_model_that_is_one_layer_has_no_name_to_target(self):
        """There is nothing that it could be replaced in."""
        with pytest.raises(ContractError, match="fits no linear layer; the model's are called: none"):
            lora(nn.Linear(2, 2), rank=1, targets=["*"])


class TestTraining:
    """What learns, and what does not."""

    def test_all_adapters_get_gradients_and_the_base_none(self):
        """In all layers, through the accumulator."""
        model = adapted()
        grads = augend.Accumulator(model)
        grads.backward(augend.losses.causal_lm(model(tokens()), tokens()))
        assert lora_state(model).keys() == grads.pending.keys()
        assert all(gradient.abs().max() > 0 for gradient in grads.pending.values())

    @pytest.mark.parametrize("dtype", ["float32", "exact"])
    def test_the_base_is_unchanged_to_the_bit(self, dtype):
        """After steps with weight decay, every adapter has moved and nothing else."""
        model = adapted()
        before = copy.deepcopy(model.state_dict())
        after, state, _ = trained(model, 3, dtype=dtype)
        moved = {name for name, value in after.items() if not torch.equal(before[name], value)}
        assert lora_state(model).keys() == moved
        assert len(moved) == len(state["state"])

    def test_resume_is_bitwise(self):
        """Two steps, saved, loaded into a model built anew, and two more: the weights of four steps in a row."""
        whole, _, _ = trained(adapted(), 4)
        saved = trained(adapted(), 2)
        parts, _, _ = trained(adapted(seed=7), 2, state=saved)
        assert all(torch.equal(value, parts[name]) for name, value in whole.items())

    def test_state_of_adapters_alone(self):
        """`lora_state` taken to another model of the same base is the same model."""
        first, second = adapted(), adapted()
        trained(first, 2)
        second.load_state_dict(lora_state(first), strict=False)
        assert torch.equal(first(tokens()), second(tokens()))


class TestMerging:
    """From adapters to weights."""

    @given(st.integers(0, 99), st.sampled_from([torch.float32, torch.float64]))
    @settings(max_examples=20)
    def test_a_merged_weight_is_rounded_once(self, seed, dtype):
        """W + scale · B A in float64, off by half a unit of the dtype and the rounding of sums in float64."""
        model = adapted(seed).to(dtype)
        state = {name: value.double() for name, value in copy.deepcopy(model.state_dict()).items()}
        merge_lora(model)
        half_unit = torch.finfo(dtype).eps / 2
        for name in PROJECTIONS:
            path = next(each for each in state if each.endswith(f"1.{part(name)}.{name}.weight")).removesuffix(
                ".weight"
            )
            a, b, w = (state[f"{path}.{each}"] for each in ("lora_a.weight", "lora_b.weight", "weight"))
            sizes = w.abs() + 5 / 3 * (b.abs() @ a.abs())
            bound = half_unit * (w + 5 / 3 * (b @ a)).abs() * (1 + half_unit) + 12 * U * sizes
            actual = model.state_dict()[f"{path}.weight"].double()
            assert ((actual - (w + 5 / 3 * (b @ a))).abs() <= bound).all()

    @given(st.integers(0, 99))
    @settings(max_examples=15)
    def test_merged_equals_unmerged(self, seed):
        """The logits are those of the unmerged model, within 1e-5 of their size in float32.

        To first order both models' errors are proportional to the unit roundoff, so in float64 they may differ by 2^-29
        of what either is off in float32; a factor of 64 allows for errors that happened to cancel there.
        """
        model = adapted(seed)
        merged = copy.deepcopy(model)
        merge_lora(merged)
        exact = copy.deepcopy(model).double()
        expected = exact(tokens(seed))
        single, twin = model(tokens(seed)).double(), merged(tokens(seed)).double()
        assert (twin - single).abs().max() <= 1e-5 * expected.abs().max()
        merge_lora(exact)
        error = torch.maximum((single - expected).abs().max(), (twin - expected).abs().max())
        assert (exact(tokens(seed)) - expected).abs().max() <= 64 * 2.0**-29 * error

    def test_a_merged_model_is_a_plain_one(self):
        """Names, types and state dict are a Llama's own, all frozen; it takes new adapters, and is exported."""
        model = adapted()
        merge_lora(model)
        assert Llama(**TINY).state_dict().keys() == model.state_dict().keys()
        assert nn.Linear is type(model.model.layers[0].self_attn.q_proj)
        assert not any(parameter.requires_grad for parameter in model.parameters())
        lora(model, rank=1)
        assert 2 * 7 * 2 == len(lora_state(model))

    def test_adapters_are_no_part_of_an_export(self, tmp_path):
        """A model of other programs would leave them out in silence; merged, it is written."""
        model = adapted()
        with pytest.raises(ContractError, match=r"q_proj has an adapter.*call merge_lora\(\) first"):
            export(model, tmp_path / "out")
        assert not (tmp_path / "out").exists()
        merge_lora(model)
        export(model, tmp_path / "out")
        assert (tmp_path / "out" / "config.json").is_file()

    @pytest.mark.parametrize("function", [merge_lora, lora_state])
    def test_a_model_without_adapters_is_refused(self, function):
        """There is nothing to merge or to return."""
        with pytest.raises(ContractError, match=r"no adapters.*call lora\(\)"):
            function(MLP([2, 2]))


def part(name):
    """Return the part of a layer that a projection is in."""
    return "self_attn" if name in PROJECTIONS[:4] else "mlp"
