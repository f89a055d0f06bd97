#!/usr/bin/env bash
# Repeats the published measurements on one and two GPUs. Needs a machine with two GPUs. Each part takes less than ten minutes. The
# most important parts come first:
#
#     bash benchmarks/two_gpus.sh collectives|pipelines|pipelines_gpt|pipelines_fp8|soaks|one|one_1b3 OUT [REVISION]
#     bash benchmarks/two_gpus.sh fsdp|tensor_context|tests|tests_several|restarts OUT [REVISION]
#     bash benchmarks/two_gpus.sh experts|experts_soak|experts_profile OUT [REVISION]
#     bash benchmarks/two_gpus.sh llama_soak OUT [REVISION]
#     bash benchmarks/two_gpus.sh llama OUT [REVISION [STEPS]]
#
# Further parts, with `OUT [REVISION]`:
#
#     fp8, fp8_1b3, curves      FP8 on one GPU; needs torchao and Transformer Engine
#     fp8_sharded, llama        FP8 on two GPUs; needs torchao. A soak of 1,000 STEPS in `llama` takes longer than ten minutes
#     te_sharded, te_llama      the same with Transformer Engine; needs both
#     decode, folders           Hugging Face checkpoints on one GPU; needs transformers
#     moe, moe_fp8, moe_soak, grouped      mixtures of experts on one GPU, five minutes each
#     lora, lora_short, lora_remat         LoRA on two GPUs; needs peft and transformers
#     finetune                             LoRA on one GPU; needs peft and transformers
#
# Results and log.txt go to the folder OUT, a profile to OUT/profile. The script continues after a failed or timed-out command, stores
# its partial results, and lists it at the end. Works that need one GPU run on both GPUs in parallel, one work per GPU. On a machine with
# four GPUs, two parts can run at once, with CUDA_VISIBLE_DEVICES=0,1 and 2,3.
set -u
cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD/models${PYTHONPATH:+:$PYTHONPATH} # for a checkout without installation
part=$1 out=$2 revision=${3:-} steps=${4:-300}
mkdir -p "$out"
export PYTHONUNBUFFERED=1
failed=$(mktemp)

piece() { # SECONDS BENCHMARK FLAGS...
  local limit=$1 name=$2 started=$SECONDS status=0
  shift 2
  timeout -k 30 "$limit" python3 -m benchmarks run "$name" --timeout 100 --out "$out" --revision "$revision" "$@" >>"$out/log.txt" 2>&1 || status=$?
  echo "exit $status after $((SECONDS - started)) s: $name $*" | tee -a "$([ $status = 0 ] && echo /dev/null || echo "$failed")"
}
on() { # GPU PIECE...
  CUDA_VISIBLE_DEVICES=$1 piece "${@:2}"
}
tests() { # SECONDS FLAGS...; several processes share the GPUs, because the tests mostly compile
  timeout -k 10 "$1" python3 -m pytest -p no:benchmark -m gpu -q --tb=short "${@:2}" >"$out/pytest.txt" 2>&1 || echo "pytest: exit $?" >>"$failed"
  tail -n 60 "$out/pytest.txt" | cut -c1-300
}
train() { # NAME FLAGS...
  CUDA_VISIBLE_DEVICES=0 XLA_CLIENT_MEM_FRACTION=0.22 timeout 470 python3 -m jgraph.train --preset gpt-124m --data python-source \
    --steps 2000 --log-every 10 --eval-every 500 --checkpoint-every 2000 --sample-tokens 0 --on-nonfinite skip \
    --run-dir "$runs/$1" "${@:2}" >"$runs/$1.txt" 2>&1 || echo "$1: exit $?, $(tail -n 1 "$runs/$1.txt")" >>"$failed"
}
no_branches=xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION
in_turn=xla_gpu_enable_latency_hiding_scheduler=false # no overlap of collectives with compute
copies=xla_gpu_use_memcpy_local_p2p=true # all-to-all by copy engines
peer_copies=xla_gpu_collective_permute_mode=COLLECTIVES_PEER_MEMORY # permutes by copy engines, not measured yet
short="--warmup-seconds 0.3 --seconds 0.2" # for steps too short to reach the power limit of the GPU
pipeline="pipeline --xla-option xla_gpu_enable_triton_gemm=false"
gpt="$pipeline --work gpt-1b3 --together 2 --rounds 2 --repeats 1" # memory for two processes; each builds for a minute
fsdp="fsdp --one-gpu no --rounds 3 --name fsdp2"
partitioned="tensor_context --together 2 --rounds 2 --repeats 2 --warmup-seconds 0.4 --timeout 60 --categories"
sharded="fsdp --name fsdp_fp8 --first fp8=delayed --variant fp8=current --plain --peers compile compile:float8 --one-gpu no --rounds 3 --timeout 200"
te_sharded=(compile:float8 "te delayed" "te delayed fp8-params" "te current fp8-params" "te delayed:graph")
llama="fsdp --work llama3-8b --one-gpu no --timeout 200"
te_llama=(compile:float8 "te delayed" "te delayed fp8-params" "te current fp8-params")
experts="layout=ep capacity=2" # enough capacity for the uneven load of an untrained router
experts_te=("te bf16 bf16-params graphed-attention" "te bf16 bf16-params cutlass graphed-attention")
captured="fp8=delayed graph=full grads=float32"
lora="finetune --ranks 2 --preset llama3-8b --name finetune2 --together 1 --rounds 2 --repeats 1 --seconds 1.5 --timeout 150"
peft=(jgraph "peft compile" "jgraph fp8=delayed:e4m3" "peft compile cudnn" "peft eager") # the most important variants first
callables="callables --parts pipeline --ranks 2 --schedules aligned --rounds 3 --name callables2"

case $part in
collectives)
  piece 450 $fsdp --work launch-bound $short --timeout 150 --plain same stock --peers compile:graph compile:whole:graph compile \
    --variant graph=off --variant graph=full --variant layout=dp --variant "layout=dp graph=off" --variant "layout=dp graph=full"
  ;;
pipelines)
  piece 270 $pipeline --work mlp-launch-bound --schedules aligned "aligned graph=full" "aligned $no_branches" "1f1b engine=dispatch" \
    --name pipeline2 $short --rounds 3 --peers Schedule1F1B:compile Schedule1F1B ScheduleZBVZeroBubble:compile
  piece 270 $pipeline --work mlp-large --schedules aligned "zb-v:2 engine=dispatch" "1f1b engine=dispatch" --name pipeline2 --rounds 3 \
    --peers ScheduleZBVZeroBubble:compile Schedule1F1B:compile ScheduleZBVZeroBubble
  ;;
pipelines_gpt)
  piece 540 $gpt --schedules "zb-v:2 engine=dispatch" aligned --name pipeline2 \
    --peers Schedule1F1B:compile
  ;;
pipelines_fp8)
  piece 540 $gpt --schedules "zb-v:2 engine=dispatch fp8=delayed remat=wide" "zb-v:2 engine=dispatch" \
    "zb-v:2 engine=dispatch norm=xla" --timeout 200 --name pipeline_fp8 --peers Schedule1F1B:compile
  ;;
soaks) # all collectives in one graph, compared with graph auto on the same batches
  piece 130 fsdp --work launch-bound --variant graph=full --soak 10000
  piece 130 fsdp --work launch-bound --variant "layout=dp graph=full" --soak 10000
  piece 250 fsdp --work launch-bound --variant "layout=pp graph=full" --soak 10000
  piece 200 fsdp --work launch-bound --variant "layout=tp graph=full" --soak 10000 --soak-against nothing
  ;;
one)
  on 1 500 single_gpu --presets gpt-124m --timeout 240 &
  on 0 500 single_gpu --presets launch-bound $short --timeout 240
  wait
  ;;
one_1b3)
  on 1 570 single_gpu --presets gpt-1b3 --together 2 --rounds 3 --timeout 240 --name single_gpu_1b3 --variants jgraph \
    "torch compile" "torch compile + CUDA graph" "jgraph graph=off" "torch eager" "torch compile max-autotune + CUDA graph" &
  on 0 220 callables --parts blocks $short --name callables1
  on 0 40 callables --parts blocks --soak 1000
  wait
  ;;
fsdp)
  piece 390 $fsdp --work gpt-1b3 --together 2 --plain same stock "same tuned" "stock tuned" --peers compile compile:reshard --variant reshard=yes
  piece 75 $callables --pipelines launch-bound $short
  piece 75 $callables --pipelines large --peers ScheduleZBVZeroBubble
  ;;
tensor_context) # five minutes at most; memory of an H200 for two processes. A hanging `compile:async` ends after --timeout
  piece 190 $partitioned --work gpt-1b3-tp --variant "$peer_copies" --variant tensor_overlap=none --tensor-peers compile:async compile
  piece 110 $partitioned --work gpt-1b3-cp --context-peers compile:cudnn
  ;;
tests) XLA_CLIENT_MEM_FRACTION=0.12 tests 190 -n 7 -rs --ignore tests/gpu/test_folders_on_gpu.py --ignore tests/gpu/test_parallel_on_gpu.py \
    --ignore tests/gpu/test_processes_on_gpu.py tests/gpu ;;
tests_several) tests 400 -n 0 -rs tests/gpu/test_p{arallel,rocesses}_on_gpu.py ;; # aborts with several processes
restarts) piece 560 restarts --timeout 300 ;;
decode) piece 340 decode --models llama-1b3 --rounds 3 --timeout 120 --variants "" xla --peers transformers "loop tuned" ;;
folders) XLA_PYTHON_CLIENT_PREALLOCATE=false tests 240 -n 3 -rP -W default tests/gpu/test_folders_on_gpu.py ;;
fp8)
  piece 130 kernels --rounds 2 $short
  piece 440 fp8 --presets gpt-124m --rounds 3
  ;;
fp8_1b3)
  piece 580 fp8 --presets gpt-1b3 --together 2 --rounds 3 --name fp8_1b3 --variants "jgraph fp8=delayed" "jgraph fp8=current" jgraph \
    "torch float8 tensorwise compile" "torch te delayed + CUDA graph" "torch te delayed bf16-params + CUDA graph" \
    "torch te delayed fp8-params + CUDA graph" "torch te delayed bf16-params fp8-attention + CUDA graph" \
    "torch te current bf16-params + CUDA graph"
  ;;
moe) # in parallel if there are two GPUs
  other=$(($(nvidia-smi --list-gpus | wc -l) > 1))
  on 0 230 moe --work gpt-moe --rounds 3 --seconds 0.5 --timeout 120 --peers compile "compile + CUDA graph" "${experts_te[@]}" &
  [ "$other" = 1 ] || wait
  on "$other" 180 moe --work qwen3-30b-a3b-layers --rounds 3 --seconds 0.5 --name moe_layers --peers compile "compile + CUDA graph" \
    "${experts_te[@]}" &
  wait
  ;;
moe_fp8) on 0 330 moe --work gpt-moe --rounds 3 --seconds 0.5 --timeout 200 --name moe_fp8 --together 6 --peers "compile + CUDA graph" \
    "te delayed bf16-params graphed-attention" "te current bf16-params graphed-attention" "${experts_te[0]}" --variant fp8=current:e4m3 --variant fp8=delayed:e4m3 ;;
moe_soak) on 0 290 moe --work gpt-moe --variant graph=full --soak 1000 --soak-against nothing ;;
grouped) on 0 290 grouped --rounds 2 --repeats 2 $short ;;
experts) # expert parallelism of jgraph and PyTorch, and jgraph with gathered experts
  piece 330 fsdp --work gpt-moe --name fsdp_experts --together 7 --rounds 3 --seconds 0.4 --timeout 230 \
    --first "$experts num_microbatches=2 $copies" --variant "$experts" --variant "$experts $copies" \
    --variant "$experts num_microbatches=2 $in_turn" --peers compile:experts
  piece 170 fsdp --work qwen3-30b-a3b --name fsdp_experts --together 3 --rounds 2 --seconds 0.4 --timeout 150 --one-gpu no \
    --first "$experts num_microbatches=2" --peers compile:experts
  ;;
experts_soak) piece 400 fsdp --work gpt-moe --variant "$experts num_microbatches=2 graph=full" --soak 1000 ;;
experts_profile) # profile of two interleaved microbatches: planned and actual overlap with each all-to-all
  run=$(mktemp -d)
  timeout 280 python3 -m jgraph.train --preset gpt-moe --data python-source --batch-size 32 --fsdp 2 --ep 2 --num-microbatches 2 \
    --model.moe.capacity 2 --steps 14 --log-every 4 --eval-every 1000 --checkpoint-every 1000 --sample-tokens 0 --profile 8:10 \
    --run-dir "$run" >"$out/log.txt" 2>&1 || echo "training run: exit $?" >>"$failed"
  mkdir -p "$out/profile"
  cp "$run"/profile/profile.* "$out/profile"
  ;;
curves)
  runs=$(mktemp -d)
  train bf16 & train again & train current --precision fp8 & train delayed --precision fp8 --fp8.recipe delayed &
  wait
  piece 60 convergence --name convergence_fp8 --draw "$out" --runs "bf16=$runs/bf16" "again=$runs/again" "current=$runs/current" \
    "delayed=$runs/delayed"
  ;;
fp8_sharded)
  piece 260 $sharded --work gpt-1b3 --together 2
  piece 300 $sharded --work gpt-7b --together 1
  piece 90 fsdp --work launch-bound --variant "fp8=delayed graph=full" --soak 1000
  ;;
te_sharded)
  piece 560 fsdp --work gpt-1b3 --name fsdp_fp8 --first fp8=delayed --plain --one-gpu no --together 2 --rounds 3 --timeout 200 \
    --peers "${te_sharded[@]}"
  ;;
te_llama)
  piece 560 $llama --first "$captured" --name fsdp_fp8_llama --together 1 --rounds 2 --seconds 2 --plain --peers "${te_llama[@]}"
  ;;
llama) # one process at a time on both GPUs; the soak reuses the compilation cache
  piece 350 $llama --first "$captured" --name fsdp_fp8_llama --together 1 --rounds 2 --seconds 2 --plain --peers compile:float8 compile:float8:cudnn
  piece $((120 + steps)) $llama --variant "$captured" --soak "$steps" --soak-against nothing
  ;;
lora) # one process at a time on both GPUs
  piece 230 $lora --batch-size 2 --seq-len 8192 --variants "${peft[@]}"
  ;;
lora_short) piece 230 $lora --batch-size 8 --seq-len 2048 --variants "${peft[@]}" ;;
lora_remat) piece 150 $lora --batch-size 2 --seq-len 8192 --name finetune2_remat --variants "jgraph remat=layer" "peft compile checkpointing" \
  "peft checkpointing" ;;
finetune) piece 290 finetune --together 2 --rounds 2 --timeout 150 ;;
llama_soak) # half the sequence length, so that 1,000 steps take less than ten minutes
  piece 470 $llama --variant "$captured seq_len=4096" --soak 1000 --soak-against nothing
  ;;
esac
python3 -m benchmarks show "$out"
echo "failed: $(cat "$failed")"
