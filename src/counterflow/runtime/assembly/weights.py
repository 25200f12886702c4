"""A worker's weights, put together of their parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..mesh.parallel_dims import ParallelDims
from ..parameters.compressed_sums import SumCompression
from ..parameters.ema import WeightEma
from ..parameters.extra_state import ExtraState
from ..parameters.local_state import LocalState
from ..parameters.loss_scale import LossScale
from ..parameters.names import Names
from ..parameters.optimizers import MakeOptimizer, MakeScheduler
from ..parameters.parameter_placement import ParameterPlacement
from ..parameters.pending_copies import PendingCopies
from ..parameters.sharded_updates import Owners
from ..parameters.stage_optimizers import StageOptimizers
from ..parameters.weights import Weights
from ..stages.randomness import RandomStreams
from ..stages.stage import LocalStage
from ..transport.base import Transport


def weights_of(
    stages: Mapping[int, LocalStage],
    *,
    names: Names,
    aliases: Mapping[str, Sequence[str]],
    holders: Sequence[Sequence[int]],
    dims: ParallelDims,
    transport: Transport,
    optimizer: MakeOptimizer,
    scheduler: MakeScheduler | None,
    streams: RandomStreams,
    extra_state: ExtraState,
    sharded: bool,
    compression: SumCompression | None = None,
    loss_scale: LossScale | None = None,
) -> Weights:
    """The weights of a worker's stages; all workers call it.

    Args:
        stages: the worker's stages.
        names: names of the parameters of all stages of the model.
        aliases: by the first name of a tensor that the model has under several, all its names.
        holders: by stage, the workers of a group that hold a copy.
        dims: record of the parallel dimensions.
        transport: transport to the other workers.
        optimizer: the user's function of parameters to an optimiser.
        scheduler: the user's function of an optimiser to a learning-rate scheduler.
        streams: random streams.
        extra_state: state of the model that is in none of its layers.
        sharded: True if of a parameter's holders one alone has its optimiser state (ZeRO stage 1).
        compression: form in which gradients are summed; None: in full.
        loss_scale: factor of the losses; None: 1.

    Raises:
        ConfigError: a pipeline cannot step an optimiser, or workers have different models or optimisers.
    """
    extra_state.broadcast(transport)
    placement = ParameterPlacement(stages, names, holders, dims, transport, compression=compression)
    owners = Owners(placement.all_gradients(), names, transport) if sharded else None
    optimizers = StageOptimizers(
        stages,
        placement,
        owners,
        optimizer=optimizer,
        scheduler=scheduler,
        streams=streams,
        transport=transport,
    )
    ema, copies = WeightEma(stages, optimizers.parameters, transport), PendingCopies()
    state = LocalState(
        stages,
        names=names,
        aliases=aliases,
        extra_state=extra_state,
        holders=holders,
        dims=dims,
        placement=placement,
        optimizers=optimizers,
        ema=ema,
        loss_scale=loss_scale,
        copies=copies,
        transport=transport,
    )
    return Weights(
        stages,
        names=names,
        aliases=aliases,
        extra_state=extra_state,
        dims=dims,
        placement=placement,
        optimizers=optimizers,
        ema=ema,
        loss_scale=loss_scale,
        state=state,
        copies=copies,
        streams=streams,
        transport=transport,
    )
