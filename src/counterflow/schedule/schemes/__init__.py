"""Every scheme, one file each: a pure function from options to a ``Schedule``, and its record, ``SCHEME``."""

from .chimera import Concat, chimera
from .dapple import dapple
from .dualpipe import dualpipe
from .dualpipe_v import dualpipe_v
from .gems import gems
from .gpipe import gpipe
from .hanayo import hanayo
from .interleaved import interleaved
from .interleaved_zb import interleaved_zb
from .mixpipe import mixpipe
from .pipedream import pipedream
from .pipedream_2bw import pipedream_2bw
from .v_half import v_half
from .v_min import v_min
from .wpipe import wpipe
from .zb_h1 import zb_h1
from .zb_h2 import zb_h2
from .zb_v import zb_v


def __dir__() -> list[str]:
    """The schemes alone: what makes their orders stands in the same folder."""
    return __all__


__all__ = [
    "Concat",
    "chimera",
    "dapple",
    "dualpipe",
    "dualpipe_v",
    "gems",
    "gpipe",
    "hanayo",
    "interleaved",
    "interleaved_zb",
    "mixpipe",
    "pipedream",
    "pipedream_2bw",
    "v_half",
    "v_min",
    "wpipe",
    "zb_h1",
    "zb_h2",
    "zb_v",
]
