"""Plain files, cut to rows."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import final

import numpy as np
from torch import Tensor

from augend.errors import ConfigError
from augend.sources._files import file_at, text_of
from augend.sources._source import Source, of_tokens
from augend.sources._tokenizer import Bytes, Tokenizer, tokenizer_of
from augend.sources._tokens import TokenRows, labelled


def text(
    path: str | Path | Sequence[str | Path],
    *,
    length: int = 256,
    tokenizer: str | Path | Tokenizer | None = None,
    end_of_text: str | None = None,
) -> Source:
    """Return files cut to rows of ``length`` tokens, all of them supervised.

    Each file ends with the end of text, and its last row may be shorter; a last row of a single token, which predicts
    nothing, is left out. Without a tokenizer the tokens are bytes, and a row is read from its file when it is asked
    for, so that files may be larger than the memory. With one, all files are encoded here, each as a whole, and their
    tokens are kept (2 or 4 bytes each); a file begins with the tokenizer's start of text, where it has one.

    Args:
        path: A file, or several, in the order of their rows. UTF-8 where there is a tokenizer.
        length: Most tokens of a row, at least 2.
        tokenizer: A ``tokenizer.json`` of the package `tokenizers`, or a `Tokenizer`; None for `Bytes`.
        end_of_text: The token of that file which ends a text; None for the usual one.

    Returns:
        Rows ``{"tokens": [length] int64, "labels": [length] int64}``; `augend.losses.causal_lm`; accuracy of the next
        token; the tokenizer.

    Raises:
        ConfigError: A file cannot be used, all are empty, or an argument is out of its range.
    """
    if length < 2:  # noqa: PLR2004  one token predicts nothing
        raise ConfigError(f"length must be at least 2, a token and the next; got {length}")
    paths = [path] if isinstance(path, str | Path) else list(path)
    files = [file_at(one, "text file") for one in paths]
    encoder = tokenizer_of(tokenizer, end_of_text)
    rows: TokenRows | FileRows
    if isinstance(encoder, Bytes):
        rows = FileRows(files, length, encoder)
    else:
        rows = TokenRows(_encoded(files, length, encoder), encoder.vocab_size)
    if not len(rows):
        raise ConfigError(
            f"there is no text in {', '.join(map(str, paths)) or 'no files'}; name files that are not empty"
        )
    return of_tokens(rows, encoder)


@final
class FileRows:
    """Rows of bytes, read when they are asked for; a worker process opens the files by itself."""

    def __init__(self, files: Sequence[Path], length: int, tokenizer: Bytes) -> None:
        self._files, self._length, self._end_of_text = files, length, tokenizer.end_of_text
        self._sizes = [file.stat().st_size for file in files]
        # A file has one token more than bytes; a last row of one token is none.
        self._ends = list(accumulate((size + length - 1) // length for size in self._sizes))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return ``{"tokens": [length], "labels": [length]}``, both int64."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        file = bisect.bisect_right(self._ends, index)
        start = (index - (self._ends[file - 1] if file else 0)) * self._length
        wanted = min(self._length, self._sizes[file] - start)
        with self._files[file].open("rb") as opened:
            opened.seek(start)
            content = np.frombuffer(opened.read(wanted), np.uint8)
        if len(content) < wanted:
            size, now = self._sizes[file], start + len(content)
            raise ConfigError(f"text file {self._files[file]} had {size} bytes and now has {now}; start again")
        tokens = content.astype(np.uint16)
        return labelled(tokens if wanted == self._length else np.append(tokens, np.uint16(self._end_of_text)), [0])


def _encoded(files: Sequence[Path], length: int, tokenizer: Tokenizer) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the rows of each file, encoded as a whole."""
    before = [] if tokenizer.start_of_text is None else [tokenizer.start_of_text]
    for file in files:
        tokens = [*before, *tokenizer.encode(text_of(file, "text file")), tokenizer.end_of_text]
        for start in range(0, len(tokens) - 1, length):
            yield tokens[start : start + length], [0]
