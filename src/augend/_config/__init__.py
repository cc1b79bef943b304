"""Run files: TOML to frozen dataclasses and back, and one line for each mistake."""

from augend._config._overrides import Setting
from augend._config._read import read
from augend._config._refuse import did_you_mean, refuse, shown
from augend._config._schema import RunFile
from augend._config._toml import to_toml

__all__ = ["RunFile", "Setting", "did_you_mean", "read", "refuse", "shown", "to_toml"]
