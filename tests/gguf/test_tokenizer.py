"""The tokenizer of a GGUF file."""

from __future__ import annotations

import pytest
from vocabularies import BEGIN, END, lines, of, trained

from augend.errors import ConfigError, GGUFError
from augend.gguf import Tokenizer, Value, metadata_of, tokenizer_of
from augend.sources import ChatTokenizer, text

KEY = "tokenizer.ggml"


@pytest.fixture(scope="module")
def metadata():
    """Give the metadata of a trained tokenizer."""
    return metadata_of(trained(), end_of_text=0)


def test_it_is_a_tokenizer_of_sources(metadata, tmp_path):
    """It satisfies the protocol, and a source of text takes it."""
    tokenizer = tokenizer_of(metadata | of(add_bos_token=True, bos_token_id=1))
    assert isinstance(tokenizer, Tokenizer)
    assert isinstance(tokenizer, ChatTokenizer)
    whole = "\n".join(lines())
    (tmp_path / "code.txt").write_text(whole)
    rows = text(tmp_path / "code.txt", tokenizer=tokenizer, length=100).rows
    tokens = [token for row in rows for token in row["tokens"].tolist()]
    assert [1, *tokenizer.encode(whole), 0] == tokens
    assert whole == tokenizer.decode(tokens)


@pytest.mark.parametrize(
    ("changes", "start"),
    [
        ({"bos_token_id": 1}, None),
        ({"bos_token_id": 1, "add_bos_token": True}, 1),
        ({"bos_token_id": 1, "add_bos_token": False, "pre": "llama-bpe"}, None),
        ({"bos_token_id": 1, "pre": "llama-bpe"}, 1),
    ],
)
def test_the_beginning_of_a_text(metadata, changes, start):
    """A text begins with a token where the file says so; where it says nothing, where llama.cpp does so."""
    without = {key: value for key, value in metadata.items() if key != f"{KEY}.add_bos_token"}
    assert start == tokenizer_of(without | of(**changes)).start_of_text


def test_what_a_file_need_not_say(metadata):
    """Without types all tokens are ordinary; a token that does not exist is none, and padding then is the end."""
    few = {key: value for key, value in metadata.items() if "type" not in key and "add" not in key}
    tokenizer = tokenizer_of(few | of(padding_token_id=600))
    assert 0 == tokenizer.padding
    assert len(tokenizer.encode(END)) > 1
    assert END == tokenizer.decode(tokenizer.encode(END))


def test_tokens_without_letters(metadata):
    """They are named by their place, as in llama.cpp, and are found nowhere."""
    tokens = metadata[f"{KEY}.tokens"].value
    tokens[2] = ""
    changed = metadata | {f"{KEY}.tokens": Value.of("array[string]", tokens)}
    assert [2] == tokenizer_of(changed).encode("[EMPTY_2]")


def test_half_a_surrogate_pair(metadata):
    """What has no UTF-8 becomes a question mark."""
    tokenizer = tokenizer_of(metadata)
    assert tokenizer.encode("a?") == tokenizer.encode("a\ud800")


STRINGS = "array[string]"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "tokenizer.ggml.model is missing"),
        ({"model": Value.of("string", "llama")}, "tokenizer.ggml.model is 'llama'; only 'gpt2'"),
        ({"model": Value.of("uint32", 1)}, "tokenizer.ggml.model is of type uint32; expected string"),
        ({"model": Value("string", b"\1\0\0\0\0\0\0\0\xff")}, "tokenizer.ggml.model is not UTF-8"),
        ({"pre": Value.of("string", "klingon")}, "tokenizer.ggml.pre is 'klingon', which is not known; .* smollm"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": Value.of(STRINGS, ["a", "b", "a"])}, "tokenizer.ggml.tokens has 'a' more than once"),
        ({"token_type": Value.of("array[int32]", [1])}, "token_type has 1 numbers; .* each of 600 tokens"),
        ({"token_type": Value.of("array[int8]", [1])}, r"token_type is of type array\[int8\]"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"merges": Value.of(STRINGS, ["Ġ t", "Ġ <|im_end|>"])}, "merges has 'Ġ <|im_end|>'"),
        ({"merges": Value.of(STRINGS, ["Ġt"])}, "merges has 'Ġt', which does not make"),
        ({"eos_token_id": None}, "tokenizer.ggml.eos_token_id is missing"),
        ({"eos_token_id": Value.of("uint32", 600)}, "tokenizer.ggml.eos_token_id is missing"),
        ({"bos_token_id": None, "add_bos_token": Value.of("bool", value=True)}, "bos_token_id is missing"),
        ({"add_bos_token": Value.of("uint8", 1)}, "add_bos_token is of type uint8; expected bool"),
    ],
)
def test_what_cannot_be_read_is_refused(metadata, changes, message):
    """The key is named that is missing, of another type, or has a value that is not known."""
    changed = metadata | {f"{KEY}.{key}": value for key, value in changes.items() if value is not None}
    left = {key: value for key, value in changed.items() if changes.get(key.removeprefix(f"{KEY}."), value) is not None}
    with pytest.raises(GGUFError, match=message):
        tokenizer_of(left)


def test_without_the_package(metadata, monkeypatch):
    """It is named, with the remedy."""
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(GGUFError, match=r"pip install 'augend\[gguf\]'"):
        tokenizer_of(metadata)


def test_without_a_template(metadata):
    """A conversation needs one."""
    with pytest.raises(ConfigError, match=r"no chat template \(tokenizer\.chat_template\)"):
        tokenizer_of(metadata).chat([{"role": "assistant", "content": "a"}])


def test_special_tokens_are_found_in_texts(metadata):
    """What is written like a special token is that token, and nothing in a decoded text."""
    tokenizer = tokenizer_of(metadata)
    assert [1, *tokenizer.encode("a"), 0] == tokenizer.encode(f"{BEGIN}a{END}")
    assert "a" == tokenizer.decode(tokenizer.encode(f"{BEGIN}a{END}"))
