"""Supervision of a run: one writer, signals, failures, restarts, fewer workers.

The supervisor is the process that starts the workers, or torchrun or Slurm. A run is in one of these states;
its folder says which one, so the next process that opens the folder can go on from any of them::

    LOCKED ──begin──▶ STARTING ──first step──▶ TRAINING ──last step──▶ ENDED
                        ▲   │                     │  │
                        │   └──────failure────────┘  └──signal──▶ STOPPED
                        │             ▼
                        ├──restart── FAILED ──refused──▶ GIVEN UP
                        └──fewer workers──┘

* LOCKED: one process holds the folder's lock (``exclusive.Lock``). Each attempt puts a new mark there
  (``exclusive.Fence``), and a worker of an earlier attempt that wakes up later writes nothing.
* STARTING: workers compare their configs and data (``same_run``), load the last state, and build the
  pipeline. A signal unwinds at once (``stopping.Phase.UNWIND``), as there is nothing to save.
* TRAINING: metrics go through ``appending``, and copies to memory are due as ``restarts.CopyTurns`` decides.
  A signal is noted, and all workers agree on the step after which they end (STOPPED).
* FAILED: one process notes the failure in the run's events (``events``). ``restarts.Restarts`` refuses
  another attempt if there were too many, or the same failure repeats; otherwise the next attempt resumes from
  memory or a checkpoint. If a worker stays away for longer than ``train.fewer_after``, the run continues
  with fewer (``fewer``).

Invariant: every transition is written before it takes effect, by the process that holds the lock or, under
torchrun and Slurm, by the first worker that fails; no state needs the process of an earlier one.
"""
