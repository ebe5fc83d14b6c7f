# NVIDIA/Megatron-LM, examples/gpt3/train_gpt3_175b_distributed.sh (BSD-3-Clause): its arguments
GPUS_PER_NODE=8
LAUNCH=(--nproc_per_node $GPUS_PER_NODE --nnodes ${NNODES:-1})
SIZES=(
    --num-layers 96 --hidden-size 12288 --num-attention-heads 96
    --seq-length 2048 --max-position-embeddings 2048
)
BATCH=(--micro-batch-size 1 --global-batch-size 1536 --rampup-batch-size 16 16 5859375)
torchrun ${LAUNCH[@]} pretrain_gpt.py ${SIZES[@]} ${BATCH[@]} --fp16 \
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --train-iters 500000 \
    --lr 6.0e-5 --min-lr 6.0e-6 --weight-decay 0.1 --clip-grad 1.0 \
    --vocab-file $VOCAB_FILE --merge-file $MERGE_FILE --data-path $DATA_PATH \
    --save-interval 10000 --save $CHECKPOINT_PATH --eval-interval 1000 --eval-iters 10
