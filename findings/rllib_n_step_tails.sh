#!/usr/bin/env bash
# RLlib (ray 2.60.0), EpisodeReplayBuffer with n_step: the last n - 1 rows of an episode.
#
# Input: an episode of 4 steps, 1 reward a step, n = 3, gamma = 1; once terminated, once truncated. Shown for each row: sum
# of rewards, new observation, terminated, truncated, n. The rows 2 and 3 sum 2 and 1 rewards; neither their flags nor
# their n say that. DQN's target is reward + gamma**n * value, without the value where it terminated.
#
# Seen:      1 terminated: (3.0, 4, True, False, 3) truncated: (3.0, 4, False, True, 3)
#            2 terminated: (2.0, 4, False, False, 3) truncated: (2.0, 4, False, False, 3)
#            3 terminated: (1.0, 4, False, False, 3) truncated: (1.0, 4, False, False, 3)
#
# Exit status: 0 if this is still so, 1 if not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 "ray[rllib]==2.60.0"
cd "$folder"
"$folder/venv/bin/python" - <<'PROGRAM'
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.replay_buffers.episode_replay_buffer import EpisodeReplayBuffer

def sampled(terminated):
    """Return for each step of an episode of four: reward, new observation, terminated, truncated, n."""
    ends = {"terminated": terminated, "truncated": not terminated}
    episode = SingleAgentEpisode(
        observations=[0, 1, 2, 3, 4], actions=[0] * 4, rewards=[1.0] * 4, len_lookback_buffer=0, **ends
    )
    buffer = EpisodeReplayBuffer(capacity=100)
    buffer.add(episode)
    found = {}
    for row in buffer.sample(200, n_step=3, gamma=1.0, sample_episodes=True):
        n = int(row.get_extra_model_outputs("n_step")[0])
        flags = row.is_terminated, row.is_truncated
        found[row.get_observations(0)] = (float(row.get_rewards(0)), row.get_observations(-1), *flags, n)
    return found

ended = sampled(terminated=True)
cut = sampled(terminated=False)
for step in range(4):
    print(step, "terminated:", ended[step], "truncated:", cut[step])
tails = [(2.0, 4, False, False, 3), (1.0, 4, False, False, 3)]
as_seen = ended[1] == (3.0, 4, True, False, 3) and [ended[2], ended[3]] == tails and [cut[2], cut[3]] == tails
raise SystemExit(not as_seen)
PROGRAM
