"""Lists with an entry a sample, micro-batches with nothing to cut, mappings of any class."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import counterflow as cf
from counterflow.common.mappings import register_mapping_classes
from counterflow.runtime.mini_batch.samples import cut, joined, refuse_whole_entries, samples_in

from ...kit import sgd

D = torch.float64


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=D)


def launched(work: Any, *args: Any) -> Any:
    return cf.launch(work, *args, workers=2, transport="local", timeout_seconds=30)[0]


def net() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(6, 8, dtype=D), nn.Linear(8, 4, dtype=D)]


# -- which dimension


ROWS = [torch.zeros(3, 4)] * 3
BOXES = [{"boxes": torch.zeros(2, 4), "name": "a"}, {"boxes": torch.zeros(5, 4), "name": "b"}]


def test_entries_are_counted_and_cut() -> None:
    assert samples_in(ROWS, cf.ENTRIES) == 3
    assert samples_in(ROWS, [0, 0, 0]) == 3
    assert samples_in({"x": torch.zeros(2), "y": BOXES}, {"x": 0, "y": cf.ENTRIES}) == 2
    assert cut(BOXES, slice(1, 2), cf.ENTRIES) == BOXES[1:]
    assert cut(tuple(BOXES), slice(0, 1), cf.ENTRIES) == (BOXES[0],)
    part = cut((torch.arange(4), ["a", "b", "c", "d"]), slice(1, 3), (0, cf.ENTRIES))
    assert part[0].tolist() == [1, 2]
    assert part[1] == ["b", "c"]
    assert joined([BOXES[:1], BOXES[1:]], cf.ENTRIES, "outputs", [1, 1]) == BOXES


EITHER = r"is a (list|tuple) of 3 entries of one kind, as many as there are samples"


@pytest.mark.parametrize(
    ("tree", "dims", "message"),
    [
        (ROWS, 0, EITHER),
        (tuple(ROWS), 0, EITHER),
        ({"x": torch.zeros(3), "y": ROWS}, 0, r"inputs\['y'\] " + EITHER),
        ({"x": torch.zeros(3), "y": ROWS}, {"x": 0, "y": 0}, r"inputs\['y'\] " + EITHER),
        ([{"boxes": rows} for rows in ROWS], 0, EITHER),
        ({"x": torch.zeros(3), "y": [torch.tensor(1.0)] * 3}, 0, EITHER),
        (BOXES, 0, "or cf.ENTRIES for a list with an entry a sample"),
        (torch.zeros(3), cf.ENTRIES, "inputs is a Tensor, and input_dims=cf.ENTRIES is for a list or tuple"),
        ({"x": ROWS}, cf.ENTRIES, "inputs is a dict, and input_dims=cf.ENTRIES is for a list or tuple"),
        ({"x": ROWS}, {"y": cf.ENTRIES}, "does not fit the inputs, which are a dict of 'x'"),
        ((torch.zeros(4), ["a"] * 4), 0, "whether it has one a sample .cf.ENTRIES."),
    ],
)
def test_what_may_be_either_is_refused(tree: object, dims: Any, message: str) -> None:
    with pytest.raises(cf.ConfigError, match=message):
        samples_in(tree, dims)


def test_what_cannot_be_either_is_not() -> None:
    assert samples_in((torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64))) == 2  # of other kinds
    assert samples_in([torch.zeros(1, 3)]) == 1
    assert samples_in(ROWS, uncut=True) == 3  # nothing is cut
    known_layouts: Any = []
    pair = [torch.zeros(8, 3)] * 3
    assert samples_in(pair, known_layouts=known_layouts) == 8
    assert (
        samples_in(ROWS, known_layouts=known_layouts) == 3
    )  # a last mini-batch of three samples: known by now


def test_outputs_that_may_be_either_are_refused() -> None:
    with pytest.raises(cf.ConfigError, match=r"output_dims which it is: cf\.ENTRIES"):
        joined([ROWS, ROWS], 0, "outputs", [3, 3])
    assert len(joined([ROWS, ROWS], [0, 0, 0], "outputs", [3, 3])) == 3


class Pair:
    """A pytree that tells no names of what is in it."""

    def __init__(self, *both: Any) -> None:
        self.both = both


pytree.register_pytree_node(Pair, lambda pair: (list(pair.both), None), lambda both, _: Pair(*both))


def test_pytrees_without_names_are_counted_and_told() -> None:
    assert samples_in(Pair(torch.zeros(4, 2), torch.zeros(4))) == 4
    with pytest.raises(cf.ConfigError, match=r"found 3 in inputs \(its tensor or value 1\) and 4 in"):
        samples_in(Pair(torch.zeros(4, 2), torch.zeros(3)))


# -- a list of a tensor, or of dicts, a sample


def of_rows(output: Tensor, target: list[Tensor]) -> Tensor:
    return torch.stack([(o - t.mean(0)).abs().mean() for o, t in zip(output, target, strict=True)]).mean()


def of_boxes(output: Tensor, target: list[dict[str, Tensor]]) -> Tensor:
    return of_rows(output, [one["boxes"] for one in target])


def detections(step: int, samples: int = 8) -> tuple[Tensor, list[dict[str, Tensor]]]:
    sizes = [1 + (step + k) % 4 for k in range(samples)]
    boxes = [numbers(size, 4, seed=10 * step + k) for k, size in enumerate(sizes)]
    return numbers(samples, 6, seed=step), [
        {"boxes": each, "labels": torch.zeros(len(each))} for each in boxes
    ]


def alone(loss: Any, batches: Any) -> list[float]:
    model = nn.Sequential(*net())
    optimizer, told = sgd(list(model.parameters())), []
    for x, y in batches:
        optimizer.zero_grad()
        found = loss(model(x), y)
        found.backward()
        optimizer.step()
        told.append(found.item())
    return told


@pytest.mark.parametrize(
    "schedule",
    [cf.schemes.dapple(2, 4), cf.schemes.chimera(2, 4), cf.schemes.chimera(2, 4, concat="backward-halving")],
    ids=str,
)
def test_targets_are_cut_by_their_entries(schedule: cf.Schedule) -> None:
    rows = [(numbers(8, 6, seed=k), [numbers(8, 4, seed=k + i) + i for i in range(8)]) for k in range(2)]
    boxes = [detections(step) for step in range(2)]

    def work(loss: Any, batches: Any) -> list[float]:
        with cf.Pipeline(net(), loss, schedule, optimizer=sgd, target_dims=cf.ENTRIES) as pipeline:
            return [pipeline.step(*each).loss for each in batches]

    assert launched(work, of_rows, rows) == pytest.approx(alone(of_rows, rows), rel=1e-12)
    assert launched(work, of_boxes, boxes) == pytest.approx(alone(of_boxes, boxes), rel=1e-12)


def test_a_list_of_a_tensor_a_sample_is_refused_before_it_is_cut() -> None:
    def work() -> None:
        cf.Pipeline(net(), of_rows, cf.schemes.dapple(2, 4), optimizer=sgd).step(
            numbers(8, 6), [numbers(8, 4, seed=k) for k in range(8)]
        )

    with pytest.raises(cf.ConfigError, match="targets is a list of 8 entries of one kind"):
        launched(work)


def test_entries_that_go_whole_to_a_loss_that_fails_on_them() -> None:
    def work() -> None:
        cf.Pipeline(net(), of_boxes, cf.schemes.dapple(2, 4), optimizer=sgd, target_dims=None).step(
            *detections(0)
        )

    with pytest.raises(cf.ConfigError, match="outputs of 2 samples and targets of 8 entries") as error:
        launched(work)
    assert str(error.value).endswith("if each entry is a sample's, say target_dims=cf.ENTRIES")
    assert "ValueError: zip()" in str(error.value)


@pytest.mark.parametrize(
    ("target", "dims", "samples", "total"),
    [
        (BOXES, None, 2, 2),  # it is the whole mini-batch
        (BOXES, None, 1, 4),  # as many as there are anchors, say
        (BOXES, cf.ENTRIES, 1, 2),
        (torch.zeros(2), None, 1, 2),
    ],
)
def test_other_errors_of_a_loss_stay_its_own(target: Any, dims: Any, samples: int, total: int) -> None:
    refuse_whole_entries(ValueError("its own"), target, dims, samples, total)


# -- micro-batches that are ready need a number of samples, and no dimension


class Graphs:
    """Some graphs, as graph libraries collate them; no pytree."""

    def __init__(self, x: Tensor, edges: Tensor, of: Tensor, count: int) -> None:
        self.x, self.edges, self.of, self.count = x, edges, of, count


class Read(nn.Linear):
    """The mean of each graph's nodes, after a step along its edges."""

    def forward(self, graphs: Any) -> Tensor:
        x, edges, of, count = graphs.x, graphs.edges, graphs.of, graphs.count
        seen = super().forward(x + torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])).tanh()
        sizes = torch.bincount(of, minlength=count)[:, None]
        return seen.new_zeros(count, seen.shape[1]).index_add(0, of, seen) / sizes


COUNTS = (4, 3, 1, 2)


def graphs(number: int, graph_type: Any = Graphs) -> tuple[Any, Tensor]:
    count = COUNTS[number]
    of = torch.arange(count).repeat_interleave(torch.arange(3, 3 + count))
    edges = torch.stack([torch.arange(len(of)), torch.arange(len(of)).roll(1)])
    return graph_type(numbers(len(of), 6, seed=number), edges, of, count), numbers(count, 4, seed=number + 9)


def read() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Read(6, 8, dtype=D), nn.Linear(8, 4, dtype=D)]


def expected(weights: tuple[int, ...]) -> float:
    """The mean of the micro-batches' losses, by some weights."""
    model = nn.Sequential(*read())
    losses = [nn.functional.mse_loss(model(x), y).item() for x, y in map(graphs, range(4))]
    return sum(loss * weight for loss, weight in zip(losses, weights, strict=True)) / sum(weights)


@pytest.mark.parametrize(
    ("options", "samples", "weights"),
    [
        ({"input_dims": None}, None, COUNTS),  # the targets tell
        ({}, COUNTS, COUNTS),
        ({"input_dims": None, "target_dims": None}, None, (1, 1, 1, 1)),
        ({"input_dims": None, "target_dims": None}, (5, 1, 1, 1), (5, 1, 1, 1)),
    ],
)
def test_ready_micro_batches_are_weighted_by_their_numbers(
    options: Any, samples: Any, weights: tuple[int, ...]
) -> None:
    def work() -> tuple[float, float]:
        given: dict[str, Any] = {"micro_batches": [graphs(number) for number in range(4)], "samples": samples}
        loss = nn.functional.mse_loss
        with cf.Pipeline(read(), loss, cf.schemes.dapple(2, 4), optimizer=sgd, **options) as pipeline:
            return pipeline.evaluate(**given).loss, pipeline.step(**given).loss

    assert launched(work) == pytest.approx((expected(weights), expected(weights)), rel=1e-12)


HALVES = cf.schemes.chimera(2, 4, concat="backward-halving")


@pytest.mark.parametrize(
    ("options", "samples", "schedule", "message"),
    [
        (
            {},
            None,
            cf.schemes.dapple(2, 4),
            "Graphs, and it is not known .* samples= tells the numbers",
        ),
        ({"input_dims": None}, None, HALVES, "chimera halves micro-batches, and input_dims=None tells no"),
        ({"input_dims": None}, COUNTS, HALVES, "chimera halves micro-batches, and input_dims=None tells no"),
        (
            {},
            (1, 2),
            cf.schemes.dapple(2, 4),
            r"samples=\(1, 2\) are to be .* of 4 micro-batches",
        ),
        ({}, (1, 2, 3, -1), cf.schemes.dapple(2, 4), "whole numbers from 0 on"),
    ],
)
def test_what_tells_no_number_is_refused(
    options: Any, samples: Any, schedule: cf.Schedule, message: str
) -> None:
    def work() -> None:
        ready = [graphs(number) for number in range(4)]
        cf.Pipeline(read(), nn.functional.mse_loss, schedule, optimizer=sgd, **options).step(
            micro_batches=ready, samples=samples
        )

    with pytest.raises(cf.ConfigError, match=message):
        launched(work)


def test_a_mini_batch_of_which_nothing_tells_its_samples_is_refused() -> None:
    def work() -> None:
        nowhere: Any = {"input_dims": None, "target_dims": None}
        cf.Pipeline(net(), of_rows, cf.schemes.dapple(2, 4), optimizer=sgd, **nowhere).step(
            numbers(8, 6), numbers(8, 4)
        )

    with pytest.raises(cf.ConfigError, match="nothing tells how many samples the mini-batch has"):
        launched(work)


# -- mappings


class Named(UserDict[str, Any]):
    """With an attribute of its own."""

    scale = 1.0


class Held(Named):
    """With an attribute that is no item."""


MAPPINGS = [
    transformers.BatchEncoding,
    transformers.BatchFeature,
    UserDict,
    OrderedDict,
    Named,
    transformers.modeling_outputs.BaseModelOutput,
]


class Looks(nn.Linear):
    """Takes and gives a mapping of a class."""

    def __init__(self, kind: Any) -> None:
        super().__init__(4, 4, dtype=D)
        self.kind = kind

    def forward(self, given: Any) -> Any:
        assert type(given) is self.kind
        found = self.kind({"last_hidden_state": super().forward(given["last_hidden_state"])})
        if self.kind is Named:
            assert given.scale == 2.0
            found.scale = given.scale
        return found


def named(kind: Any, x: Tensor) -> Any:
    found = kind({"last_hidden_state": x})
    if kind is Named:
        found.scale = 2.0
    return found


@pytest.mark.table
@pytest.mark.parametrize("recompute", ["none", "stage", "layer"])
@pytest.mark.parametrize("kind", MAPPINGS, ids=lambda kind: kind.__name__)
def test_mappings_are_taken_handed_on_and_given(kind: Any, recompute: Any) -> None:
    torch.manual_seed(0)
    layers = [Looks(kind) for _ in range(4)]
    x, y = numbers(8, 4), numbers(8, 4, seed=1)

    def loss(output: Any, target: Any) -> Tensor:
        return nn.functional.mse_loss(output["last_hidden_state"], target["y"])

    def work() -> Any:
        with cf.Pipeline(
            layers, loss, cf.schemes.interleaved(2, 4, chunks=2), optimizer=sgd, recompute=recompute
        ) as pipeline:
            step = pipeline.step(named(kind, x), UserDict({"y": y}))
            return step.loss, pipeline.model_state_dict(), pipeline.predict(named(kind, x))

    model = nn.Sequential(*(nn.Linear(4, 4, dtype=D) for _ in range(4)))
    model.load_state_dict(nn.Sequential(*layers).state_dict())
    true = nn.functional.mse_loss(model(x), y)
    true.backward()
    sgd(list(model.parameters())).step()
    told, state, output = launched(work)
    assert told == pytest.approx(true.item(), rel=1e-12)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-12, atol=1e-13)
    assert type(output) is kind
    torch.testing.assert_close(output["last_hidden_state"], model(x).detach())


def test_an_attribute_that_is_no_item_is_refused() -> None:
    batch: Any = Held({"x": numbers(4, 6)})
    batch.table = numbers(3)
    with pytest.raises(cf.ConfigError, match="an attribute 'table' of type Tensor that is none of its items"):
        register_mapping_classes({"held": [batch]})


# -- what is not dense


@pytest.mark.parametrize("kind", ["sparse_coo", "sparse_csr", "nested"])
@pytest.mark.parametrize("what", ["inputs", "targets", "ready"])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_that_are_not_dense_are_refused_by_name(kind: str, what: str) -> None:
    made: Any = {"sparse_coo": Tensor.to_sparse, "sparse_csr": Tensor.to_sparse_csr, "nested": nested}[kind]
    other = (numbers(4, 6), made(torch.eye(4, dtype=D)))
    ways: dict[str, dict[str, Any]] = {
        "inputs": {"inputs": other, "targets": numbers(4, 4)},
        "targets": {"inputs": numbers(4, 6), "targets": other},
        "ready": {"micro_batches": [(numbers(2, 6), numbers(2, 4)), (other, numbers(2, 4))]},
    }
    given = ways[what]

    def work() -> None:
        dims: dict[str, Any] = {"input_dims": (0, None)} if what == "inputs" else {}
        cf.Pipeline(net(), of_rows, cf.schemes.dapple(2, 2), optimizer=sgd, **dims).step(**given)

    where = "inputs[1] of micro-batch 1" if what == "ready" else f"{what}[1]"
    with pytest.raises(cf.ConfigError) as refused:
        launched(work)
    assert str(refused.value).startswith(f"{where} is a {kind} tensor; pass on the dense tensors")


def nested(dense: Tensor) -> Tensor:
    return torch.nested.nested_tensor([dense[0], dense[1, :2]], layout=torch.jagged)


@pytest.mark.parametrize("made", [Tensor.to_sparse, Tensor.to_sparse_csr, nested])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_buffers_that_are_not_dense_are_refused_by_name(made: Any) -> None:
    layer = nn.Linear(6, 6, dtype=D)
    layer.register_buffer("adjacency", made(torch.eye(6, dtype=D)))

    def work() -> None:
        cf.Pipeline([layer, *net()], of_rows, cf.schemes.dapple(2, 2), optimizer=sgd)

    with pytest.raises(cf.ConfigError, match=r"adjacency of layer 0 \(Linear\) is a (sparse|neste)"):
        launched(work)
