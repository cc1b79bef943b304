"""Run files: TOML to frozen dataclasses and back, and from there to a model, data and an optimizer."""

from augend._config._overrides import Setting
from augend._config._read import read
from augend._config._schema import RunFile
from augend._config._toml import to_toml

__all__ = ["RunFile", "Setting", "read", "to_toml"]
