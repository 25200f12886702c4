"""A layout as ``counterflow layout --json`` prints it. What it does not do: print."""

from __future__ import annotations

from typing import Annotated

from counterflow.common.json_models import Part, Result, describe

from .megatron_layout import LayerKind
from .rederived import Rederived


class StageShown(Part):
    """A stage of a layout."""

    stage: Annotated[int, describe("from 0")]
    rank: Annotated[int, describe("its pipeline rank in Megatron-LM: `stage` modulo `pp`")]
    chunk: Annotated[int, describe("which virtual stage of that rank: `stage` over `pp`, from 0")]
    layers: Annotated[str, describe("their letters; empty: it has none")]
    embedding: Annotated[int, describe("embeddings")]
    transformer: Annotated[int, describe("transformer layers")]
    mtp: Annotated[int, describe("MTP layers")]
    loss: Annotated[int, describe("heads with the loss")]


class LayoutShown(Result):
    """`counterflow layout`."""

    layout: Annotated[str, describe("for Megatron-LM's `--pipeline-model-parallel-layout`, and for `cuts`")]
    given: Annotated[str, describe("the layout that was given, in its shortest form")]
    changed: Annotated[bool, describe("whether the stages are others than those given")]
    pp: Annotated[int, describe("pipeline ranks")]
    vpp: Annotated[int, describe("virtual stages of each rank")]
    layers: Annotated[int, describe("transformer layers")]
    mtp: Annotated[int, describe("MTP layers")]
    usual_layers: Annotated[int, describe("transformer layers of a usual stage of the layout that was given")]
    embedding_layers: Annotated[int, describe("transformer layers that the embedding counts as")]
    loss_layers: Annotated[
        int, describe("transformer layers that the loss, and MTP layers in its stage, count as")
    ]
    mtp_layers: Annotated[int, describe("transformer layers that MTP layers in stages of their own count as")]
    cuts: Annotated[
        list[int] | None, describe("layers at which stages begin after the first; null: some are empty")
    ]
    stages: list[StageShown]


def shown(result: Rederived) -> LayoutShown:
    """A re-derived layout, with all of its stages."""
    layout = result.layout
    transformer, mtp = layout.count(LayerKind.TRANSFORMER), layout.count(LayerKind.MTP)
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
                embedding=stage.count(LayerKind.EMBEDDING),
                transformer=stage.count(LayerKind.TRANSFORMER),
                mtp=stage.count(LayerKind.MTP),
                loss=stage.count(LayerKind.LOSS),
            )
            for number, stage in enumerate(layout.stages)
        ],
    )
