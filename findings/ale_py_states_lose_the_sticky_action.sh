#!/usr/bin/env bash
# ale-py 0.12.1, NumPy 2.4.6.
#
# A state that contains the random generator (`cloneState(include_rng=True)`) does not contain the action that a sticky
# frame repeats. So a restored game plays other frames than the game did, where the next frame is sticky.
#
# Input: Breakout with repeat_action_probability=0.25. At each of 200 frames the state is cloned, ten frames are played,
# the state is restored, and the same ten frames are played again, once at once and once after 20 frames of another
# action. One would expect the same frames in all 200 cases.
#
# Output: how many of the 200 differ
#     {'at once': 4, 'after another action': 50}
set -euo pipefail
venv=$(mktemp -d)
trap 'rm -rf "$venv"' EXIT
python3 -m venv "$venv"
"$venv/bin/pip" install -q ale-py==0.12.1 numpy==2.4.6
"$venv/bin/python" - <<'EOF'
from ale_py import Action, ALEInterface, LoggerMode, roms

ALEInterface.setLoggerMode(LoggerMode.Error)
ale = ALEInterface()
ale.setInt("random_seed", 0)
ale.setFloat("repeat_action_probability", 0.25)
ale.loadROM(roms.get_rom_path("breakout"))
ale.reset_game()


def frames():
    played = []
    for _ in range(10):
        ale.act(Action.NOOP)
        played.append(ale.getRAM().tobytes())
    return played


differ = {"at once": 0, "after another action": 0}
for number in range(200):
    ale.act([Action.FIRE, Action.LEFT][number % 2])
    state = ale.cloneState(include_rng=True)
    first = frames()
    ale.restoreState(state)
    differ["at once"] += frames() != first

    for _ in range(20):
        ale.act(Action.RIGHT)
    ale.restoreState(state)
    differ["after another action"] += frames() != first
    ale.restoreState(state)
print(differ)
assert min(differ.values()) > 0
EOF
