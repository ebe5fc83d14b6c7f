# zyzshishui/slime, scripts/models/qwen3-30B-A3B.sh (of THUDM/slime, Apache-2.0): its arguments
MODEL_ARGS=(
   --disable-bias-linear --qk-layernorm --swiglu --untie-embeddings-and-output-weights
   --group-query-attention --num-attention-heads 32 --num-query-groups 4 --kv-channels 128
   --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --vocab-size 151936
   --moe-ffn-hidden-size 768 --moe-router-topk 8 --num-experts 128 --moe-layer-freq "'([1]*48)'"
   --moe-token-dispatcher-type alltoall --moe-grouped-gemm --moe-permute-fusion
)
