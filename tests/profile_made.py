"""A made-up profile of training: one GPU, layers of products and elementwise ops, as PyTorch's."""

from itertools import count

TOKENS, HIDDEN, FFN = (2, 8192), 1024, 4096
"""Batch and sequence, and the widths of what `profile` trains."""
MM_US, MUL_US, SUM_US, ADAM_US = 250.0, 120.0, 7.0, 300.0


def profile(layers=4, microbatches=2, steps=4, shapes=True, head=True, attention=()):
    """Give a trace's JSON: every layer has a norm, a product to FFN, a gelu and one back.

    Where `attention` lists host ops, the outermost first, each with its shapes and inputs, a layer
    begins with it.
    """
    events, at, number = [], [0.0], count(1)
    rows, n = TOKENS[0] * TOKENS[1], number

    def kernel(name, us, ops):
        """Put a kernel with the ops around its launch, the outermost first: name and shapes."""
        begin, correlation = at[0], next(n)
        for depth, (op, dims, *inputs) in enumerate(ops):
            args = {"Input Dims": dims} if shapes and dims else {}
            args |= {"Concrete Inputs": inputs[0]} if shapes and inputs else {}
            events.append({"ph": "X", "cat": "cpu_op", "name": op, "pid": 1, "tid": 1,
                           "ts": begin + 0.01 * depth, "dur": 3.0 - 0.02 * depth,
                           "args": args})  # fmt: skip
        events.append({"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1,
                       "tid": 1, "ts": begin + 1.0, "dur": 1.0,
                       "args": {"correlation": correlation}})  # fmt: skip
        events.append({"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7,
                       "ts": begin + 4.0, "dur": us,
                       "args": {"correlation": correlation, "stream": 7}})  # fmt: skip
        at[0] = begin + 5.0 + us

    def mm(k, n, us, around=()):
        kernel("nvjet_mm", us, [*around, ("aten::mm", [[rows, k], [k, n]])])

    def gradient(name):
        return [(f"autograd::engine::evaluate_function: {name}Backward0", None)]

    wide = [*TOKENS, FFN]
    for step in range(steps):
        first = at[0]
        for microbatch in range(microbatches):
            if head:
                kernel("index_kernel", 5.0, [("aten::embedding", [[8000, HIDDEN], [*TOKENS]])])
            for _ in range(layers):
                if attention:
                    kernel("flash_fwd_kernel", 50.0, attention)
                kernel("rms_norm", 11.0, [("aten::_fused_rms_norm", [[*TOKENS, HIDDEN]])])
                mm(HIDDEN, FFN, MM_US)
                kernel("gelu_kernel", MUL_US, [("aten::gelu", [wide])])
                mm(FFN, HIDDEN, MM_US)
            mm(HIDDEN, 8000, 2 * MM_US)
            mm(8000, HIDDEN, 4 * MM_US, gradient("Mm"))
            for _ in range(layers):
                for k, n_ in ((FFN, HIDDEN), (HIDDEN, FFN)):
                    mm(n_, k, MM_US, gradient("Mm"))
                    mm(k, n_, MM_US, gradient("Mm"))
                    if microbatch:
                        kernel("add_kernel", SUM_US, [
                            ("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad",
                             None), ("torch::autograd::AccumulateGrad", [[k, n_]]),
                            ("aten::add_", [[k, n_], [k, n_]]),
                        ])  # fmt: skip
                    if n_ == HIDDEN:
                        ops = [*gradient("Gelu"), ("aten::gelu_backward", [wide, wide])]
                        kernel("gelu_backward_kernel", 2 * MUL_US, ops)
                kernel("rms_norm_backward", 22.0, [
                    *gradient("FusedRmsNorm"),
                    ("aten::_fused_rms_norm_backward", [[*TOKENS, HIDDEN]]),
                ])  # fmt: skip
        kernel("multi_tensor_apply_kernel<adam>", ADAM_US, [("Optimizer.step#AdamW.step", None)])
        events.append({"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step}",
                       "pid": 1, "tid": 1, "ts": first, "dur": at[0] - first})  # fmt: skip
    device = {"id": 0, "name": "NVIDIA H100 80GB HBM3"}
    return {"schemaVersion": 1, "deviceProperties": [device], "traceEvents": events}
