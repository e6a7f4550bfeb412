"""What holds for every test: one thread, no network, nothing asked of a service."""

import os

# Set before torch or tokenizers are imported by any test, and inherited by processes tests start.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "disabled"
os.environ["MPLBACKEND"] = "agg"
