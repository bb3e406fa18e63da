#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=2
#SBATCH --requeue
# An ordinary training job: one task per node, one process per GPU, a checkpoint to resume from. LAUNCHER=torchrun: the
# processes are torchrun's, which meet at the first node.

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_ADDR=$(scontrol show node -o "$first" | sed 's/.*NodeAddr=\([^ ]*\).*/\1/')
# a port of this attempt's own: the store of the attempt before may still be closing
MASTER_PORT=$((20000 + (SLURM_JOB_ID * 101 + ${SLURM_RESTART_COUNT:-0}) % 12000))
case $MASTER_ADDR in
127.*) GLOO_SOCKET_IFNAME=lo ;;
*) GLOO_SOCKET_IFNAME=eth0 ;;
esac
export MASTER_ADDR MASTER_PORT GLOO_SOCKET_IFNAME OMP_NUM_THREADS=1 TORCH_CPP_LOG_LEVEL=ERROR
export CHECKPOINT=${CHECKPOINT:-checkpoint-$SLURM_JOB_ID.pt}

echo "attempt ${SLURM_RESTART_COUNT:-0} on $SLURM_JOB_NODELIST"
# USR1 means "save now" and is for the ranks, which set a handler of their own
case ${LAUNCHER:-fork} in
fork) srun env --ignore-signal=USR1 python3 train.py ;;
torchrun) srun env --ignore-signal=USR1 ./torchrun.sh train.py ;;
esac
