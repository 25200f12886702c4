"""Every scheme, one file each: a pure function from options to a ``Schedule``, and its record, ``SCHEME``."""

from .chimera import Concat, chimera
from .dapple import dapple
from .gems import gems
from .gpipe import gpipe
from .hanayo import hanayo
from .interleaved import interleaved
from .mixpipe import mixpipe
from .pipedream import pipedream
from .pipedream_2bw import pipedream_2bw
from .wpipe import wpipe

__all__ = [
    "Concat",
    "chimera",
    "dapple",
    "gems",
    "gpipe",
    "hanayo",
    "interleaved",
    "mixpipe",
    "pipedream",
    "pipedream_2bw",
    "wpipe",
]
