"""What a GGUF file says of a tokenizer."""

from __future__ import annotations

import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from vocabularies import END, trained

from augend.errors import ContractError
from augend.gguf import metadata_of, tokenizer_of
from augend.gguf._words import WORDS
from augend.sources import Bytes, TokenizerFile

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
PRE = tokenizers.pre_tokenizers
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def changed(**changes):
    """Return the description of a trained tokenizer with changes, those of its model too."""
    content = json.loads(trained())
    for key, value in changes.items():
        (content if key in content else content["model"])[key] = value
    return json.dumps(content)


def cut_by(step):
    """Return the description of a trained tokenizer with another pre-tokenizer."""
    tokenizer = tokenizers.Tokenizer.from_str(trained())
    tokenizer.pre_tokenizer = step
    return tokenizer.to_str()


@given(TEXT)
def test_the_same_tokens(text):
    """What was trained makes the same tokens when it is made again of its metadata, and the same text of them."""
    before = TokenizerFile(tokenizers.Tokenizer.from_str(trained()), end_of_text=0)
    after = tokenizer_of(metadata_of(before.description, end_of_text=0))
    tokens = before.encode(text)
    assert tokens == after.encode(text)
    assert before.decode(tokens) == after.decode(tokens) == text
    assert (before.vocab_size, 0, 0, None) == (after.vocab_size, after.end_of_text, after.padding, after.start_of_text)


@given(TEXT)
def test_the_same_bytes(text):
    """Bytes are byte pairs without a merge."""
    after = tokenizer_of(metadata_of(None, end_of_text=Bytes.end_of_text, padding=Bytes.padding))
    assert Bytes().encode(text) == after.encode(text)
    assert text == after.decode([*after.encode(text), Bytes.end_of_text, Bytes.padding])
    sizes = (after.vocab_size, after.end_of_text, after.padding)
    assert (Bytes.vocab_size, Bytes.end_of_text, Bytes.padding) == sizes


@pytest.mark.parametrize(
    ("step", "name"),
    [
        (PRE.ByteLevel(add_prefix_space=False), "gpt-2"),
        (PRE.Sequence([PRE.Digits(individual_digits=True), PRE.ByteLevel(add_prefix_space=False)]), "smollm"),
        (
            PRE.Sequence(
                [
                    PRE.Split(tokenizers.Regex(QWEN), "isolated"),
                    PRE.ByteLevel(add_prefix_space=False, use_regex=False),
                ]
            ),
            "qwen2",
        ),
    ],
)
def test_the_way_to_cut_has_a_name(step, name):
    """The usual pre-tokenizers, as they stand in the models' own files, are found by what they do."""
    assert name == metadata_of(cut_by(step), end_of_text=0)["tokenizer.ggml.pre"].value


@pytest.mark.parametrize("name", WORDS)
def test_what_was_read_can_be_written(name):
    """Each tokenizer of a file describes itself with the name of its way to cut, or of one that is the same."""
    metadata = metadata_of(trained(), end_of_text=0)
    tokenizer = tokenizer_of(metadata | {"tokenizer.ggml.pre": type(metadata["tokenizer.ggml.pre"]).of("string", name)})
    found = metadata_of(tokenizer._tokenizer.to_str(), end_of_text=0)["tokenizer.ggml.pre"].value
    assert (WORDS[name].expressions, WORDS[name].whole) == (WORDS[found].expressions, WORDS[found].whole)


def test_special_tokens_and_gaps():
    """Added tokens are control tokens or the user's own, and numbers without a token are unused ones."""
    tokenizer = tokenizers.Tokenizer.from_str(trained())
    tokenizer.add_tokens([tokenizers.AddedToken("augend", normalized=False)])
    content = json.loads(tokenizer.to_str())
    content["added_tokens"][-1]["id"] += 2
    metadata = metadata_of(json.dumps(content), end_of_text=0, padding=1)
    texts, kinds = metadata["tokenizer.ggml.tokens"].value, metadata["tokenizer.ggml.token_type"].value
    assert [END, *[3] * 4, 1] == [texts[0], *kinds[:5]]
    assert ["[UNUSED_600]", "[UNUSED_601]", "augend"] == texts[600:]
    assert [5, 5, 4] == kinds[600:]
    after = tokenizer_of(metadata)
    assert [602, 0] == after.encode("augend<|endoftext|>")
    assert "augend" == after.decode([602, 0])
    assert 1 == after.padding


@pytest.mark.parametrize(
    ("description", "message"),
    [
        (changed(type="WordLevel"), "BPE without byte_fallback"),
        (changed(byte_fallback=True), "BPE without byte_fallback"),
        (changed(normalizer={"type": "NFC"}), "normalises no text"),
        (changed(end_of_word_suffix="</w>"), "no prefix or suffix"),
        (changed(pre_tokenizer=None), "no name for the tokenizer's way to cut"),
        (cut_by(PRE.ByteLevel(add_prefix_space=True)), "no name"),
        (cut_by(PRE.Whitespace()), "no name"),
        (cut_by(PRE.Sequence([PRE.Digits(), PRE.ByteLevel(add_prefix_space=False)])), "no name"),
        (cut_by(PRE.Sequence([PRE.ByteLevel(add_prefix_space=False), PRE.Digits()])), "no name"),
    ],
)
def test_what_llama_cpp_does_not_know_is_refused(description, message):
    """Another model, a normalizer, affixes, and other ways to cut text."""
    with pytest.raises(ContractError, match=message):
        metadata_of(description, end_of_text=0)


@pytest.mark.parametrize("flag", ["single_word", "lstrip", "rstrip"])
def test_special_tokens_that_look_around_are_refused(flag):
    """llama.cpp finds a special token wherever it stands."""
    content = json.loads(trained())
    content["added_tokens"][0][flag] = True
    with pytest.raises(ContractError, match=r"the token '<\|endoftext\|>' everywhere"):
        metadata_of(json.dumps(content), end_of_text=0)


@pytest.mark.parametrize(("end", "padding", "message"), [(-1, None, "end_of_text is -1"), (0, 600, "padding is 600")])
def test_tokens_that_are_not_there_are_refused(end, padding, message):
    """The end of a text and the padding must be tokens."""
    with pytest.raises(ContractError, match=f"{message}; the tokenizer has tokens 0 to 599"):
        metadata_of(trained(), end_of_text=end, padding=padding)
