"""Checkpoints that someone with bad intentions has made: their hashes are right, and what they say is not."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

MANIFEST, STATE = "manifest.json", "state.json"
Change = Callable[[dict[str, Any]], object]


def sealed(plain: dict[str, Any]) -> bytes:
    """Return a manifest's text with the right checksum, whatever it says."""
    return sealed_text(json.dumps({**plain, "checksum": ""}, sort_keys=True, indent=1))


def sealed_text(text: str) -> bytes:
    """Put the right checksum into a text that has an empty one, and a line end after it."""
    whole = f"{text}\n"
    checksum = hashlib.sha256(whole.encode()).hexdigest()
    assert whole.count('"checksum": ""') == 1
    return whole.replace('"checksum": ""', f'"checksum": "{checksum}"').encode()


def forge_manifest(path: Path, change: Change) -> None:
    """Change what the manifest of a checkpoint says."""
    plain = json.loads((path / MANIFEST).read_bytes())
    change(plain)
    (path / MANIFEST).write_bytes(sealed(plain))


def forge_file(path: Path, name: str, content: bytes) -> None:
    """Give a checkpoint a file with another content, and its manifest the right hash of it."""
    (path / name).parent.mkdir(exist_ok=True)
    (path / name).write_bytes(content)
    record = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    forge_manifest(path, lambda plain: plain["files"].update({name: record}))


def tensors_in(path: Path) -> tuple[dict[str, Any], bytes]:
    """Take a safetensors file apart: its header, and the bytes behind it."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:end]), content[end:]


def tensors_of(header: object, data: bytes) -> bytes:
    """Put a safetensors file together, of whatever header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data
