"""The command line: one file for each verb."""

from augend._cli._app import main

__all__ = ["main"]
