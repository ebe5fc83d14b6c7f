"""Kernels by what they do: classes by name and launching op, and a step's time by class."""

import pytest
from test_kineto import Recorder, shown, write

CUDNN, FLASH = "aten::_cudnn_attention_backward", "aten::_flash_attention_backward"
REAL = {
    ("compute", "gemm"): (
        ("x", "aten::_grouped_mm"),
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NTT", ""),
        ("Cijk_Alik_Bljk_BBS_BH_Bias_HAS_SAV_UserArgs_MT256x256x64_MI16x16x1", ""),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", ""),
        ("triton_tem_fused_addmm_3", ""),
    ),
    ("compute", "convolution"): (
        ("sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc", ""),
        ("cutlass_80_tensorop_s1688gemm_256x64_16x4_nn_align4", "aten::cudnn_convolution"),
    ),
    ("compute", "attention"): (
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26", CUDNN),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>", ""),
        ("void cutlass::device_kernel<flash::FlashAttnFwdSm90<x>>", ""),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80(x)", ""),
        ("_ZN7ck_tile6kentryILi256ELi1ENS_13FmhaFwdKernelI", ""),
        ("_ZN5aiter38fmha_bwd_hd128_bf16_causal_a32_rtna_psskE", ""),
        ("_attn_fwd", ""),
        ("triton_tem_fused_flex_attention_0", "triton_tem_fused_flex_attention_0"),
        ("void softmax_warp_forward<float, float, float, 1, false, false>(x)", "aten::_softmax"),
    ),
    ("memory", "elementwise"): (
        ("void cudnn::fusion::compute_dot_do_o_specialized<true, 128>(x)", CUDNN),
        ("void cudnn::fusion::convert_dq_to_16bits<true>(x)", CUDNN),
        ("void pytorch_flash::flash_bwd_dot_do_o_kernel<true, x>", FLASH),
        ("void pytorch_flash::flash_bwd_convert_dq_kernel<x>", FLASH),
        ("void cutlass::device_kernel<flash::FlashAttnBwdPreprocess<x>>", ""),
        ("_ZN5aiter23fmha_bwd_hd128_odo_bf16E", ""),
        ("triton_poi_fused__scaled_dot_product_cudnn_attention_clone_mul_3", "triton_poi_fused__x"),
        ("triton_red_fused__to_copy_sum_7", ""),
        ("void at::native::reduce_kernel<512, 1, ReduceOp<float, NormTwoOps<float>>>", ""),
        ("void at::native::vectorized_elementwise_kernel<8, silu_kernel>", "aten::silu"),
        ("void fbgemm_gpu::permute_2D_data_kernel<true, int, int, float>", ""),
    ),
    ("memory", "norm"): (
        ("x", "aten::_fused_rms_norm_backward"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<x>", ""),
        ("void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<x>", ""),
        ("void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel<x>", ""),
        ("_layer_norm_fwd_1pass_kernel", ""),
        ("void cudnn::bn_fw_tr_1C11_singleread<float, 512, true, 1, 2, 0>(x)", ""),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_2", ""),
        ("triton_per_fused__fused_rms_norm_backward_add_4", ""),
    ),
    ("compute", "loss"): (
        ("void cunn_SoftMaxBackward<4, float, float, float, LogSoftMaxBackwardEpilogue>", ""),
        ("void softmax_warp_forward<float, float, float, 10, true, false>(x)", ""),
        ("void nll_loss_forward_reduce_cuda_kernel_2d<float>", "aten::nll_loss_forward"),
        ("triton_red_fused__log_softmax_nll_loss_forward_1", ""),
    ),
    ("compute", "embedding"): (
        ("void DeviceRadixSortOnesweepKernel<x>", "aten::embedding_dense_backward"),
        ("split_embedding_backward_codegen_rowwise_adagrad_weighted_kernel_cta_per_row_1", ""),
        ("triton_poi_fused_embedding_0", ""),
    ),
    ("optimizer", "optimizer"): (
        ("void multi_tensor_apply_kernel<FusedAdamMathFunctor>", "aten::_fused_adamw_"),
    ),
}  # fmt: skip
"""Names of kernels, and of ops that launch them, as profiles have them, by op kind and class."""


@pytest.mark.parametrize("expected", REAL, ids=lambda pair: pair[1])
def test_kernels_of_real_profiles(run, tmp_path, expected):
    made = Recorder()
    for i, (kernel, op) in enumerate(REAL[expected]):
        made.kernel(kernel, 100.0 * i, 30.0, op=op)
    _, ops = shown(run, write(tmp_path, made.document) / "0.json")
    gaps = ("launch_gap", "host")
    assert {what: row["n"] for what, row in ops.items() if what != gaps} == {
        expected: len(REAL[expected])
    }
