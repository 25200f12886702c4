"""A user's model from a Python file: ``FILE.py:FUNCTION``, a function that returns model, loss and example.

Invariant: a reference to a file can be pickled; each worker runs the file and calls the function.
"""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from torch import nn

from counterflow.errors import ConfigError

from .subject_pipeline import Subject
from .user_model import UserModel

MAKE_MODEL = "make_model"
"""Name of the function, unless another one is named."""

_RETURNS = "return model, loss, (inputs, targets)"


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A Python file with a function that makes a model.

    Attributes:
        path: the file.
        function: name of a function without arguments that returns model, loss and example, or these and a
            function that makes the optimizer.
    """

    path: Path
    function: str = MAKE_MODEL

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """The file that a text names, as ``own.py:make_model`` or ``own.py``; None: no Python file.

        >>> ModelFile.parse("models/own.py:small").function
        'small'
        """
        path, colon, function = text.rpartition(":")
        if colon and path.endswith(".py"):
            return cls(Path(path), function or MAKE_MODEL)
        return cls(Path(text)) if text.endswith(".py") else None

    @property
    def name(self) -> str:
        """File and function."""
        return f"{self.path}:{self.function}"

    def __call__(self) -> Subject:
        """The subject of a measurement."""
        return self.load()()

    def load(self) -> UserModel:
        """Run the file and call the function.

        Raises:
            ConfigError: the file does not exist or fails, there is no such function, or it returns something
                else.
        """
        function = self._function()
        try:
            parts = function()
        except Exception as error:
            raise ConfigError(f"{self.name} fails ({type(error).__name__}: {error})") from error
        if not isinstance(parts, tuple) or len(parts) not in (3, 4):
            count = f"{len(parts)} values" if isinstance(parts, tuple) else f"a {type(parts).__name__}"
            raise ConfigError(
                f"{self.name} returns {count}: it has to {_RETURNS}, and a function that makes the optimizer "
                "of parameters may be a fourth value"
            )
        model, loss, example, *optimizer = parts
        if not isinstance(model, nn.Module | list | tuple):
            raise ConfigError(
                f"{self.name} returns a {type(model).__name__} as its model: {_RETURNS}, where model is a "
                "module or a list of layers"
            )
        return UserModel(model, loss, example, *optimizer)

    def _function(self) -> Any:
        path = self.path.resolve()
        if not path.is_file():
            raise ConfigError(f"{self.path}: no such file")
        name = f"counterflow_model_{path.stem}"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        if str(path.parent) not in sys.path:
            sys.path.insert(0, str(path.parent))
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            raise ConfigError(f"{self.path} fails ({type(error).__name__}: {error})") from error
        function: Any = getattr(module, self.function, None)
        if not callable(function):
            raise ConfigError(
                f"{self.path} has no function {self.function}: write def {self.function}(): ... {_RETURNS}, "
                f"or name another one: {self.path.name}:FUNCTION"
            )
        return function
