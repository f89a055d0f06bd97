#!/bin/bash
# One process per GPU of this machine, restarted up to three times: bash examples/cluster/torchrun.sh
exec torchrun --nproc-per-node 8 --max-restarts 3 -m jgraph.train \
    --preset gpt-1b3 --fsdp 8 --batch-size 128 --run-dir runs/gpt-1b3
