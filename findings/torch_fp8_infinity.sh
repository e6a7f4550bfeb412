#!/usr/bin/env bash
# torch casts infinity to the largest number in one FP8 format, and to infinity or NaN in the others.
#
# Versions: torch 2.13.0 (CPU), ml_dtypes 0.6.0 (the same formats for NumPy and JAX).
#
# Input: 1000, infinity and, for scales, 0 and -4, cast to the FP8 dtypes that both libraries have.
# Expected: E4M3 (float8_e4m3fn) has no infinity, so that one becomes NaN, as the paper of the formats says
#   (arXiv 2209.05433) and ml_dtypes does. torch's change to saturation (pull request 178817) speaks of
#   finite numbers.
# Seen: torch gives 448 for infinity as well as for 1000; ml_dtypes gives NaN for both. In E5M2 both
#   libraries give infinity, and in torch's own float8_e4m3fnuz both numbers become NaN. For E8M0, the
#   format of scales, torch drops the sign of -4 and makes 0 the smallest power of two; ml_dtypes gives NaN.
# For users: a test for finite numbers after a cast to E4M3 finds nothing, so that an overflow in a
#   gradient trains on as 448; tests of one library against the other differ. Look before the cast.
#
# Exit status: 0 while this is so, 1 when it is not.
source "$(dirname "$0")/install.sh"
install env torch==2.13.0 numpy==2.4.6 ml_dtypes==0.6.0
cat > show.py <<'P'
import math

import ml_dtypes
import numpy as np
import torch

INF, NAN = math.inf, math.nan
# Each format's numbers, what torch makes of them, and what ml_dtypes does.
CASES = {
    "float8_e4m3fn": ([1000.0, INF, -INF, NAN], [448.0, 448.0, -448.0, NAN], [NAN, NAN, NAN, NAN]),
    "float8_e5m2": ([1e9, INF, -INF, NAN], [INF, INF, -INF, NAN], [INF, INF, -INF, NAN]),
    "float8_e4m3fnuz": ([1000.0, INF, -INF, NAN], [NAN, NAN, NAN, NAN], [NAN, NAN, NAN, NAN]),
    "float8_e8m0fnu": ([0.0, -4.0, INF, NAN], [2.0**-127, 4.0, NAN, NAN], [NAN, NAN, NAN, NAN]),
}
as_stated = True
for name, (numbers, due_torch, due_numpy) in CASES.items():
    by_torch = torch.tensor(numbers).to(getattr(torch, name)).float().tolist()
    by_numpy = np.array(numbers, np.float32).astype(getattr(ml_dtypes, name)).astype(np.float32).tolist()
    print(f"{name:15} {numbers}: torch {by_torch}, ml_dtypes {by_numpy}")
    as_stated &= np.array_equal(by_torch, due_torch, equal_nan=True)
    as_stated &= np.array_equal(by_numpy, due_numpy, equal_nan=True)
raise SystemExit(0 if as_stated else 1)
P
env/bin/python -W ignore show.py
