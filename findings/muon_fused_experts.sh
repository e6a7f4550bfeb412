#!/usr/bin/env bash
# Muon of two optimizer libraries takes a stack of experts for one wide matrix with a row per expert.
#
# Versions: pytorch_optimizer 4.1.0, heavyball 3.2.1, torch 2.13.0 (CPU).
#
# Input: one step of Muon on the experts of a layer, [experts, out, in] as transformers 5 has them, and on
#   the same matrices as parameters of their own, with the same gradients.
# Expected: the same step. Muon orthogonalises matrices; its author's reference flattens convolutions
#   (four dimensions) and takes leading dimensions of others as a batch. torch.optim.Muon refuses whatever
#   is no matrix, so that a likely guess is a refusal.
# Seen: both libraries flatten to [experts, out * in] without a word. What becomes orthogonal is the set
#   of experts; each expert gets its own gradient, little changed but for its length. Of an expert's
#   singular values, which Muon makes nearly equal, the largest is some 50 times the smallest and more,
#   against 1.7 at most where each expert is a parameter.
# For users: routed experts, most of the parameters, are trained with normalised gradient descent, not
#   with Muon, and a change of layout (one parameter per expert, or fused) changes the run. Split the
#   experts, or use an optimizer that says what it does with three dimensions.
#
# Exit status: 0 while this is so, 1 when it is not.
source "$(dirname "$0")/install.sh"
install env torch==2.13.0 numpy==2.4.6 pytorch_optimizer==4.1.0 heavyball==3.2.1
cat > show.py <<'P'
import heavyball
import pytorch_optimizer
import torch

EXPERTS, OUT, IN = 4, 16, 16
heavyball.utils.compile_mode = None
torch.manual_seed(0)
start, gradient = torch.randn(2, EXPERTS, OUT, IN)
MUONS = {
    "pytorch_optimizer": lambda p: pytorch_optimizer.Muon([{"params": p, "use_muon": True}], lr=0.01),
    "heavyball": lambda p: heavyball.Muon(p, lr=0.01),
}


def step(muon, weights, gradients):
    """Return the change of each weight by one step."""
    parameters = [torch.nn.Parameter(w.clone()) for w in weights]
    for p, g in zip(parameters, gradients, strict=True):
        p.grad = g.clone()
    muon(parameters).step()
    return [p.detach() - w for p, w in zip(parameters, weights, strict=True)]


def spread(changes):
    """Return the largest ratio of the largest to the smallest singular value of a matrix."""
    values = [torch.linalg.svdvals(c) for c in changes]
    return max((v[0] / v[-1]).item() for v in values)


def distance(a, b):
    return ((a - b).norm() / b.norm()).item()


as_stated = True
for name, muon in MUONS.items():
    (stacked,) = step(muon, [start], [gradient])
    (flat,) = step(muon, [start.flatten(1)], [gradient.flatten(1)])
    single = torch.stack(step(muon, list(start), list(gradient)))
    from_single, from_flat = distance(stacked, single), distance(stacked, flat.view_as(stacked))
    print(f"{name}: the stack's step is {from_single:.0%} off that of single experts,", end=" ")
    print(f"{from_flat:.0%} off that of [{EXPERTS}, {OUT} * {IN}]; largest ratio of singular values", end=" ")
    print(f"{spread(stacked):.0f}, of single experts {spread(single):.1f}")
    as_stated &= from_flat < 0.03 and from_single > 0.3 and spread(single) < 2 < 20 < spread(stacked)
raise SystemExit(0 if as_stated else 1)
P
env/bin/python -W ignore show.py 2>log || { status=$?; tail -5 log; exit $status; }
