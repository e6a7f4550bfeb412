"""Cross-entropy over the whole logits at once: what the chunked form is compared with."""

import torch.nn.functional as F
from torch import Tensor


def cross_entropy_sum(
    x_TD: Tensor, head_VD: Tensor, labels_T: Tensor, ignored: int = -100
) -> Tensor:
    """Return the summed cross-entropy of the rows whose label is not ``ignored``."""
    logits_TV = (x_TD @ head_VD.t()).double()
    return F.cross_entropy(logits_TV, labels_T, ignore_index=ignored, reduction="sum")
