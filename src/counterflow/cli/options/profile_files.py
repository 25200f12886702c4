"""Files of ``counterflow profile`` as costs of a command, in place of its costs in flags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from counterflow.common.cli_fields import cli_field
from counterflow.errors import ConfigError
from counterflow.planning.inputs.cluster import Cluster
from counterflow.planning.inputs.input_files import load_cluster, load_model, load_profile
from counterflow.planning.inputs.model import Model
from counterflow.planning.inputs.profile import Profile

from .flags import OptionRecord
from .wording import flag


class ProfiledModel(NamedTuple):
    """A model, its profile and a cluster, and samples of a micro-batch."""

    model: Model
    profile: Profile
    cluster: Cluster
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileFiles(OptionRecord):
    """Files that measured costs are read from."""

    panel: ClassVar[str] = (
        "Profile: measured costs instead of the costs above, in the files of 'counterflow plan'"
    )

    model: Path | None = cli_field(None, "Layers of the model.", metavar="FILE")
    profile: Path | None = cli_field(
        None,
        "Costs of its layers; or the folder that 'counterflow profile' wrote, with all three.",
        metavar="FILE|DIR",
    )
    cluster: Path | None = cli_field(None, "Devices and links.", metavar="FILE")
    micro_batch_size: int | None = cli_field(None, "Samples of a micro-batch.", metavar="SAMPLES")

    @property
    def has_values(self) -> bool:
        """True if any file or size is given."""
        return any(value is not None for value in asdict(self).values())

    def read(self) -> ProfiledModel:
        """The records in the files.

        Raises:
            ConfigError: only some of the files are given, or a file is damaged.
        """
        files = asdict(self)
        if self.profile is not None and self.profile.is_dir():
            folder = self.profile
            files |= {name: files[name] or folder / f"{name}.toml" for name in ("model", "cluster")}
            files["profile"] = folder / "profile.toml"
        missing = [flag(name) for name, value in files.items() if value is None]
        if missing:
            raise ConfigError(
                "measured costs need a model, a profile, a cluster and a size: also give "
                + ", ".join(missing)
            )
        return ProfiledModel(
            load_model(files["model"]),
            load_profile(files["profile"]),
            load_cluster(files["cluster"]),
            files["micro_batch_size"],
        )


def refuse_costs(costs: Mapping[str, Any]) -> None:
    """Refuse costs in flags beside a profile.

    Raises:
        ConfigError: there are some.
    """
    if costs:
        raise ConfigError(
            f"{flag(next(iter(costs)))}: the profile has all costs; leave it out, or leave out --profile"
        )
