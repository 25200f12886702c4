"""Equal layers: recognised by structure, weights and shapes, and measured once in a row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from counterflow.api.skip import Skip
from counterflow.capture import layers
from counterflow.execution import Execution
from counterflow.measure.equal_layers import flows_of, kinds_of, without_repeats
from counterflow.measure.layer_chain import LayerChain, with_values
from counterflow.measure.subject_pipeline import Subject
from counterflow.measure.user_model import RepeatedSamples, UserModel


class Block(nn.Module):
    """A block with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 32), nn.Linear(32, width)

    def forward(self, x: Tensor) -> Tensor:
        """Output of the block."""
        return torch.add(x, self.down(torch.relu(self.up(self.norm(x)))))


class Blocks(nn.Module):
    """Some equal blocks between two linear layers."""

    def __init__(self, blocks: int, *, device: str = "cpu") -> None:
        super().__init__()
        with torch.device(device):
            self.first = nn.Linear(4, 8)
            self.blocks = nn.ModuleList(Block(8) for _ in range(blocks))
            self.last = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Output of the model."""
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        output: Tensor = self.last(x)
        return output


def _subject(parts: list[nn.Module]) -> Subject:
    example = torch.ones(2, 4), torch.ones(2, 4)
    batch = RepeatedSamples(example, 2)
    return Subject(parts, nn.MSELoss(), lambda p: torch.optim.SGD(p, lr=0.1), batch, 0, Execution())


@pytest.mark.parametrize(
    ("width", "places"), [(8, (0, 1, 2, 3, 4, 81)), (5000, (0, 1, 2, 3, 81)), (2**15, (0, 1, 81))]
)
def test_few_of_eighty_equal_blocks_are_measured(width: int, places: tuple[int, ...]) -> None:
    """Small layers remain in caches, which a stage of many does not have: of these four are measured."""
    with torch.device("meta"):
        first, last = nn.Linear(4, width), nn.Linear(width, 2)
        parts: list[nn.Module] = [first, *(Block(width) for _ in range(80)), last]
    chain = LayerChain.of(_subject(parts))
    assert chain.kinds == ("linear", *["block"] * 80, "linear-2")
    assert chain.places == places


def test_equal_captured_blocks_are_measured_once() -> None:
    """Of a captured model the last block may end with the head."""
    chain = LayerChain.of(UserModel(Blocks(8), nn.MSELoss(), (torch.ones(2, 4), torch.ones(2, 2)))())
    assert len(chain.kinds) >= 8
    assert len(chain.measured_kinds) == len({*chain.kinds}) + 3 <= 7


def test_captured_blocks_have_the_name_of_their_class() -> None:
    model = Blocks(3)
    parts = layers(model, torch.ones(2, 4))
    assert kinds_of(parts)[:2] == ["linear", "block"]


def test_layers_without_weights_differ_by_their_inputs() -> None:
    """A ReLU of a large image costs more than one of a small image, and convolutions differ by strides."""
    parts: list[nn.Module] = [
        nn.Conv2d(3, 3, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(3, 3, 3, padding=1, stride=2),
        nn.ReLU(),
    ]
    flows = flows_of(parts, torch.ones(2, 3, 8, 8))
    assert kinds_of(parts, flows) == ["conv2d", "relu", "conv2d-2", "relu-2"]


def test_layers_with_other_operations_differ() -> None:
    class Narrow(nn.Module):
        def __init__(self, times: int) -> None:
            super().__init__()
            self.weight, self.times = nn.Parameter(torch.ones(4, 4)), times

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(self.times):
                x = x @ self.weight
            return x

    parts = [nn.Linear(4, 4), Narrow(1), Narrow(2), Narrow(1), nn.Identity()]
    assert kinds_of(parts, flows_of(parts, torch.ones(2, 4)))[1:-1] == ["narrow", "narrow-2", "narrow"]


class Elementwise(nn.Module):
    """A linear layer, and operators without operations that torch counts."""

    def __init__(self, times: int, number: int = 0, *, recompute: bool = False, decide: bool = False) -> None:
        super().__init__()
        self.linear, self.times, self.layer_idx = nn.Linear(4, 4), times, number
        self.recompute, self.decide = recompute, decide

    def forward(self, x: Tensor) -> Tensor:
        """Output of the layer."""
        if self.decide and x.sum().item() > 1e30:
            return x
        y: Tensor = checkpoint(self.linear, x, use_reentrant=False) if self.recompute else self.linear(x)
        for _ in range(self.times):
            y = torch.tanh(y)
        return y / (1 + self.layer_idx)


def _kinds(parts: list[nn.Module]) -> list[str]:
    return kinds_of(parts, flows_of(parts, torch.ones(2, 4)))[1:-1]


def test_layers_with_other_elementwise_work_differ() -> None:
    parts = [nn.Linear(4, 4), *(Elementwise(times) for times in (1, 1, 9, 1)), nn.Identity()]
    assert _kinds(parts) == ["elementwise", "elementwise", "elementwise-2", "elementwise"]


def test_layers_with_other_backwards_differ() -> None:
    parts = [nn.Linear(4, 4), *(Elementwise(1, recompute=n == 1) for n in range(3)), nn.Identity()]
    assert _kinds(parts) == ["elementwise", "elementwise-2", "elementwise"]


def test_layers_that_differ_by_their_number_are_equal() -> None:
    parts = [nn.Linear(4, 4), *(Elementwise(1, number) for number in range(80)), nn.Identity()]
    assert _kinds(parts) == ["elementwise"] * 80


def test_a_layer_whose_input_has_no_gradient_is_like_no_other() -> None:
    """After frozen layers the first one has less to compute in its backward."""
    parts: list[nn.Module] = [nn.Linear(4, 4), *(Elementwise(1) for _ in range(3)), nn.Identity()]
    parts[0].requires_grad_(requires_grad=False)
    assert _kinds(parts) == ["elementwise", "elementwise-2", "elementwise-2"]


def test_layers_that_need_values_differ_by_their_settings() -> None:
    settings = ((1, 0), (1, 1), (9, 2))
    parts: list[nn.Module] = [Elementwise(times, number, decide=True) for times, number in settings]
    parts = [nn.Identity(), *parts, nn.Identity()]
    assert flows_of(parts, torch.ones(2, 4)) is None
    assert _kinds(parts) == ["elementwise", "elementwise", "elementwise-2"]


def test_the_first_layer_and_the_last_are_like_no_other() -> None:
    parts = [nn.Linear(4, 4) for _ in range(5)]
    kinds = kinds_of(parts, flows_of(parts, torch.ones(2, 4)))
    assert kinds == ["linear", "linear-2", "linear-2", "linear-2", "linear-3"]


def test_flows_neither_compute_nor_change_the_layers() -> None:
    norm = nn.BatchNorm1d(4)
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    (flow,) = flows_of([norm], torch.ones(2, 4)) or ()
    assert flow.input == flow.output
    for name, value in norm.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


def test_layers_that_need_values_are_all_measured() -> None:
    class Decides(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum().item() > 0 else -x

    parts: list[nn.Module] = [Decides(), Decides(), Decides()]
    assert flows_of(parts, torch.ones(2, 4)) is None
    assert LayerChain.of(_subject(parts)).places == (0, 1, 2)


def test_layers_that_pass_values_are_all_measured() -> None:
    """Numbers of layers that save and load would be others in a shorter chain."""
    skip = Skip("entry")
    parts: list[nn.Module] = [skip.saver(), nn.ReLU(), nn.ReLU(), nn.Sequential(skip.loader(), _First())]
    assert LayerChain.of(_subject(parts)).places == (0, 1, 2, 3)


class _First(nn.Module):
    def forward(self, values: tuple[Tensor, Tensor]) -> Tensor:
        return values[0]


def test_rows_of_several_kinds_repeat() -> None:
    assert without_repeats(["E", "A", "M", "A", "M", "A", "M", "H"]) == [0, 1, 2, 7]
    assert without_repeats(["A", "A", "A", "B", "A", "A"]) == [0, 3, 4]
    assert without_repeats(["A"]) == [0]
    assert without_repeats(["E", "A", "M", "A", "M", "A", "M", "H"], keep=2) == [0, 1, 2, 3, 4, 7]
    assert without_repeats(["A", "A", "A", "B", "A", "A", "A", "B"], keep=2) == [0, 1, 3, 4, 5, 7]


def test_a_model_without_memory_is_measured_with_any_weights() -> None:
    model = Blocks(8, device="meta")
    subject = UserModel(model, nn.MSELoss(), (torch.ones(2, 4), torch.ones(2, 2)))()
    chain = LayerChain.of(subject).subject(subject)
    assert len(chain.layers) <= 7
    assert not any(tensor.is_meta for layer in chain.layers for tensor in layer.parameters())
    assert all(tensor.is_meta for tensor in model.parameters())


def test_shared_weights_remain_shared() -> None:
    first, second = nn.Linear(2, 2, device="meta"), nn.Linear(2, 2, device="meta")
    second.weight = first.weight
    one, two = with_values([first, second])
    assert one.weight is two.weight
    assert one.bias is not two.bias


def test_samples_of_an_example_repeat() -> None:
    batch = RepeatedSamples(({"x": torch.arange(3.0)}, (torch.arange(3), None, 5)), 3)
    inputs, targets = batch(5)
    assert inputs["x"].tolist() == [0, 1, 2, 0, 1]
    assert targets[0].tolist() == [0, 1, 2, 0, 1]
    assert targets[1:] == (None, 5)
