"""Named configurations of training runs. `PRESETS` maps the name of each to its `TrainConfig`.

`gpt-*` have the sizes of GPT-3 (arXiv:2005.14165, table 2.1). `llama3-*` and `qwen3-*` have the sizes of meta-llama's
Llama-3.2-1B, Llama-3.1-8B and Llama-3.1-70B, and Qwen's Qwen3-0.6B, Qwen3-8B and Qwen3-30B-A3B, from config.json on the Hugging
Face hub.
"""

from typing import Any

from jgraph.moe.config import MoEConfig
from jgraph.train.config import OptimizerConfig, TrainConfig
from jgraph_models.gpt_config import GPTConfig

_GPT_VOCAB = 50_304  # GPT-2's 50257 rounded up to a multiple of 128, so that the head's matmul has whole tiles


def _gpt(preset: str, *, layers: int, width: int, heads: int, batch_size: int, seq_len: int, peak: float) -> TrainConfig:
    model = GPTConfig(
        num_layers=layers, d_model=width, num_heads=heads, num_kv_heads=heads, d_ff=4 * width, vocab_size=_GPT_VOCAB
    )
    return _run(preset, model, batch_size=batch_size, seq_len=seq_len, peak=peak)


def _llama(factor: float, **sizes: Any) -> GPTConfig:
    scaling: dict[str, Any] = {"rope_theta": 500_000.0, "rope_scaling": "llama3", "rope_factor": factor}
    return GPTConfig(num_kv_heads=8, mlp="swiglu", norm_eps=1e-5, vocab_size=128_256, **scaling, **sizes)


def _qwen3(**sizes: Any) -> GPTConfig:
    defaults: dict[str, Any] = {"num_kv_heads": 8, "vocab_size": 151_936, "mlp": "swiglu", "qk_norm": "head"}
    defaults |= {"rope_theta": 1_000_000.0, "norm_eps": 1e-6}
    return GPTConfig(**defaults | sizes)


def _run(preset: str, model: GPTConfig, *, batch_size: int, seq_len: int, peak: float) -> TrainConfig:
    return TrainConfig.from_fields(
        preset=preset,
        steps=10_000,
        batch_size=batch_size,
        seq_len=seq_len,
        eval_every=1000,
        checkpoint_every=1000,
        # At these sizes cuBLAS is faster than Triton under the GPU's power limit, and fuses GELU as an epilogue (1% of a step
        # of gpt-1b3 on an H200, notes/develop/measurements/single-gpu.md). Small matmuls, as in launch-bound,
        # are faster with Triton.
        xla_options=("xla_gpu_enable_triton_gemm=false",),
        model=model,
        optimizer=OptimizerConfig(learning_rate=peak).with_defaults(warmup_steps=500),
    )


def _tiny(preset: str, model: GPTConfig, *, batch_size: int) -> TrainConfig:
    return TrainConfig.from_fields(
        preset=preset,
        # Takes less than two minutes on two CPU cores. In this time, many small steps reach a lower loss than few large steps.
        steps=700,
        batch_size=batch_size,
        seq_len=128,
        log_every=20,
        eval_every=350,
        eval_batches=512 // batch_size,
        checkpoint_every=350,
        model=model,
        optimizer=OptimizerConfig(learning_rate=3e-3).with_defaults(warmup_steps=50, beta2=0.99),
    )


PRESETS: dict[str, TrainConfig] = {
    config.preset: config
    for config in (
        _tiny("cpu-tiny", GPTConfig(compute_dtype="float32"), batch_size=8),
        _tiny(
            "gpt-moe-tiny",
            GPTConfig(compute_dtype="float32", mlp="swiglu", moe=MoEConfig(num_experts=4, experts_per_token=2, d_ff=256)),
            # On a CPU, every expert multiplies every row, so that half the batch takes about as long as cpu-tiny.
            batch_size=4,
        ),
        TrainConfig.from_fields(
            preset="launch-bound",
            batch_size=2,
            seq_len=128,
            # XLA splits the sums of small matmuls, and adds a kernel to each that joins the parts: 61 of 360 kernels and 2.6%
            # of the step on an H200 (notes/develop/measurements/single-gpu.md).
            xla_options=("xla_gpu_experimental_force_split_k=1",),
            model=GPTConfig(num_layers=12, d_model=256, num_heads=4, num_kv_heads=4, d_ff=1024, vocab_size=8192),
        ),
        _gpt("gpt-124m", layers=12, width=768, heads=12, batch_size=16, seq_len=1024, peak=6e-4),
        _run(
            "gpt-moe",
            # An expert has as many weights as the MLP of gpt-124m.
            GPTConfig(
                num_layers=12,
                d_model=768,
                num_heads=12,
                num_kv_heads=12,
                d_ff=2048,
                vocab_size=_GPT_VOCAB,
                mlp="swiglu",
                moe=MoEConfig(num_experts=8, experts_per_token=2),
            ),
            batch_size=16,
            seq_len=1024,
            peak=6e-4,
        ),
        _gpt("gpt-350m", layers=24, width=1024, heads=16, batch_size=16, seq_len=1024, peak=3e-4),
        _gpt("gpt-1b3", layers=24, width=2048, heads=16, batch_size=8, seq_len=2048, peak=2e-4),
        _gpt("gpt-7b", layers=32, width=4096, heads=32, batch_size=4, seq_len=2048, peak=1.2e-4),
        _run(
            "llama3-1b",
            _llama(32.0, num_layers=16, d_model=2048, num_heads=32, d_ff=8192),
            batch_size=4,
            seq_len=4096,
            peak=3e-4,
        ),
        _run(
            "llama3-8b",
            _llama(8.0, num_layers=32, d_model=4096, num_heads=32, d_ff=14_336, head="untied"),
            batch_size=2,
            seq_len=8192,
            peak=3e-4,
        ),
        _run(
            "llama3-70b",
            _llama(8.0, num_layers=80, d_model=8192, num_heads=64, d_ff=28_672, head="untied"),
            batch_size=4,
            seq_len=8192,
            peak=1.5e-4,
        ),
        _run(
            "qwen3-0.6b",
            _qwen3(num_layers=28, d_model=1024, num_heads=16, head_dim=128, d_ff=3072),
            batch_size=4,
            seq_len=4096,
            peak=3e-4,
        ),
        _run(
            "qwen3-30b-a3b",
            _qwen3(
                num_layers=48,
                d_model=2048,
                num_heads=32,
                num_kv_heads=4,
                head_dim=128,
                d_ff=6144,
                head="untied",
                moe=MoEConfig(num_experts=128, experts_per_token=8, d_ff=768, balance_loss=0.001),
            ),
            batch_size=4,
            seq_len=4096,
            peak=3e-4,
        ),
        _run(
            "qwen3-8b",
            _qwen3(num_layers=36, d_model=4096, num_heads=32, d_ff=12_288, head="untied"),
            batch_size=2,
            seq_len=8192,
            peak=3e-4,
        ),
    )
}
