"""Train JAX models on NVIDIA GPUs as one captured program per step.

- A training step for your loop: `train_step`; strategies `Replicated`, `FullySharded` and `Pipelined`; `elementwise`,
  `sharded_matrices`, `Loss`.
- A model for it: `functional` for a Flax module, `PipelineModel`, `split_embedding`, `cross_entropy`, `rms_norm`, `scope`,
  `BATCH_AXES`; with experts: `MoE`, `MoEConfig`, `grouped_dot`.
- Fine-tuning: `lora`, `AdaptedModel`; `lm_eval_model` for tasks of lm-eval.
- Checkpoints: `Checkpoints`; `CanonicalLayout` converts a state.
- Text from a model: `generate`, `stream`, `Decoder`; `load` for the model of a run or of a Hugging Face folder.
- A backward pass in two parts: `split_backward`. Functions as CUDA graphs: `make_graphed_callables`, `Borrowed`, `fold_key`.
- Any JAX program: `jit` checks donations, `explain` reports on a compiled program, `compare` times two in turns, `record`
  writes a profile; `Program`, `compiler_options`, `packed`, `Packing`.
- Before a run: `plan` predicts the memory of every layout of a model, a `Plan` of `Option`s.
- Pipeline schedules: `Order`, `Schedule`. Base of all errors: `JgraphError`.

The application, `python -m jgraph.train`, is in `jgraph.train`; its configuration is `jgraph.train.config.TrainConfig`.
"""

import lazy_loader

# Names are imported at their first use, because importing jax takes a second. `__init__.pyi` has the module of each name.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
