"""Checkpoints made by someone with bad intentions: refused before anything is loaded, allocated or executed."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from forge import MANIFEST, STATE, forge_file, forge_manifest, sealed_text, tensors_in, tensors_of
from little import Little, loaded, three_saves

import augend
from augend._checkpoint import _load
from augend.errors import AugendError, CheckpointError, ContractError

SHARD = "shard-00001-model-00001-of-00001.safetensors"
MEMORY = 256 << 20  # bytes: far more than a checkpoint of 30 KB needs
HUGE = 1 << 60


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory of three checkpoints, to be copied."""
    directory = tmp_path_factory.mktemp("saved") / "run"
    three_saves(directory)
    return directory


@pytest.fixture
def newest(saved: Path, tmp_path: Path) -> Path:
    """Return the newest checkpoint of a copy of it."""
    shutil.copytree(saved, tmp_path / "run")
    return max(path for path in (tmp_path / "run").iterdir() if path.is_dir())


@contextmanager
def little_memory() -> Iterator[None]:
    """Let the system refuse this process more memory than it has and a bit."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def refused(path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[AugendError] = CheckpointError) -> str:
    """Check that nothing is loaded from a checkpoint, nor anything opened outside of it; return the message."""
    opened = []
    real_open, real_scandir = os.open, os.scandir

    def watch(real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda place, *rest: (opened.append(Path(os.path.normpath(place))), real(place, *rest))[1]

    little = Little(path.parent.with_name("other"))
    little.train(1)
    before = little.digest()
    with monkeypatch.context() as patched, little_memory():
        patched.setattr(os, "open", watch(real_open))
        patched.setattr(os, "scandir", watch(real_scandir))
        patched.setattr(_load, "read_part", None)
        with pytest.raises(kind) as caught:
            augend.verify(path)
        with pytest.raises(kind):
            little.run.load(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert before == little.digest()
    assert [] == [one for one in opened if not one.is_relative_to(path)]
    assert opened
    return str(caught.value)


def at(*keys: str) -> Callable[[object], Callable[[dict[str, Any]], None]]:
    """Return what sets a value at some place of a manifest."""

    def changing(value: object) -> Callable[[dict[str, Any]], None]:
        def change(plain: dict[str, Any]) -> None:
            for key in keys[:-1]:
                plain = plain[key]
            plain[keys[-1]] = value

        return change

    return changing


def without(*keys: str) -> Callable[[dict[str, Any]], None]:
    """Return what removes a key of a manifest."""

    def change(plain: dict[str, Any]) -> None:
        for key in keys[:-1]:
            plain = plain[key]
        del plain[keys[-1]]

    return change


NOTHING = {"bytes": 0, "sha256": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"}
OUTSIDE = "../../secret/key.safetensors"
WEIGHT = ("parts", "model", "tensors", "weight")
CHANGES = {
    "a path that leaves": at("files", OUTSIDE)(NOTHING),
    "a path that leaves through a part": at("files", "model/../../../secret.safetensors")(NOTHING),
    "an absolute path": at("files", "/etc/passwd")(NOTHING),
    "a path into the home": at("files", "~/x.safetensors")(NOTHING),
    "a path with a line end": at("files", f"model/{SHARD}\n")(NOTHING),
    "a path with a NUL": at("files", "model/x\0.safetensors")(NOTHING),
    "the manifest itself": at("files", MANIFEST)(NOTHING),
    "a pickle": at("files", "model/data.pkl")(NOTHING),
    "a file two levels down": at("files", f"model/deeper/{SHARD}")(NOTHING),
    "an empty path": at("files", "")(NOTHING),
    "a file that is not there": at("files", "model/more.safetensors")(NOTHING),
    "no state": without("files", STATE),
    "no files": at("files")({}),
    "files in a list": at("files")([STATE]),
    "a negative size": at("files", STATE, "bytes")(-1),
    "a huge size": at("files", STATE, "bytes")(HUGE),
    "a size beyond 64 bits": at("files", STATE, "bytes")(1 << 70),
    "a size that is no whole number": at("files", STATE, "bytes")(1.5),
    "a size in words": at("files", STATE, "bytes")("12"),
    "a short hash": at("files", STATE, "sha256")("00"),
    "no hash": at("files", STATE, "sha256")(None),
    "a part that is called as none can be": at("parts", "../x")({"kind": "state", "tensors": {}, "parameters": []}),
    "a part that is nothing": at("parts", "model")(None),
    "no parts": without("parts"),
    "a huge tensor": at(*WEIGHT, "shape")([HUGE]),
    "a huge tensor of many dims": at(*WEIGHT, "shape")([1 << 30] * 9),
    "a huge tensor without elements": at(*WEIGHT, "shape")([1 << 62, 1 << 62, 0]),
    "a dim beyond 64 bits": at(*WEIGHT, "shape")([1 << 64, 0]),
    "a negative dim": at(*WEIGHT, "shape")([-2, -3]),
    "a dim that is no whole number": at(*WEIGHT, "shape")([2.0, 3.5]),
    "a dim that is true": at(*WEIGHT, "shape")([True, 6]),
    "a shape that is none": at(*WEIGHT, "shape")(6),
    "another shape of as many elements": at(*WEIGHT, "shape")([3, 2]),
    "a hundred thousand dims": at(*WEIGHT, "shape")([1] * 100_000),
    "an unknown dtype": at(*WEIGHT, "dtype")("object"),
    "another dtype of the same size": at(*WEIGHT, "dtype")("int32"),
    "a dtype that is no text": at(*WEIGHT, "dtype")(["float32"]),
    "a tensor that no file has": at("parts", "model", "tensors", "more")({"dtype": "float32", "shape": [0]}),
    "a tensor that only the file has": without(*WEIGHT),
    "tensors of a part without files": at("parts", "data", "tensors", "x")({"dtype": "float32", "shape": []}),
    "a step before the first": at("step")(-1),
    "a step beyond 64 bits": at("step")(10**30),
    "a step that is no number": at("step")("12"),
    "a step that is true": at("step")(True),
    "half a row": at("rows_done")(0.5),
    "a negative count": at("count")(-1.5),
    "a world of nobody": at("world")(0),
    "no time": at("created")(None),
    "half a character": at("parts", "model", "kind")("\ud800"),
    "half a character in a key": at("parts", "model", "tensors", "\udfff")({"dtype": "float32", "shape": []}),
    "another format": at("format")("pickle"),
    "no format": without("format"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_manifest_with_a_right_checksum_is_not_believed(
    newest: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Paths, sizes, types, coverage: CheckpointError, little memory, nothing opened outside; the one before is used."""
    (newest.parent.parent / "secret").mkdir()
    (newest.parent.parent / "secret" / "key.safetensors").touch()
    forge_manifest(newest, CHANGES[change])
    message = refused(newest, monkeypatch)
    assert change.startswith("half a character") or "its checksum" not in message
    with pytest.warns(UserWarning, match="passed over"):
        assert loaded(newest.parent)[0].path != newest


def text_of(path: Path) -> str:
    """Return the text of a manifest, with an empty checksum."""
    plain = json.loads((path / MANIFEST).read_bytes())
    return json.dumps({**plain, "checksum": ""}, sort_keys=True, indent=1)


TEXTS: dict[str, Callable[[str], str]] = {
    "a duplicate key": lambda text: text.replace('"step": 2,', '"step": 2,\n "step": 2,'),
    "not a number": lambda text: text.replace('"count": 2', '"count": NaN'),
    "infinity": lambda text: text.replace('"count": 2', '"count": Infinity'),
    "a number that overflows": lambda text: text.replace('"count": 2', '"count": 1e999'),
    "thousands of digits": lambda text: text.replace('"step": 2', f'"step": 1{"0" * 4000}'),
    "tens of thousands of digits": lambda text: text.replace('"step": 2', f'"step": 1{"0" * 40_000}'),
    "a hundred thousand brackets": lambda text: text.replace('"step": 2', f'"step": {"[" * 100_000}{"]" * 100_000}'),
    "a hundred thousand braces": lambda text: text.replace(
        '"step": 2', '"step": {}1{}'.format('{"a":' * 100_000, "}" * 100_000)
    ),
    "other spaces": lambda text: text.replace('"step": 2', '"step":  2'),
    "another order": lambda text: text.replace('"step": 2,\n', "").replace("{\n", '{\n "step": 2,\n', 1),
    "a comment": lambda text: text + "// trust me",
    "a list": lambda text: f"[{text}]",
    "a text": lambda text: '"\\u0022checksum\\u0022"\n"checksum": ""',
    "nothing": lambda text: '{"checksum": ""}',
}


@pytest.mark.parametrize("change", TEXTS)
def test_a_text_that_augend_does_not_write_is_no_manifest(
    newest: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Whatever JSON allows or Python reads, with a checksum that is right for the text: CheckpointError."""
    text = TEXTS[change](text_of(newest))
    assert text != text_of(newest)
    (newest / MANIFEST).write_bytes(sealed_text(text))
    refused(newest, monkeypatch)


def test_a_manifest_of_a_gigabyte_is_not_read(newest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of holes costs no time and no memory."""
    os.truncate(newest / MANIFEST, 1 << 40)
    assert "larger than any manifest" in refused(newest, monkeypatch)


def test_another_version_is_said(newest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole checkpoint of another format is no damage: ContractError names both versions and who wrote it."""
    forge_manifest(newest, lambda plain: plain.update(version=2, augend="9.1"))
    assert "version 2, and this augend reads version 1" in refused(newest, monkeypatch, ContractError)
    forge_manifest(newest, lambda plain: plain.update(version="x" * 10_000, augend=["y" * 10_000]))
    refused(newest, monkeypatch, ContractError)
    forge_manifest(newest, lambda plain: plain.pop("version"))
    refused(newest, monkeypatch, ContractError)


def header_change(key: str, value: object) -> Callable[[dict[str, Any]], None]:
    """Return what sets one entry of the weight in a header."""
    return lambda header: header["weight"].update({key: value})


def offsets(text: str) -> Callable[[dict[str, Any]], None]:
    """Return what sets the places of the parts in the whole."""
    return lambda header: header["__metadata__"].update(DCP_SHARDING_INFO=text)


HEADERS: dict[str, Callable[[dict[str, Any]], object]] = {
    "huge shape": header_change("shape", [HUGE]),
    "negative shape": header_change("shape", [-2, -3]),
    "shape of another kind": header_change("shape", "23"),
    "shape beyond 64 bits": header_change("shape", [10**30, 10**4000]),
    "bytes beyond the file": header_change("data_offsets", [8, 1 << 40]),
    "bytes behind the file": header_change("data_offsets", [1000, 1024]),
    "bytes before the file": header_change("data_offsets", [-24, 0]),
    "bytes backwards": header_change("data_offsets", [24, 0]),
    "too few bytes": header_change("data_offsets", [8, 12]),
    "bytes of three ends": header_change("data_offsets", [0, 24, 24]),
    "other dtype": header_change("dtype", "I32"),
    "unknown dtype": header_change("dtype", "PICKLE"),
    "dtype of another kind": header_change("dtype", None),
    "no entry": lambda header: header.pop("weight"),
    "entry of another kind": lambda header: header.update(weight=[1, 2]),
    "one more": lambda header: header.update(more=header["weight"]),
    "no metadata": lambda header: header.pop("__metadata__"),
    "metadata of another kind": lambda header: header.update(__metadata__=[1]),
    "no places": lambda header: header["__metadata__"].pop("DCP_SHARDING_INFO"),
    "places that are no JSON": offsets("{"),
    "places of another kind": offsets("[1]"),
    "places of others": offsets('{"bias": {"saved_offsets": [0]}}'),
    "a place outside": offsets('{"bias": {"saved_offsets": [0]}, "weight": {"saved_offsets": [1, 0]}}'),
    "a place before": offsets('{"bias": {"saved_offsets": [0]}, "weight": {"saved_offsets": [-1, 0]}}'),
    "a place in too few dims": offsets('{"bias": {"saved_offsets": [0]}, "weight": {"saved_offsets": [0]}}'),
    "a place of another kind": offsets('{"bias": {"saved_offsets": [0]}, "weight": {"saved_offsets": null}}'),
    "places nested deep": offsets("[" * 100_000 + "]" * 100_000),
}


@pytest.mark.parametrize("change", HEADERS)
def test_the_header_of_a_file_is_not_believed(newest: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    """Hashes are right, and the tensors are not those of the manifest: CheckpointError names the file or tensor."""
    name = f"model/{SHARD}"
    header, data = tensors_in(newest / name)
    HEADERS[change](header)
    sys.set_int_max_str_digits(0)
    try:
        forge_file(newest, name, tensors_of(header, data))
    finally:
        sys.set_int_max_str_digits(4300)
    assert re.search(f"{name}|'weight'", refused(newest, monkeypatch))


@pytest.mark.parametrize(
    "content",
    [b"", b"\1", b"\xff" * 8, b"\xff" * 100, tensors_of(b"{", b""), tensors_of(b"[]", b""), tensors_of(b"\xff", b"")],
)
def test_a_file_that_is_no_safetensors_file_is_named(
    newest: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    """Whatever stands in it."""
    forge_file(newest, f"model/{SHARD}", content)
    assert f"model/{SHARD}" in refused(newest, monkeypatch)


def halves(path: Path, places: list[tuple[int, int]]) -> None:
    """Replace the model's file by several, each with some rows of its weight; the first also has the bias."""
    header, data = tensors_in(path / "model" / SHARD)
    begin = {key: header[key]["data_offsets"] for key in ("bias", "weight")}
    (path / "model" / SHARD).unlink()
    forge_manifest(path, lambda plain: plain["files"].pop(f"model/{SHARD}"))
    for index, (first, rows) in enumerate(places):
        weight = (data[slice(*begin["weight"])] * 2)[12 * first : 12 * (first + rows)]
        new = {"weight": {"dtype": "F32", "shape": [rows, 3], "data_offsets": [0, len(weight)]}}
        where = {"weight": {"saved_offsets": [first, 0]}}
        if index == 0:
            bias = data[slice(*begin["bias"])]
            new["bias"] = {"dtype": "F32", "shape": [2], "data_offsets": [len(weight), len(weight) + len(bias)]}
            where["bias"] = {"saved_offsets": [0]}
            weight += bias
        new["__metadata__"] = {"DCP_SHARDING_INFO": json.dumps(where)}
        forge_file(path, f"model/shard-{index}.safetensors", tensors_of(new, weight))


def test_a_tensor_in_several_files_is_read_whole(newest: Path) -> None:
    """As many ranks write it: each its rows, and one of them none."""
    _, expected = loaded(newest.parent)
    halves(newest, [(0, 1), (1, 1), (2, 0)])
    augend.verify(newest)
    assert expected == loaded(newest.parent)[1]


@pytest.mark.parametrize(
    "places",
    [[(0, 1)], [(0, 1), (0, 1)], [(0, 2), (0, 2)], [(0, 2), (1, 1)], [(0, 1), (2, 1)]],
)
def test_a_tensor_that_is_covered_in_part_or_twice_is_named(
    newest: Path, monkeypatch: pytest.MonkeyPatch, places: list[tuple[int, int]]
) -> None:
    """Every element exactly once: torch's reader would load whatever is there, silently."""
    halves(newest, places)
    assert "model: the tensor 'weight' is not in the files" in refused(newest, monkeypatch)
