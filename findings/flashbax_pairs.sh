#!/usr/bin/env bash
# flashbax 0.1.3, flat buffer: the pair of a row that ends an episode holds the next episode's first observation.
#
# Its README says so: "The user is expected to handle the case of final to first timestep."
#
# Input: two episodes of three steps and the first step of a third, added as an env gives them that resets itself.
#
# Seen:      pairs: [(10, 11), (11, 12), (12, 20), (20, 21), (21, 22), (22, 30)]
#
# Exit status: 0 if this is still so, 1 if not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet flashbax==0.1.3 jax==0.10.2 jaxlib==0.10.2
cd "$folder"
"$folder/venv/bin/python" - <<'PROGRAM'
import flashbax as fbx
import jax
import jax.numpy as jnp

# Two episodes of three steps, as an env that resets itself gives them: the step's observation, and whether it ended
# the episode. The observations after the ends are 13 and 23; the buffer has no place for them.
steps = [(10, 0), (11, 0), (12, 1), (20, 0), (21, 0), (22, 1), (30, 0)]
buffer = fbx.make_flat_buffer(max_length=16, min_length=2, sample_batch_size=16)
state = buffer.init({"obs": jnp.zeros(()), "done": jnp.zeros(())})
for obs, done in steps:
    state = buffer.add(state, {"obs": jnp.float32(obs), "done": jnp.float32(done)})

pairs = {}
for seed in range(20):
    pair = buffer.sample(state, jax.random.PRNGKey(seed)).experience
    pairs.update(zip(pair.first["obs"].astype(int).tolist(), pair.second["obs"].astype(int).tolist()))
print("pairs:", sorted(pairs.items()))
raise SystemExit(not (pairs[12] == 20 and pairs[22] == 30 and pairs[10] == 11))
PROGRAM
