#!/bin/bash
# Starts one rank per GPU on every node:
#   sbatch docs/slurm.sh python -m moefold train RUN --layout "tp2 pp2 ep8" --folder OUT
#SBATCH --job-name=moefold
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --signal=TERM@120   # every rank hears of the end two minutes before, and saves

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# A rank that fails ends the others: they would only wait for it.
exec srun --kill-on-bad-exit=1 --label "$@"
