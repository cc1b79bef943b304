"""Listeners for ``fit``: where the record of a run goes."""

from augend._listeners._jsonl import json_lines

__all__ = ["json_lines"]
