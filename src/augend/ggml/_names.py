"""Names of tensors: how long, of what, and which of them a state dict can have."""

from __future__ import annotations

from collections.abc import Iterable

from augend.errors import ContractError
from augend.ggml._limits import Limits
from augend.ggml._nodes import Node


def kept_name(name: str, limits: Limits) -> str:
    """Return what is kept of a name.

    Raises:
        ContractError: It is too long, has a NUL, is no UTF-8, or would be cut inside a character.
    """
    if not isinstance(name, str):
        raise ContractError(f"a name must be a str; got {type(name).__name__}")
    try:
        encoded = name.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ContractError(f"the name {name!r} cannot be written in UTF-8: {error.reason}") from None
    if b"\0" in encoded:
        raise ContractError(f"the name {name!r} has a NUL, which ends a name in ggml")
    if len(encoded) > limits.name_bytes:
        raise ContractError(f"a name may have {limits.name_bytes} bytes of UTF-8; {name!r} has {len(encoded)}")
    try:
        return encoded[: limits.kept_name_bytes].decode("utf-8")
    except UnicodeDecodeError:
        raise ContractError(
            f"{limits.kept_name_bytes} bytes are kept of a name, which cuts {name!r} inside a character: shorten it"
        ) from None


def by_name(parameters: Iterable[Node]) -> dict[str, Node]:
    """Return parameters under the names that they have in a state dict; those without one are called ``tensor_7``.

    Raises:
        ContractError: Two have the same name, or one is the beginning of another's, or no module can have it.
    """
    found: dict[str, Node] = {}
    for node in parameters:
        name = node.name or f"tensor_{node.index}"
        if name in found:
            raise ContractError(f"two parameters are called {name!r}: {found[name]!r} and {node!r}; rename one")
        if not all(name.split(".")):
            raise ContractError(f"{node!r} cannot be a parameter of a module: there is nothing between its dots")
        found[name] = node
    for name in found:
        *owners, _ = name.split(".")
        inside = next((front for i in range(len(owners)) if (front := ".".join(owners[: i + 1])) in found), None)
        if inside is not None:
            raise ContractError(f"{name!r} would be inside the parameter {inside!r}; rename one")
    return found
