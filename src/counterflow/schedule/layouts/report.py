"""A layout as ``counterflow layout --json`` prints it. What it does not do: print."""

from __future__ import annotations

from typing import Annotated

from counterflow.common.json_models import Part, Result, said

from .layout import Kind
from .rederived import Rederived


class StageShown(Part):
    """A stage of a layout."""

    stage: Annotated[int, said("from 0")]
    rank: Annotated[int, said("its pipeline rank in Megatron-LM: `stage` modulo `pp`")]
    chunk: Annotated[int, said("which virtual stage of that rank: `stage` over `pp`, from 0")]
    layers: Annotated[str, said("their letters; empty: it has none")]
    embedding: Annotated[int, said("embeddings")]
    transformer: Annotated[int, said("transformer layers")]
    mtp: Annotated[int, said("MTP layers")]
    loss: Annotated[int, said("heads with the loss")]


class LayoutShown(Result):
    """`counterflow layout`."""

    layout: Annotated[str, said("for Megatron-LM's `--pipeline-model-parallel-layout`, and for `cuts`")]
    given: Annotated[str, said("the layout that was given, in its shortest form")]
    changed: Annotated[bool, said("whether the stages are others than those given")]
    pp: Annotated[int, said("pipeline ranks")]
    vpp: Annotated[int, said("virtual stages of each rank")]
    layers: Annotated[int, said("transformer layers")]
    mtp: Annotated[int, said("MTP layers")]
    usual_layers: Annotated[int, said("transformer layers of a usual stage of the layout that was given")]
    embedding_layers: Annotated[int, said("transformer layers that the embedding counts as")]
    loss_layers: Annotated[
        int, said("transformer layers that the loss, and MTP layers in its stage, count as")
    ]
    mtp_layers: Annotated[int, said("transformer layers that MTP layers in stages of their own count as")]
    cuts: Annotated[
        list[int] | None, said("layers at which stages begin after the first; null: some are empty")
    ]
    stages: list[StageShown]


def shown(result: Rederived) -> LayoutShown:
    """A re-derived layout, with all of its stages."""
    layout = result.layout
    transformer, mtp = layout.count(Kind.TRANSFORMER), layout.count(Kind.MTP)
    return LayoutShown.of(
        layout=str(layout),
        given=str(result.original),
        changed=result.changed,
        pp=result.pp,
        vpp=result.vpp,
        layers=transformer,
        mtp=mtp,
        usual_layers=result.usual,
        embedding_layers=result.embedding,
        loss_layers=result.loss,
        mtp_layers=result.mtp,
        cuts=None if () in layout.stages else list(layout.cuts(transformer + mtp + 2, mtp=mtp)),
        stages=[
            StageShown(
                stage=number,
                rank=number % result.pp,
                chunk=number // result.pp,
                layers="".join(stage),
                embedding=stage.count(Kind.EMBEDDING),
                transformer=stage.count(Kind.TRANSFORMER),
                mtp=stage.count(Kind.MTP),
                loss=stage.count(Kind.LOSS),
            )
            for number, stage in enumerate(layout.stages)
        ],
    )
