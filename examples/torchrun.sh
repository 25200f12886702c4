#!/bin/sh
# The same on each machine. HEAD is the name of one of them, OUT a folder that all see.
set -eu
: "${HEAD:?the machine where workers meet}" "${OUT:?the folder of the results, on shared storage}"
# GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose a network: see docs/several-machines.md
exec torchrun --nnodes "${MACHINES:-2}" --nproc-per-node "${WORKERS:-4}" \
    --rdzv-backend c10d --rdzv-endpoint "$HEAD:${PORT:-29400}" --rdzv-id "${RUN:-1}" --max-restarts 3 \
    -m counterflow train "$(dirname "$0")/gpt.toml" --out "$OUT"
