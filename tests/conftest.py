"""What holds for every test: one thread, no network, nothing asked of a service."""

import os

from hypothesis import settings

# Set before torch or tokenizers are imported by any test, and inherited by processes tests start.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "disabled"
os.environ["MPLBACKEND"] = "agg"

# No test depends on how fast a machine is; under CI the drawn cases are the same every time.
settings.register_profile("house", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("house")
