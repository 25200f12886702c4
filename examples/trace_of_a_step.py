"""A step of two workers under torch's profiler, as one trace that Perfetto opens: trace.json.

Run it: python examples/trace_of_a_step.py; open ui.perfetto.dev and drop trace.json there. Every action of
the schedule is a range of its worker, above the operators of torch that it calls.
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import counterflow as cf

WORKERS = 2


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


def work(folder):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [Block(512) for _ in range(8)]
    schedule = f"zb-v(workers={WORKERS}, micro_batches=4)"
    batch = torch.randn(1024, 512), torch.zeros(1024, 512)
    with cf.Pipeline(layers, nn.MSELoss(), schedule, optimizer=torch.optim.SGD) as pipeline:
        for _ in range(2):  # the first steps find out shapes
            pipeline.step(*batch)
        with profile(activities=[ProfilerActivity.CPU]) as found:
            pipeline.step(*batch)
        found.export_chrome_trace(f"{folder}/{pipeline.transport.rank}.json")


def merged(folder):
    """The events of all workers: a process each, with one row of actions and torch's operators below them."""
    events = []
    for rank in range(WORKERS):
        trace = json.loads(Path(folder, f"{rank}.json").read_text())
        ours = [event for event in trace["traceEvents"] if event.get("cat") in ("user_annotation", "cpu_op")]
        # What gloo's own threads do overlaps what the worker does.
        ours = [event for event in ours if not event["name"].startswith("gloo:")]
        events += [{**event, "pid": rank, "tid": 0} for event in ours]
        for kind, name in (("process_name", "worker"), ("thread_name", "actions, operators below")):
            events.append({"ph": "M", "name": kind, "pid": rank, "tid": 0, "args": {"name": name}})
    return events


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        cf.launch(work, folder, workers=WORKERS)
        Path("trace.json").write_text(json.dumps({"traceEvents": merged(folder)}))
    print("wrote trace.json")
