#!/usr/bin/env bash
# torch's writer of Hugging Face checkpoints writes dtypes of scales and FP4 that its own reader refuses.
#
# Versions: torch 2.13.0 (CPU), safetensors 0.8.0.
#
# Input: a bfloat16 weight beside the scales of MX formats (float8_e8m0fnu) or packed FP4 (float4_e2m1fn_x2),
#   saved by torch.distributed.checkpoint with HuggingFaceStorageWriter, loaded with HuggingFaceStorageReader.
# Expected: what was saved, as in bfloat16, E4M3 and E5M2; or a refusal when it is saved.
# Seen: saving succeeds, and load_file of safetensors reads the file as it was. Loading fails for every
#   tensor of the folder, the bfloat16 weight alone included, with "metadata is None" and the dtype's name:
#   safetensors' table from names to dtypes lacks both, though its own save writes them. Its `load`
#   (of bytes) has a KeyError for the same reason, and slices of FP4, even the whole one, have a
#   RuntimeError as their shape is counted in halves of a byte.
# For users: a checkpoint with quantised experts that is written so cannot be resumed by the same call.
#   Keep such tensors as uint8, as released MXFP4 folders do, or read them with load_file or safe_open.
#
# Exit status: 0 while this is so, 1 when it is not.
source "$(dirname "$0")/install.sh"
install env torch==2.13.0 numpy==2.4.6 safetensors==0.8.0
cat > show.py <<'P'
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load, load_file

BYTES = torch.arange(64, dtype=torch.uint8).view(4, 16)
READS, REFUSED = "reads it", "refuses"


def attempt(read, due):
    """Return whether a reader gives what was saved."""
    try:
        return READS if torch.equal(read().view(torch.uint8), due.view(torch.uint8)) else "reads another"
    except (KeyError, RuntimeError, dcp.api.CheckpointException) as error:
        return f"{REFUSED} ({type(error).__name__})"


def read_slice(path, name):
    with safe_open(path, "pt") as file:
        return file.get_slice(name)[:]


def restore(folder, name, like):
    state = {name: like.view(torch.uint8).clone().zero_().view(like.dtype)}
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(folder), no_dist=True)
    return state[name]


as_stated = True
# Whether the readers of each dtype succeed: the reader of a folder, of bytes, of slices.
for dtype, due in {
    torch.float8_e4m3fn: (True, True, True),
    torch.float8_e5m2: (True, True, True),
    torch.float8_e8m0fnu: (False, False, True),
    torch.float4_e2m1fn_x2: (False, False, False),
}.items():
    folder = str(dtype)
    saved = {"codes": BYTES.view(dtype), "weight": torch.ones(4, 4, dtype=torch.bfloat16)}
    dcp.save(saved, storage_writer=dcp.HuggingFaceStorageWriter(folder), no_dist=True)
    (path,) = Path(folder).glob("*.safetensors")
    codes, weight = saved["codes"], saved["weight"]
    whole = attempt(lambda: load_file(path)["codes"], codes)
    back = [attempt(lambda name=name: restore(folder, name, saved[name]), saved[name]) for name in saved]
    by_bytes = attempt(lambda: load(path.read_bytes())["codes"], codes)
    by_slice = attempt(lambda: read_slice(path, "codes"), codes)
    print(f"{dtype}: HuggingFaceStorageReader {back[0]}, of the weight {back[1]};", end=" ")
    print(f"load_file {whole}, load {by_bytes}, get_slice {by_slice}")
    as_stated &= whole == READS and back[0].split(" (")[0] == back[1].split(" (")[0]
    outcomes = (back[0], by_bytes, by_slice)
    as_stated &= tuple(o == READS for o in outcomes) == due and "another" not in "".join(outcomes)
raise SystemExit(0 if as_stated else 1)
P
env/bin/python -W ignore show.py 2>log || { status=$?; tail -5 log; exit $status; }
