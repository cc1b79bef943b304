"""Reading the user's files, with errors that name them."""

from __future__ import annotations

from pathlib import Path

from augend.errors import ConfigError


def file_at(path: str | Path, kind: str) -> Path:
    """Return the path of an existing file.

    Raises:
        ConfigError: There is none, or it is a folder.
    """
    found = Path(path)
    if found.is_dir():
        raise ConfigError(f"{kind} {path} is a folder; name a file in it")
    if not found.is_file():
        raise ConfigError(f"{kind} {path} does not exist, looked for in {Path.cwd()}; correct the path")
    return found


def content_of(path: str | Path, kind: str) -> bytes:
    """Return the bytes of a file.

    Raises:
        ConfigError: It cannot be read.
    """
    found = file_at(path, kind)
    try:
        return found.read_bytes()
    except OSError as error:
        raise ConfigError(f"{kind} {path} cannot be read: {error.strerror}; check its permissions") from error


def text_of(path: str | Path, kind: str) -> str:
    """Return the text of a UTF-8 file, its line ends as they are.

    Raises:
        ConfigError: It cannot be read, or is not UTF-8; names the line.
    """
    content = content_of(path, kind)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = 1 + content.count(b"\n", 0, error.start)
        raise ConfigError(f"{kind} {path}, line {line}, is not UTF-8: {error.reason}; convert the file") from error
