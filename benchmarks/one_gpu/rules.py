"""Each rule of the pretended device, tried on it and on the GPU: where they differ, it is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from counterflow.common.tensors.devices import HostCopy
from counterflow.testing.strict_nccl.device import Device
from counterflow.testing.strict_nccl.device_memory import CopyError
from counterflow.testing.strict_nccl.operator_modes import computing
from one_gpu import Report

LONG = 50_000_000
"""Clock cycles that a kernel of the GPU waits, so that its host is ahead of it."""

Rule = Callable[[torch.device, Callable[[], None]], object]
"""Function of a device, and of a call after which the device is behind its host."""


def adds_host_tensor(device: torch.device, _: Callable[[], None]) -> object:
    return (torch.ones(3, device=device) + torch.ones(3)).tolist()


def adds_number_of_host(device: torch.device, _: Callable[[], None]) -> object:
    return (torch.ones(3, device=device) + torch.tensor(1.0)).tolist()


def indexes_by_host(device: torch.device, _: Callable[[], None]) -> object:
    return torch.arange(3.0, device=device)[torch.tensor([2, 0])].tolist()


def masks_by_host(device: torch.device, _: Callable[[], None]) -> object:
    return torch.arange(3.0, device=device)[torch.tensor([True, False, True])].tolist()


def assigns_host_rows(device: torch.device, _: Callable[[], None]) -> object:
    there = torch.zeros(3, device=device)
    there[1:] = torch.ones(2)
    return there.tolist()


def multiplies_by_module_of_host(device: torch.device, _: Callable[[], None]) -> object:
    return nn.Linear(3, 3)(torch.ones(3, device=device)).shape


def embeds_host_indices(device: torch.device, _: Callable[[], None]) -> object:
    return nn.Embedding(4, 2).to(device)(torch.tensor([1])).shape


def losses_of_host_targets(device: torch.device, _: Callable[[], None]) -> object:
    return nn.functional.cross_entropy(torch.zeros(2, 3, device=device), torch.tensor([0, 1])).item()


def concatenates_host(device: torch.device, _: Callable[[], None]) -> object:
    return torch.cat([torch.ones(1, device=device), torch.ones(1)]).tolist()


def copies_in_place_from_host(device: torch.device, _: Callable[[], None]) -> object:
    return torch.zeros(2, device=device).copy_(torch.ones(2)).tolist()


def fills_where_mask_of_host(device: torch.device, _: Callable[[], None]) -> object:
    return torch.zeros(2, device=device).masked_fill_(torch.tensor([True, False]), 1.0).tolist()


def reads_numpy(device: torch.device, _: Callable[[], None]) -> object:
    return torch.ones(2, device=device).numpy().tolist()


def reads_item(device: torch.device, behind: Callable[[], None]) -> object:
    behind()
    return torch.arange(3.0, device=device)[1].item()


def reads_list(device: torch.device, behind: Callable[[], None]) -> object:
    behind()
    return torch.arange(3.0, device=device).tolist()


def reads_later(device: torch.device, behind: Callable[[], None]) -> object:
    behind()
    return HostCopy(torch.arange(3.0, device=device)).read()


def queries_event(device: torch.device, behind: Callable[[], None]) -> object:
    behind()
    event = torch.get_device_module(device).Event()
    event.record()
    first = event.query()
    event.synchronize()
    return first, event.query()


def reads_copy_at_once(device: torch.device, behind: Callable[[], None]) -> object:
    there = torch.arange(1.0, 3.0, device=device)
    pinned = torch.zeros(2, pin_memory=True)
    behind()
    pinned.copy_(there, non_blocking=True)
    early = pinned.tolist() == [1.0, 2.0]
    torch.get_device_module(device).synchronize()
    return "right at once" if early else "not there", pinned.tolist()


def copies_to_host_blocking(device: torch.device, behind: Callable[[], None]) -> object:
    there = torch.arange(1.0, 3.0, device=device)
    behind()
    return there.to("cpu").tolist()


def changes_pinned_source(device: torch.device, behind: Callable[[], None]) -> object:
    pinned = torch.ones(2).pin_memory()
    behind()
    there = torch.empty(2, device=device)
    there.copy_(pinned, non_blocking=True)
    pinned.fill_(3)
    torch.get_device_module(device).synchronize()
    return "the change is seen" if there.tolist() == [3.0, 3.0] else there.tolist()


def changes_pageable_source(device: torch.device, behind: Callable[[], None]) -> object:
    pageable = torch.ones(2)
    behind()
    there = torch.empty(2, device=device)
    there.copy_(pageable, non_blocking=True)
    pageable.fill_(3)
    torch.get_device_module(device).synchronize()
    return there.tolist()


def _stepped(device: torch.device) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    parameter = nn.Parameter(torch.ones(3, device=device))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=True)
    parameter.grad = torch.ones(3, device=device)
    optimizer.step()
    return parameter, optimizer


def counts_steps_on_device(device: torch.device, _: Callable[[], None]) -> object:
    parameter, optimizer = _stepped(device)
    return optimizer.state[parameter]["step"].device.type == device.type


def counts_steps_on_host(device: torch.device, _: Callable[[], None]) -> object:
    parameter, optimizer = _stepped(device)
    optimizer.state[parameter]["step"] = optimizer.state[parameter]["step"].cpu()
    optimizer.step()
    torch.get_device_module(device).synchronize()
    return "accepted"


def assigns_gradient_of_host(device: torch.device, _: Callable[[], None]) -> object:
    parameter = nn.Parameter(torch.ones(3, device=device))
    parameter.grad = torch.ones(3)
    return "accepted"


def keeps_device_of_like(device: torch.device, _: Callable[[], None]) -> object:
    there = torch.ones(3, device=device)
    made: list[Tensor] = [torch.zeros_like(there), there.new_zeros(2), there[1:], there.to(torch.float64)]
    return all(tensor.device.type == device.type for tensor in made)


def moves_module(device: torch.device, _: Callable[[], None]) -> object:
    layer = nn.Linear(3, 2).to(device)
    layer(torch.ones(3, device=device)).sum().backward()
    assert layer.weight.grad is not None
    return layer.weight.grad.device.type == device.type


RULES: tuple[Rule, ...] = (
    *(adds_host_tensor, adds_number_of_host, indexes_by_host, masks_by_host, assigns_host_rows),
    *(multiplies_by_module_of_host, embeds_host_indices, losses_of_host_targets, concatenates_host),
    *(copies_in_place_from_host, fills_where_mask_of_host, reads_numpy, reads_item, reads_list, reads_later),
    *(queries_event, reads_copy_at_once, copies_to_host_blocking, changes_pinned_source),
    *(changes_pageable_source, counts_steps_on_device, assigns_gradient_of_host, keeps_device_of_like),
    *(moves_module, counts_steps_on_host),  # the last may be an error of the device
)

EXPECTED = {
    "changes_pinned_source": ("CopyError", "the change is seen"),
    "reads_copy_at_once": (("not there", [1.0, 2.0]), ("not there", [1.0, 2.0])),
}
"""Outcomes on the pretended device and on a GPU that differ in words and mean the same."""


def outcome(rule: Rule, device: torch.device, behind: Callable[[], None]) -> object:
    """Result of a rule, or the class of its error."""
    try:
        return rule(device, behind)
    except CopyError:
        return "CopyError"
    except (RuntimeError, TypeError) as error:
        return type(error).__name__


def pretended(rule: Rule) -> object:
    """Outcome on the pretended device."""
    device = Device(0, lambda _launches, _why: None)
    with computing(device.stream, device):
        return outcome(rule, device.handle, lambda: None)


def tried(report: Report, rule: Rule) -> tuple[str, str, dict[str, Any]]:
    """Outcomes on both devices."""
    torch.manual_seed(0)
    there = pretended(rule)
    if report.pretend:
        return "agrees", repr(there), {}
    here = outcome(rule, torch.device("cuda", 0), lambda: torch.cuda._sleep(LONG))
    same = repr(here) == repr(there) or (there, here) == EXPECTED.get(rule.__name__)
    text = repr(here) if same else f"pretended {there!r}, on the GPU {here!r}"
    return "agrees" if same else "differs", text, {}


def rows(report: Report) -> None:
    """A row for each rule."""
    for rule in report.cases(RULES):
        report.case(rule.__name__.replace("_", " "), lambda rule=rule: tried(report, rule))
