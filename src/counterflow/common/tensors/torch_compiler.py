"""Names of torch's compiler that are not public; each says what happens without it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import fx

Compile = Callable[[fx.GraphModule], Callable[[list[Any]], Sequence[Any]]]
"""Compiles a graph to a function that takes the list of its inputs, and may clear it."""

SPLITTING = frozenset(("aot_eager", "inductor"))
"""Backends whose backward graph can be taken apart (``compile_parts``)."""


def backend_of(name: str) -> Callable[..., Any]:
    """A backend of torch's compiler. Without: ``torch.compile`` finds it, and its graphs are not counted."""
    from torch._dynamo import lookup_backend  # noqa: PLC0415 - it takes seconds

    return cast("Callable[..., Any]", lookup_backend(name))


def compile_parts(
    name: str, graph: Any, inputs: Any, backward: Callable[[fx.GraphModule, Compile], Callable[..., Any]]
) -> Any:
    """Compile a graph of ``torch.compile``, with a backward of one's own. Without: one graph of the backward.

    Args:
        name: backend, one of ``SPLITTING``.
        graph: forward graph.
        inputs: its example inputs.
        backward: returns the function that runs the backward's graph, with the backend's compiler of a graph.
    """
    from torch._functorch import config  # noqa: PLC0415 - it takes a while

    if name == "inductor":
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner  # noqa: PLC0415 - seconds

        def inner(part: fx.GraphModule, example: Sequence[Any], **options: Any) -> Any:
            if not options.get("is_backward"):
                return compile_fx_inner(part, example, **options)

            def compiled(piece: fx.GraphModule) -> Any:
                example = [node.meta["val"] for node in piece.graph.find_nodes(op="placeholder")]
                return compile_fx_inner(piece, example, **options | {"static_input_idxs": ()})

            return backward(part, compiled)

        # A cached backward would be one graph; buffers of a backward whose graph is kept are not given away.
        with config.patch(enable_autograd_cache=False, donated_buffer=False):
            return compile_fx(graph, inputs, inner_compile=cast("Any", inner))
    from torch._dynamo.backends.common import aot_autograd  # noqa: PLC0415
    from torch._functorch.partitioners import min_cut_rematerialization_partition  # noqa: PLC0415

    def boxed(part: fx.GraphModule, _: Any = None) -> Any:
        def run(values: list[Any]) -> Sequence[Any]:
            return cast("Sequence[Any]", part.forward(*values))

        run._boxed_call = True  # type: ignore[attr-defined] # noqa: SLF001 - torch passes one list then
        return run

    with config.patch(donated_buffer=False):
        return aot_autograd(
            fw_compiler=boxed,
            bw_compiler=lambda part, _: backward(part, boxed),
            partition_fn=min_cut_rematerialization_partition,
            keep_inference_input_mutations=True,
        )(graph, inputs)
