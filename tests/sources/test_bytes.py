"""The byte tokenizer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from augend.models import Llama
from augend.sources import Bytes


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_round_trip(text):
    """A text is its bytes and comes back from them; the special tokens are nothing."""
    tokens = Bytes().encode(text)
    assert list(text.encode()) == tokens
    assert text == Bytes().decode([*tokens, Bytes.end_of_text, Bytes.padding])


@given(st.lists(st.integers(0, 257)))
def test_any_tokens_have_a_text(tokens):
    """What a model says need not be UTF-8."""
    assert bytes(t for t in tokens if t < 256).decode(errors="replace") == Bytes().decode(tokens)


def test_half_a_surrogate_pair():
    """What has no UTF-8 becomes a question mark."""
    assert [ord("a"), ord("?")] == Bytes().encode("a\ud800")


def test_the_model_has_its_tokens():
    """Llama's vocabulary is that of bytes by default."""
    assert Bytes.vocab_size == Llama(width=2, layers=1, heads=1).model.embed_tokens.weight.shape[0]
