torchrun --nproc_per_node 8 --nnodes 16 pretrain_gpt.py \
  --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 \
  --group-query-attention --num-query-groups 8 --seq-length 8192 --swiglu --bf16 \
  --padded-vocab-size 128256 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 \
  --use-distributed-optimizer --micro-batch-size 1 --global-batch-size 512 --train-samples 1000000
