"""Attributes that a called module sets in its forward are its own, in stages as in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import counterflow as cf

from .kit import sample, trained, trained_in_stages

SCHEMES = [
    "1f1b(workers=2, micro_batches=4)",
    "zb-v(workers=2, micro_batches=4)",
    "interleaved(workers=2, micro_batches=4, chunks=2)",
]


class Block(nn.Module):
    """A block that counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(8, 8), 0
        self.counts = {"forwards": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.counts["forwards"] += 1
        return x + torch.tanh(self.linear(x))


class Scaled(Block):
    """A block whose count is in its numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * min(1.0, self.calls / 8)


class Keeping(Block):
    """A block that keeps what it computed: without its graph, with it, and a table of its first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.last_output, self.size = y.detach(), (y**2).mean()
        if self.table is None or len(self.table) != x.shape[1]:
            self.table = torch.linspace(0, 1, x.shape[1], dtype=x.dtype)
        return y * self.table


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entry, self.first, self.second = nn.Linear(8, 8), nn.LSTM(8, 8), nn.LSTM(8, 8)
        self.third, self.head = nn.GRU(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.entry(x)[:, None]
        for memory in (self.first, self.second, self.third):
            hidden = memory(hidden.transpose(0, 1))[0].transpose(0, 1)
        return self.head(hidden[:, 0])  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self, kind: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.entry, self.blocks, self.head = nn.Linear(8, 8), nn.ModuleList(), nn.Linear(8, 8)
        self.blocks.extend(kind() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    "make",
    [Net, lambda: Net(Scaled), lambda: Net(Keeping), Recurrent],
    ids=["counts", "scaled", "keeping", "recurrent"],
)
def test_attributes_that_a_called_module_sets_are_its_own(make: Callable[[], nn.Module], scheme: str) -> None:
    # The witness's own forward of a micro-batch counts as well.
    numbers = trained_in_stages(make, scheme, witness_every=0)
    torch.testing.assert_close(numbers, trained(make, 4), rtol=1e-11, atol=1e-13)


def test_attributes_that_a_called_module_sets_are_its_own_in_processes() -> None:
    numbers = trained_in_stages(Net, SCHEMES[0], "gloo")
    torch.testing.assert_close(numbers, trained(Net, 4), rtol=1e-11, atol=1e-13)


class Reads(Net):
    """Reads beside its blocks what they change."""

    def __init__(self, value: Callable[[Any], Any]) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.value(self.blocks[0])  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        (
            Block,
            lambda block: block.calls,
            r"its forward reads blocks\.0\.calls, which a module that it calls",
        ),
        (
            Block,
            lambda block: block.counts["forwards"],
            r"reads blocks\.0\.counts\['forwards'\], which a module",
        ),
        (Keeping, lambda block: block.size, "uses a tensor of a call that is not traced"),
    ],
)
def test_traced_code_that_reads_what_a_called_module_sets_is_refused(
    kind: Callable[[], Block], value: Callable[[Any], Any], message: str
) -> None:
    model = Reads(value)
    model.blocks[0] = kind()
    with pytest.raises(cf.ConfigError, match=message):
        cf.layers(model, sample(0))


class Around(nn.Module):
    """A block that reads what its parts change, so it is no longer traced."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x)) / self.one.calls  # type: ignore[no-any-return]


def test_a_block_that_reads_what_its_parts_change_is_one_layer() -> None:
    def make() -> nn.Module:
        return Net(Around)

    assert [layer.title for layer in cf.layers(make(), sample(0))][1:3] == ["blocks.0", "blocks.1"]
    numbers = trained_in_stages(make, SCHEMES[0], witness_every=0)
    torch.testing.assert_close(numbers, trained(make, 4), rtol=1e-11, atol=1e-13)


class Peer(Block):
    """A block that reads the count of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.peers: list[Block] = []

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.0 + sum(peer.calls for peer in self.peers))


def test_what_a_called_module_changes_and_one_of_another_stage_reads_is_refused() -> None:
    def make() -> nn.Module:
        model = Net(Peer)
        model.blocks[3].peers = [model.blocks[0]]  # type: ignore[assignment]
        return model

    with pytest.raises(cf.ConfigError, match=r"changes 'calls' .* in another stage reads"):
        trained_in_stages(make, SCHEMES[0])


class Notes(nn.Module):
    """A block that notes something in one dict, and reads it in another."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(8, 8), 0

    def forward(self, x: Tensor, keys: dict[str, Any], state: dict[str, Any]) -> Tensor:
        self.calls += 1  # which is not traced
        state["scale"] = 0.5
        return torch.tanh(self.layer(x)) * keys.get("scale", 1.0)  # type: ignore[no-any-return]


class NotesTwice(nn.Module):
    def __init__(self, *, once: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.once = nn.ModuleList(Notes() for _ in range(2)), once
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            state: dict[str, Any] = {"x": x}
            x = block(x, {"x": x} if self.once else state, state)
        return self.head(x)  # type: ignore[no-any-return]


def test_a_dict_that_a_module_is_given_twice_and_changes_is_refused() -> None:
    """A recorded call would give it two dicts."""
    x = torch.randn(6, 8)
    model = NotesTwice(once=True)
    torch.testing.assert_close(nn.Sequential(*cf.layers(model, x))(x), model(x), rtol=0, atol=0)
    with pytest.raises(cf.ConfigError, match=r"passes a list or dict twice to 'blocks\.0', which changes it"):
        cf.layers(NotesTwice(once=False), x)


class Takes(nn.Module):
    """A block that takes the first entry of the caller's list, and counts in the caller's dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(8, 8), 0

    def forward(self, x: Tensor, history: list[Tensor], notes: dict[str, int]) -> Tensor:
        self.calls += 1  # which is not traced
        notes["blocks"] = notes.get("blocks", 0) + 1
        return torch.tanh(self.layer(x)) + history.pop(0)


class History(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.head = nn.ModuleList(Takes() for _ in range(4)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        history, notes = [x * (number + 1) for number in range(4)], dict[str, int]()
        for block in self.blocks:
            x = block(x, history, notes)
        return self.head(x) * notes["blocks"]  # type: ignore[no-any-return]


def test_the_own_forward_sees_what_modules_of_other_workers_do_to_its_lists() -> None:
    numbers = trained_in_stages(History, "1f1b(workers=2, micro_batches=2)")
    torch.testing.assert_close(numbers, trained(History), rtol=1e-9, atol=1e-12)
