"""``python -m augend``, and the entry point of the ``augend`` command."""

from __future__ import annotations

import sys

from augend._cli import main

if __name__ == "__main__":
    sys.exit(main())
