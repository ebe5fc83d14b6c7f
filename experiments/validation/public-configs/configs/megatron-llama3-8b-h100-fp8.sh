# NVIDIA/Megatron-LM, examples/llama/train_llama3_8b_h100_fp8.sh (BSD-3-Clause): its arguments
GPUS=8; NODES=1
FORMAT="fp8"
ARGS=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --kv-channels 128
    --seq-length 8192 --max-position-embeddings 8192 --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --position-embedding-type rope
    --micro-batch-size 1 --global-batch-size 128 --train-samples 1953125000
    --bf16 --grad-reduce-in-bf16 --cross-entropy-loss-fusion --manual-gc
)
if [[ "$FORMAT" == "fp8" ]]; then
    ARGS+=("--fp8-format hybrid" "--fp8-amax-history-len 1024" "--fp8-param-gather")
fi
LAYOUT=(--tensor-model-parallel-size 1 --context-parallel-size 1 --sequence-parallel)
ARGS+=(--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather)
torchrun --nproc_per_node $GPUS --nnodes $NODES pretrain_gpt.py "${ARGS[@]}" ${LAYOUT[@]} \
    --vocab-size 128256 --tokenizer-type NullTokenizer --mock-data \
    --eval-interval 100 --eval-iters 32 --save-interval 1000 --save "$CHECKPOINTS"
