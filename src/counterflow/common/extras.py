"""Packages that belong to an extra, and the error if one is missing."""

from __future__ import annotations

import importlib
from typing import Any

from ..errors import ConfigError


def imported(name: str, extra: str = "transformers") -> Any:
    """Import a package that not every installation has.

    Raises:
        ConfigError: the package is not installed.

    >>> imported("json").dumps(1)
    '1'
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0]:
            raise
        raise ConfigError(f'{name} is not installed; pip install "counterflow[{extra}]"') from None
