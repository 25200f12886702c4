"""Private names of torch stand in one file a room."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import nn

from counterflow.api.torch_internals import in_backward
from counterflow.common.tensors import torch_private

SOURCES = Path(torch_private.__file__).parents[2]

PRIVATE = re.compile(
    r"torch\._C\b|_execution_engine|_get_backend\(|_get_default_store|_unsafe_preserve|_python_dispatch|_NormBase"
    r"|\._local_tensor\b|_get_fsdp_state|_all_gather_comm|_unsharded_param|_root_post_backward|_broadcast_to_and_flatten|tensor\._utils|_backward_hooks|Backend\._plugins"
    r"|\._parameters\[|\._buffers\b|\._modules\b|aten\._|\._schema\b|loss\._Loss|child\._parameters"
)

PLACES = {
    "torch_compiler.py",
    "torch_fsdp.py",
    "torch_private.py",
    "torch_internals.py",
    "tracing_internals.py",
}


def test_no_other_file_names_what_is_private() -> None:
    found = {
        f"{path.relative_to(SOURCES)}: {match[0]}"
        for path in SOURCES.rglob("*.py")
        if path.name not in PLACES
        for match in PRIVATE.finditer(path.read_text(encoding="utf-8"))
    }
    assert found == {"models/hf/shells.py: ._modules"}  # models know nobody


def test_uses_of_a_storage() -> None:
    one = torch.ones(3)
    alone = torch_private.storage_uses(one)
    view = one[1:]
    assert torch_private.storage_uses(one) == alone + 1
    del view
    assert torch_private.storage_uses(one) == alone


def test_a_backward_is_seen_from_within() -> None:
    seen = []
    value = torch.ones(1, requires_grad=True)
    value.register_hook(lambda _: seen.append(in_backward()))
    torch_private.run_backward(
        (value * 2,),
        (torch.ones(1),),
        False,
        False,
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )
    assert seen == [True]
    assert not in_backward()
    assert value.grad is not None


def test_hooks_and_norms() -> None:
    parameter = nn.Parameter(torch.ones(1))
    parameter.register_hook(lambda grad: grad)
    parameter.register_post_accumulate_grad_hook(lambda _: None)
    assert [len(hooks) for hooks in torch_private.hooks_of(parameter)] == [1, 1]
    assert torch_private.keeps_statistics(nn.BatchNorm1d(2))
    assert not torch_private.keeps_statistics(nn.LayerNorm(2))
