#!/usr/bin/env bash
# Everything that README says of one and of two GPUs, on a machine with two; three commands of less than ten minutes each:
#
#     bash benchmarks/two_gpus.sh one|several|rest|tests OUT [REVISION]
#
# Results and a log go to the folder OUT. A piece that fails or takes too long is named at the end and keeps no other from
# running. What one GPU is enough for runs on both at once, another work on each.
set -u
cd "$(dirname "$0")/.."
part=$1 out=$2 revision=${3:-}
mkdir -p "$out"
export PYTHONUNBUFFERED=1
failed=$(mktemp)

# piece SECONDS BENCHMARK FLAGS...
piece() {
  local limit=$1 started=$SECONDS status=0
  shift
  timeout -k 30 "$limit" python3 -m benchmarks run "$@" --timeout 100 --out "$out" --revision "$revision" >>"$out/log.txt" 2>&1 || status=$?
  echo "$* took $((SECONDS - started)) s"
  [ $status = 0 ] || echo "exit $status after $((SECONDS - started)) s: $*" >>"$failed"
}
on() { # GPU PIECE...
  CUDA_VISIBLE_DEVICES=$1 piece "${@:2}"
}
tests() { # mostly compiling, so several processes share the GPUs
  XLA_CLIENT_MEM_FRACTION=0.12 timeout -k 10 190 python3 -m pytest -p no:benchmark -n 7 -m gpu -q -rs --tb=short tests/gpu >"$out/pytest.txt" 2>&1 ||
    echo "pytest: exit $?" >>"$failed"
  tail -n 60 "$out/pytest.txt" | cut -c1-300
}
no_branches=xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION
triton=xla_gpu_enable_triton_gemm=false
short="--warmup-seconds 0.3 --seconds 0.2" # where a step is too short for the card to reach its power limit

case $part in
one)
  on 1 360 single_gpu --presets gpt-1b3 --together 2 --name single_gpu_1b3 &
  on 0 110 single_gpu --presets launch-bound $short
  on 0 130 single_gpu --presets gpt-124m
  on 0 240 callables --parts blocks $short --name callables1
  on 0 40 callables --parts replays --name callables1
  wait
  ;;
several)
  piece 150 pipeline --work mlp-launch-bound --schedules aligned --variant $no_branches --xla-option $triton --actions no $short \
    --peers Schedule1F1B Schedule1F1B:compile ScheduleZBVZeroBubble ScheduleDualPipeV --name pipeline2
  piece 160 pipeline --work mlp-large --schedules aligned zb-h1 --xla-option $triton --actions no \
    --peers ScheduleZBVZeroBubble Schedule1F1B ScheduleDualPipeV --name pipeline2
  piece 230 pipeline --work gpt-1b3 --schedules aligned --xla-option $triton --actions no --together 2 --rounds 4 --repeats 1 \
    --peers Schedule1F1B:compile ScheduleZBVZeroBubble ScheduleZBVZeroBubble:compile --name pipeline2
  ;;
rest)
  piece 190 fsdp --work gpt-1b3 --together 2 --one-gpu no --rounds 3 --peers compile compile:reshard --variant reshard=yes --name fsdp2
  piece 160 fsdp --work launch-bound --one-gpu no --rounds 3 $short --peers compile eager --variant graph=off --variant graph=full \
    --variant layout=dp --variant "layout=dp graph=off" --variant "layout=dp graph=full" --name fsdp2
  piece 75 callables --parts pipeline --pipelines launch-bound --ranks 2 --schedules aligned --rounds 3 $short --name callables2
  piece 75 callables --parts pipeline --pipelines large --ranks 2 --schedules aligned --rounds 3 \
    --peers ScheduleZBVZeroBubble --name callables2
  piece 35 fsdp --work launch-bound --variant graph=full --soak 1000
  piece 35 pipeline --work mlp-launch-bound --schedules aligned --graph full --xla-option $triton --soak 1000
  tests
  ;;
tests)
  tests
  ;;
esac
python3 -m benchmarks show "$out"
echo "failed: $(cat "$failed")"
