#!/usr/bin/env bash
# TorchRL 0.14.1, GymEnv(num_envs=2): the next observation of a row that ends an episode is zeros, where the docstring of
# VecGymEnvTransform says that it is the true one (or NaN, where it is lost).
#
# Input: two CartPoles, 40 random steps of each.
#
# Seen:      every next observation at an end is [0, 0, 0, 0]
#
# Exit status: 0 if this is still so, 1 if not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 tensordict==0.14.3 torchrl==0.14.1 gymnasium==1.4.0 numpy
cd "$folder"
cat > program.py <<'PROGRAM'
import torch
from torchrl.collectors import Collector
from torchrl.envs import GymEnv

if __name__ == "__main__":
    torch.manual_seed(0)
    env = GymEnv("CartPole-v1", num_envs=2)
    (batch,) = Collector(env, None, frames_per_batch=80, total_frames=80)
    last = batch["next", "observation"][batch["next", "done"].squeeze(-1)]
    print(len(last), "ends, zeros in", int((last == 0).all(-1).sum()))
    env.close()
    raise SystemExit(not (len(last) > 0 and bool((last == 0).all())))
PROGRAM
"$folder/venv/bin/python" program.py
