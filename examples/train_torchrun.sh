#!/usr/bin/env bash
# Train on every GPU of this machine with torchrun:
#   examples/train_torchrun.sh optimizer=muon data.train=pairs.jsonl
# On a machine without GPUs, two gloo processes: DEVICES=2 examples/train_torchrun.sh hardware.accelerator=cpu
# STRATEGY=fsdp splits weights, gradients and optimizer state over the devices; ddp copies them.
# After a crash, RESTARTS starts the processes again and resume=auto continues from the newest checkpoint.
set -euo pipefail

devices="${DEVICES:-$(nvidia-smi --list-gpus | wc -l)}"

exec torchrun --standalone --nproc-per-node "$devices" --max-restarts "${RESTARTS:-0}" \
  -m rm_optimizer.train hardware="${STRATEGY:-ddp}" hardware.devices="$devices" resume=auto "$@"
