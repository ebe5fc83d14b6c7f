#!/bin/bash
# llm-jp/Megatron-LM, scripts/mdx/llm-jp-llama-2-13b/13b-llm-jp-v2_CC_100k.sh (Megatron-LM's licence,
# BSD-3-Clause): its arguments
PER_NODE=8
NODES=16
GPUS=$((${NODES} * ${PER_NODE}))
SEQ=4096
if [[ -f "checkpoints/latest" ]]; then
  LOAD="--load checkpoints"
else
  LOAD="--load checkpoints --no-load-rng --no-load-optim"
fi
mpirun -np $GPUS --npernode $PER_NODE -x CUDA_DEVICE_MAX_CONNECTIONS=1 python pretrain_gpt.py \
  --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 \
  --sequence-parallel --use-distributed-optimizer \
  --num-layers 40 --hidden-size 5120 --ffn-hidden-size 13824 --num-attention-heads 40 \
  --seq-length ${SEQ} --max-position-embeddings ${SEQ} \
  --micro-batch-size 1 --global-batch-size 1024 --train-iters 61000 \
  --tokenizer-type SentencePieceTokenizer ${LOAD} --save checkpoints --save-interval 100 \
  --eval-interval 100 --eval-iters 10 --bf16 --untie-embeddings-and-output-weights --swiglu
