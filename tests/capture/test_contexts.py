"""Contexts in a forward, dtypes that it names, and the gradient mode of evaluations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import counterflow as cf


def sample(number: int) -> Tensor:
    return torch.randn((4, 8), generator=torch.Generator().manual_seed(number))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Float64(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to(torch.float64) / 3


class Bfloat16(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(torch.bfloat16).to(x.dtype))


class ByDtype(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return 2 * x if x.dtype == torch.float32 else x


class Autocast(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            for layer in self.layers:
                value = layer(x)
                x = torch.tanh(value.float()).to(value.dtype)
        return x.float()


class NoGradients(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.layers[0](x)
            with torch.enable_grad():
                x = self.layers[1](x)
        return self.layers[2](x) + self.layers[3](x)  # type: ignore[no-any-return]


class Inference(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            table = torch.linspace(0, 1, 8)
        return super().forward(x) + table.clone()


class Attends(Net):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            query = layer(x)[:, None, None]
            with sdpa_kernel(SDPBackend.MATH):
                x = scaled_dot_product_attention(query, query, query)[:, 0, 0]
        return x


class ByGradients(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x if torch.is_grad_enabled() else x.softmax(-1)


class Forces(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = super().forward(x)
            return energy + torch.autograd.grad(energy.sum(), x, create_graph=self.training)[0]


KINDS = [
    *(Float64, Bfloat16, ByDtype, Autocast, NoGradients, Inference, Attends, ByGradients, Forces),
]


@pytest.mark.parametrize("kind", KINDS)
def test_training_and_prediction_are_those_of_one_process(kind: type[Net]) -> None:
    def make() -> Net:
        torch.manual_seed(0)
        return kind()

    def work() -> tuple[list[Tensor], Tensor]:
        with cf.Pipeline(
            make(),
            lambda output, target: nn.functional.mse_loss(output, target.to(output.dtype)),
            "dapple(stages=1, micro_batches=1)",
            optimizer=lambda p: torch.optim.SGD(p, 0.1),
            example=sample(0),
        ) as pipeline:
            predicted = pipeline.predict(sample(1))
            pipeline.step(sample(2), sample(3))
            return list(pipeline.state_dict()["model"].values()), predicted

    weights, predicted = cf.launch(work, workers=1, transport="local")[0]
    model = make().eval()
    with torch.no_grad():
        expected = model(sample(1))
    torch.testing.assert_close(predicted, expected)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    output = model(sample(2))
    nn.functional.mse_loss(output, sample(3).to(output.dtype)).backward()
    optimizer.step()
    for weight, alone_weight in zip(weights, model.state_dict().values(), strict=True):
        torch.testing.assert_close(weight, alone_weight)
