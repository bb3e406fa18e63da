#!/bin/bash
# One node's part of a job under torchrun. Addresses are given: the nodes of a lab share their host's name.

ip=$(scontrol show node -o "$SLURMD_NODENAME" | sed 's/.*NodeAddr=\([^ ]*\).*/\1/')
host=$([ "$SLURM_NODEID" = 0 ] && echo true || echo false)
exec torchrun --nnodes="$SLURM_NNODES" --nproc-per-node="${SLURM_GPUS_ON_NODE:-2}" --local-addr="$ip" \
    --rdzv-id="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}" --rdzv-backend=c10d \
    --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" --rdzv-conf="is_host=$host" "$@"
