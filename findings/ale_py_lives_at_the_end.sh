#!/usr/bin/env bash
# ale-py 0.12.1, AtariVectorEnv in the mode SAME_STEP: info of the step that ends a game is that of the next game.
#
# Input: two games of Breakout, which end when no life is left, the same seed and actions in both modes, up to the first
# end. Gymnasium's vector envs put the infos of the last step into info["final_info"] in this mode.
#
# Seen:      NEXT_STEP: step, lives, frame of the episode, final_info: (120, 0, 498, False)
#            SAME_STEP: step, lives, frame of the episode, final_info: (120, 5, 17, False)
#
# Exit status: 0 if this is still so, 1 if not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet ale-py==0.12.1 gymnasium==1.4.0
cd "$folder"
"$folder/venv/bin/python" - <<'PROGRAM'
import numpy as np
from ale_py.vector_env import AtariVectorEnv
from gymnasium.vector import AutoresetMode

def end(mode):
    """Return the number of the step that ends the first game of Breakout, and its infos of that env."""
    env = AtariVectorEnv("breakout", 2, autoreset_mode=mode)
    env.reset(seed=0)
    generator = np.random.default_rng(0)
    for step in range(10_000):
        _, _, terminated, _, info = env.step(generator.integers(0, 4, 2))
        if terminated.any():
            number = int(np.flatnonzero(terminated)[0])
            return step, int(info["lives"][number]), int(info["episode_frame_number"][number]), "final_info" in info

seen = end(AutoresetMode.NEXT_STEP), end(AutoresetMode.SAME_STEP)
print("NEXT_STEP: step, lives, frame of the episode, final_info:", seen[0])
print("SAME_STEP: step, lives, frame of the episode, final_info:", seen[1])
raise SystemExit(not (seen[0][0] == seen[1][0] and seen[0][1] == 0 and seen[1][1] == 5 and not seen[1][3]))
PROGRAM
