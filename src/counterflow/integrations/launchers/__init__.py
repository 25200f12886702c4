"""Launchers that people already use: submitit, Kubeflow Trainer, Ray Train, Monarch.

torchrun and Slurm need nothing of this room: their variables are read where workers meet. A module here gives
a launcher's processes their ranks, the address where they meet and the run's folder, and states them in
torchrun's variables. What happens after a failure is decided where it is for every run
(``training.supervision``); a launcher only starts the workers again.

Each launcher's package is imported only in its module; ``pip install "counterflow[submitit]"`` installs it.
"""
