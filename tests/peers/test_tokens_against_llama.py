"""Tokens and conversations against llama.cpp itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from vocabularies import CHAT, TURN, TURN_END, lines, nonsense, of, trained_across

from augend.gguf import Value, metadata_of, tokenizer_of, write
from augend.gguf._words import WORDS

# One name for each way to cut text.
DIFFERENT = list({words: name for name, words in reversed(WORDS.items())}.values())
PIECES = ["12", "345", "1234 56789", "x'S", "x'Re", "I'LL", "'tis", " 'll", "a!!", "--b", "=>", "a\n\nb", " \n ", "½²"]


def saved(path: Path, **changes: object) -> tuple[str, dict[str, Value]]:
    """Write a file that has a tokenizer and no tensors."""
    kind = {"general.architecture": Value.of("string", "llama"), "tokenizer.chat_template": Value.of("string", CHAT)}
    metadata = kind | metadata_of(trained_across(), end_of_text=0) | of(**changes)
    del metadata["tokenizer.ggml.add_bos_token"]
    write(path, metadata, {})
    return str(path), metadata


@pytest.mark.parametrize("pre", DIFFERENT)
def test_tokens_are_those_of_llama_cpp(llama, tmp_path: Path, pre: str) -> None:
    """All tokens of a thousand lines of real text and of three thousand of nonsense, and the beginning of each."""
    path, metadata = saved(tmp_path / "tokens.gguf", pre=pre, bos_token_id=1)
    tokenizer = tokenizer_of(metadata)
    texts = [*lines()[:1000], *nonsense(3000), *PIECES, "", f"a{TURN}b{TURN_END}", "\0"]
    found = llama("tokens", path=path, texts=texts, special=True, begin=True)
    start = [] if tokenizer.start_of_text is None else [tokenizer.start_of_text]
    assert [1, 0, 2000] == [*found["ends"], found["size"]]
    assert [[*start, *tokenizer.encode(text)] for text in texts] == found["tokens"]


def test_texts_are_those_of_llama_cpp(llama, tmp_path: Path) -> None:
    """Of tokens, where llama.cpp does not also leave out spaces before signs, as it does with some pre-tokenizers."""
    path, metadata = saved(tmp_path / "texts.gguf", pre="qwen2")
    tokenizer = tokenizer_of(metadata)
    texts = [*lines()[:1000], *nonsense(1000)]
    found = llama("tokens", path=path, texts=texts, special=False, begin=False)
    assert [tokenizer.decode(tokens) for tokens in found["tokens"]] == found["texts"]
    assert texts == found["texts"]


def test_llama_cpp_knows_every_name(llama, tmp_path: Path) -> None:
    """Names that are taken for the same way to cut are the same to llama.cpp: also where they are told apart."""
    texts = [*nonsense(200), *PIECES]
    paths, expected = [], []
    for name in WORDS:
        path, metadata = saved(tmp_path / f"{name}.gguf", pre=name, bos_token_id=1)
        tokenizer = tokenizer_of(metadata)
        start = [] if tokenizer.start_of_text is None else [tokenizer.start_of_text]
        paths.append(path)
        expected.append([[*start, *tokenizer.encode(text)] for text in texts])
    assert expected == llama("tokens_of_all", paths=paths, texts=texts)


def test_bytes_are_tokens_of_llama_cpp(llama, tmp_path: Path) -> None:
    """A vocabulary of bytes, which has no merges, is one that llama.cpp reads."""
    kind = {"general.architecture": Value.of("string", "llama")}
    write(tmp_path / "bytes.gguf", kind | metadata_of(None, end_of_text=256, padding=257), {})
    texts = [*lines()[:100], *nonsense(500)]
    found = llama("tokens", path=str(tmp_path / "bytes.gguf"), texts=texts, special=False, begin=True)
    assert [list(text.encode()) for text in texts] == found["tokens"]
    assert texts == found["texts"]


def test_conversations_are_those_of_llama_cpp(llama, tmp_path: Path) -> None:
    """The pieces are the words of llama.cpp's own copy of the template, up to the end of the last answer."""
    path, metadata = saved(tmp_path / "chat.gguf")
    said = [("system", "Be short."), ("user", "2+2?"), ("assistant", "4"), ("user", "and 1?"), ("assistant", "5")]
    messages = [{"role": role, "content": content} for role, content in said]
    pieces = tokenizer_of(metadata).chat(messages)
    whole = llama("conversation", path=path, messages=messages, answer=False)
    assert whole == "".join(text for text, _ in pieces) + "\n"
    introduced = llama("conversation", path=path, messages=messages[:4], answer=True)
    assert introduced == "".join(text for text, _ in pieces[:3])
