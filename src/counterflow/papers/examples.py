"""The papers' clusters and runs as the planner's data, each number with its source or its fit.

No paper gives α and β of its links; they are stated with what they are taken from or fitted on
(``benchmarks/fit_papers.py`` shows how far each may be moved). So predictions compare plans on one machine;
they are not the papers' seconds. What the models' layers cost is in ``transformers.py``.
"""

from __future__ import annotations

from collections.abc import Callable

from counterflow.planning.inputs.cluster import Cluster, Link
from counterflow.planning.task import Task

from .transformers import (
    BERT_48,
    BERT_48_MIXPIPE,
    BERT_64,
    BERT_192,
    BERT_768,
    GPT_2,
    GPT_72,
    Transformer,
    model_of,
    profile_of,
)

GIB = 2**30

_PIZ_DAINT = {
    "memory_bytes": "NVIDIA P100, 16 GB (Chimera, section 4)",
    "between": "fit on the best configurations of Figure 10: 1 GB/s of Aries' 10, Gloo's messages staged "
    "through the host; 30 µs taken",
    "allreduce_between": "fit on the same: 3.85 GB/s, so that Chimera and GPipe are best at D=4; 30 µs taken",
    "reserve_bytes": "fit on the same: with 5.6 to 5.79 GiB GEMS fits D=4 with B=32 and not D=2, 2BW needs "
    "recomputation with B=16, Chimera fits B=8 at D=4; CUDA, PyTorch 1.6, Gloo's buffers, fragmentation",
    "sync_slowdown": "fit: Gloo's threads; Chimera, Figure 12: eager-opt up to 1.09 times as fast as eager",
}


def _piz_daint(nodes: int) -> Cluster:
    link = Link(latency_seconds=30e-6, seconds_per_byte=1 / 1e9)
    return Cluster(
        name=f"Piz Daint, {nodes} nodes",
        nodes=nodes,
        devices=1,
        memory_bytes=16.0 * GIB,
        inside=link,
        between=link,
        allreduce_between=Link(latency_seconds=30e-6, seconds_per_byte=1 / 3.85e9),
        reserve_bytes=5.7 * GIB,
        sync_slowdown=0.1,
        sources=_PIZ_DAINT,
    )


def _servers(name: str, nodes: int, memory_gib: float, between: Link, sources: dict[str, str]) -> Cluster:
    """Servers of eight devices with NVLink inside."""
    return Cluster(
        name=name,
        nodes=nodes,
        devices=8,
        memory_bytes=memory_gib * GIB,
        inside=Link(latency_seconds=10e-6, seconds_per_byte=1 / 100e9),
        between=between,
        reserve_bytes=2.0 * GIB,
        shared_adapter=True,
        sources={
            "inside": "taken: 10 µs, and 100 GB/s of NVLink's 300 GB/s (both ways together)",
            "reserve_bytes": "taken: CUDA's context, libraries and fragmentation",
            **sources,
        },
    )


def chimera_bert48(name: str, nodes: int, mini_batch: int) -> Task:
    """BERT-48 on so many nodes of Piz Daint."""
    return Task(
        name,
        f"BERT-48 on {nodes} nodes with one P100 each",
        model_of("bert-48", BERT_48, 2.0, "Chimera, Table 4; Adam"),
        profile_of("p100", BERT_48),
        _piz_daint(nodes),
        mini_batch,
        "Chimera, section 4.2; the mini-batch in proportion to the nodes",
    )


def chimera_gpt2(name: str, nodes: int, mini_batch: int | None = None) -> Task:
    """GPT-2 on so many nodes of Piz Daint; one sample a node, unless it is given."""
    return Task(
        name,
        f"GPT-2 of 64 blocks on {nodes} nodes with one P100 each",
        model_of("gpt-2", GPT_2, 2.0, "Chimera, Table 4; Adam"),
        profile_of("p100", GPT_2),
        _piz_daint(nodes),
        nodes if mini_batch is None else mini_batch,
        "Chimera, section 4.2; one sample a node",
    )


def _chimera_v100(name: str) -> Task:
    cluster = _servers(
        "4 servers of 8 V100, Infiniband",
        4,
        32.0,
        Link(latency_seconds=20e-6, seconds_per_byte=1 / 10e9),
        {"between": "taken: 20 µs, and 10 GB/s of Infiniband EDR's 12.5 GB/s"},
    )
    return Task(
        name,
        "BERT-48 on 4 servers of 8 V100 with Infiniband",
        model_of("bert-48", BERT_48, 2.0, "Chimera, Table 4; Adam"),
        profile_of("v100", BERT_48),
        cluster,
        512,
        "Chimera, section 4.2.3, Figure 16",
    )


def mixpipe(name: str, shape: Transformer, model: str, mini_batch: int, servers: int = 4) -> Task:
    """A model on so many servers of 8 V100."""
    cluster = _servers(
        f"{servers} servers of 8 V100, Ethernet",
        servers,
        32.0,
        Link(latency_seconds=50e-6, seconds_per_byte=1 / 1.25e9),
        {
            "between": "Ethernet (MixPipe, section IV-A), 50 µs taken; fit on Figure 8's GEMS: of the usual "
            "10, 25, 40 and 100 Gbit/s 10 comes nearest, at -20 %"
        },
    )
    return Task(
        name,
        f"{model} on {servers} servers of 8 V100 with Ethernet",
        model_of(model, shape, 2.0, "MixPipe, Table II; Adam"),
        profile_of("v100", shape),
        cluster,
        mini_batch,
        "MixPipe, section IV-C, Figures 8 and 9",
    )


def hanayo(name: str) -> Task:
    """BERT-64 on a server of 8 A100."""
    cluster = _servers(
        "8 A100, NVLink between all",
        1,
        80.0,
        Link(latency_seconds=10e-6, seconds_per_byte=1 / 100e9),
        {"between": "there is one server only", "memory_bytes": "A100, 80 GB (Hanayo, section 5)"},
    )
    return Task(
        name,
        "BERT-64 on a server of 8 A100, all linked by NVLink",
        model_of("bert-64", BERT_64, 2.0, "Hanayo, section 5; Adam"),
        profile_of("a100", BERT_64),
        cluster,
        8,
        "Hanayo, section 5.2, Figure 9",
    )


def hanayo_tacc(name: str, devices: int) -> Task:
    """BERT-64 on so many A100 of Lonestar6: eight samples on 8 devices, and in proportion on more."""
    link = Link(latency_seconds=20e-6, seconds_per_byte=1 / 1.05e9)
    cluster = Cluster(
        name=f"Lonestar6, {devices} A100",
        nodes=devices,
        devices=1,
        memory_bytes=40.0 * GIB,
        inside=link,
        between=link,
        allreduce_between=Link(latency_seconds=20e-6, seconds_per_byte=1 / 5e9),
        reserve_bytes=2.0 * GIB,
        sources={
            "nodes": "taken: every device reaches every other alike; three share a node without NVLink",
            "between": "20 µs taken; 1.05 GB/s: fit on Figure 11's Chimera-wave with 8 devices",
            "allreduce_between": "taken: 20 µs and 5 GB/s",
            "memory_bytes": "A100, 40 GB (Hanayo, section 5)",
            "reserve_bytes": "taken: CUDA's context, libraries and fragmentation",
        },
    )
    return Task(
        name,
        f"BERT-64 on {devices} A100 of Lonestar6",
        model_of("bert-64", BERT_64, 2.0, "Hanayo, section 5; Adam"),
        profile_of("a100", BERT_64),
        cluster,
        devices,
        "Hanayo, section 5.4, Figure 11",
    )


def wpipe(name: str, shape: Transformer, model: str) -> Task:
    """A model on WPipe's 64 V100."""
    cluster = _servers(
        "8 servers of 8 V100 16 GB, 25 Gbit/s Ethernet",
        8,
        16.0,
        Link(latency_seconds=50e-6, seconds_per_byte=1 / 3.125e9),
        {
            "between": "25 Gbit/s Ethernet (WPipe, appendix A.2); 50 µs taken",
            "inside": "NVLink of 300 GB/s, 96 times the Ethernet (WPipe, appendix A.2), of which 100 GB/s "
            "are taken; 10 µs taken",
        },
    )
    return Task(
        name,
        f"{model} on 8 servers of 8 V100 with 25 Gbit/s Ethernet",
        model_of(model, shape, 2.0, "WPipe, appendix A.2; Adam"),
        profile_of("v100", shape),
        cluster,
        512,
        "WPipe, section 4.2, Figure 8",
    )


MADE: dict[str, Callable[[str], Task]] = {
    "chimera-bert48": lambda name: chimera_bert48(name, 32, 512),
    "chimera-bert48-64": lambda name: chimera_bert48(name, 64, 1024),
    "chimera-bert48-2048": lambda name: chimera_bert48(name, 2048, 32768),
    "chimera-bert48-v100": _chimera_v100,
    "chimera-gpt2": lambda name: chimera_gpt2(name, 512),
    "chimera-gpt2-2048": lambda name: chimera_gpt2(name, 2048),
    "mixpipe-bert48": lambda name: mixpipe(name, BERT_48_MIXPIPE, "bert-48-mixpipe", 512),
    "mixpipe-gpt72": lambda name: mixpipe(name, GPT_72, "gpt-72", 256),
    "hanayo-bert64": hanayo,
    "wpipe-bert192": lambda name: wpipe(name, BERT_192, "bert-192"),
    "wpipe-bert768": lambda name: wpipe(name, BERT_768, "bert-768"),
}
"""What the planner's examples are made from: its files of data say the same."""
