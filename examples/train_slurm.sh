#!/usr/bin/env bash
# Train under SLURM, on one node or several, through preemption and time limits:
#   RUN=runs/first sbatch examples/train_slurm.sh optimizer=muon data.train=pairs.jsonl
# STRATEGY=fsdp splits weights, gradients and optimizer state over the devices; ddp copies them.
#SBATCH --job-name=rm-train
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log
# Two minutes before the time limit srun's tasks get SIGTERM, as they do when the job is preempted: they finish their
# step, save a checkpoint and exit with 130.
#SBATCH --signal=TERM@120
set -uo pipefail

# A fixed folder, so that a requeued job continues from its newest checkpoint.
run="${RUN:-outputs/train/slurm-$SLURM_JOB_ID}"

srun --kill-on-bad-exit=0 python -m rm_optimizer.train \
  hardware="${STRATEGY:-ddp}" \
  hardware.devices="$SLURM_NTASKS_PER_NODE" hardware.num_nodes="$SLURM_NNODES" \
  hydra.run.dir="$run" resume=auto training.progress=false "$@"
status=$?

if [ "$status" -eq 130 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
