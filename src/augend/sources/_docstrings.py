"""Functions and what their authors say of them: real supervised pairs on every machine that has Python."""

from __future__ import annotations

import ast
import os
import sysconfig
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Final

from augend.errors import ConfigError
from augend.sources._files import content_of
from augend.sources._source import Source, of_tokens
from augend.sources._tokenizer import Tokenizer, tokenizer_of
from augend.sources._tokens import TokenRows

_LEFT_OUT: Final = {"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def docstrings(
    folder: str | Path | None = None,
    *,
    max_bytes: int = 512,
    limit: int | None = None,
    tokenizer: str | Path | Tokenizer | None = None,
    end_of_text: str | None = None,
) -> Source:
    '''Return pairs of a function's signature and its docstring, read from Python files without running them.

    A row is ``def name(arguments) -> result:``, a new line, four spaces and ``"""`` as the prompt, then the cleaned
    docstring and the end of text, which alone are supervised. Rows come in the order of the files' paths and the lines
    in them; each pair comes once. Folders of tests and of installed packages are left out.

    Args:
        folder: Where to look for ``*.py``, subfolders included; None for the standard library of the running Python.
        max_bytes: Pairs of more bytes, the end of text counted as one, or of more tokens are left out.
        limit: Only the first so many pairs; None for all.
        tokenizer: A ``tokenizer.json`` of the package `tokenizers`, or a `Tokenizer`; None for `Bytes`.
        end_of_text: The token of that file which ends a text; None for the usual one.

    Returns:
        Rows ``{"tokens": [length] int64, "labels": [length] int64}``, -100 on the prompt; `augend.losses.causal_lm`;
        accuracy of the next token; the tokenizer.

    Raises:
        ConfigError: An argument is out of its range, there is nothing to read, or a file is not Python or no tokenizer.

    Example:
        >>> source = augend.sources.docstrings(limit=1)
        >>> row = source.rows[0]
        >>> prompt = row["tokens"][row["labels"] == -100].tolist()
        >>> source.tokenizer.decode(prompt)[:4]
        'def '
    '''
    for name, value in {"max_bytes": max_bytes, "limit": 1 if limit is None else limit}.items():
        if value < 1:
            raise ConfigError(f"{name} must be at least 1; got {value}")
    root = Path(sysconfig.get_path("stdlib") if folder is None else folder)
    if not root.is_dir():
        raise ConfigError(f"folder {root} does not exist, looked for in {Path.cwd()}; name a folder of Python files")
    encoder = tokenizer_of(tokenizer, end_of_text)
    rows = TokenRows(islice(_rows(root, encoder, max_bytes), limit), encoder.vocab_size)
    if not len(rows):
        remedy = "raise max_bytes or name another folder"
        raise ConfigError(f"folder {root} has no function with a docstring of at most {max_bytes} bytes; {remedy}")
    return of_tokens(rows, encoder)


def _rows(root: Path, tokenizer: Tokenizer, max_bytes: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the tokens of each pair once, and where supervision begins."""
    seen = set()
    start = [] if tokenizer.start_of_text is None else [tokenizer.start_of_text]
    for path in _python_files(root):
        for function, docstring in _documented(path):
            signature = f'{_signature(function)}\n    """'
            pair = f"{signature}{docstring}".encode(errors="replace")
            if len(pair) >= max_bytes or pair in seen:
                continue
            prompt = [*start, *tokenizer.encode(signature)]
            tokens = [*prompt, *tokenizer.encode(docstring), tokenizer.end_of_text]
            if len(tokens) <= max_bytes:
                seen.add(pair)
                yield tokens, [len(prompt)]


def _python_files(root: Path) -> Iterator[Path]:
    """Yield files in the order of their paths below the root, which is the same on every file system."""
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _LEFT_OUT]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    yield from sorted(found, key=lambda path: path.relative_to(root).parts)


def _documented(path: Path) -> Iterator[tuple[Function, str]]:
    """Yield the functions of a file that have a docstring, by line."""
    content = content_of(path, "file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about somebody else's escape sequences
            tree = ast.parse(content)
    except (SyntaxError, ValueError) as error:  # ValueError: a null byte
        line = error.lineno if isinstance(error, SyntaxError) else None
        raise ConfigError(
            f"{path}, line {line or 1}, is not Python: {error}; move the file out of the folder"
        ) from error
    for function in sorted(_functions(tree), key=lambda node: (node.lineno, node.col_offset)):
        docstring = ast.get_docstring(function)
        if docstring:
            yield function, docstring


def _functions(tree: ast.Module) -> Iterator[Function]:
    """Yield all functions, nested ones too. Expressions, most of a tree, hold none and are skipped."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Function):
            yield node
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            waiting += getattr(node, name, ())


def _signature(function: Function) -> str:
    """Return the line of a definition, as the running Python writes it."""
    kind = "async def" if isinstance(function, ast.AsyncFunctionDef) else "def"
    result = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    return f"{kind} {function.name}({ast.unparse(function.args)}){result}:"
