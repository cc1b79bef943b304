"""Who of several ranks says what ends them all."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Final

import torch.distributed as dist

from augend._cli._launch import Launch

_PATIENCE: Final = timedelta(seconds=3)
_GLANCE_SECONDS: Final = 0.05


def said_by_first(launch: Launch, message: str) -> bool:
    """Tell the others what ends the first rank; return on them whether it was the same, after some waiting.

    Not collective: who is not there is not needed.

    Args:
        launch: Which rank this is.
        message: What ends it.
    """
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    try:
        store = dist.TCPStore(host, int(port), is_master=False, timeout=_PATIENCE)  # type: ignore[attr-defined]  # public, but torch does not list it
        key = f"augend/failure/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        if launch.leads:
            store.set(key, message)
            return False
        end = time.monotonic() + _PATIENCE.total_seconds()
        while time.monotonic() < end:
            if store.check([key]):
                return store.get(key).decode() == message
            time.sleep(_GLANCE_SECONDS)
    except (RuntimeError, ValueError):  # the store went away with the rank that kept it
        return False
    return False
