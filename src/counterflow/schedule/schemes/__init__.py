"""Every scheme, one file each: a pure function from options to a ``Schedule``, and its record, ``SCHEME``.

Each function here accepts ``workers=`` or ``stages=``.
"""

from counterflow.schedule.either_depth import either_depth as _either_depth

from .chimera import SCHEME as _CHIMERA
from .chimera import chimera as _chimera
from .dapple import SCHEME as _DAPPLE
from .dapple import dapple as _dapple
from .dualpipe import SCHEME as _DUALPIPE
from .dualpipe import dualpipe as _dualpipe
from .dualpipe_v import SCHEME as _DUALPIPE_V
from .dualpipe_v import dualpipe_v as _dualpipe_v
from .gems import SCHEME as _GEMS
from .gems import gems as _gems
from .gpipe import SCHEME as _GPIPE
from .gpipe import gpipe as _gpipe
from .hanayo import SCHEME as _HANAYO
from .hanayo import hanayo as _hanayo
from .interleaved import SCHEME as _INTERLEAVED
from .interleaved import interleaved as _interleaved
from .interleaved_zb import SCHEME as _INTERLEAVED_ZB
from .interleaved_zb import interleaved_zb as _interleaved_zb
from .mixpipe import SCHEME as _MIXPIPE
from .mixpipe import mixpipe as _mixpipe
from .pipedream import SCHEME as _PIPEDREAM
from .pipedream import pipedream as _pipedream
from .pipedream_2bw import SCHEME as _PIPEDREAM_2BW
from .pipedream_2bw import pipedream_2bw as _pipedream_2bw
from .v_half import SCHEME as _V_HALF
from .v_half import v_half as _v_half
from .v_min import SCHEME as _V_MIN
from .v_min import v_min as _v_min
from .wpipe import SCHEME as _WPIPE
from .wpipe import wpipe as _wpipe
from .zb_h1 import SCHEME as _ZB_H1
from .zb_h1 import zb_h1 as _zb_h1
from .zb_h2 import SCHEME as _ZB_H2
from .zb_h2 import zb_h2 as _zb_h2
from .zb_v import SCHEME as _ZB_V
from .zb_v import zb_v as _zb_v

chimera = _either_depth(_CHIMERA, _chimera)
dapple = _either_depth(_DAPPLE, _dapple)
dualpipe = _either_depth(_DUALPIPE, _dualpipe)
dualpipe_v = _either_depth(_DUALPIPE_V, _dualpipe_v)
gems = _either_depth(_GEMS, _gems)
gpipe = _either_depth(_GPIPE, _gpipe)
hanayo = _either_depth(_HANAYO, _hanayo)
interleaved = _either_depth(_INTERLEAVED, _interleaved)
interleaved_zb = _either_depth(_INTERLEAVED_ZB, _interleaved_zb)
mixpipe = _either_depth(_MIXPIPE, _mixpipe)
pipedream = _either_depth(_PIPEDREAM, _pipedream)
pipedream_2bw = _either_depth(_PIPEDREAM_2BW, _pipedream_2bw)
v_half = _either_depth(_V_HALF, _v_half)
v_min = _either_depth(_V_MIN, _v_min)
wpipe = _either_depth(_WPIPE, _wpipe)
zb_h1 = _either_depth(_ZB_H1, _zb_h1)
zb_h2 = _either_depth(_ZB_H2, _zb_h2)
zb_v = _either_depth(_ZB_V, _zb_v)


def __dir__() -> list[str]:
    """Only the schemes."""
    return __all__


__all__ = [
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
