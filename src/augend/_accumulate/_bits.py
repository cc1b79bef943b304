"""What the bits of a run depend on besides its data and its code: recorded, and compared when it goes on."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, final

import torch

from augend.errors import ContractError, StateError

_SUBNORMAL: Final = 2.0**-140  # of float32

Bits = Mapping[str, str | int | bool]


def machine_bits(device: torch.device) -> dict[str, str | int | bool]:
    """Return what decides how torch rounds here, by names that messages use.

    Args:
        device: Where the parameters are.
    """
    processor = torch.cpu.get_capabilities()
    attention = (
        torch.backends.cuda.flash_sdp_enabled,  # of every device, in spite of its name
        torch.backends.cuda.mem_efficient_sdp_enabled,
        torch.backends.cuda.math_sdp_enabled,
        torch.backends.cuda.cudnn_sdp_enabled,
    )
    bits: dict[str, str | int | bool] = {
        "torch": torch.__version__,
        "build": _mark(line for line in torch.__config__.show().splitlines() if "capability" not in line),
        "device": device.type,
        "processor": str(processor.get("cpu_name") or processor["architecture"]),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "precision": _precision(device),
        "subnormals": bool(
            torch.tensor(_SUBNORMAL, dtype=torch.float32, device="cpu") * 0.5 > 0
        ),  # torch.set_flush_denormal
        "mkldnn": bool(torch.backends.mkldnn.enabled),
        "attention": "".join("01"[enabled()] for enabled in attention),  # type: ignore[no-untyped-call]  # torch leaves them untyped
    }
    if device.type == "cuda":
        bits |= {
            "accelerator": torch.cuda.get_device_name(device),
            "cuda": str(torch.version.cuda or torch.version.hip),
            "cudnn": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]  # torch leaves it untyped
            "cudnn_benchmark": bool(torch.backends.cudnn.benchmark),
            "cudnn_deterministic": bool(torch.backends.cudnn.deterministic),
            "float16_sums": bool(torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction),
            "bfloat16_sums": bool(torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction),
        }
    return bits


@final
class Fingerprint:
    """What the bits of one accumulator's sums depend on, and what is done where it has changed.

    Args:
        device: Where the parameters are.
        other: Whether a change is told or refused.
        tells: Whether this rank is the one that tells.
    """

    def __init__(self, device: torch.device, other: Literal["warn", "error"], *, tells: bool) -> None:
        self._device = device
        self._other = other
        self._tells = tells
        self._told = ""  # what is to be said
        self._size: int | None = None  # of the micro-batches that came last
        self._loaded = False  # that size is a loaded state's, and no batch was entered since

    def now(self) -> dict[str, str | int | bool]:
        """Return the fingerprint of this moment."""
        return {**machine_bits(self._device), **({} if self._size is None else {"microbatch_size": self._size})}

    def compare(self, saved: Bits) -> None:
        """Refuse what differs from a saved fingerprint, or keep it for ``tell``.

        What either does not know is not compared, and the size of micro-batches when the next batch is entered, whose
        it is.

        Raises:
            ContractError: Something does, and that is an error.
        """
        now = machine_bits(self._device)
        self._judge(
            [f"{name} was {saved[name]} and is {now[name]}" for name in now if saved.get(name, now[name]) != now[name]]
        )

    def expect(self, saved: Bits) -> None:
        """Take the size of the micro-batches of a loaded state as that of the first batch to come."""
        size = saved.get("microbatch_size")
        self._size, self._loaded = (size, True) if isinstance(size, int) else (None, False)

    def enter(self, size: object) -> None:
        """Take note of the size of a batch's micro-batches.

        Raises:
            ContractError: A loaded state was made with another size, and that is an error.
        """
        if isinstance(size, int):
            if self._loaded and self._size != size:
                self._judge([f"microbatch_size was {self._size} and is {size}"])
            self._size, self._loaded = size, False

    def _judge(self, told: Sequence[str]) -> None:
        if not told:
            return
        what = ", ".join(told)
        if self._other == "error":
            raise ContractError(
                f'{what}, and the bits of exact sums depend on it: bring back what it was, or pass other_bits="warn"'
            )
        self._told = f"{what}: from here on the bits may be others than those of a run that was not interrupted"

    def tell(self) -> None:
        """Warn of what differed, once: where no rank waits for another, as a warning may be an error."""
        told, self._told = self._told, ""
        if told and self._tells:
            warnings.warn(told, UserWarning, stacklevel=2)


def read_bits(bits: object) -> Bits:
    """Return a saved fingerprint.

    Raises:
        StateError: It is none.
    """
    if not isinstance(bits, Mapping) or not all(
        isinstance(name, str) and isinstance(value, str | int | bool) for name, value in bits.items()
    ):
        raise StateError(f"bits must be a dictionary of numbers and strings; got {bits!r:.80}")
    return bits


def _precision(device: torch.device) -> str:
    """Return in what float32 products are computed; the older getters raise where the newer ones were used."""
    backends: Any = torch.backends  # torch leaves it untyped
    parts = [backends, backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn]
    if device.type == "cuda":
        parts += [backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn]
    return " ".join(str(part.fp32_precision).replace("none", "ieee") for part in parts)  # none is the part's default


def _mark(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
