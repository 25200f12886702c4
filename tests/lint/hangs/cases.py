"""Lists of the hangs, and what the linter shall say of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from counterflow.lint.calls import CallLists, CommunicatorScope
from counterflow.lint.recorded import recorded_lists
from counterflow.lint.torch_lists import read_torch_lists
from counterflow.lint.waiting import TransportRule

FOLDER = Path(__file__).parent
RENDEZVOUS, NCCL, ONE_QUEUE, BLOCKING, FIRST_USE = (
    TransportRule.RENDEZVOUS,
    TransportRule.NCCL,
    TransportRule.ONE_QUEUE,
    TransportRule.BLOCKING,
    TransportRule.FIRST_USE,
)
STREAMS = (RENDEZVOUS, NCCL, ONE_QUEUE, BLOCKING)
"""Rules that a circle of streams breaks."""


@dataclass(frozen=True)
class Hang:
    """A public hang.

    Attributes:
        thread: its thread.
        lists: function that makes its lists.
        broken: the rules under which they do not end.
        fix: beginning of the first change of the smallest fix.
        stalls: True if they end, but lose time.
        crossed: True if messages meet others.
    """

    thread: str
    lists: Callable[[], CallLists]
    broken: tuple[TransportRule, ...]
    fix: str = ""
    stalls: bool = False
    crossed: bool = False


def torch_text(*rows: str) -> CallLists:
    return read_torch_lists("\n".join(rows), "thread", CommunicatorScope.PAIR)


def torch_file(name: str, communicators: CommunicatorScope) -> CallLists:
    return read_torch_lists((FOLDER / name).read_text(encoding="utf-8"), name, communicators)


def first_comment() -> CallLists:
    """172668, 2026-01-21: where the log of two nodes ends, two ranks of four stages."""
    return torch_text("[... 0SEND_F1, 2RECV_F0, 2F0]", "[... 1SEND_F0, 1RECV_F1, 1F1]")


def second_comment() -> CallLists:
    """172668, the same day: sends and receives of odd ranks swapped, and still a circle."""
    return torch_text(
        "[... 2SEND_F1, 0F2, 0SEND_F2, 2RECV_B0, 2B0]",
        "[... 3RECV_F1, 3SEND_B0, 3F1, 3B1, 1RECV_F2, 3SEND_B1, 1F2]",
    )


def warm_up() -> CallLists:
    """188833: interleaved 1F1B, 8 ranks of 2 stages, as torch 2.13 lowers it; N = 8 is assumed.

    It is no hang: receives stand before sends that are ready, in the one stream of a group.
    """
    return torch_file("pytorch-188833.csv", CommunicatorScope.GROUP)


def parity_rule() -> CallLists:
    """PR 178815: its rule (the lower rank receives before it sends), as torch 2.13 has it in defer_pp_recv.

    The text of the review's counter-example was not to be had; this one is the rule on interleaved 1F1B,
    2 ranks of 2 stages, 4 micro-batches.
    """
    return torch_file("pytorch-178815.csv", CommunicatorScope.PAIR)


def one_batch_for_two_peers() -> CallLists:
    """175225: rank 2 receives from ranks 1 and 3 in one batch, and works on the first message.

    The lists around it are assumed. It is no hang: the batch is complete when both messages are.
    """
    rows: list[list[dict[str, Any]]] = [
        [],
        [{"send": 2, "tag": "F1"}],
        [
            {"batch": [{"recv": 1, "tag": "F1", "id": "f"}, {"recv": 3, "tag": "B0", "id": "b"}]},
            {"compute": "F1", "wait": ["f"]},
            {"compute": "B0", "wait": ["b"], "seconds": 2},
        ],
        [{"compute": "F0 B0", "seconds": 3}, {"send": 2, "tag": "B0"}],
    ]
    return recorded_lists({"ranks": rows, "connected": True}, "175225")


def large_batch(ranks: int = 8, messages: int = 20) -> CallLists:
    """PR 174942: more than 256 calls in one batch, each rank's in the order of a rotation.

    The rotation is the one that the PR names as deadlocking; 280 calls are assumed. Where NCCL splits a batch
    is not public in calls: torch's limit stands for it.
    """
    rows = []
    for rank in range(ranks):
        batch: list[dict[str, Any]] = []
        for turn in range(1, ranks):
            peer = (rank + turn) % ranks
            batch += [{"send": peer, "tag": f"{rank}→{peer}.{number}"} for number in range(messages)]
            batch += [{"recv": peer, "tag": f"{peer}→{rank}.{number}"} for number in range(messages)]
        rows.append([{"batch": batch}])
    return recorded_lists({"ranks": rows, "connected": True}, "174942")


def shapes_of_two_ranks() -> CallLists:
    """Megatron 5100 and PR 5271: shapes of both directions in one batch, where both neighbours are one rank.

    Each rank sends a gradient's shape back and an output's on, and receives an output's and a gradient's.
    """
    rows = []
    for rank in range(2):
        peer = 1 - rank
        batch = [
            {"send": peer, "tag": f"gradient of {rank}"},
            {"recv": peer, "tag": f"output of {peer}"},
            {"send": peer, "tag": f"output of {rank}"},
            {"recv": peer, "tag": f"gradient of {peer}"},
        ]
        rows.append([{"batch": batch, "wait": True}])
    return recorded_lists({"ranks": rows, "connected": True}, "5100")


def shapes_of_a_ring() -> CallLists:
    """Megatron 5100 with 4 ranks: the reporter blames the order of the shapes' calls.

    That the four calls run one after another, not as one group, is assumed.
    """
    rows = []
    for rank in range(4):
        before, after = (rank - 1) % 4, (rank + 1) % 4
        rows.append(
            [
                {"send": before, "tag": f"gradient of {rank}"},
                {"recv": before, "tag": f"output of {before}"},
                {"send": after, "tag": f"output of {rank}"},
                {"recv": after, "tag": f"gradient of {after}"},
                {"wait": "all"},
            ]
        )
    return recorded_lists({"ranks": rows, "connected": True}, "5100")


def few_micro_batches(ranks: int = 8, micro_batches: int = 1) -> CallLists:
    """torchtitan 775: torch's 1F1B of one stage a rank, 8 ranks, one micro-batch; it hangs in the warm-up.

    The last forward's output and the first gradient share a batch, whose other sides are two calls if there
    are fewer micro-batches than ranks. That each call is complete before the next is assumed; the first
    step's connections are then made in no order that ends.
    """
    rows = [_one_stage(rank, ranks, micro_batches) for rank in range(ranks)]
    return recorded_lists({"ranks": rows, "connected": False}, "775")


def _one_stage(rank: int, ranks: int, micro_batches: int) -> list[dict[str, Any]]:
    row: list[dict[str, Any]] = []

    def call(*messages: tuple[str, int, str]) -> None:
        ends = [{way: peer, "tag": tag} for way, peer, tag in messages if 0 <= peer < ranks]
        if ends:
            row.append({"batch": ends, "wait": True})

    warm_up = min(micro_batches, ranks - rank)
    for number in range(warm_up):
        call(("recv", rank - 1, f"F{number}"))
        row.append({"compute": f"F{number}"})
        if number < warm_up - 1:
            call(("send", rank + 1, f"F{number}"))
    forward, backward = warm_up, 0
    while True:
        call(("send", rank + 1, f"F{forward - 1}"), ("recv", rank + 1, f"B{backward}"))
        row.append({"compute": f"B{backward}", "seconds": 2})
        backward += 1
        if forward == micro_batches:
            break
        call(("send", rank - 1, f"B{backward - 1}"), ("recv", rank - 1, f"F{forward}"))
        row.append({"compute": f"F{forward}"})
        forward += 1
    call(("send", rank - 1, f"B{backward - 1}"))
    for number in range(backward, micro_batches):
        call(("recv", rank + 1, f"B{number}"))
        row.append({"compute": f"B{number}", "seconds": 2})
        call(("send", rank - 1, f"B{number}"))
    return row


HANGS = {
    "pytorch-172668": Hang("pytorch/pytorch#172668", first_comment, STREAMS, "rank 0: swap 0SEND_F1"),
    "pytorch-172668-swapped": Hang(
        "pytorch/pytorch#172668", second_comment, STREAMS, "rank 0: swap 0SEND_F2"
    ),
    "pytorch-188833": Hang("pytorch/pytorch#188833", warm_up, (), stalls=True),
    "pytorch-175225": Hang("pytorch/pytorch#175225", one_batch_for_two_peers, (), stalls=True),
    "pytorch-174942": Hang("pytorch/pytorch#174942", large_batch, STREAMS, "split the large batches"),
    "pytorch-178815": Hang("pytorch/pytorch#178815", parity_rule, STREAMS, "post each receive"),
    "megatron-5100": Hang(
        "NVIDIA/Megatron-LM#5100", shapes_of_two_ranks, (), "rank 1: swap the receives", crossed=True
    ),
    "megatron-5100-ring": Hang("NVIDIA/Megatron-LM#5100", shapes_of_a_ring, STREAMS, "post each receive"),
    "torchtitan-775": Hang(
        "pytorch/torchtitan#775", few_micro_batches, (FIRST_USE,), "connect before the first step"
    ),
}
