#!/usr/bin/env bash
# Adapters of a large model on small GPUs: every clip is encoded once; training then builds no encoder and keeps frozen
# weights and the optimizer in host memory (ZeRO-3 with offload), with one layer at a time on the GPU.
#
#   FACTORY=my_pkg.train:build DATA=videos/ METADATA=videos/metadata.csv OUTPUT=run \
#     bash configs/recipes/low_memory.sh --model_paths '["weights/dit.safetensors", "weights/vae.safetensors"]' \
#       --max_pixels 399360 --num_frames 49 --num_epochs 5
#
# Both stages get the arguments of the script. They share only $LATENTS, which the first writes and the second reads.
# Stopped anywhere, the same command resumes.
# DATA may be a sealed dataset, without METADATA. PROCESSES: one per GPU (8). PRECISION: bf16 or fp16.
# LAUNCH=python runs everything in one process, without a GPU.
set -euo pipefail

: "${FACTORY:?import path of the function that builds the training module, as my_pkg.train:build}"
: "${DATA:?the folder of the videos, or a sealed dataset}"
OUTPUT=${OUTPUT:-run}
LATENTS=${LATENTS:-$OUTPUT/latents}
LORA_MODEL=${LORA_MODEL:-dit}
LORA_LAYERS=${LORA_LAYERS:-q,k,v,o,ffn.0,ffn.2}
LORA_RANK=${LORA_RANK:-32}
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")/../accelerate" && pwd)
RANKS="--num_processes ${PROCESSES:-8} --main_process_port 0"
ENCODE_LAUNCH=${LAUNCH:-accelerate launch --config_file $HERE/ddp_8gpu.yaml $RANKS}
TRAIN_LAUNCH=${LAUNCH:-accelerate launch --config_file $HERE/zero3_cpu_offload.yaml $RANKS
  --deepspeed_config_file $HERE/ds_zero3_cpu_offload.json --mixed_precision ${PRECISION:-bf16}}

both=(--factory "$FACTORY" "$@")

$ENCODE_LAUNCH -m streamvid train "${both[@]}" --task sft:data_process \
  --dataset_base_path "$DATA" ${METADATA:+--dataset_metadata_path "$METADATA"} --output_path "$LATENTS"

$TRAIN_LAUNCH -m streamvid train "${both[@]}" --task sft:train \
  --dataset_base_path "$LATENTS" --output_path "$OUTPUT" \
  --lora_base_model "$LORA_MODEL" --lora_target_modules "$LORA_LAYERS" --lora_rank "$LORA_RANK" \
  --use_gradient_checkpointing --initialize_model_on_cpu
