#!/usr/bin/env bash
# torch 2.13.0: kl_divergence of two Categoricals with the same action masked by a logit of -inf has the right, finite
# value, but its gradient is nan for all actions. The gradient of the entropy is finite.
#
# Input: logits [0, 1, -inf] and [1, 1, -inf]: two policies that both know that the third action is not allowed.
#
# Seen:      kl 0.1109, gradient [nan, nan, nan]
#            entropy 0.5822, gradient [0.1966, -0.1966, 0.0]
#
# Exit status: 0 if this is still so, 1 if not.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cd "$folder"
"$folder/venv/bin/python" - <<'PROGRAM'
import torch
from torch.distributions import Categorical, kl_divergence

def measured(value_of):
    logits = torch.tensor([0.0, 1.0, -torch.inf], requires_grad=True)
    value = value_of(Categorical(logits=logits))
    value.backward()
    return round(value.item(), 4), [round(number, 4) for number in logits.grad.tolist()]

other = Categorical(logits=torch.tensor([1.0, 1.0, -torch.inf]))
kl = measured(lambda policy: kl_divergence(policy, other))
entropy = measured(lambda policy: policy.entropy())
print(f"kl {kl[0]}, gradient {kl[1]}")
print(f"entropy {entropy[0]}, gradient {entropy[1]}")
raise SystemExit((str(kl), entropy) != ("(0.1109, [nan, nan, nan])", (0.5822, [0.1966, -0.1966, 0.0])))
PROGRAM
