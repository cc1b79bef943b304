"""The Llama: against the same formulas written as loops in float64, and its own promises."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from augend.errors import ContractError
from augend.models import Llama

TINY = {"vocab_size": 11, "width": 16, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 24}


def rms(x, weight, eps):
    """Zhang & Sennrich 2019, eq. 4, for one vector."""
    return [w * v / math.sqrt(sum(u * u for u in x) / len(x) + eps) for v, w in zip(x, weight, strict=True)]


def times(weight, x):
    """Return the product of a matrix, as lists, and a vector."""
    return [sum(w * v for w, v in zip(row, x, strict=True)) for row in weight]


def turned(x, position, theta):
    """Rotate the pairs (i, i + half) of one head: Su et al. 2021, eq. 15, in the order of Hugging Face."""
    half = len(x) // 2
    out = [0.0] * len(x)
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def attended(queries, keys, values):
    """Causal attention of one head, each [length][head_width]."""
    out = []
    for position, query in enumerate(queries):
        scores = [
            sum(a * b for a, b in zip(query, k, strict=True)) / math.sqrt(len(query)) for k in keys[: position + 1]
        ]
        weights = [math.exp(score - max(scores)) for score in scores]
        mixed = [sum(w * v[i] for w, v in zip(weights, values, strict=False)) for i in range(len(query))]
        out.append([m / sum(weights) for m in mixed])
    return out


def by_loops(state, tokens, *, heads, kv_heads, theta=10_000.0, eps=1e-5):
    """Compute the logits of one row from the named weights, in Python floats."""
    at = {name: weight.double().tolist() for name, weight in state.items()}
    stream = [at["model.embed_tokens.weight"][token] for token in tokens]
    size = len(stream[0]) // heads
    for layer in range(1 + max(int(name.split(".")[2]) for name in at if ".layers." in name)):
        w = {name.removeprefix(f"model.layers.{layer}."): value for name, value in at.items()}
        normed = [rms(x, w["input_layernorm.weight"], eps) for x in stream]
        q, k, v = ([times(w[f"self_attn.{n}_proj.weight"], x) for x in normed] for n in "qkv")
        mixed = [[] for _ in tokens]
        for head in range(heads):
            group = head // (heads // kv_heads)
            ours, shared = slice(head * size, (head + 1) * size), slice(group * size, (group + 1) * size)
            queries = [turned(x[ours], i, theta) for i, x in enumerate(q)]
            keys = [turned(x[shared], i, theta) for i, x in enumerate(k)]
            for position, x in enumerate(attended(queries, keys, [x[shared] for x in v])):
                mixed[position] += x
        stream = [
            [a + b for a, b in zip(x, times(w["self_attn.o_proj.weight"], m), strict=True)]
            for x, m in zip(stream, mixed, strict=True)
        ]
        for position, x in enumerate(stream):
            normed = rms(x, w["post_attention_layernorm.weight"], eps)
            gate, up = times(w["mlp.gate_proj.weight"], normed), times(w["mlp.up_proj.weight"], normed)
            inner = [g / (1 + math.exp(-g)) * u for g, u in zip(gate, up, strict=True)]
            stream[position] = [a + b for a, b in zip(x, times(w["mlp.down_proj.weight"], inner), strict=True)]
    out = at.get("lm_head.weight", at["model.embed_tokens.weight"])
    return torch.tensor([times(out, rms(x, at["model.norm.weight"], eps)) for x in stream], dtype=torch.float64)


def roughened(model, seed):
    """Give a model weights that make every part matter, norms included."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / math.sqrt(parameter.shape[-1]) + 0.1)
    return model


class TestForward:
    """Logits."""

    @settings(max_examples=12)
    @given(
        shape=st.sampled_from([(4, 4), (4, 2), (4, 1), (2, 1), (1, 1)]),
        tied=st.booleans(),
        length=st.integers(1, 6),
        theta=st.sampled_from([10.0, 10_000.0]),
        seed=st.integers(0, 99),
    )
    def test_equals_loops(self, shape, tied, length, theta, seed):
        """Every logit is that of the plain formulas, for every grouping of heads.

        To first order errors are proportional to the unit roundoff, so the float64 model may be off by what the float32
        model is off, times 2^-29; a factor of 64 allows for errors that happened to cancel there.
        """
        heads, kv_heads = shape
        options = {**TINY, "heads": heads, "kv_heads": kv_heads, "tied": tied, "rope_theta": theta}
        model = roughened(Llama(**options), seed)
        tokens = torch.randint(0, 11, (2, length), generator=torch.Generator().manual_seed(seed))
        single = model(tokens).detach().double()
        expected = torch.stack(
            [by_loops(model.state_dict(), row, heads=heads, kv_heads=kv_heads, theta=theta) for row in tokens.tolist()]
        )
        actual = model.double()(tokens).detach()
        bound = 64 * 2.0**-29 * (single - expected).abs().max()
        assert (actual - expected).abs().max() <= bound

    @given(st.integers(1, 8), st.integers(0, 99))
    def test_padding_on_the_right_changes_no_bit(self, length, seed):
        """Causal attention: what stands after a position has no influence on its logits."""
        model = roughened(Llama(**TINY), seed)
        tokens = torch.randint(0, 11, (3, 8), generator=torch.Generator().manual_seed(seed))
        padded = tokens.clone()
        padded[:, length:] = 0
        assert torch.equal(model(tokens)[:, :length], model(padded)[:, :length])

    def test_dropout_is_for_training(self):
        """In training two passes differ, in evaluation they are the plain model's."""
        model, plain = Llama(**TINY, dropout=0.3), Llama(**TINY)
        plain.load_state_dict(model.state_dict())
        tokens = torch.arange(8)[None]
        assert not torch.equal(model(tokens), model(tokens))
        assert torch.equal(plain(tokens), model.eval()(tokens))

    def test_all_parameters_learn(self):
        """Every parameter, the shared embedding once, gets a gradient."""
        for tied in (True, False):
            model = roughened(Llama(**TINY, tied=tied), 0)
            model(torch.arange(8)[None]).logsumexp(-1).sum().backward()
            assert all(parameter.grad.abs().max() > 0 for parameter in model.parameters())

    @pytest.mark.parametrize("shape", [(3,), (1, 2, 3), (1, 9)])
    def test_tokens_that_do_not_fit_are_refused(self, shape):
        """The message has the shape and the longest length."""
        with pytest.raises(ContractError, match=f"at most 8.*{shape[0]}.*max_length"):
            Llama(**TINY, max_length=8)(torch.zeros(shape, dtype=torch.int64))


class TestWeights:
    """Names and beginnings of the parameters."""

    def test_names_and_shapes_are_hugging_faces(self):
        """`state_dict` reads as a LlamaForCausalLM's file: width 16, 4 heads of 4, 2 key heads, 24 hidden."""
        layer = {
            "self_attn.q_proj.weight": (16, 16),
            "self_attn.k_proj.weight": (8, 16),
            "self_attn.v_proj.weight": (8, 16),
            "self_attn.o_proj.weight": (16, 16),
            "mlp.gate_proj.weight": (24, 16),
            "mlp.up_proj.weight": (24, 16),
            "mlp.down_proj.weight": (16, 24),
            "input_layernorm.weight": (16,),
            "post_attention_layernorm.weight": (16,),
        }
        expected = {f"model.layers.{n}.{name}": shape for n in range(2) for name, shape in layer.items()}
        expected |= {"model.embed_tokens.weight": (11, 16), "model.norm.weight": (16,)}
        assert expected == {name: tuple(p.shape) for name, p in Llama(**TINY).state_dict().items()}
        expected["lm_head.weight"] = (11, 16)
        assert expected == {name: tuple(p.shape) for name, p in Llama(**TINY, tied=False).state_dict().items()}

    def test_defaults(self):
        """Hidden width 8/3 of the width, rounded up to 32; as many key heads as heads; bytes and two more tokens."""
        model = Llama(width=128, heads=2)
        assert [352, 128] == list(model.model.layers[0].mlp.up_proj.weight.shape)
        assert [128, 128] == list(model.model.layers[0].self_attn.k_proj.weight.shape)
        assert [258, 128] == list(model.model.embed_tokens.weight.shape)
        assert [256, 96] == list(Llama(width=96, heads=2).model.layers[0].mlp.up_proj.weight.shape)

    def test_initial_weights(self):
        """Deviation 0.02, into the residual stream 0.02 / sqrt(2 layers), within six standard errors; norms are 1."""
        torch.manual_seed(0)
        model = Llama(width=128, layers=8, tied=False)
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                assert torch.equal(torch.ones_like(weight), weight)
                continue
            expected = 0.02 / 4 if "o_proj" in name or "down_proj" in name else 0.02
            assert abs(weight.std() / expected - 1) < 6 / math.sqrt(2 * weight.numel())
            assert abs(weight.mean()) < 6 * expected / math.sqrt(weight.numel())

    def test_resetting_draws_the_same_weights(self):
        """One seed, one model, also where it was built without memory first."""
        with torch.device("meta"):
            empty = Llama(**TINY)
        states = []
        for model in (Llama(**TINY), empty.to_empty(device="cpu")):
            torch.manual_seed(3)
            model.reset_parameters()
            states.append(model.state_dict())
        assert all(torch.equal(states[0][name], value) for name, value in states[1].items())


class TestGenerate:
    """Greedy continuation."""

    @given(st.lists(st.integers(0, 10), min_size=1, max_size=5), st.integers(0, 6), st.integers(0, 9))
    @settings(max_examples=25)
    def test_greedy(self, prompt, max_tokens, seed):
        """Each new token is the most likely one after all before it."""
        model = roughened(Llama(**TINY, max_length=8), seed)
        new = model.generate(prompt, max_tokens)
        assert min(max_tokens, 8 - len(prompt)) == len(new)
        for i, token in enumerate(new):
            assert token == int(model(torch.tensor([prompt + new[:i]]))[0, -1].argmax())
        assert all(type(token) is int for token in new)

    def test_stop(self):
        """The text ends before the stop token."""
        model = roughened(Llama(**TINY), 0)
        new = model.generate([1, 2], 20)
        stop = new[3]
        assert new[: new.index(stop)] == model.generate([1, 2], 20, stop=stop)

    @pytest.mark.parametrize("training", [True, False])
    def test_training_state_is_as_before(self, training):
        """Generating draws no dropout, builds no graph, and leaves the mode as it was, also after an error."""
        model = Llama(**TINY, dropout=0.5).train(training)
        state = torch.get_rng_state()
        assert model.generate([1], 4) == model.generate([1], 4)
        with pytest.raises(IndexError):
            model.generate([99], 4)
        assert training == model.training == model.model.layers[0].training
        assert torch.equal(state, torch.get_rng_state())

    def test_every_part_keeps_its_mode(self):
        """Parts that somebody froze in evaluation mode stay there, in a model that trains."""
        model = Llama(**TINY).train()
        model.model.layers[0].eval()
        before = [module.training for module in model.modules()]
        model.generate([1], 2)
        assert before == [module.training for module in model.modules()]

    def test_a_prompt_that_fills_the_model_is_not_continued(self):
        """At `max_length` tokens there is no room, and that is no error."""
        assert [] == Llama(**TINY, max_length=8).generate([1] * 8, 3)

    @pytest.mark.parametrize("length", [0, 9])
    def test_a_prompt_that_does_not_fit_is_refused(self, length):
        """An empty prompt, or one longer than the model."""
        with pytest.raises(ContractError, match=f"1 to 8 tokens; got {length}"):
            Llama(**TINY, max_length=8).generate([1] * length, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"vocab_size": 0}, "vocab_size.*0"),
        ({"layers": 0}, "layers.*0"),
        ({"heads": 0}, "heads.*0"),
        ({"kv_heads": 0}, "kv_heads.*0"),
        ({"hidden": -1}, "hidden.*-1"),
        ({"max_length": 0}, "max_length.*0"),
        ({"width": 12, "heads": 4}, "width 12 and 4 heads"),
        ({"heads": 4, "kv_heads": 3}, "3 and 4"),
        ({"dropout": 1.0}, r"dropout.*1\.0"),
        ({"rope_theta": 0.0}, r"rope_theta.*0\.0"),
        ({"norm_eps": -1.0}, r"norm_eps.*-1\.0"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, message):
    """Every argument out of its range is a ContractError that names it and its value."""
    with pytest.raises(ContractError, match=message):
        Llama(**arguments)
