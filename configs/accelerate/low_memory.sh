#!/bin/bash
# configs/accelerate/low_memory.sh CONFIG DATASET OUTPUT [--set NAME=VALUE …]
#
# Adapters for a model that the GPUs together do not hold with its encoders: the encoders run once, on any number of
# GPUs, and what they make is kept in OUTPUT/encoded; then the model alone trains, its weights spread over the GPUs and
# the host's memory. CONFIG says the model, `lora` with its base_model, and recompute.blocks. Stopped, the same command
# goes on. PROCESSES: one a GPU (default: 8).
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
config=$1 dataset=$2 output=$3
shift 3
shared=(--config "$config" --set "dataset=$dataset" --set "sidecar=$output/encoded" "$@")
processes=(--num_processes "${PROCESSES:-8}" --main_process_port 0)

accelerate launch --config_file "$here/ddp_8gpu.yaml" "${processes[@]}" -m streamvid encode "${shared[@]}"
accelerate launch --config_file "$here/zero3_cpu_offload.yaml" "${processes[@]}" \
  --deepspeed_config_file "$here/ds_zero3_cpu_offload.json" --mixed_precision "${PRECISION:-bf16}" \
  -m streamvid.trainer "${shared[@]}" --set "output=$output" --set task=sft:train
