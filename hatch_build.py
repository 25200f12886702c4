"""README of the package: on an index its relative links lead to the repository that made the release."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_INLINE = re.compile(r"(!?\[[^\]]*\]\()(?!https?:|#)([^)\s]+)")
_REFERENCE = re.compile(r"^(\[[^\]]+\]: )(?!https?:|#)(\S+)", re.MULTILINE)
_PICTURES = ".png", ".svg"


def absolute_links(text: str, environment: Mapping[str, str]) -> str:
    """README with absolute links, if the environment is that of a GitHub workflow; otherwise as it is.

    Args:
        text: the README.
        environment: variables of the environment.
    """
    repository = environment.get("GITHUB_REPOSITORY")
    if not repository:
        return text
    server = environment.get("GITHUB_SERVER_URL", "https://github.com")
    version = environment.get("GITHUB_REF_NAME", "main")

    def absolute(match: re.Match[str]) -> str:
        view = "raw" if match[2].endswith(_PICTURES) else "blob"
        return f"{match[1]}{server}/{repository}/{view}/{version}/{match[2]}"

    return _REFERENCE.sub(absolute, _INLINE.sub(absolute, text))


class Readme(MetadataHookInterface):
    """Hook that sets the README."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the README of the package's metadata."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute_links(text, os.environ)}
